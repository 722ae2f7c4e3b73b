"""Layers that move while a run trains: a callback that exchanges times, and makes the move that pays.

After every window of steps all processes exchange the times of their stages. Each decides by the same policy
(`pipefit.planner.rebalance`), and the decision of the first one counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from torch.nn.parameter import is_lazy

from pipefit.errors import PlanError
from pipefit.pipeline.callbacks import Checkpoints, Record
from pipefit.pipeline.layer_sizes import layer_costs, state_per_weight
from pipefit.pipeline.rearrange import rearrange, refuse_unmovable
from pipefit.pipeline.request import Decision
from pipefit.planner.plan_figures import at_size_of
from pipefit.planner.rebalance import Move, Rebalance, Window
from pipefit.profiling.tensors import num_bytes
from pipefit.profiling.workload import Workload
from pipefit.runtime.collectives import exchange
from pipefit.runtime.faults import note
from pipefit.spec import Layer, Plan, Profile, Topology
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

    Attributes:
        every: the training pauses at multiples of so many steps.

    Raises:
        PlanError: the plan is one whose layers cannot move.
    """

    every = WINDOW

    def __init__(self, pipe: Any, decision: Decision) -> None:
        _check(pipe)
        self._pipe = pipe
        self._decision = decision
        self._policy = self._fresh()
        self._build_s = _FIRST_S
        self._end: int | None = None
        self._folder: Path | None = None

    def begin(self, steps: int | None, callbacks: Sequence[Any]) -> None:
        """Begins a `fit` of so many steps; None: their number is not known."""
        self._end = None
        if steps is not None:
            self._end = self._pipe.num_updates + steps
        self._folder = self._pipe.session.folder
        for one in callbacks:
            if self._folder is None and isinstance(one, Checkpoints):
                self._folder = one.folder

    def step(self, record: Record) -> None:
        """Looks at the last window when it is complete. Every rank calls it."""
        if record.step % self.every or record.step != self._pipe.num_updates:
            return
        passes = self._pipe.loop.own_passes(self.every)
        if len(passes) < self.every:
            return
        if self._policy.plan != self._pipe.plan:
            # A rank was lost, and the run goes on by another plan.
            self._policy = self._fresh()
        session = self._pipe.session
        rows = exchange(session, self.figures_of(passes))
        window = self._window(record.step, rows)
        found = self._policy.look(window)
        # Processors may differ in the last digit of a sum.
        decided = exchange(session, msgspec.to_builtins(found))[0]
        if decided is not None:
            self._make(msgspec.convert(decided, Move))

    def _fresh(self) -> Rebalance:
        """The policy for the plan that runs, which knows no times yet."""
        plan = self._pipe.plan
        work = self._pipe.given.work
        found = self._decision.profile
        if found is None:
            profile = _counted(work, plan)
        else:
            profile = at_size_of(plan, found)
        topology = self._decision.topology or Topology.local(plan.num_processes)
        return Rebalance(plan, profile, topology, found is not None, state_per_weight(work.layers, work.optimizer))

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
        self._policy.moved(replace(move, plan=self._pipe.plan))
        if self._pipe.session.rank == 0:
            _log.warning("%s", move)
            if self._folder is not None:
                facts = {"move": move.what, "why": move.why, "step": move.step, "gain": move.gain}
                facts |= {"before_s": move.before_s, "after_s": move.after_s, "seconds": seconds}
                note(self._folder, time.time(), **facts, start=self._pipe.session.start.restart)


def _check(pipe: Any) -> None:
    """Refuses a training whose layers cannot move.

    Raises:
        PlanError: the message names the reason.
    """
    if not pipe.session.is_distributed or pipe.plan.placement.num_ranks == 1:
        raise PlanError(
            "rebalance: expected several processes, between which layers can move, got one; start as many as the plan "
            "has ranks (pipefit run -n 2 …), or leave it out"
        )
    try:
        refuse_unmovable(pipe, pipe.plan)
    except PlanError as problem:
        raise PlanError(f"rebalance: layers of this training cannot move while it runs: {problem}") from None


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
