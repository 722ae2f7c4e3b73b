"""`pipefit synthesize`: a schedule by search, for given costs and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pipefit.cli.answer import Answer
from pipefit.cli.options import (
    PICTURES,
    Count,
    Counts,
    Figures,
    Forward,
    InputGradient,
    Json,
    Latency,
    Number,
    ProfileName,
    TopologyName,
    WeightGradient,
    at_least_0,
    ending,
    verb,
)
from pipefit.cli.programs import Source, figures, read_profile, save_timeline
from pipefit.errors import PipefitError

if TYPE_CHECKING:
    from pipefit.cost import CostModel
    from pipefit.ir import Header
    from pipefit.spec import Plan
    from pipefit.synthesize import Synthesis
    from pipefit.timeline import Timeline


@verb()
def command(
    *,
    ranks: Annotated[Count | None, "-p"] = None,
    microbatches: Annotated[Count | None, "-m"] = None,
    chunks: Annotated[Count, "-v"] = 1,
    placement: Literal["loop", "v"] = "loop",
    forward: Forward = 1,
    input_gradient: InputGradient = None,
    weight_gradient: WeightGradient = None,
    stage_work: Figures = (),
    latency: Latency = 0,
    memory: Figures = (),
    capacity: str | None = None,
    plan: Path | None = None,
    profile: ProfileName = None,
    layers: Counts = (),
    topology: TopologyName = None,
    whole: bool = False,
    seconds: Annotated[Number, at_least_0] = 10,
    candidates: int = 20_000,
    seed: int = 0,
    output: Annotated[Path | None, "-o", ending(*PICTURES)] = None,
    json: Json = False,
) -> Answer:
    """Search for the fastest schedule for given costs and memory.

    Example: pipefit synthesize -p 4 -m 8 --memory 2 -o found.pipe

    Says what no schedule can beat, and what the built-in ones take. A .pipe file is a schedule for every verb: pipefit
    train --schedule found.pipe --ranks 4 --microbatches 8.

    Args:
        ranks: Ranks of the pipeline, p.
        microbatches: micro-batches per weight update, m.
        chunks: Stages on each rank, v.
        placement: How chunks lie on ranks: round and round, or down and up again.
        stage_work: Cost of each stage relative to the others, like 1,2,1,1.
        memory: Micro-batches of its layers whose activations a rank may hold: 4, or 4,3,2,1 rank by rank.
        capacity: Memory of each rank, like 8GiB; needs --profile.
        plan: Stages, ranks and micro-batches of this plan; needs --profile.
        layers: With a profile and no plan: layers of each stage, like 3,3.
        whole: Backwards stay whole: inputs and weights in one.
        seconds: Time to search, at most.
        candidates: Orders to look at, at most.
        seed: Of the search.
        output: .pipe for the schedule, to run it; .svg, .html or .png for a picture.
    """
    from pipefit.units import parse_quantity

    if capacity and profile is None:
        raise PipefitError("unit costs do not say how many bytes values have: --capacity needs --profile")
    header, made = _shape(plan, ranks, microbatches, chunks, placement)
    times = {"forward": forward, "input": input_gradient, "weight": weight_gradient, "latency": latency}
    cost = _cost(header, made, profile, topology, layers, stage_work, times)

    from pipefit.simulate import simulate
    from pipefit.synthesize import synthesize

    found = synthesize(
        header,
        cost,
        in_flight=(memory[0] if len(memory) == 1 else memory) or None,
        capacity_bytes=parse_quantity(capacity, "bytes", "--capacity") if capacity else None,
        split=not whole,
        candidates=candidates,
        seconds=seconds,
        seed=seed,
    )
    real = cost.topology is not None
    timeline = simulate(found.program, cost, contention=real, rendezvous=real)
    data = figures(found.program, timeline, cost) | {
        "unit": "s" if profile else "",
        "bound": found.bound_s,
        "gap": found.gap,
        "built_in": found.built_in,
        "best_built_in": found.best_built_in,
        "num_candidates": found.num_candidates,
        "cut_short": found.is_cut_short,
    }
    if output:
        save_timeline(timeline, output, seconds=profile is not None)
        data |= {"output": str(output)}
    return Answer(data, lambda: _verdict(data, found, timeline))


def _shape(
    path: Path | None, ranks: int | None, microbatches: int | None, chunks: int, placement: str
) -> tuple[Header, Plan | None]:
    from pipefit.ir.program import WeightRule
    from pipefit.schedules import shape_of
    from pipefit.spec import Plan
    from pipefit.synthesize import header_of

    if path is None:
        if ranks is None or microbatches is None:
            raise PipefitError("expected -p ranks and -m micro-batches, or --plan with --profile")
        layout = "wave" if placement == "v" else "loop"
        return header_of(ranks, microbatches, chunks, layout), None
    if ranks is not None or microbatches is not None or chunks != 1:
        raise PipefitError(f"{path} says ranks, micro-batches and chunks; leave out -p, -m and -v")
    plan = Plan.load(path)
    if plan.tensor > 1 or plan.spill or any(stage.recompute for stage in plan.partition.stages):
        raise PipefitError(f"{path}: the search knows no tensor parallelism, recomputation or spilling")
    return shape_of(plan).header("synthesized", "loop", WeightRule.FLUSH), plan


def _cost(
    header: Header,
    plan: Plan | None,
    profile: str | None,
    topology: str | None,
    layers: tuple[int, ...],
    work: tuple[float, ...],
    times: dict[str, Any],
) -> CostModel:
    """Costs from a profile, or unit costs of stages that may differ."""
    from pipefit.ir import Program
    from pipefit.planner.machines import load_topology

    if plan and profile is None:
        raise PipefitError("a plan does not say what its layers cost: --plan needs --profile")
    links = load_topology(topology) if topology else None
    if links and links.num_devices < header.num_ranks:
        raise PipefitError(f"{topology} has {links.num_devices} devices, but {header.num_ranks} ranks are asked for")
    size = plan.microbatch_size if plan else 0
    loaded = read_profile(profile, links, size or 1) if profile else None
    cost = Source(Program(header, ()), plan, loaded, links, layers).cost(**times)
    if not work:
        return cost
    if len(work) != header.num_stages:
        raise PipefitError(f"--stage-work: expected a figure for each of {header.num_stages} stages, got {len(work)}")

    def scaled(each: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(share * seconds for share, seconds in zip(work, each, strict=True))

    forward = scaled(cost.forward_s)
    halves = scaled(cost.backward_input_s), scaled(cost.backward_weight_s)
    return replace(
        cost, forward_s=forward, recompute_s=forward, backward_input_s=halves[0], backward_weight_s=halves[1]
    )


def _verdict(data: dict[str, Any], found: Synthesis, timeline: Timeline) -> str:
    from pipefit.draw import grid
    from pipefit.units import format_seconds

    def time(seconds: float) -> str:
        return format_seconds(seconds) if data["unit"] else f"{seconds:.6g}"

    held = " ".join(f"{peak:.3g}" for peak in data["peak_inflight"])
    lines = [f"makespan {time(found.makespan_s)}, bubble {100 * data['bubble_fraction']:.1f} %, peak in flight {held}"]
    beyond = f"{100 * found.gap:.1f} % above it" if found.gap > 1e-6 else "none is faster"
    lines.append(f"no schedule takes less than {time(found.bound_s)}: {beyond}")
    if found.best_built_in is None:
        lines.append("no built-in schedule of this shape keeps the limit")
    else:
        takes = found.built_in[found.best_built_in]
        slower = takes / found.makespan_s - 1
        rest = f", {100 * slower:.1f} % more" if slower > 1e-6 else ": as fast"
        lines.append(f"best of the built-in: {found.best_built_in} takes {time(takes)}{rest}")
    if found.is_cut_short:
        lines.append(f"the time was over after {found.num_candidates} orders; more --seconds may find better")
    if "output" in data:
        return "\n".join([*lines, f"wrote {data['output']}"])
    return "\n".join([grid(timeline), *lines])
