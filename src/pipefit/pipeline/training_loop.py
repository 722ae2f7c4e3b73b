"""The passes of a training run: run a program, collect its losses, advance the counters."""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from pipefit.checkpoint.memory import Memory
from pipefit.checkpoint.run_state import RunState
from pipefit.errors import DataError, ModelError, NonFiniteLossError, PipefitError
from pipefit.ir.program import Program
from pipefit.pipeline.batches import BatchStream, size_of
from pipefit.pipeline.callbacks import Callbacks, Record
from pipefit.pipeline.given_model import GivenModel
from pipefit.pipeline.losses import PendingLosses
from pipefit.pipeline.nonfinite import finite, refusal
from pipefit.pipeline.step_figures import HeldMemory, own_figures
from pipefit.runtime.collectives import exchange, sum_table
from pipefit.runtime.engine import Engine
from pipefit.runtime.executor import Execution
from pipefit.runtime.finite import all_finite
from pipefit.runtime.malloc import in_use
from pipefit.runtime.microbatches import Feed, feed_of, pair_of
from pipefit.runtime.transport import Ending
from pipefit.runtime.updating import gradient_norm
from pipefit.runtime.worker import follow_model
from pipefit.schedules.registry import Schedule
from pipefit.spec.options import STOP
from pipefit.stage.accelerator import settle
from pipefit.stage.device import in_pinned_memory
from pipefit.timeline import Event, Timeline

_KEPT_PASSES = 16
_log = logging.getLogger("pipefit.pipeline")


class _Pass(NamedTuple):
    """A pass whose losses are being sent.

    Attributes:
        first: updates before it.
        runs: of this process's ranks.
        losses: of its steps.
        norms: of the gradients of its steps.
        sizes: samples and tokens of its batches.
        began: its beginning, in seconds of `time.perf_counter`.
    """

    first: int
    runs: Sequence[Execution]
    losses: PendingLosses
    norms: Sequence[torch.Tensor | None]
    sizes: Sequence[tuple[int, int]]
    began: float


class Times(NamedTuple):
    """Times of a rank in a pass; see `Execution`."""

    starts: list[float]
    ends: list[float]
    launches: list[tuple[int, float, float]]


class _RefusedStepError(NonFiniteLossError):
    """A step that no rank has made: the run is as it was before."""


