"""The passes of a training run: run a program, collect its losses, advance the counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pipefit.errors import DataError, PipefitError
from pipefit.ir.program import Program
from pipefit.pipeline.batches import BatchStream
from pipefit.pipeline.losses import PendingLosses, finite
from pipefit.pipeline.step_figures import HeldMemory, StepFigures, own_figures
from pipefit.runtime.collectives import exchange
from pipefit.runtime.engine import Engine
from pipefit.runtime.executor import Execution
from pipefit.runtime.malloc import in_use
from pipefit.runtime.microbatches import Feed, Weigh, feed_of, pair_of
from pipefit.schedules.registry import Schedule
from pipefit.timeline import Event, Timeline

OnStep = Callable[[int, float], None]
_KEPT_PASSES = 16


class TrainingLoop:
    """Runs programs of weight updates and counts them.

    Args:
        engine: the ranks of this process.
        schedule: of the training.
        num_microbatches: per weight update.
        program_of: from a number of updates to their program.
        weigh: from a micro-batch's target to its weight in its batch.
        on_updates: called after each pass.

    Attributes:
        num_updates: updates so far.
        next_ordinal: micro-batches so far, which seed the random numbers of the next one.
        held_bytes: peak bytes of tensors of this process in one pass; None: not measured yet.
        moved_bytes: in the last pass, to other ranks, and to the processes that share this one's rank.
        shares_figures: whether each step also collects bubble and memory of all ranks.
        figures: those of the last step.
    """

    def __init__(
        self,
        engine: Engine,
        schedule: Schedule,
        num_microbatches: int,
        program_of: Callable[[int], Program],
        weigh: Weigh | None,
        on_updates: Callable[[], None],
    ) -> None:
        self._engine, self._schedule, self._size = engine, schedule, num_microbatches
        self._program_of, self._weigh, self._on_updates = program_of, weigh, on_updates
        self.num_updates = 0
        self.next_ordinal = 0
        # The times of the last passes over the newest program, by rank.
        self._newest: Program | None = None
        self._passes: deque[dict[int, tuple[list[float], list[float]]]] = deque(maxlen=_KEPT_PASSES)
        self.held_bytes: float | None = None
        self.moved_bytes = (0.0, 0.0)
        self.shares_figures = False
        self.figures: StepFigures | None = None

    def start_step(self, x: Any, y: Any) -> PendingLosses:
        """Runs one update; returns its loss, which is still being sent."""
        self._engine.mesh.check(x)
        feed = feed_of((x, y), self._size, self.next_ordinal, "train", self._weigh)
        runs = self._run(1, feed)
        figures = own_figures(self._engine.session, runs) if self.shares_figures else ()
        return PendingLosses(self._engine, runs, self._size, 1, *figures)

    def run_steps(
        self, batches: Iterator[Any], steps: int | None, on_step: OnStep, stops: Callable[[], bool]
    ) -> list[float]:
        """Runs a program for each update; a loss is read while the next step runs.

        Args:
            batches: of (input, target).
            steps: number of updates; None: until the batches end.
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
                    bubble, *memory_bytes = pending.extra[:-1]
                    self.figures = StepFigures(bubble, tuple(memory_bytes))
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
        feed = BatchStream(map(pair_of, batches), self._size, self.next_ordinal, self._weigh)
        first = self.num_updates
        runs = self._run(steps, feed)
        losses = list(PendingLosses(self._engine, runs, self._size, steps).wait())
        for step, loss in enumerate(losses, 1):
            on_step(step, finite(loss, first + step))
        return losses

    def _run(self, num_steps: int, feed: Feed) -> list[Execution]:
        """Runs the program of some updates, measures the memory if due, and counts the updates."""
        program, workers = self._program_of(num_steps), self._engine.workers
        for worker in workers:
            worker.train(True)
        # In the second pass of a synchronous schedule: then the optimizers have states.
        due = self.held_bytes is None and (self.num_updates > 0 or not self._schedule.is_synchronous)
        tell = in_use(workers[0].device) if due and len(workers) == 1 else None
        watch = HeldMemory(workers[0], tell) if tell else None
        runs = self._engine.run(program, feed, look=watch.look if watch else None)
        if watch is not None:
            self.held_bytes = watch.held_bytes
        if program is not self._newest:
            self._newest = program
            self._passes.clear()
        self.moved_bytes = self._engine.moved_bytes
        self._passes.append({run.compiled.rank: (run.starts, run.ends) for run in runs})
        self.num_updates += num_steps
        self.next_ordinal += num_steps * self._size
        self._on_updates()
        return runs

    def timeline(self, last: int) -> Timeline:
        """The last passes of all ranks, times in seconds since the first of them began.

        Clocks are assumed to be common, as on one machine.

        Raises:
            PipefitError: nothing has run yet.
        """
        if self._newest is None:
            raise PipefitError("nothing has run yet: there is no timeline")
        passes = [sorted(times.items()) for times in list(self._passes)[-last:]]
        # Processes that share a rank hold the times of the same instructions: those of its first one count.
        of_processes = exchange(self._engine.session, passes if self._engine.mesh.is_first else [[]] * len(passes))
        events = [
            Event(rank, position, repeat, start, end)
            for of_process in of_processes
            for repeat, times in enumerate(of_process)
            for rank, (starts, ends) in times
            for position, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        origin = min((event.start_s for event in events if event.start_s), default=0.0)
        shifted = [e._replace(start_s=e.start_s - origin, end_s=max(e.end_s, e.start_s) - origin) for e in events]
        shifted.sort(key=lambda event: (event.rank, event.repeat, event.position))
        return Timeline(self._newest, tuple(shifted), source="measured", num_repeats=len(passes))


def number_of(batches: Iterable[Any], schedule: str) -> int:
    """The number of batches.

    Raises:
        DataError: they have no length.
    """
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(f"{schedule} needs to know its number of steps: give fit(…, steps=N)") from None
