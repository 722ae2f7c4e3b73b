"""Schedules by name (built-in, a user's own, or from other packages), and the program of a plan."""

from __future__ import annotations

from importlib.metadata import entry_points

from pipefit.errors import ScheduleError, look_up
from pipefit.ir.instruction import Groups
from pipefit.ir.program import Program
from pipefit.ir.spill import Spill
from pipefit.schedules import gpipe, looped, one_f_one_b, patched, spilled, zero_bubble
from pipefit.schedules.registry import REGISTRY, Schedule
from pipefit.schedules.shape import Shape
from pipefit.schedules.written import SUFFIX, from_file
from pipefit.spec.plan import INSIDE, Plan

HOUSE = (gpipe, one_f_one_b, looped, zero_bubble, spilled)
"""The built-in families, one file each; importing a family registers its schedules."""


def names() -> list[str]:
    """The built-in schedules, then any others that have been registered."""
    return list(REGISTRY)


def find(name: str) -> Schedule:
    """A schedule by its name, or by the path of a `.pipe` file; entry points of the group `pipefit.schedules` count.

    Raises:
        ScheduleError: no such schedule; the message suggests the nearest.
    """
    if name.endswith(SUFFIX):
        return from_file(name)
    if name == patched.NAME:
        return patched.SCHEDULE
    if name not in REGISTRY:
        for point in entry_points(group="pipefit.schedules"):
            if point.name == name:
                point.load()
    return look_up(name, REGISTRY, "unknown schedule", ScheduleError)


def generate(name: str, shape: Shape) -> Program:
    """The program of a schedule by name."""
    return find(name)(shape)


def shape_of(plan: Plan, *, num_steps: int = 1, ties: Groups = (), clip: bool = False) -> Shape:
    """The shape from which a plan's program is generated.

    Args:
        plan: the plan of a run.
        num_steps: weight updates in the program.
        ties: groups of stages that share a weight; a property of the model, not of the plan.
        clip: gradients are clipped by their global norm.
    """
    stages = plan.partition.stages
    return Shape(
        depth=max(len(stages) // plan.num_chunks, 1),
        num_microbatches=plan.num_microbatches,
        num_chunks=plan.num_chunks,
        num_steps=num_steps,
        placement=plan.placement.ranks,
        recompute=tuple(index for index, stage in enumerate(stages) if stage.is_replayed),
        inside={index: stage.replays for index, stage in enumerate(stages) if stage.recompute in INSIDE},
        ties=ties,
        clip=clip,
        shard=plan.shard,
        shard_slots=plan.shard_slots,
        tensor=plan.tensor,
        pieces=plan.pieces,
        spill=_spill(plan),
        prefetch=plan.spill.prefetch if plan.spill else None,
        frozen=plan.frozen,
        shares=plan.shares,
        options=plan.options,
    )


def _spill(plan: Plan) -> Spill | None:
    if plan.spill is None:
        return None
    own = {name: getattr(plan.spill, name) for name in Spill.__struct_fields__}
    if not plan.spill.stages:
        own["stages"] = tuple(range(len(plan.partition.stages)))
    return Spill(**own)


def program_of(plan: Plan, *, num_steps: int = 1) -> Program:
    """The program of a plan whose model has no tied weights.

    Raises:
        ScheduleError: an unknown schedule, or a shape that it does not support.
    """
    return generate(plan.schedule, shape_of(plan, num_steps=num_steps))
