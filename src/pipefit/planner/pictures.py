"""Pictures of plans: the partition over the model, throughput against memory, against depth and micro-batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from pipefit.draw import chart
from pipefit.draw.chart import HUES
from pipefit.draw.look import mix
from pipefit.errors import PipefitError
from pipefit.planner.bounds import quick_bytes
from pipefit.planner.candidate import Estimate
from pipefit.planner.estimate import estimate
from pipefit.planner.methods import problem_of, sizes_to_try, space_of
from pipefit.planner.space import Problem, configs
from pipefit.spec import Plan, Profile, Topology
from pipefit.units import counted, format_bytes, format_seconds

_GIB = 2.0**30


@dataclass(frozen=True)
class Point:
    """One configuration of an exploration.

    Attributes:
        summary: in words.
        depth: p.
        microbatch_size: b.
        throughput: samples per second.
        peak_bytes: the most that a rank needs.
        fits: whether the devices have it.
    """

    summary: str
    depth: int
    microbatch_size: int
    throughput: float
    peak_bytes: float
    fits: bool


def explore(
    profile: Profile,
    topology: Topology,
    *,
    method: str = "auto",
    global_batch: int | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    recompute: bool | None = None,
    tensors: Sequence[int] | None = None,
    state_per_weight: float | None = None,
) -> tuple[Point, ...]:
    """Every configuration with its throughput and memory, whether it fits or not.

    Arguments as for `plan`; times are those of the closed forms.
    """
    problem = problem_of(profile, topology, global_batch, state_per_weight)
    if method == "pipedream":
        raise PipefitError("pipedream plans one partition by its own recurrence; there is nothing to explore")
    space = space_of(
        problem,
        method,
        microbatch_sizes=sizes_to_try(problem, microbatch_sizes),
        schedules=schedules,
        recompute=recompute,
        tensors=tensors,
    )
    points = []
    for config in configs(problem, space):
        if config.recompute == "some" or config.partitioner == "links":
            continue
        estimated = estimate(problem, config)
        if estimated.partition is not None:
            points.append(_point(problem, estimated))
    return tuple(points)


def _point(problem: Problem, estimated: Estimate) -> Point:
    config = estimated.config
    peak = max(estimated.peak_bytes, default=quick_bytes(problem, config))
    rate = problem.global_batch / estimated.step_s
    return Point(config.summary, config.depth, config.microbatch_size, rate, peak, estimated.fits)


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in throughput and memory, by memory."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, -p.throughput)):
        if not front or point.throughput > front[-1].throughput:
            front.append(point)
    return front


def pareto_svg(points: Sequence[Point], title: str = "") -> str:
    """Throughput against memory per rank: the front, and the best of each depth below it; only what fits."""
    points = _fitting(points)
    series = {"front": [(point.peak_bytes / _GIB, point.throughput) for point in pareto(points)]}
    for depth in sorted({point.depth for point in points}):
        own = pareto([point for point in points if point.depth == depth])
        series[f"depth {depth}"] = [(point.peak_bytes / _GIB, point.throughput) for point in own]
    return chart(
        series,
        title=title or "Throughput against memory",
        x_label="peak memory of a rank, GiB",
        y_label="samples/s",
    )


def _fitting(points: Sequence[Point]) -> list[Point]:
    fitting = [point for point in points if point.fits]
    if not fitting:
        raise PipefitError("nothing of the exploration fits, so there is no throughput to draw")
    return fitting


def depth_svg(points: Sequence[Point], title: str = "") -> str:
    """Throughput against depth, a line for each micro-batch size; only what fits."""
    series: dict[str, list[tuple[float | str, float]]] = {}
    fitting = _fitting(points)
    for size in sorted({point.microbatch_size for point in fitting}):
        best: dict[int, float] = {}
        for point in fitting:
            if point.microbatch_size == size:
                best[point.depth] = max(best.get(point.depth, 0.0), point.throughput)
        series[f"micro-batch {size}"] = [(float(depth), best[depth]) for depth in sorted(best)]
    return chart(
        series,
        title=title or "Throughput against depth",
        x_label="depth of the pipeline",
        y_label="samples/s",
        log_x=True,
    )


# ----------------------------------------------------------------------------------------- the partition over the model


def partition_svg(plan: Plan, profile: Profile, topology: Topology | None = None, width: int = 900) -> str:
    """The layers as a strip in the colours of their stages, each as wide as its time; below, their time and memory.

    Args:
        plan: with a prediction, or memory is left out.
        profile: of the model.
        topology: for the memory that devices have.
        width: of the picture, in pixels.
    """
    figures = profile.at(plan.microbatch_size) if plan.microbatch_size else profile
    stages = plan.partition.stages
    owner = {layer: index for index, stage in enumerate(stages) for layer in stage.layers}
    row, top = 26, 178
    height = top + row * len(stages) + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="system-ui,-apple-system,Segoe UI,Roboto,Arial,sans-serif" font-size="12">',
        f'<title>{escape(plan.model)}</title><rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(
            24,
            32,
            f"{plan.model}: {plan.schedule}, {counted(len(stages), 'stage')}, "
            f"{counted(plan.num_microbatches, 'micro-batch', 'micro-batches')}",
            17,
        ),
        _text(24, 54, "layers, each as wide as its forward and backward take; bars: their weights", colour="#5a6675"),
    ]
    parts += _strip(figures, owner, width)
    parts += _stage_rows(plan, figures, topology, width, top, row)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _strip(figures: Profile, owner: dict[int, int], width: int) -> list[str]:
    total = sum(layer.total_s for layer in figures.layers) or 1.0
    heaviest = max(layer.weight_bytes for layer in figures.layers) or 1.0
    least = min(1.0, 0.35 * (width - 48) / len(figures))
    room = width - 48 - least * len(figures)
    x, parts = 24.0, []
    for index, layer in enumerate(figures.layers):
        wide = least + room * layer.total_s / total
        hue = _hue(owner[index])
        words = (
            f"{layer.name}: stage {owner[index]}, {format_seconds(layer.total_s)}, {format_bytes(layer.weight_bytes)}"
        )
        tall = 40 * layer.weight_bytes / heaviest
        gap = 0.8 if wide > 3 else 0.0
        parts.append(
            f'<rect x="{x:.2f}" y="68" width="{max(wide - gap, 0.4):.2f}" height="34" fill="{hue}">'
            f"<title>{escape(words)}</title></rect>"
        )
        parts.append(
            f'<rect x="{x:.2f}" y="{106:.2f}" width="{max(wide - gap, 0.4):.2f}" height="{tall:.2f}" fill="{hue}" '
            'opacity="0.45"/>'
        )
        x += wide
    return parts


def _stage_rows(plan: Plan, figures: Profile, topology: Topology | None, width: int, top: int, row: int) -> list[str]:
    stages = plan.partition.stages
    peaks = plan.prediction.peak_bytes if plan.prediction else ()
    seconds = [
        sum(figures.layers[i].total_s + figures.layers[i].forward_s * s.recompute for i in s.layers)
        / (s.tensor * s.replicas)
        for s in stages
    ]
    memory = [max(peaks[rank] for rank in ranks) for ranks in plan.placement.ranks] if peaks else [0.0] * len(stages)
    limit = topology.device.memory_bytes if topology else math.inf
    most = max([*memory, limit if math.isfinite(limit) else 0.0]) or 1.0
    longest = max(seconds) or 1.0
    left, half = 250, (width - 250 - 48) / 2 - 70
    second = left + half + 90
    parts = [_text(left, top - 12, "time per micro-batch and replica", colour="#5a6675")]
    parts += [_text(second, top - 12, "peak memory of its rank", colour="#5a6675")] * bool(peaks)
    for index, stage in enumerate(stages):
        y = top + index * row
        copies = len(plan.placement.ranks[index])
        words = f"stage {index}: {counted(len(stage.layers), 'layer')}" + (f", {copies} replicas" if copies > 1 else "")
        words += ", recompute" if stage.recompute else ""
        parts.append(f'<rect x="24" y="{y}" width="12" height="12" rx="2" fill="{_hue(index)}"/>')
        parts.append(_text(44, y + 11, words))
        parts += _bar(left, y, half * seconds[index] / longest, _hue(index), format_seconds(seconds[index]))
        if peaks:
            parts += _bar(second, y, half * memory[index] / most, _hue(index), format_bytes(memory[index]))
    if peaks and math.isfinite(limit):
        x = second + half * limit / most
        bottom = top + row * len(stages)
        parts.append(f'<path d="M{x:.1f} {top - 6}V{bottom}" stroke="#7a2e2e" stroke-dasharray="4 3"/>')
        label = f'<text x="{x:.1f}" y="{bottom + 16}" fill="#7a2e2e" text-anchor="middle">'
        parts.append(f"{label}a device has {format_bytes(limit)}</text>")
    return parts


def _bar(x: float, y: float, long: float, hue: str, words: str) -> list[str]:
    bar = f'<rect x="{x:.1f}" y="{y}" width="{max(long, 1):.1f}" height="14" rx="2" fill="{hue}"/>'
    return [bar, _text(x + long + 6, y + 11, words)]


def _text(x: float, y: float, words: str, size: int = 12, colour: str = "#10151d") -> str:
    weight = ' font-weight="650"' if size > 12 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}"{weight}>{escape(words)}</text>'


def _hue(stage: int) -> str:
    """The eight hues, then the same lighter, and lighter still: neighbours never look alike."""
    return mix(HUES[stage % len(HUES)][0], "#ffffff", stage // len(HUES) % 3 * 0.28)
