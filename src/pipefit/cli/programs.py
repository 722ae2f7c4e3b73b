"""From what a user names to a program and its costs: a schedule with its integers, a `.pipe` file, a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipefit.errors import PipefitError

if TYPE_CHECKING:
    from pipefit.cost import CostModel
    from pipefit.ir import Program
    from pipefit.schedules import Shape
    from pipefit.spec import Plan, Profile, Topology

__all__ = ["figures", "load", "profiled_cost", "program_of", "rank_times", "updates_to_draw", "with_rhythm"]

_DRAWN_UPDATES = 3


def updates_to_draw(schedule: str, num_microbatches: int, num_steps: int | None) -> tuple[int, int]:
    """Micro-batches per update and updates of a picture.

    Unless the user says how many steps, PipeDream's m micro-batches are m mini-batches with an update each, and 2BW is
    shown over a few updates: within one, neither would show its versions.
    """
    from pipefit.ir import WeightRule
    from pipefit.schedules import find

    rule = find(schedule).weights
    if num_steps is not None:
        return num_microbatches, num_steps
    if rule in (WeightRule.STASH, WeightRule.VERTICAL):
        return 1, num_microbatches
    return num_microbatches, _DRAWN_UPDATES if rule is WeightRule.DOUBLE else 1


def with_rhythm(shape: Shape) -> Shape:
    """A shape with enough updates for a steady state to show, for schedules without a flush."""
    import msgspec

    needed = -(-8 * shape.depth // shape.num_microbatches)
    return msgspec.structs.replace(shape, num_steps=max(shape.num_steps, needed, 8))


def load(path: Path, num_steps: int = 1) -> tuple[Program, Plan | None]:
    """The program of a `.pipe` file or of a plan (then with the plan).

    Raises:
        PipefitError: with the file and the place in it.
    """
    from pipefit.ir import text
    from pipefit.spec import Plan

    if path.suffix == ".json":
        plan = Plan.load(path)
        return program_of(plan, num_steps), plan
    if path.suffix == ".pipe" or path.is_dir() or not path.exists():
        return text.load(path), None
    raise PipefitError(f"{path}: expected a program (.pipe) or a plan (.json)")


def program_of(plan: Plan, num_steps: int = 1) -> Program:
    """The program of a plan."""
    from pipefit.schedules import generate

    return generate(plan.schedule, _shape(plan, num_steps))


def _shape(plan: Plan, num_steps: int) -> Shape:
    from pipefit.schedules import Shape

    stages = plan.partition.stages
    return Shape(
        depth=max(len(stages) // plan.num_chunks, 1),
        num_microbatches=plan.num_microbatches,
        num_chunks=plan.num_chunks,
        num_steps=num_steps,
        placement=plan.placement.ranks,
        recompute=tuple(index for index, stage in enumerate(stages) if stage.recompute),
        options=plan.options,
    )


def profiled_cost(plan: Plan | None, profile: Path, topology: Topology | None, layers: tuple[int, ...]) -> CostModel:
    """Costs of a plan's partition, or of one given by layer counts, from a profile.

    Raises:
        PipefitError: neither says which layers make a stage, or they do not belong to the profile.
    """
    from pipefit.cost import from_profile
    from pipefit.spec import Partition, Topology

    figures_of = _profile(profile)
    if plan is None and not layers:
        raise PipefitError(
            "a .pipe file does not say which layers make a stage; add --layers with their counts, like 3,3"
        )
    partition = plan.partition if plan else Partition.from_counts(layers, len(figures_of))
    num_ranks = plan.placement.num_ranks if plan else len(layers)
    if plan and plan.microbatch_size:
        figures_of = figures_of.at(plan.microbatch_size)
    return from_profile(
        figures_of,
        partition,
        topology or Topology.local(num_ranks),
        placement=plan.placement if plan else None,
        loss_s=figures_of.loss_s,
    )


def _profile(path: Path) -> Profile:
    from pipefit.spec import Profile

    return Profile.load(path)


def rank_times(cost: CostModel, num_ranks: int) -> tuple[float, float]:
    """Forward and backward, f and b, of one micro-batch on a rank, on average over the ranks."""
    backward = sum(cost.backward_input_s) + sum(cost.backward_weight_s)
    return sum(cost.forward_s) / num_ranks, backward / num_ranks


def figures(program: Program, timeline: Any, cost: CostModel, steady: Program | None = None) -> dict[str, Any]:
    """The figures of a program under a cost model; see `pipefit.simulate.metrics`."""
    from pipefit.simulate import metrics

    return metrics(program, timeline, *rank_times(cost, program.header.num_ranks), cost=cost, steady=steady)
