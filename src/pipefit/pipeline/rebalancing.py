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

from pipefit.errors import ModelError, PlanError
from pipefit.pipeline.callbacks import Checkpoints, Record
from pipefit.pipeline.layer_sizes import layer_costs, state_per_weight
from pipefit.pipeline.rearrange import rearrange, why_stay
from pipefit.pipeline.repairable import why_fixed
from pipefit.pipeline.request import Decision
from pipefit.pipeline.training_loop import Times
from pipefit.planner.plan_figures import at_size_of
from pipefit.planner.rebalance import Move, Rebalance, Window
from pipefit.profiling.tensors import num_bytes
from pipefit.profiling.workload import Workload
from pipefit.runtime.collectives import exchange
from pipefit.runtime.faults import note
from pipefit.spec import Layer, Plan, Profile, Topology
from pipefit.timeline.stage_seconds import middle, stage_seconds

_log = logging.getLogger("pipefit.rebalance")

WINDOW = 8
"""Steps whose medians are one measurement."""

_FIRST_S = 1.0
"""Assumed seconds of building stages and proving a program, before a move has been measured."""


class Rebalancer:
    """Moves layers between the ranks of a training; a callback of its `fit`s.

    Args:
        pipe: that is trained.
        decision: its plan, with the profile and topology from which it was made.

    Attributes:
        every: the training pauses at multiples of so many steps.
        common: see `Callbacks`.
        policy: for the plan that runs; None: the next look makes one, and begins anew.

    Raises:
        PlanError: the plan is one whose layers cannot move.
    """

    every = WINDOW
    common = ("_has_ended", "_move_s")

    def __init__(self, pipe: Any, decision: Decision) -> None:
        _check(pipe)
        self._pipe = pipe
        self._decision = decision
        self.policy: Rebalance | None = None
        self._move_s = _FIRST_S
        self._has_ended = False
        self._end: int | None = None
        self._folder: Path | None = None

    def begin(self, steps: int | None, callbacks: Sequence[Any]) -> None:
        """Begins a `fit` of so many steps; None: their number is not known."""
        self._end = None
        if steps is not None:
            self._end = self._pipe.num_updates + steps
        folders = [one.folder for one in callbacks if isinstance(one, Checkpoints)]
        self._folder = next(iter(folders), None)

    def step(self, record: Record) -> None:
        """Looks at the last window when it is complete. Every rank calls it."""
        pipe = self._pipe
        if self._has_ended or record.step % self.every or record.step != pipe.num_updates:
            return
        passes = pipe.loop.own_passes(self.every)
        # After the step a rank may have been lost: then the passes are those of the plan before.
        if len(passes) < self.every or not pipe.loop.has_run(pipe.program):
            return
        if self.policy is None or self.policy.plan != pipe.plan:
            # The first window, or a rank was lost and the run goes on by another plan.
            self.policy = self._fresh()
        rows = exchange(pipe.session, self.figures_of([one[pipe.rank] for one in passes]))
        found = self.policy.look(self._window(record.step, rows))
        # Processors may differ in the last digit of a sum: the decision of the first one counts.
        decided = exchange(pipe.session, msgspec.to_builtins(found))[0]
        if decided is not None:
            self._make(msgspec.convert(decided, Move))

    def figures_of(self, passes: Sequence[Times]) -> list[Any]:
        """Seconds of this rank's stages in some passes, their noise, the seconds of a step, and of the last move."""
        instructions = self._pipe.program.ranks[self._pipe.rank]
        found = middle([stage_seconds(instructions, one.starts, one.ends) for one in passes])
        periods = [after.starts[0] - before.starts[0] for before, after in pairwise(passes)]
        return [list(found.seconds.items()), found.noise, median(periods), self._move_s]

    def _window(self, step: int, rows: Sequence[Any]) -> Window:
        times = {}
        for rank, row in enumerate(rows):
            for stage, seconds in row[0]:
                times[rank, stage] = seconds
        _, noises, periods, moves = zip(*rows, strict=True)
        # Where the end is not known, as many steps follow as were made.
        left = (self._end or 2 * step) - step
        return Window(step, times, max(noises), max(periods), left, max(moves))

    def _make(self, move: Move) -> None:
        """Makes a move, and notes it with its reason."""
        assert self.policy is not None
        began = time.perf_counter()
        try:
            rearrange(self._pipe, move.plan)
        except ModelError as problem:
            _log.warning("layers no longer move: %s", problem)
            self._has_ended = True
            return
        self._move_s = time.perf_counter() - began
        self.policy.moved(replace(move, plan=self._pipe.plan))
        session = self._pipe.session
        if session.rank == 0:
            _log.warning("%s", move)
            facts = {"move": move.what, "why": move.why, "step": move.step, "gain": move.gain}
            facts |= {"before_s": move.before_s, "after_s": move.after_s, "seconds": self._move_s}
            if folder := session.folder or self._folder:
                note(folder, time.time(), **facts, start=session.num_faults)

    def _fresh(self) -> Rebalance:
        """The policy for the plan that runs, which knows no times yet."""
        plan = self._pipe.plan
        work = self._pipe.given.work
        if self._decision.profile is None:
            profile = _counted(work, plan)
        else:
            profile = at_size_of(plan, self._decision.profile)
        topology = self._decision.topology or Topology.local(plan.num_processes)
        # Measured times hold the effect of shared cores.
        levels = tuple(msgspec.structs.replace(level, cores=None) for level in topology.levels)
        topology = msgspec.structs.replace(topology, levels=levels)
        return Rebalance(plan, profile, topology, state_per_weight(work.layers, work.optimizer))


def _check(pipe: Any) -> None:
    """Refuses a training whose layers cannot move.

    Raises:
        PlanError: the message names the reason.
    """
    if not pipe.session.is_distributed:
        raise PlanError(
            "rebalance: expected several processes, between which layers can move, got one; start as many as the plan "
            "has ranks (pipefit run -n 2 …), or leave it out"
        )
    if why := why_fixed(pipe.plan) or why_stay(pipe.layers):
        raise PlanError(f"rebalance: layers of this training cannot move while it runs: {why}; leave the option out")


def _counted(work: Workload, plan: Plan) -> Profile:
    """A profile whose seconds are in proportion to FLOP and parameters."""
    layers = []
    trains = False
    for layer, cost in zip(work.layers, layer_costs(work), strict=True):
        parameters = [parameter for parameter in layer.module.parameters() if not is_lazy(parameter)]
        trained = num_bytes(parameter for parameter in parameters if parameter.requires_grad)
        trains = trains or trained > 0
        forward_s = (cost + 1) / 3
        backward_s = 0.0  # of layers before the first one that trains
        if trains:
            backward_s = forward_s
        name = f"layer {layer.index}"
        size = num_bytes(parameters)
        layers.append(Layer(name, forward_s, backward_s, backward_s, 0.0, 0.0, size, trained_bytes=trained))
    return Profile(work.model, plan.microbatch_size or 1, tuple(layers), source="FLOP and parameters")