class TrainingLoop:
    """Runs programs of weight updates and counts them.

    Args:
        engine: the ranks of this process.
        given: the model, and the weights of micro-batches.
        on_updates: called after each pass.
        state: of the run; the loop advances it.

    Attributes:
        callbacks: of the `fit` that runs.
        metrics: that the loss returned, of the last step or evaluation.
        held_bytes: peak bytes of tensors of this process in one pass; None: not measured yet.
        moved_bytes: in the last pass, to other ranks, and to the processes that share this one's rank.
        memory: copies the training after each step of `fit`; None: not after each one.
        copied: number of the last step, where it was committed with its copy.
    """

    def __init__(
        self,
        engine: Engine,
        given: GivenModel,
        on_updates: Callable[[], None],
        state: RunState,
    ) -> None:
        self._engine = engine
        self._given = given
        self._weigh = given.weigh
        self._on_updates = on_updates
        self._stop = engine.session.stop
        self._state = state
        self.callbacks = Callbacks((), self._stop)
        self.metrics: dict[str, float] = {}
        self.moved_bytes = (0.0, 0.0)
        self.memory: Memory | None = None
        self.copied = -1
        # The times of the last passes over the newest program, by rank.
        self._newest: Program | None = None
        self._passes: deque[dict[int, Times]] = deque(maxlen=_KEPT_PASSES)
        self._committed: PendingLosses | None = None
        # The saved buffers before the step that runs, each with the number of its changes.
        self._buffers: list[tuple[str, torch.Tensor, int]] = []

    def follow(self, schedule: Schedule, num_microbatches: int, program_of: Callable[[int], Program]) -> None:
        """Follows a plan from now on; the times of passes are those of the last one until it has run.

        Args:
            schedule: of the plan.
            num_microbatches: per weight update.
            program_of: from a number of updates to their program.
        """
        self._schedule = schedule
        self._size = num_microbatches
        self._program_of = program_of
        self._newest_runs: Sequence[Execution] = ()
        self.held_bytes: float | None = None

    def fit(
        self,
        batches: Iterator[Any],
        steps: int | None,
        callbacks: Sequence[Any] = (),
        evaluate: Callable[[], float] | None = None,
        evaluate_every: int = 0,
    ) -> list[float]:
        """Trains on batches, with pauses after the steps where an evaluation or a callback needs one.

        Args:
            batches: of (input, target).
            steps: number of updates; None: until the batches end; an asynchronous schedule needs a number.
            callbacks: see `Callbacks`.
            evaluate: returns the loss on held-out data; None: there is none.
            evaluate_every: steps between evaluations, counted since training began; 0: only at the end.

        Returns:
            The losses of the steps.

        Raises:
            DataError: the batches end before `steps`.
        """
        self._stop.wanted = self._stop.ended = False
        self.callbacks = Callbacks(callbacks, self._stop)
        self._began = time.perf_counter()
        self._evaluated = -1
        try:
            losses = self._until_the_end(batches, steps, evaluate, evaluate_every)
            if self._stop.agreed:
                why = "SIGTERM"
            elif self._stop.ended:
                why = "STOP"
            else:
                why = "done"
            if why == "done" and steps is not None and 0 < len(losses) < steps:
                raise DataError(f"the data ended after {len(losses)} of {steps} steps; give more, or fewer steps")
            if why != "SIGTERM" and evaluate is not None and losses and self._evaluated != self._state.num_updates:
                self._evaluate(evaluate)
            self.callbacks.follow("end", ended=why)
            self._engine.session.settle()
        except _RefusedStepError as refused:
            self.callbacks.follow("end", ended="not finite")
            last = self.callbacks.last
            if last is not None and last.path is not None:
                saved = f"; they are saved in {last.path}"
            else:
                saved = ""
            raise NonFiniteLossError(f"{refused}{saved}") from None
        finally:
            self.callbacks = Callbacks((), self._stop)
        return losses

    def _until_the_end(
        self, batches: Iterator[Any], steps: int | None, evaluate: Callable[[], float] | None, evaluate_every: int
    ) -> list[float]:
        """Runs all steps, with the evaluations between them; returns their losses."""
        losses: list[float] = []
        if self._schedule.is_synchronous:
            run = self._run_steps
        else:
            run = self._run_segment
        while not (self._stop.agreed or self._stop.ended) and (steps is None or len(losses) < steps):
            done = self._state.num_updates
            pauses = [every - done % every for every in (evaluate_every, *self.callbacks.pauses) if every]
            if steps is not None:
                pauses.append(steps - len(losses))
            count = min(pauses, default=None)
            part = run(batches, count)
            losses += part
            if len(part) != count:
                break
            if evaluate is not None and evaluate_every and self._state.num_updates % evaluate_every == 0:
                self._evaluate(evaluate)
        return losses

    def _evaluate(self, evaluate: Callable[[], float]) -> None:
        """Evaluates; then all ranks agree on whether to stop."""
        self._evaluated = self._state.num_updates
        with self.callbacks.evaluating():
            loss = evaluate()
            self.callbacks.follow("evaluation", held_out_loss=loss, held_out_metrics=self.metrics)

        def is_wanted() -> bool:
            wanted = torch.tensor([float(self._stop.wanted)])
            return bool(sum_table(self._engine.session, wanted))

        self._stop.ended |= self._engine.session.unit(is_wanted)

    def start_step(self, x: Any, y: Any) -> _Pass:
        """Runs one update; its loss is still being sent."""
        began = time.perf_counter()
        batch = in_pinned_memory((x, y), self._engine.device)
        feed = feed_of(batch, self._size, self._state.ordinal, "train", self._weigh)
        return self.start(1, feed, [size_of(x)], began, x)

    def _run_steps(self, batches: Iterator[Any], steps: int | None) -> list[float]:
        """Runs a program for each update; a loss is read while the next step runs."""
        losses = []
        first = self._state.num_updates
        door = self._engine.session.door
        pending = None
        while steps is None or self._state.num_updates - first < steps:
            if self._stop.agreed or self._stop.ended:
                break
            newcomer = door.take()
            before = door.growing.saved() if newcomer else {}
            batch = next(batches, None)
            if batch is None:
                break
            if newcomer:
                if pending:
                    losses += self._read(pending)
                    pending = None
                door.growing.admit(newcomer, before, batch)
            try:
                started = self.start_step(*pair_of(batch, trains=True))
            except _RefusedStepError:
                if pending:
                    self._read(pending)
                raise
            if pending:
                losses += self._read(pending, started.began)
            pending = started
        if pending:
            losses += self._read(pending)
        return losses

    def _run_segment(self, batches: Iterator[Any], steps: int | None) -> list[float]:
        """Runs one program over all updates, whose micro-batches overlap; it drains at its end."""
        assert steps is not None, "an asynchronous schedule needs a number of steps"
        began = time.perf_counter()
        sizes = []

        def pairs() -> Iterator[tuple[Any, Any]]:
            for batch in batches:
                pair = pair_of(batch, trains=True)
                self._engine.check(pair[0])
                sizes.append(size_of(pair[0]))
                # A loader may use the memory of a batch again while its micro-batches are still in flight.
                yield in_pinned_memory(copy.deepcopy(pair), self._engine.device)

        feed = BatchStream(pairs(), self._size, self._state.ordinal, self._weigh)
        return self._read(self.start(steps, feed, sizes, began))

    def start(self, num_steps: int, feed: Feed, sizes: Sequence[tuple[int, int]], began: float, x: Any = None) -> _Pass:
        """Checks an input, and runs a program over the micro-batches of some updates; its losses are being sent."""
        self._given.check_layers()
        follow_model(self._engine.workers, self._given.work.layers)
        first = self._state.num_updates
        runs = self._run(num_steps, feed, x)
        losses = self._committed
        timed = self._timed(runs, num_steps)
        if losses is None:
            figures = own_figures(self._engine.session, runs, timed)
            losses = PendingLosses(self._engine, runs, self._size, num_steps, *figures)
        header = runs[0].compiled.program.header
        updates = [header.update_of(header.last_stage, step * self._size) for step in range(num_steps)]
        norms = [gradient_norm(runs[0], header.last_stage, update, on_host=True) for update in updates]
        return _Pass(first, runs, losses, norms, sizes, began)

    def _commit(self, run: Execution) -> Ending:
        """Begins the sum of the losses in the pass, where the ranks commit a step; its times are those of the last.

        The host of a GPU goes on before it has the gradients of other ranks, so it waits for them here.
        """
        settle(self._engine.device)
        session = self._engine.session
        assert session.repairs is not None
        session.repairs.check_none_is_lost()
        for earlier in self._newest_runs:
            earlier.read_times()
        figures = own_figures(session, [run], self._newest_runs)
        self._committed = PendingLosses(self._engine, [run], self._size, 1, *figures)
        return self._committed.commit

    def _timed(self, runs: Sequence[Execution], num_steps: int) -> Sequence[Execution]:
        """The runs whose times are read now: on a GPU those of the step before, which has ended, without a wait."""
        earlier, self._newest_runs = self._newest_runs, runs
        if num_steps > 1 or self._engine.device.type == "cpu":
            timed = runs
        else:
            timed = earlier
        for run in timed:
            run.read_times()
        return timed

    def _read(self, done: _Pass, ended: float | None = None) -> list[float]:
        """Waits for the losses of a pass, and calls the callbacks.

        Args:
            done: the pass.
            ended: its end, in seconds of `time.perf_counter`; None: now.
        """
        losses = list(done.losses.wait())
        now = time.perf_counter()
        samples, tokens = (
            sum(column) / max((ended or now) - done.began, 1e-9) for column in zip(*done.sizes, strict=True)
        )
        bubble, *others = done.losses.extra
        memory = others[: len(others) // 2]
        shared = others[len(others) // 2 :]
        for index, (loss, norm, self.metrics) in enumerate(zip(losses, done.norms, done.losses.metrics, strict=True)):
            step = done.first + index + 1
            finite(loss, step, self._engine.workers[0].training.nonfinite)
            if self.callbacks:
                # A process that trains nothing takes the rate of another.
                rates = self._rates(done.runs, index)
                if not rates and len(losses) == 1 and any(shared):
                    rates = (max(shared),)
                value = None
                if norm is not None and norm.isfinite():
                    value = float(norm)
                figures = rates, value, samples, tokens or None, bubble, tuple(memory), self.metrics
                self.callbacks.notify(Record(step, loss, now - self._began, *figures))
        if not self._engine.session.background.is_busy:
            self._engine.session.settle()
        return losses

    def _rates(self, runs: Sequence[Execution], step: int) -> tuple[float, ...]:
        """Learning rates of an update of the first stage of this process that trains; (): unknown."""
        found = ((run, stage) for run in runs for stage in run.worker.optimizers)
        for run, stage in found:
            update = run.compiled.program.header.update_of(stage, step * self._size)
            if (stage, update) in run.rates:
                return run.rates[stage, update]
        return ()

    def _run(self, num_steps: int, feed: Feed, x: Any) -> list[Execution]:
        """Runs the program of some updates, and counts them; again if a rank is lost before they are committed."""
        session = self._engine.session
        if session.repairs is None:
            runs = self._once(num_steps, feed, x)
        else:
            runs = session.repairs.repeated(lambda: self._once(num_steps, feed, x))
        self._on_updates()
        return runs

    def _once(self, num_steps: int, feed: Feed, x: Any) -> list[Execution]:
        """Runs the program of some updates; where copies share weights, all ranks then have it in memory, or none.

        Without the part of a lost rank the others could go neither on nor back.
        """
        if x is not None:
            self._engine.check(x)
        self._committed = None
        self.copied = -1
        repairs = self._engine.session.repairs
        is_shared = self._program_of(num_steps).header.shard != "none"
        if repairs is None or self.memory is None or not (is_shared and self.callbacks):
            return self._counted(num_steps, feed)
        with self.memory.stepping(), self._state.attempted():
            runs = self._counted(num_steps, feed)
            with repairs.inside():
                self.memory.keep()
            self._commit(runs[0])()
        self.copied = self._state.num_updates
        return runs

    def _counted(self, num_steps: int, feed: Feed) -> list[Execution]:
        """Runs the program of some updates, measures the memory if due, and counts the updates."""
        program = self._program_of(num_steps)
        workers = self._engine.workers
        if self._engine.session.repairs is not None:
            self._buffers = [(name, buffer, buffer._version) for name, buffer in self._saved_buffers()]
        # In the second pass of a synchronous schedule: then the optimizers have states.
        due = self.held_bytes is None and (len(self._newest_runs) > 0 or not self._schedule.is_synchronous)
        watch = None
        if due and len(workers) == 1:
            tell = in_use(workers[0].device)
            if tell:
                watch = HeldMemory(workers[0], tell)
        if watch:
            with watch.counting():
                runs = self._engine.run(program, feed, look=watch.look, commit=self._commit)
        else:
            runs = self._engine.run(program, feed, commit=self._commit)
        # Batches that no stage here needs are drawn too, so that all ranks have the same position in the data.
        feed[num_steps * self._size - 1]
        if not all_finite(runs[0]):
            self._refuse(runs, num_steps)
        if watch is not None:
            self.held_bytes = watch.held_bytes
        if program is not self._newest:
            self._newest = program
            self._passes.clear()
        self.moved_bytes = self._engine.moved_bytes
        self._passes.append({run.compiled.rank: Times(run.starts, run.ends, run.launches) for run in runs})
        self._state.num_updates += num_steps
        self._state.ordinal += num_steps * self._size
        self._buffers = []
        return runs

    def _saved_buffers(self) -> list[tuple[str, torch.Tensor]]:
        stages = chain.from_iterable(worker.stages.values() for worker in self._engine.workers)
        return [named for stage in stages for named in stage.saved_buffers()]

    def check_repeatable(self) -> None:
        """Refuses to repeat a step whose forwards have changed a buffer: they would change it once more.

        Raises:
            ModelError: they have.
        """
        now = dict(self._saved_buffers())
        for name, buffer, version in self._buffers:
            if now[name] is not buffer or buffer._version != version:
                raise ModelError(f"a forward of the step has changed the buffer {name}")

    def _refuse(self, runs: Sequence[Execution], num_steps: int) -> None:
        """Raises the error of a step that no rank has made, or reports one that is left out."""
        losses = self._committed or PendingLosses(self._engine, runs, self._size, num_steps)
        losses.wait()
        norms: Any = sum(runs[0].norms.values())
        step = self._state.num_updates + num_steps
        problem = refusal(losses.of_microbatches, norms.tolist(), step, self._state.position.words)
        if runs[0].worker.training.nonfinite == STOP:
            raise _RefusedStepError(str(problem))
        _log.warning("%s", problem)

    def own_passes(self, last: int) -> list[dict[int, Times]]:
        """The times of the last passes over the newest program, by the ranks of this process."""
        for run in self._newest_runs:
            run.read_times()
        return list(self._passes)[-last:]

    def has_run(self, program: Program) -> bool:
        """Whether the last passes are of a program."""
        return self._newest is program

    def timeline(self, last: int) -> Timeline:
        """The last passes of all ranks, times in seconds since the first of them began.

        Clocks are assumed to be common, as on one machine.

        Raises:
            PipefitError: nothing has run yet.
        """
        if self._newest is None:
            raise PipefitError("nothing has run yet: there is no timeline")
        passes = self.own_passes(last)
        own = []
        # Processes that share a rank hold the times of the same instructions: those of its first one count.
        if self._engine.mesh.is_first:
            own = [sorted(times.items()) for times in passes]
        events = []
        launches = []
        for of_process in exchange(self._engine.session, own):
            for repeat, times in enumerate(of_process):
                for rank, (starts, ends, launched) in times:
                    for position, (start, end) in enumerate(zip(starts, ends, strict=True)):
                        events.append(Event(rank, position, repeat, start, end))
                    launches += [Event(rank, position, repeat, start, end) for position, start, end in launched]
        origin = min((event.start_s for event in events + launches if event.start_s), default=0.0)
        return Timeline(
            self._newest,
            _since(origin, events),
            source="measured",
            num_repeats=len(passes),
            launches=_since(origin, launches),
        )


def _since(origin: float, events: Sequence[Event]) -> tuple[Event, ...]:
    """Events in the order of a timeline that begins at an origin."""
    shifted = [replace(e, start_s=e.start_s - origin, end_s=max(e.end_s, e.start_s) - origin) for e in events]
    return tuple(sorted(shifted, key=lambda event: (event.rank, event.repeat, event.position)))
