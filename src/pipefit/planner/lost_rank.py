"""The plan of a run that has lost a rank: the ranks that are left, and the program in whose bubbles its work fits."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import product
from operator import itemgetter

import msgspec

from pipefit.cost import CostModel, unit
from pipefit.errors import PipefitError, PlanError, ScheduleError
from pipefit.ir.instruction import Groups
from pipefit.ir.liveness import peak_inflight
from pipefit.ir.program import Program
from pipefit.schedules import find, shape_of
from pipefit.schedules.patched import NAME
from pipefit.simulate import simulate
from pipefit.spec import Partition, Placement, Plan
from pipefit.verify import verify

_UNITS = 12
"""The time of a mean forward in the orders that are tried: so backwards are whole numbers in nearly their ratio."""


def plan_without(
    plan: Plan,
    lost: int,
    *,
    cost: CostModel | None = None,
    held: float | None = None,
    ties: Groups = (),
    clip: bool = False,
) -> Plan:
    """The plan for the ranks that are left when one is lost, numbered by their places among these.

    The other copies of its stages take its micro-batches. A stage without another copy goes to the rank that has the
    least work. Of the plan's own schedule, ZB-H1 and patched orders, all over these ranks, the one with the shortest
    simulated update is taken, and proved.

    >>> from pipefit.planner import by_hand
    >>> made = by_hand(2, num_ranks=4, replicas=(2, 2), schedule="1f1b", num_microbatches=4)
    >>> made.placement.ranks, plan_without(made, 1).placement.ranks
    (((0, 2), (1, 3)), ((0, 1), (2,)))

    Args:
        plan: of all ranks.
        lost: a rank; one that tensor-parallel processes share is lost with any of these.
        cost: of the plan; None: forwards and both halves of backwards take equally long at all stages.
        held: micro-batches that a rank may hold; None: as many as the fullest rank under the plan, or under the same
            schedule over the ranks that are left.
        ties: groups of stages that share a weight.
        clip: gradients are clipped by their global norm.

    Raises:
        PlanError: there is no such rank, no rank is left, or the plan is asynchronous or spilled.
        ScheduleError: no program for these ranks is proved; the message says why.
    """
    if not find(plan.schedule).is_synchronous or plan.spill is not None:
        raise PlanError(f"{plan.schedule}: only a synchronous schedule without spilled stages can lose a rank")
    placement = _left(plan, lost)
    stages = []
    for stage, ranks in zip(plan.partition.stages, placement, strict=True):
        stages.append(msgspec.structs.replace(stage, replicas=len(ranks)))
    shard = plan.shard
    if all(len(ranks) == 1 for ranks in placement):
        shard = "none"
    rest = msgspec.structs.replace(
        plan,
        partition=Partition(tuple(stages)),
        placement=Placement(placement),
        data=1,
        shard=shard,
        shares=(),
        prediction=None,
        candidates=(),
    )

    def program_of(made: Plan) -> Program:
        return find(made.schedule)(shape_of(made, ties=ties, clip=clip))

    before = program_of(plan)
    if cost is None:
        cost = unit(before.header)
    speed = cost.speed[:lost] + cost.speed[lost + 1 :]
    cost = dataclasses.replace(cost, speed=speed)
    if held is None:
        held = _most_held(before, lambda: program_of(rest))
    found: list[tuple[float, Plan, Program]] = []
    refused: list[str] = []
    for made in _candidates(rest, cost, {int(_fullest(before)), int(held)}):
        try:
            program = program_of(made)
            update_s = simulate(program, cost, memory=False, steps_only=True).makespan_s
        except PipefitError as problem:
            refused.append(f"{made.schedule}: {problem}")
            continue
        if _fullest(program) <= held:
            found.append((update_s, made, program))
    for _, made, program in sorted(found, key=itemgetter(0)):
        report = verify(program)
        if not report.violations:
            return made
        refused.append(str(report))
    raise ScheduleError("\n".join([f"no program for the {rest.placement.num_ranks} ranks that are left:", *refused]))


def _most_held(before: Program, program_of_rest: Callable[[], Program]) -> float:
    """Micro-batches of the fullest rank under the plan, or under its schedule over the ranks that are left."""
    most = _fullest(before)
    try:
        own = program_of_rest()
        verify(own).raise_if_bad()
    except PipefitError:
        return most
    return max(most, _fullest(own))


def _left(plan: Plan, lost: int) -> Groups:
    """The ranks of each stage without the one that is lost, in their new numbers."""
    num_ranks = plan.placement.num_ranks
    if not 0 <= lost < num_ranks or num_ranks == 1:
        raise PlanError(f"expected one of several ranks to be lost, got rank {lost} of {num_ranks}")
    placement = []
    work: Counter[int] = Counter(dict.fromkeys(range(num_ranks - 1), 0))
    for ranks in plan.placement.ranks:
        left = tuple(rank - (rank > lost) for rank in ranks if rank != lost)
        placement.append(left)
        for rank in left:
            work[rank] += plan.num_microbatches // len(left)
    for stage, left in enumerate(placement):
        if not left:
            heir = min(work, key=work.__getitem__)
            placement[stage] = (heir,)
            work[heir] += plan.num_microbatches
    return tuple(placement)


def _candidates(rest: Plan, cost: CostModel, room: Collection[int]) -> Iterator[Plan]:
    """Plans for the same ranks: the plan's own schedule, ZB-H1, and patched orders."""
    yield rest
    if rest.schedule != "zb-h1":
        yield msgspec.structs.replace(rest, schedule="zb-h1", options={})
    forward_s = sum(cost.forward_s)
    times = {"forward": _UNITS}
    for name, seconds in (("input", cost.backward_input_s), ("weight", cost.backward_weight_s)):
        times[name] = _UNITS
        if forward_s:
            times[name] = round(_UNITS * sum(seconds) / forward_s)
    for held, eager, split in product(sorted(room), (0, 1), (1, 0)):
        options = {"held": held, "eager": eager, "split": split, **times}
        yield msgspec.structs.replace(rest, schedule=NAME, options=options)


def _fullest(program: Program) -> float:
    """Micro-batches that the fullest rank holds."""
    return max(peak_inflight(program, rank) for rank in range(len(program.ranks)))
