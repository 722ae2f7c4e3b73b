"""Layers that move while a run trains: a callback that exchanges times, and makes the move that pays.

After every window of steps all processes exchange the times of their stages. Each decides by the same policy
(`pipefit.planner.rebalance`), and the decision of the first one counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from torch.nn.parameter import is_lazy

from pipefit.errors import PlanError
from pipefit.pipeline.callbacks import EMA, Checkpoints, Record
from pipefit.pipeline.layer_sizes import layer_costs, state_per_weight
from pipefit.pipeline.rearrange import rearrange
from pipefit.pipeline.request import Decision
from pipefit.planner.plan_figures import at_size_of
from pipefit.planner.rebalance import Move, Rebalance, Window
from pipefit.profiling.tensors import num_bytes
from pipefit.profiling.workload import Workload
from pipefit.runtime.collectives import exchange
from pipefit.runtime.faults import note
from pipefit.schedules import find
from pipefit.spec import Layer, Plan, Profile, Topology
from pipefit.stage.ties import tied_layers
from pipefit.timeline.stage_seconds import Middle, middle, stage_seconds

_log = logging.getLogger("pipefit.rebalance")

WINDOW = 8
"""Steps whose medians are one measurement."""

_FIRST_S = 1.0
"""Seconds that count for building stages and proving a program before a move has been measured."""


class Rebalancer:
    """Moves layers between the ranks of a training; a callback of its `fit`s.

    Args:
        pipe: that is trained.
        decision: its plan, with the profile and topology from which it was made.
        work: the model.

    Attributes:
        every: the training pauses at multiples of so many steps.

    Raises:
        PlanError: the plan is one whose layers cannot move.
    """

    every = WINDOW

    def __init__(self, pipe: Any, decision: Decision, work: Workload) -> None:
        plan = decision.plan
        _check(plan, work, pipe.session.is_distributed)
        self._pipe = pipe
        if decision.profile is None:
            profile = _counted(work, plan)
        else:
            profile = at_size_of(plan, decision.profile)
        topology = decision.topology or Topology.local(plan.num_processes)
        state = state_per_weight(work.layers, work.optimizer)
        self._policy = Rebalance(plan, profile, topology, decision.profile is not None, state)
        self._build_s = _FIRST_S
        self._end: int | None = None
        self._folder: Path | None = None

    def begin(self, steps: int | None, callbacks: Sequence[Any]) -> None:
        """Begins a `fit` of so many steps; None: their number is not known.

        Raises:
            PlanError: a callback keeps the weights of a stage.
        """
        self._end = None
        if steps is not None:
            self._end = self._pipe.num_updates + steps
        self._folder = self._pipe.session.folder
        for one in callbacks:
            if isinstance(one, EMA):
                raise PlanError("rebalance: EMA averages the weights of the stages, whose layers would move; give one")
            if self._folder is None and isinstance(one, Checkpoints):
                self._folder = one.folder

    def step(self, record: Record) -> None:
        """Looks at the last window when it is complete. Every rank calls it."""
        if record.step % self.every or record.step != self._pipe.num_updates:
            return
        passes = self._pipe.loop.own_passes(self.every)
        if len(passes) < self.every:
            return
        session = self._pipe.session
        rows = exchange(session, self.figures_of(passes))
        window = self._window(record.step, rows)
        found = self._policy.look(window)
        # Processors may differ in the last digit of a sum.
        decided = exchange(session, msgspec.to_builtins(found))[0]
        if decided is not None:
            self._make(msgspec.convert(decided, Move))

    def figures_of(self, passes: Sequence[Any]) -> dict[str, Any]:
        """The figures of this process in some passes, as JSON data."""
        own: dict[int, Middle] = {}
        programs = self._pipe.program.ranks
        for rank in passes[0]:
            seconds = [stage_seconds(programs[rank], one[rank].starts, one[rank].ends) for one in passes]
            own[rank] = middle(seconds)
        begins = [min(times.starts[0] for times in one.values()) for one in passes]
        periods = [after - before for before, after in pairwise(begins)]
        return {
            "times": [(rank, stage, s) for rank, mid in own.items() for stage, s in mid.seconds.items()],
            "noise": max(mid.noise for mid in own.values()),
            "period": median(periods),
            "build": self._build_s,
        }

    def _window(self, step: int, rows: Sequence[dict[str, Any]]) -> Window:
        times = {}
        for row in rows:
            for rank, stage, seconds in row["times"]:
                times[rank, stage] = seconds
        # Where the end is not known, as many steps follow as were made.
        left = step
        if self._end is not None:
            left = self._end - step
        noise = max(row["noise"] for row in rows)
        period_s = max(row["period"] for row in rows)
        return Window(step, times, noise, period_s, left, max(row["build"] for row in rows))

    def _make(self, move: Move) -> None:
        """Makes a move, and notes it with its reason."""
        began = time.perf_counter()
        rearrange(self._pipe, move.plan)
        seconds = time.perf_counter() - began
        self._build_s = max(seconds - move.travel_s, 0.0)
        self._policy.moved(move)
        if self._pipe.session.rank == 0:
            _log.warning("%s", move)
            if self._folder is not None:
                facts = {"move": move.what, "why": move.why, "step": move.step, "gain": move.gain}
                facts |= {"before_s": move.before_s, "after_s": move.after_s, "seconds": seconds}
                note(self._folder, time.time(), **facts, start=self._pipe.session.start.restart)


def _check(plan: Plan, work: Workload, is_distributed: bool) -> None:
    """Refuses plans whose layers cannot move.

    Raises:
        PlanError: the message names the reason.
    """
    reasons = {
        "all ranks are in one process, which has one speed; start processes (pipefit run -n 2 …)": not is_distributed,
        "the plan has one rank, so there is no other to move a layer to": plan.placement.num_ranks == 1,
        f"{plan.schedule} is asynchronous, and its weights have several versions": not _flushes(plan),
        "spilled stages stay on their tier; leave out spill": plan.spill is not None,
        "the processes of a tensor-parallel rank hold parts of layers; use tensor=1": plan.tensor > 1,
        f"copies share their {plan.shard}; leave out shard": plan.shard != "none",
        "layers share a weight, so they cannot move one by one": bool(tied_layers(work.layers)),
    }
    for reason, holds in reasons.items():
        if holds:
            raise PlanError(f"rebalance: {reason}")


def _flushes(plan: Plan) -> bool:
    return find(plan.schedule).is_synchronous


def _counted(work: Workload, plan: Plan) -> Profile:
    """A profile whose seconds are in proportion to FLOP and parameters."""
    layers = []
    for index, (layer, cost) in enumerate(zip(work.layers, layer_costs(work), strict=True)):
        parameters = [parameter for parameter in layer.module.parameters() if not is_lazy(parameter)]
        trained = num_bytes(parameter for parameter in parameters if parameter.requires_grad)
        third = cost / 3
        size = num_bytes(parameters)
        layers.append(Layer(f"layer {index}", third, third, third, 0.0, 0.0, size, trained_bytes=trained))
    return Profile(work.model, plan.microbatch_size or 1, tuple(layers), source="FLOP and parameters")
