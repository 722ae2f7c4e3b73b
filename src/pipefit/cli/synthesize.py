"""`pipefit synthesize`: a schedule by search, for given costs and memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from pipefit.cli.answer import Answer, picked
from pipefit.cli.options import (
    Count,
    Figures,
    Json,
    Seed,
    Simulated,
    Size,
    Time,
    verb,
)
from pipefit.cli.programs import SourceOptions, check_forwards, save_timeline, source_of, time_text
from pipefit.cost.unit_costs import UnitCosts
from pipefit.errors import PipefitError
from pipefit.spec.files import JsonObject

if TYPE_CHECKING:
    from pipefit.ir import Header
    from pipefit.spec import Plan
    from pipefit.synthesize import Synthesis


@verb("backward", "copy", "steps", layers="With a profile and no plan: layers of each stage, like 3,3.")
def command(
    *,
    ranks: Annotated[Count | None, Parameter(alias="-p")] = None,
    microbatches: Annotated[Count | None, Parameter(alias="-m")] = None,
    chunks: Annotated[Count, Parameter(alias="-v")] = 1,
    placement: Literal["loop", "v"] = "loop",
    costs: UnitCosts,
    stage_work: Figures = (),
    memory: Figures = (),
    capacity: Size | None = None,
    plan: Path | None = None,
    given: SourceOptions,
    whole: bool = False,
    seconds: Time = 10,
    candidates: int = 20_000,
    seed: Seed = 0,
    output: Simulated = None,
    json: Json = False,
) -> Answer:
    """Search for the fastest schedule for given costs and memory.

    Example: pipefit synthesize -p 4 -m 8 --memory 2 -o found.pipe

    Prints a lower bound over all schedules, and the time of the best built-in one. A .pipe file is a schedule for every
    verb: pipefit train --schedule found.pipe --ranks 4 --microbatches 8.

    Args:
        ranks: Ranks of the pipeline, p.
        microbatches: micro-batches per weight update, m.
        chunks: Stages on each rank, v.
        placement: Placement of chunks on ranks: round-robin, or down and up again.
        stage_work: Cost of each stage relative to the others, like 1,2,1,1.
        memory: Micro-batches of its layers whose activations a rank may hold: 4, or 4,3,2,1 rank by rank.
        capacity: Memory of each rank, like 8GiB; needs --profile.
        plan: Stages, ranks and micro-batches of this plan; needs --profile.
        whole: Keep backwards whole: inputs and weights in one.
        seconds: Maximum time of the search.
        candidates: Maximum number of orders to examine.
        seed: Of the search.
        output: .pipe for the schedule, to run it; .svg, .html or .png for a picture.
    """
    from pipefit.cost import weighted
    from pipefit.draw import grid
    from pipefit.ir import Program
    from pipefit.simulate import metrics, simulate
    from pipefit.synthesize import synthesize

    has_profile = given.profile is not None
    if capacity is not None and not has_profile:
        raise PipefitError("unit costs do not contain the bytes of values: --capacity needs --profile")
    header, made = _shape(plan, ranks, microbatches, chunks, placement)
    if made and not has_profile:
        raise PipefitError("a plan does not contain the costs of its layers: --plan needs --profile")
    source = source_of(Program(header, ()), made, given)
    cost = weighted(source.cost(costs), stage_work)
    in_flight: float | Sequence[float] | None = memory or None
    if len(memory) == 1:
        in_flight = memory[0]
    found = synthesize(
        header,
        cost,
        in_flight=in_flight,
        capacity_bytes=capacity,
        split=not whole,
        candidates=candidates,
        seconds=seconds,
        seed=seed,
    )
    real = cost.topology is not None
    timeline = simulate(found.program, cost, contention=real, rendezvous=real)
    data = metrics(found.program, timeline, cost)
    data |= picked(found, "gap", "built_in", "best_built_in", "num_candidates")
    data |= {"unit": "", "bound": found.bound_s, "cut_short": found.is_cut_short}
    if has_profile:
        data["unit"] = "s"
    save_timeline(timeline, output, cost=cost, seconds=has_profile)

    def text() -> str:
        lines = _verdict(data, found)
        if output is None:
            lines.insert(0, grid(timeline))
        return "\n".join(lines)

    return Answer(data, text, output=output)


_LAYOUTS = {"v": "wave", "loop": "loop"}


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
        check_forwards(ranks, chunks, microbatches)
        return header_of(ranks, microbatches, chunks, _LAYOUTS[placement]), None
    if ranks is not None or microbatches is not None or chunks != 1:
        raise PipefitError(f"{path} determines ranks, micro-batches and chunks; leave out -p, -m and -v")
    plan = Plan.load(path)
    if plan.tensor > 1 or plan.spill or any(stage.recompute != "none" for stage in plan.partition.stages):
        raise PipefitError(f"{path}: the search does not support tensor parallelism, recomputation or spilling")
    return shape_of(plan).header("synthesized", "loop", WeightRule.FLUSH), plan


def _verdict(data: JsonObject, found: Synthesis) -> list[str]:
    real = bool(data["unit"])
    held = " ".join(f"{peak:.3g}" for peak in data["peak_inflight"])
    beyond = "none is faster"
    if found.gap > 1e-6:
        beyond = f"{100 * found.gap:.1f} % above it"
    lines = [
        f"makespan {time_text(found.makespan_s, real)}, bubble {100 * data['bubble_fraction']:.1f} %, "
        f"peak in flight {held}",
        f"no schedule takes less than {time_text(found.bound_s, real)}: {beyond}",
    ]
    if found.best_built_in is None:
        lines.append("no built-in schedule of this shape respects the limit")
    else:
        takes = found.built_in[found.best_built_in]
        slower = takes / found.makespan_s - 1
        rest = ": as fast"
        if slower > 1e-6:
            rest = f", {100 * slower:.1f} % more"
        lines.append(f"best of the built-in: {found.best_built_in} takes {time_text(takes, real)}{rest}")
    if found.is_cut_short:
        lines.append(f"the time was over after {found.num_candidates} orders; more --seconds may find better")
    return lines
