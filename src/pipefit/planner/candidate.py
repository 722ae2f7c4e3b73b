"""A candidate: its estimate, its plan, its program and its costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from pipefit.cost import FREE, CostModel, of_plan
from pipefit.cost.rings import all_gather_s, ring_of
from pipefit.ir.program import Program
from pipefit.planner.lane_limits import Limit
from pipefit.planner.space import Config, Problem, placement_for
from pipefit.schedules import generate
from pipefit.schedules.catalogue import shape_of
from pipefit.spec import Partition, Plan, StageSpec
from pipefit.spec.plan import Figures

LESS_SHARED: Final = ", less shared"
"""The end of the family of a candidate that is the winner if its copies shared less."""


@dataclass(frozen=True)
class Estimate:
    """An estimated or simulated candidate.

    Attributes:
        config: the candidate.
        partition: its stages; None: not possible, see `why`.
        peak_bytes: of each rank of one pipeline, or of all ranks.
        overflow: the worst of needed over available bytes.
        period_s: seconds from weight update to weight update.
        step_s: seconds of one update in isolation.
        why: the reason why it does not fit, in words.
        limit: of a candidate that spills, the lane that binds; then no simulated time is below the estimate.
        size: number of simulated forwards; 0: its times are estimated.
    """

    config: Config
    partition: Partition | None
    peak_bytes: Figures = ()
    overflow: float = 1e9
    period_s: float = math.inf
    step_s: float = math.inf
    why: str = ""
    limit: Limit | None = None
    size: int = 0

    @property
    def fits(self) -> bool:
        """Returns whether every rank has the memory."""
        return self.overflow <= 1


def plan_of(problem: Problem, config: Config, partition: Partition, method: str = "auto") -> Plan:
    """The plan of a candidate, still without a prediction.

    Args:
        problem: that it solves.
        config: the candidate.
        partition: its stages.
        method: by which it was found.
    """
    spill = config.spill
    frozen = problem.profile.num_frozen(partition)
    stages = []
    for index, stage in enumerate(partition.stages):
        recompute = stage.recompute
        # The schedule for one rank always replays.
        if spill is not None and config.schedule != "spilled" and index not in spill.keeps:
            recompute = "stage"
        stages.append(StageSpec(stage.layers, stage.replicas, config.tensor, recompute))
    options = {}
    if spill is not None and config.schedule == "breadth-first":
        # A pipeline that visits a stage for all micro-batches at once need not replay the last one.
        options = {"turn": 1}
    return Plan(
        Partition(tuple(stages)),
        placement_for(config),
        config.schedule,
        config.num_microbatches,
        config.microbatch_size,
        config.chunks,
        options=options,
        data=config.data,
        shard=config.shard,
        spill=spill,
        frozen=frozen,
        shares=config.shares,
        model=problem.profile.model,
        method=method,
    )


def program_for(problem: Problem, plan: Plan) -> Program:
    """The program of a candidate's plan, with the ties and the clipping that a cap must account for."""
    cap = problem.capped
    return generate(plan.schedule, shape_of(plan, ties=cap.ties_of(plan.partition), clip=cap.clip))


def costs_of(problem: Problem, config: Config, partition: Partition) -> tuple[CostModel, CostModel]:
    """Costs for time, and costs for memory: messages that a rank waits for are part of its work.

    With scatter/gather a message is 1/t of the value that is held, and the t devices of the next stage send these
    pieces to each other before its forward or backward.
    """
    if problem.cap is None:
        return problem.once(("costs", config, partition), lambda: _with_waits(problem, config, partition))
    # Slots, and the place of the step, change nothing.
    key = ("costs", config.layers, config.spill is not None and config.spill.activations)
    cost = problem.once(key, lambda: _costs(problem, config, partition))
    return cost, cost


def _with_waits(problem: Problem, config: Config, partition: Partition) -> tuple[CostModel, CostModel]:
    cost = _costs(problem, config, partition)
    pieces = problem.pieces(config.tensor)
    if pieces == 1 and not problem.blocking:
        return cost, cost
    ring = ring_of(problem.topology, range(pieces))
    ranks = placement_for(config).ranks

    def arrival_s(stage: int, size: float) -> float:
        """Seconds that a message from a stage to the next, or back, takes from the time of the one that receives it."""
        wait_s = 0.0
        source = ranks[stage][0]
        target = ranks[stage + 1][0]
        if source == target:
            return wait_s
        if problem.blocking:
            bandwidth, latency_s = cost.link(source, target)
            wait_s = latency_s + size / pieces / bandwidth
        return wait_s + all_gather_s(ring, size)

    forward = list(cost.forward_s)
    backward = list(cost.backward_input_s)
    for stage in range(1, cost.num_stages):
        forward[stage] += arrival_s(stage - 1, cost.act_bytes[stage - 1])
        backward[stage - 1] += arrival_s(stage - 1, cost.grad_bytes[stage - 1])
    share = 1 / pieces
    if problem.blocking:
        share = 0.0
    act_bytes = tuple(size * share for size in cost.act_bytes)
    grad_bytes = tuple(size * share for size in cost.grad_bytes)
    timing = replace(
        cost,
        forward_s=tuple(forward),
        backward_input_s=tuple(backward),
        recompute_s=cost.forward_s,
        act_bytes=act_bytes,
        grad_bytes=grad_bytes,
    )
    return timing, cost


def _costs(problem: Problem, config: Config, partition: Partition) -> CostModel:
    profile = problem.at(config.microbatch_size, config.tensor)
    # On groups of t devices: each is one.
    plan = plan_of(problem, replace(config, tensor=1), partition)
    topology = problem.ranks(config.tensor)
    sizes = None
    if problem.cap is not None:
        sizes = problem.cap.sizes
    return of_plan(profile, plan, topology, state_per_weight=problem.state, runtime=FREE, sizes=sizes)
