"""The executor: one loop over a rank's instructions, for every schedule."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipefit.ir.instruction import Instruction, StageAt, ValueKey
from pipefit.ir.op import COMPUTE_OPS, Op
from pipefit.parallel.loss import Loss
from pipefit.runtime.compiled import CompiledRank
from pipefit.runtime.distributed import DistributedTransport
from pipefit.runtime.local import LocalTransport
from pipefit.runtime.microbatches import Feed
from pipefit.runtime.progress import Progress
from pipefit.runtime.transport import Ending
from pipefit.runtime.worker import Worker
from pipefit.spec.plan import Figures
from pipefit.spill.lanes import Copy
from pipefit.spill.rank import Spilling
from pipefit.stage.moments import Mark, Moments
from pipefit.stage.training import Metric

Handlers = Mapping[Op, Callable[["Execution", Instruction], None]]

_give_way = os.sched_yield
"""Offers the core to the threads that carry messages or records between two instructions, where each rank has only one.
Otherwise they would wait until the scheduler ends this thread's time slice, some milliseconds later."""


@dataclass
class Execution:
    """One rank's pass over a program.

    Attributes:
        compiled: the rank's list and its tables.
        header: of its program.
        worker: the rank's stages and optimizers.
        transport: its connection to the others.
        feed: the data.
        progress: the rank's position, for other processes.
        values: activations, inputs, gradients and tensors saved by autograd, by (kind, stage, micro-batch).
        endings: asynchronous instructions that will be waited for, by index.
        losses: (micro-batch, weighted loss) of the micro-batches whose loss this rank computed.
        logged: metrics that the loss returned, of each of these micro-batches, weighted like its loss.
        metric, metrics: a further number computed from each output, and its weighted values.
        norms: of each update, the sum of squares of every rank's gradients.
        known: those of them that the host has read.
        decided: whether an update is made, where the loss and all gradients must be finite.
        unread: whether a GPU has made the step of a stage, which the host has not read.
        rates: learning rates of each update of a stage, by (stage, update).
        index: of the instruction that is running or waiting.
        at_end: called at the end of the list.
        copies: of spilled records, that the rank has started, by the index of the instruction.
        loss: of the model's output, in place of the training's; None: the training's.
        look: called after each instruction, before values are freed.
        commit: begins the sum in which the ranks commit a step; None: they only meet.
        moments: of the rank's GPU; None: it computes on the CPU.
        starts, ends: times of each instruction, in seconds of `time.perf_counter`; on a GPU after `read_times`.
        launches: (index, start, end) of the host's launch of each computation; [] on a CPU.
    """

    compiled: CompiledRank
    worker: Worker
    transport: LocalTransport | DistributedTransport
    feed: Feed
    progress: Progress
    metric: Metric | None = None
    values: dict[ValueKey, Any] = field(default_factory=dict)
    endings: dict[int, Ending] = field(default_factory=dict)
    losses: list[tuple[int, Tensor]] = field(default_factory=list)
    logged: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    metrics: list[float] = field(default_factory=list)
    norms: dict[int, Tensor] = field(default_factory=dict)
    known: dict[int, Tensor] = field(default_factory=dict)
    decided: dict[int, bool] = field(default_factory=dict)
    unread: dict[int, Tensor] = field(default_factory=dict)
    rates: dict[StageAt, Figures] = field(default_factory=dict)
    at_end: list[Callable[[], object]] = field(default_factory=list)
    copies: dict[int, Copy] = field(default_factory=dict)
    index: int = 0
    loss: Loss | None = None
    look: Callable[[], None] | None = None
    commit: Callable[[Execution], Ending] | None = None
    moments: Moments | None = None
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    launches: list[tuple[int, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.header = self.compiled.program.header

    @property
    def spilling(self) -> Spilling:
        """The tiers, stores and lanes of a rank that spills."""
        assert self.worker.spilling is not None
        return self.worker.spilling

    def run(self, handlers: Handlers, part: range | None = None) -> Generator[Instruction]:
        """Runs the list; yields an instruction that cannot continue yet (only with a transport that never blocks).

        Args:
            handlers: of the operations; see `pipefit.runtime.handlers`.
            part: the instructions to run, by index, if not all; no transfer may cross its ends.
        """
        compiled = self.compiled
        clock = self._clock
        progress = self.progress
        progress.passes += 1
        instructions = compiled.instructions
        awaits = compiled.awaits
        frees = compiled.frees
        starts = self.starts = [0.0] * len(instructions)
        ends = self.ends = [0.0] * len(instructions)
        values, look = self.values, self.look
        on_cpu = self.moments is None
        now = clock()
        for index in part or range(len(instructions)):
            instruction = instructions[index]
            self.index = index
            if awaits[index]:
                progress.at(index, waits=True)
                yield from self._wait_for(awaits[index])
            progress.at(index)
            # A GPU begins an instruction at the moment at which it has done the one before.
            if awaits[index] or on_cpu:
                now = clock()
            starts[index] = now
            handlers[instruction.op](self, instruction)
            now = ends[index] = clock()
            if on_cpu:
                _give_way()
            if look is not None:
                look()
            for value in frees[index]:
                values.pop(value, None)
        progress.at(len(instructions), waits=True)
        yield from self._wait_for(compiled.awaited_at_end)
        self.index = len(instructions)
        for action in self.at_end:
            action()

    def wait_later(self, ending: Ending) -> None:
        """Lets the instruction that runs end later: what needs its result waits for it then."""
        self.endings[self.index] = ending

    def _wait_for(self, awaited: Sequence[int]) -> Generator[Instruction]:
        """Waits until earlier instructions are complete; yields one that cannot continue meanwhile."""
        for index in awaited:
            end = self.endings.pop(index, None)
            if end is not None:
                while not end():
                    yield self.compiled.instructions[self.index]
                self.ends[index] = self._clock()

    @property
    def _clock(self) -> Callable[[], Any]:
        if self.moments is None:
            return time.perf_counter
        return self.moments.mark

    def stands_before(self) -> int:
        """The first instruction that a GPU has been given and has not begun; −1: it has begun them all."""
        starts: list[Any] = self.starts
        for index, start in enumerate(starts):
            if isinstance(start, Mark) and not start.reached.query():
                return index
        return -1

    def read_times(self) -> None:
        """Reads when a GPU reached the instructions, after a wait for it: the host only launches them."""
        if self.moments is None:
            return
        for index, copy in self.copies.items():
            copy.launched()
            self.starts[index], self.ends[index] = copy.times
        self.copies.clear()
        for index, instruction in enumerate(self.compiled.instructions):
            start: Any = self.starts[index]
            end: Any = self.ends[index]
            if instruction.op in COMPUTE_OPS and isinstance(start, Mark) and isinstance(end, Mark):
                self.launches.append((index, start.launched_s, end.launched_s))
        for times in (self.starts, self.ends):
            times[:] = map(self.moments.seconds, times)
