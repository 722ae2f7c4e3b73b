"""The passes of a training, one after the other: a program runs, its losses are collected, the counters move on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pipefit.errors import DataError
from pipefit.ir.program import Program
from pipefit.pipeline.batches import stream_feed
from pipefit.pipeline.history import PassHistory
from pipefit.pipeline.losses import PendingLosses, finite
from pipefit.pipeline.peak_memory import HeldMemory
from pipefit.pipeline.step_figures import StepFigures, own_figures
from pipefit.pipeline.tensor_parallel import TensorParallel
from pipefit.runtime.engine import Engine
from pipefit.runtime.executor import Execution, Feed
from pipefit.runtime.microbatches import Weigh, feed_of, pair_of
from pipefit.schedules.registry import Schedule

OnStep = Callable[[int, float], None]


class TrainingLoop:
    """Runs programs of weight updates and counts them.

    Args:
        engine: the ranks of this process.
        tensor: the layers of the whole model.
        schedule: of the training.
        num_microbatches: per weight update.
        program_of: from a number of updates to their program.
        weigh: from a micro-batch's target to its weight in its batch.
        on_updates: called after each pass.

    Attributes:
        num_updates: updates so far.
        next_ordinal: micro-batches so far, which seed the random numbers of the next one.
        history: the last passes.
        held_bytes: the most bytes of tensors that this process held in one pass; None: not measured yet.
        shares_figures: whether each step also collects bubble and memory of all ranks.
        figures: those of the last step.
    """

    def __init__(
        self,
        engine: Engine,
        tensor: TensorParallel,
        schedule: Schedule,
        num_microbatches: int,
        program_of: Callable[[int], Program],
        weigh: Weigh | None,
        on_updates: Callable[[], None],
    ) -> None:
        self._engine, self._tensor, self._schedule, self._size = engine, tensor, schedule, num_microbatches
        self._program_of, self._weigh, self._on_updates = program_of, weigh, on_updates
        self.num_updates = 0
        self.next_ordinal = 0
        self.history = PassHistory()
        self.held_bytes: float | None = None
        self.shares_figures = False
        self.figures: StepFigures | None = None

    def start_step(self, x: Any, y: Any) -> PendingLosses:
        """Runs one update; its loss is still on its way."""
        self._tensor.check(x)
        feed = feed_of([(x, y)], self._size, self.next_ordinal, "train", self._weigh)
        runs = self._run(self._program_of(1), feed)
        self._count(1)
        figures = own_figures(self._engine.session, runs) if self.shares_figures else ()
        return PendingLosses(self._engine, runs, self._size, 1, *figures)

    def run_steps(
        self, batches: Iterator[Any], steps: int | None, on_step: OnStep, stops: Callable[[], bool]
    ) -> list[float]:
        """Runs a program for each update; a loss is read while the next step runs.

        Args:
            batches: of (input, target).
            steps: how many; None: until the batches end.
            on_step: see `Pipeline.fit`.
            stops: whether the run was asked to stop.

        Returns:
            The losses of the steps.
        """
        losses: list[float] = []
        first = self.num_updates
        pending: PendingLosses | None = None

        def read() -> None:
            if pending is not None:
                losses.append(finite(pending.wait()[0], first + len(losses) + 1))
                if self.shares_figures:
                    self.figures = StepFigures.of(pending.extra[:-1])
                on_step(len(losses), losses[-1])

        while steps is None or self.num_updates - first < steps:
            if stops() or (batch := next(batches, None)) is None:
                break
            started = self.start_step(*pair_of(batch))
            read()
            pending = started
        read()
        if steps is not None and 0 < len(losses) < steps and not stops():
            raise DataError(f"the data ended after {len(losses)} of {steps} steps; give more, or fewer steps")
        return losses

    def run_segment(self, batches: Iterator[Any], steps: int, on_step: OnStep) -> list[float]:
        """Runs one program over all updates, whose micro-batches overlap; it drains at its end."""
        feed = stream_feed(map(pair_of, batches), steps, self._size, self.next_ordinal, self._weigh)
        first = self.num_updates
        runs = self._run(self._program_of(steps), feed)
        self._count(steps)
        losses = list(PendingLosses(self._engine, runs, self._size, steps).wait())
        for step, loss in enumerate(losses, 1):
            on_step(step, finite(loss, first + step))
        return losses

    def _run(self, program: Program, feed: Feed) -> list[Execution]:
        workers = self._engine.workers
        for worker in workers:
            worker.train(True)
        watch = self._memory_watch()
        runs = self._engine.run(program, feed, look=watch.look if watch else None)
        if watch is not None:
            self.held_bytes = watch.held_bytes
        self.history.add(program, runs)
        return runs

    def _memory_watch(self) -> HeldMemory | None:
        """Looks at the memory in one pass: the second of a synchronous schedule, when the optimizers have states."""
        workers = self._engine.workers
        due = self.held_bytes is None and (self.num_updates > 0 or not self._schedule.is_synchronous)
        return HeldMemory.watching(workers[0]) if due and len(workers) == 1 else None

    def _count(self, num_steps: int) -> None:
        self.num_updates += num_steps
        self.next_ordinal += num_steps * self._size
        self._on_updates()


def number_of(batches: Iterable[Any], schedule: str) -> int:
    """The number of batches.

    Raises:
        DataError: they do not know it.
    """
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(f"{schedule} needs to know its number of steps: give fit(…, steps=N)") from None
