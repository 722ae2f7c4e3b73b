"""The measurements of a run before its first step: layers, machine and executor, and the plan that follows from them.

kept by an earlier run ──────────────────────► plan ─► costs
measured ─► was the machine busy? ─no─► kept ─► plan ─► costs
               │yes
               └► measured again: the quieter one counts, and is kept if it was quiet
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from pipefit.calibrate.overhead import runtime_costs
from pipefit.calibrate.tensor_shard import profile_on_ranks
from pipefit.cost import CostModel, RuntimeCosts, of_plan
from pipefit.pipeline.memory_cap import machine_tier
from pipefit.pipeline.request import Decision, Measured, decide, measured_sizes
from pipefit.pipeline.step_figures import ModelFlop, count_flop
from pipefit.profiling.machine import CpuUse, cores_of_others
from pipefit.profiling.workload import Workload
from pipefit.run.config import RunConfig
from pipefit.run.kept_measurements import KeptMeasurements, facts_of_measurement, file_of
from pipefit.run.observer import Observer
from pipefit.run.optimizers import STATE_PER_WEIGHT
from pipefit.run.result import MeasuredCosts
from pipefit.runtime.collectives import exchange, from_first
from pipefit.runtime.microbatches import largest_part
from pipefit.runtime.outliving import kept
from pipefit.runtime.progress import MEASURING
from pipefit.runtime.session import current
from pipefit.spec import Profile
from pipefit.spec.options import AUTO
from pipefit.timeline.compare import Row

_NOTABLE_CORES = 0.5
"""Cores of other programs from which a measurement is that of a busy machine."""

_MEASURING = ("measuring the layers", "measuring the layers for several numbers of micro-batches, and planning")
"""The part of a run that begins; the second one for a plan that is chosen."""


def measured(config: RunConfig, work: Workload, observer: Observer) -> tuple[Decision, MeasuredCosts]:
    """The plan of a run, and the costs of its operations here; every rank makes the same call.

    Figures that an earlier run has kept are used, unless --measure again. What was measured on a busy machine is
    measured once more, and never kept.
    """
    book = _book(config, work)
    if book.made_at:
        observer.says(_used(book))
    found = _attempt(config, work, observer, book, 0)
    cores = found.costs.cores_of_others
    if cores:
        observer.says(f"{_others(cores)} while the layers were measured: measuring once more")
        book = _book(config, work)
        another = _attempt(config, work, observer, book, 1)
        found = min(found, another, key=lambda one: one.costs.cores_of_others)
        cores = found.costs.cores_of_others
    if cores:
        observer.says(busy_measurement(cores))
    else:
        book.save()
    if not config.request.is_capped:
        observer.counted(found.flop)
    return found.decision, found.costs


class _Attempt(NamedTuple):
    """The plan, the costs and the model's FLOP by one measurement."""

    decision: Decision
    costs: MeasuredCosts
    flop: ModelFlop | None


def _book(config: RunConfig, work: Workload) -> KeptMeasurements:
    """The kept measurements of the model; of a run that spills none: its tier has other room every time."""
    if config.request.spill is not None:
        return KeptMeasurements({}, current(), None)
    sizes = measured_sizes(config.request, work)
    facts = facts_of_measurement(work, config.optimizer, sizes, current())
    return KeptMeasurements(facts, current(), file_of(facts), again=config.measure == "again")


def _used(book: KeptMeasurements) -> str:
    when = time.strftime("%-d %b %H:%M", time.localtime(book.made_at))
    return f"layers: measured on {when}, kept in {book.path} (--measure again: measure now)"


def _attempt(config: RunConfig, work: Workload, observer: Observer, book: KeptMeasurements, number: int) -> _Attempt:
    """The plan and the costs, with everything measured that is not kept.

    Args:
        config: the options of the run.
        work: the model and its training.
        observer: of the run.
        book: the kept measurements; takes the new ones.
        number: of the attempt: a restarted run has measured it already.
    """
    session = current()
    before = CpuUse.now()
    known = book.find("layers", Measured)
    if known is None:
        observer.doing(_MEASURING[config.request.schedule == AUTO])
    made = decide(config.request, work, session, measure=True, known=known)
    assert made.profile is not None and made.topology is not None
    if known is None:
        book.add("layers", Measured(made.profile, made.topology))
    flop = []
    if not config.request.is_capped:
        flop = book.take("flop", list[ModelFlop], partial(_flop, work, made.plan.num_processes))
    observer.doing("measuring the machine, and predicting the run")
    profile = made.profile.at(largest_part(work.batch("a run")[0], made.plan.num_microbatches))
    cost = _cost(config, work, made._replace(profile=profile), book)
    others = 0.0
    if book.is_new:
        others = kept(session, f"others-{number}", float, lambda: busy_cores(before))
    return _Attempt(made, MeasuredCosts(profile, cost, others), next(iter(flop), None))


def _flop(work: Workload, num_processes: int) -> list[ModelFlop]:
    """The basis of MFU, which rank 0 counts; empty: it cannot be counted."""
    with current().at(MEASURING):
        found = from_first(current(), lambda: count_flop(work, num_processes))
    if found is None:
        return []
    return [ModelFlop(*found)]


def _cost(config: RunConfig, work: Workload, made: Decision, book: KeptMeasurements) -> CostModel:
    """Costs of the plan on these ranks; spilled stages of a plan without a cap also need the tier's rates."""
    session = current()
    plan, profile, topology = made
    assert profile is not None and topology is not None
    if (config.request.spill or plan.spill) is not None and not topology.tiers:
        tier = machine_tier(config.spill, work, session, topology.tier_shares(plan.placement.num_ranks))
        topology = replace(topology, tiers=(tier,))
    if plan.tensor > 1:
        shard = f"shard of {plan.tensor}, {plan.num_microbatches} micro-batches, {plan.sequence_parallel}"
        profile = book.take(shard, Profile, partial(profile_on_ranks, plan, profile, topology, session, work))
    runtime = book.take("executor", RuntimeCosts, partial(runtime_costs, session))
    return of_plan(profile, plan, topology, state_per_weight=STATE_PER_WEIGHT[config.optimizer], runtime=runtime)


def busy_cores(before: CpuUse | None) -> float:
    """Mean number of cores that other programs took since a reading; 0 where that is too little to matter.

    Every rank makes the same call.

    Args:
        before: the reading; None: the system does not say.
    """
    after = CpuUse.now()
    own_s = None
    if before is not None and after is not None:
        own_s = after.own_s - before.own_s
    of_ranks = exchange(current(), own_s)
    if None in of_ranks:
        return 0.0
    assert before is not None and after is not None
    found: float = max(exchange(current(), cores_of_others(before, after, sum(of_ranks))))
    if found < _NOTABLE_CORES:
        return 0.0
    return found


def _others(cores: float) -> str:
    return f"other programs took {cores:.1f} cores"


def busy_measurement(cores: float) -> str:
    """The sentence about a prediction from a busy machine."""
    return (
        f"{_others(cores)} while the layers were measured, twice: the prediction is for a machine as busy, and is not "
        "kept; train again on a quiet one"
    )


def busy_training(cores: float) -> str:
    """The sentence about measured figures of a busy machine."""
    return f"{_others(cores)} during the training: its times are longer than on a quiet machine"


def slow_training(rows: Sequence[Row]) -> str:
    """The sentence about a step that took more than twice its predicted time; "": there is none."""
    for row in rows:
        if row.name == "period" and row.error > 1:
            return (
                f"a step took {row.error + 1:.1f} times its predicted time: the machine was slower than while the "
                "layers were measured; --measure again measures them now"
            )
    return ""
