"""The executor: one loop over a rank's instructions, whatever the schedule."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Op
from pipefit.runtime.compiled import CompiledRank
from pipefit.runtime.distributed import DistributedTransport
from pipefit.runtime.local import LocalTransport
from pipefit.runtime.microbatches import Feed
from pipefit.runtime.progress import Progress
from pipefit.runtime.transport import Ending
from pipefit.runtime.worker import Worker

Key = tuple[str, int, int]
Handlers = Mapping[Op, Callable[["Execution", Instruction], None]]

_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)
"""Lets the threads that carry messages have the core between two instructions, where each rank has only one: a message
that others wait for would otherwise lie there until the scheduler ends this thread's turn, some milliseconds later."""


@dataclass
class Execution:
    """One rank's pass over a program.

    Attributes:
        compiled: the rank's list and what it looks up.
        worker: the rank's stages and optimizers.
        transport: how it reaches the others.
        feed: the data.
        progress: where others can see how far the rank has come.
        values: activations, inputs, gradients and what autograd saved, by (kind, stage, micro-batch).
        endings: what is under way and will be waited for, by the index of its instruction.
        losses: (micro-batch, weighted loss) of the micro-batches whose loss this rank computed.
        metric, metrics: a further number taken of each output, and its weighted values.
        norms: of each update, the sum of squares of every rank's gradients.
        updates: by (stage, update), its learning rates, and the norm of all gradients where that is known.
        index: of the instruction that is running or waiting.
        at_end: done once the list is through.
        loss: takes the output of the model in place of the training's; None: that.
        look: called after each instruction, when what it made and what it needed are both there.
        starts, ends: when each instruction ran, in seconds of `time.perf_counter`.
    """

    compiled: CompiledRank
    worker: Worker
    transport: LocalTransport | DistributedTransport
    feed: Feed
    progress: Progress
    metric: Callable[[Any, Any], float] | None = None
    values: dict[Key, Any] = field(default_factory=dict)
    endings: dict[int, Ending] = field(default_factory=dict)
    losses: list[tuple[int, Tensor]] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    norms: dict[int, Tensor] = field(default_factory=dict)
    updates: dict[tuple[int, int], tuple[tuple[float, ...], Tensor | None]] = field(default_factory=dict)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    index: int = 0
    loss: Callable[[Any, Any], Tensor] | None = None
    look: Callable[[], None] | None = None
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def run(self, handlers: Handlers) -> Generator[Instruction]:
        """Runs the list; yields the instruction that cannot go on yet (only a transport that never blocks makes it).

        Args:
            handlers: what each operation does; see `pipefit.runtime.handlers`.
        """
        compiled, clock, progress = self.compiled, time.perf_counter, self.progress
        progress.passes += 1
        instructions, awaits, frees = compiled.instructions, compiled.awaits, compiled.frees
        starts = self.starts = [0.0] * len(instructions)
        ends = self.ends = [0.0] * len(instructions)
        values, look = self.values, self.look
        for index, instruction in enumerate(instructions):
            self.index = index
            progress.at(index)
            if awaits[index]:
                yield from self._wait_for(awaits[index])
            starts[index] = clock()
            handlers[instruction.op](self, instruction)
            ends[index] = clock()
            _give_way()
            if look is not None:
                look()
            for value in frees[index]:
                values.pop(value, None)
        yield from self._wait_for(compiled.awaited_at_end)
        self.index = len(instructions)
        for action in self.at_end:
            action()

    def _wait_for(self, awaited: Sequence[int]) -> Generator[Instruction]:
        """Waits until earlier instructions are complete; yields the one that cannot go on meanwhile."""
        for index in awaited:
            end = self.endings.pop(index, None)
            if end is not None:
                while not end():
                    yield self.compiled.instructions[self.index]
                self.ends[index] = time.perf_counter()
