"""The picture of a plan: its partition over the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pipefit.draw.chart import hue, plotted
from pipefit.planner.plan_figures import at_size_of, plan_costs
from pipefit.spec import Plan, Profile, StageSpec, Topology
from pipefit.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def partition_svg(plan: Plan, profile: Profile, topology: Topology | None = None) -> str:
    """The layers as a strip in the colours of their stages, each as wide as its time.

    Below it for each stage: its time, its memory, and the output that it sends to the next one.

    Args:
        plan: with a prediction; without one, memory is left out.
        profile: of the model.
        topology: for the memory that devices have, and for outputs, which are left out without one.

    Raises:
        PipefitError: matplotlib is not installed.
    """
    figures = at_size_of(plan, profile)
    stages = plan.partition.stages
    places_of_stages = range(len(stages))
    peaks: tuple[float, ...] = ()
    if plan.prediction:
        peaks = plan.prediction.peak_bytes
    limit = math.inf
    if topology:
        limit = topology.device.memory_bytes

    def seconds_of(stage: StageSpec) -> float:
        seconds = 0.0
        for index in stage.layers:
            layer = figures.layers[index]
            seconds += layer.replaying(stage.replays).total_s + layer.forward_s * stage.is_replayed
        return seconds / (stage.tensor * stage.replicas)

    def draw(figure: Figure) -> None:
        heights = [90, 40 + 24 * len(stages)]
        places = figure.subplot_mosaic([["layers"] * 3, ["time", "memory", "output"]], height_ratios=heights)
        _strip(places["layers"], figures, plan.partition.stage_of)
        seconds = list(map(seconds_of, stages))
        _stage_bars(places["time"], "time per micro-batch and replica", seconds, list(map(format_seconds, seconds)))
        words = [_stage_words(plan, index) for index in places_of_stages]
        places["time"].set_yticks(places_of_stages, words)
        places["memory"].axis("off")
        if peaks:
            memory = [max(peaks[rank] for rank in ranks) for ranks in plan.placement.ranks]
            label = "peak memory of its rank"
            if math.isfinite(limit):
                label += f"; dashed: a device has {format_bytes(limit)}"
            _stage_bars(places["memory"], label, memory, list(map(format_bytes, memory)), limit)
        places["output"].axis("off")
        if topology and len(stages) > 1:
            sizes, messages = _outputs(plan, profile, topology)
            _stage_bars(places["output"], "output of a micro-batch, and its message", sizes, messages)

    title = (
        f"{plan.model}: {plan.schedule}, {counted(len(stages), 'stage')}, "
        f"{counted(plan.num_microbatches, 'micro-batch', 'micro-batches')}"
    )
    return plotted(draw, 1160, 210 + 26 * len(stages), title)


def _outputs(plan: Plan, profile: Profile, topology: Topology) -> tuple[list[float], list[str]]:
    """Bytes of the output of each stage, and in words bytes and seconds of its message to the next stage."""
    cost = plan_costs(plan, profile, topology)
    last = len(plan.partition.stages) - 1
    sizes = [*cost.act_bytes[:last], 0.0]
    words = []
    for stage in range(last):
        sender = plan.placement.ranks[stage][0]
        receiver = plan.placement.ranks[stage + 1][0]
        text = format_bytes(sizes[stage])
        if sender != receiver:
            bandwidth, latency = cost.link(sender, receiver)
            text += f" in {format_seconds(latency + sizes[stage] / bandwidth)}"
        words.append(text)
    return sizes, [*words, "none"]


def _strip(axes: Axes, figures: Profile, owner: dict[int, int]) -> None:
    """Layers as wide as their time; below them bars as high as their weights."""
    seconds = [layer.total_s for layer in figures.layers]
    heaviest = max(layer.weight_bytes for layer in figures.layers) or 1.0
    starts = list(accumulate(seconds, initial=0.0))[:-1]
    colours = [hue(owner[index]) for index in range(len(figures))]
    weights = [-layer.weight_bytes / heaviest for layer in figures.layers]
    edge: dict[str, Any] = {"align": "edge", "color": colours, "linewidth": 0.5, "edgecolor": "white"}
    axes.bar(starts, 1.0, seconds, **edge)
    axes.bar(starts, weights, seconds, -0.1, alpha=0.45, **edge)
    axes.set_title("layers, each as wide as its forward and backward take; bars: their weights", loc="left")
    axes.margins(x=0)
    axes.axis("off")


def _stage_bars(
    axes: Axes, title: str, values: Sequence[float], labels: Sequence[str], limit: float = math.inf
) -> None:
    """A bar for each stage, with a dashed line at a limit; the labels are a column to the right of all of them."""
    places = range(len(values))
    axes.barh(places, values, 0.7, color=list(map(hue, places)))
    end = max(values)
    if math.isfinite(limit):
        axes.axvline(limit, linestyle="--", color="#d6336c", zorder=0)
        end = max(end, limit)
    end = max(end, 0.0) or 1.0
    for index, label in enumerate(labels):
        axes.text(1.03 * end, index, label, va="center")
    axes.axis("on")
    axes.set_title(title, loc="left")
    axes.set_xlim(0, 1.3 * end)
    axes.invert_yaxis()
    axes.tick_params(left=False)
    axes.xaxis.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)


def _stage_words(plan: Plan, index: int) -> str:
    stage = plan.partition.stages[index]
    copies = len(plan.placement.ranks[index])
    words = f"stage {index}: {counted(len(stage.layers), 'layer')}"
    if copies > 1:
        words += f", {copies} replicas"
    if stage.replays != "none":
        words += f", recompute {stage.replays}"
    return words
