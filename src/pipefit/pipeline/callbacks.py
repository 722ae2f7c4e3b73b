"""Callbacks of a training: their record, and those that come with pipefit."""

from __future__ import annotations

import contextlib
import enum
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from msgspec import Meta
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pipefit.checkpoint import Checkpoint, save
from pipefit.checkpoint.manifest import candidates, step_of
from pipefit.checkpoint.trained import Trained
from pipefit.errors import PipefitError, PlanError
from pipefit.pipeline.intervals import Interval
from pipefit.runtime.collectives import from_first
from pipefit.runtime.signals import Stop
from pipefit.spec.arguments import Amount, Share, checked
from pipefit.spec.options import Saves

_EVENTS = ("step", "evaluation", "checkpoint", "end")


class _Answer(enum.Enum):
    STOP = "stop"


STOP = _Answer.STOP
"""The return value of a callback that ends the training on all ranks; raising StopIteration does the same."""


@dataclass(frozen=True)
class Record:
    """The argument of a callback: the figures of the last step, and of the event that followed it.

    Attributes:
        step: weight updates since training began, over all runs that resumed from each other.
        loss: of the step, the same on every rank.
        seconds: since this `fit` began.
        learning_rates: of the groups of an optimizer of this process, or, where it trains nothing, the largest one of
            the run; (): unknown.
        gradient_norm: of all gradients of the step, before clipping; None: the step did not compute it.
        samples_per_s: from the beginning of the step to that of the next one.
        tokens_per_s: likewise, where inputs are token ids; tokens outside the attention mask do not count.
        bubble: share of the step without forward or backward, the mean over ranks.
        memory_bytes: peak memory of each process so far: of its GPU, or resident; of those that share a rank, the
            first one's.
        metrics: of the step, that the loss returned: means by name, weighted like the loss.
        held_out_loss: of the evaluation after the step; None: there was none.
        held_out_metrics: of that evaluation, that the loss returned.
        path: of the checkpoint that was saved after the step; None: there was none.
        ended: reason why training ends: "done", "STOP" (a callback), "SIGTERM", or "not finite" (see
            `Updates.nonfinite`); "": it does not end.
    """

    step: int
    loss: float
    seconds: float = 0.0
    learning_rates: tuple[float, ...] = ()
    gradient_norm: float | None = None
    samples_per_s: float = 0.0
    tokens_per_s: float | None = None
    bubble: float = 0.0
    memory_bytes: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    held_out_loss: float | None = None
    held_out_metrics: Mapping[str, float] = field(default_factory=dict)
    path: Path | None = None
    ended: str = ""


class Callbacks:
    """The callbacks of a `fit`.

    Each has some of the methods `step`, `evaluation`, `checkpoint` and `end`, which take a `Record`; a plain
    function is called at every step. A method `repaired` is called with the last record when the ranks have new
    numbers after the loss of one; it does nothing with other ranks. Three more attributes are optional. `every` is
    a number of steps: after each multiple of it the training pauses, and `step` is called before the next step
    begins; without it a loss is read while the next step runs. `evaluating()` is a context in which the model is
    evaluated. `moving` is a dict with tensors of the weights that this process trains, by the weights' names: they
    move to another process together with their weights. `common` are names of attributes with JSON data that all
    ranks have alike, which a process takes that enters the run.

    Args:
        all: in the order in which they are called.
        stop: shared with the training loop; notes that one of them wants to end the training.

    Raises:
        PipefitError: one of them has none of the methods and is no function.
    """

    def __init__(self, all: Sequence[Any], stop: Stop) -> None:
        self._all = list(all)
        self._stop = stop
        self.last: Record | None = None
        for one in self._all:
            if not callable(one) and not any(hasattr(one, event) for event in _EVENTS):
                wanted = f"a function, or an object with some of the methods {', '.join(_EVENTS)}"
                raise PipefitError(f"callbacks: expected {wanted}; got {type(one).__name__}")

    @property
    def pauses(self) -> list[int]:
        """Numbers of steps; the training pauses at their multiples."""
        return [every for one in self._all if (every := getattr(one, "every", 0))]

    @property
    def moving(self) -> list[dict[str, torch.Tensor]]:
        """The tensors of each that move with weights."""
        return [one.moving for one in self._all if hasattr(one, "moving")]

    @property
    def common(self) -> list[list[Any]]:
        """The attributes that all ranks have alike: the place of the callback, the name and the value of each."""
        found = []
        for place, one in enumerate(self._all):
            found += [[place, name, getattr(one, name)] for name in getattr(one, "common", ())]
        return found

    def take(self, common: Iterable[Sequence[Any]]) -> None:
        """Takes what all ranks have alike."""
        for place, name, value in common:
            setattr(self._all[place], name, value)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._all)

    def notify(self, record: Record, event: str = "step") -> None:
        """Calls the methods for an event."""
        if self.last is None or record.step >= self.last.step:
            self.last = record
        for one in self._all:
            method = getattr(one, event, None)
            if method is None and event == "step" and callable(one):
                method = one
            if method is not None:
                try:
                    self._stop.wanted |= method(record) is STOP
                except StopIteration:
                    self._stop.wanted = True

    def follow(self, event: str, record: Record | None = None, **facts: Any) -> None:
        """Calls the methods for an event that follows a step, or the last one, if there was a step."""
        if (record := record or self.last) is not None:
            self.notify(replace(record, **facts), event)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around an evaluation."""
        with contextlib.ExitStack() as stack:
            for one in self._all:
                if hasattr(one, "evaluating"):
                    stack.enter_context(one.evaluating())
            yield


class Checkpoints:
    """Saves checkpoints of a training, also when it ends. A run that was started again after a fault resumes from them.

    Those before the end are written in the background; see `Pipeline.save`.

    Args:
        pipe: that is trained.
        folder: see `Pipeline.save`.
        every: steps between checkpoints; 0: only at the end; None: seconds between them follow from `share`, see
            `pipefit.pipeline.intervals`. An asynchronous schedule, which drains for each, then saves only at the end.
        keep: number of the newest checkpoints that stay, not counting those that were in the folder when this training
            began; 0: all.
        share: see `Saves.share`.
        clock: returns seconds.
    """

    common = ("_next", "_saved", "_earlier")

    @checked()
    def __init__(
        self,
        pipe: Trained,
        folder: str | Path,
        every: Amount | None = None,
        keep: Amount | None = Saves.keep,
        share: Annotated[float, Meta(ge=0.001, le=1)] = Saves.share,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipe = pipe
        self.folder = Path(folder)
        self._every = every or 0
        self._keep = keep or None
        self._interval: Interval | None = None
        if every is None and pipe.schedule.is_synchronous:
            self._interval = Interval(share, clock)
        self._next = 1
        self._saved = -1
        self._clock = clock
        self._earlier: list[str] | None = None

    @property
    def every(self) -> int:
        """The training pauses at multiples of this number of steps; 0: nowhere."""
        if self._interval is None:
            return self._every
        return self._next

    def step(self, record: Record) -> None:
        """Saves a checkpoint when it is due."""
        self._look_around(record.step)
        if self._is_due(record.step):
            began = self._clock()
            self._save(wait=False)
            if self._interval is not None:
                self._interval.saved(self._clock() - began)

    def checkpoint(self, record: Record) -> None:
        """Notes a checkpoint that is whole."""
        if record.path is not None and record.path.parent == self.folder:
            self._saved = record.step

    def end(self, record: Record) -> None:
        """Saves a checkpoint, unless that of the last step exists."""
        self._look_around(record.step)
        self._pipe.session.unit(self._pipe.session.settle)
        # After the loss of a rank, some of the others may not know whether the last checkpoint is whole.
        if self._of_first(lambda: self._saved != record.step):
            self._save(wait=True)

    def _is_due(self, step: int) -> bool:
        if self._interval is None:
            return self._every > 0 and step % self._every == 0
        if step < self._next:
            return False
        background = self._pipe.session.background
        look = partial(self._interval.look, step, background.is_busy, background.cpu_s)
        is_due, self._next = self._of_first(look)  # by the clock of the first rank
        return bool(is_due)

    def _look_around(self, step: int) -> None:
        """Notes the checkpoints in the folder that are not of this training, or of those from which it resumed."""
        if self._earlier is None:
            self._pipe.session.roll_call("Pipeline.save()")
            # Every process knows them: another one may be rank 0 later.
            self._earlier = self._of_first(lambda: _others_in(self.folder, step))

    def _of_first(self, look: Callable[[], Any]) -> Any:
        """The result of rank 0 on all ranks."""
        return self._pipe.session.unit(lambda: from_first(self._pipe.session, look))

    def _save(self, wait: bool) -> None:
        spared = self._earlier or ()
        self._pipe.session.unit(lambda: save(self._pipe, self.folder, keep=self._keep, spared=spared, wait=wait))


def _others_in(folder: Path, step: int) -> list[str]:
    """The names of the checkpoints in a folder that are not of a training that has come to a step."""
    if not folder.is_dir():
        return []
    return [path.name for path in candidates(folder) if not 0 < step_of(path) < step]


class Restorable(Protocol):
    """A run that is saved, and restored from what it saved: a `pipefit.Pipeline`."""

    def save(self, path: str | Path, *, keep: int | None = None, wait: bool = True) -> Path:
        """See `Pipeline.save`."""

    def load(self, path: str | Path, *, weights_only: bool = False) -> Checkpoint:
        """See `Pipeline.load`."""


class EarlyStopping:
    """Ends a training whose held-out loss no longer improves, and restores the best weights.

    Args:
        pipe: that is trained.
        patience: evaluations without a better loss after which training ends; 0: no limit.
        folder: keeps the best weights, which are restored from it at the end; None: they are not kept.

    Attributes:
        folder: of the best weights.
        best_loss: the lowest held-out loss; infinite before the first evaluation.
        best_step: weight updates before it; 0: there was no evaluation.
        has_ended: whether the patience has ended the training.
    """

    common = ("best_loss", "best_step", "_since")

    @checked()
    def __init__(self, pipe: Restorable, patience: Amount = 0, folder: str | Path | None = None) -> None:
        self._pipe = pipe
        self._patience = patience
        self.folder = folder
        self.best_loss = math.inf
        self.best_step = 0
        self._since = 0
        self.has_ended = False

    def evaluation(self, record: Record) -> Any:
        """Takes the loss of the current weights, which is the same on every rank."""
        assert record.held_out_loss is not None
        self._since += 1
        if record.held_out_loss < self.best_loss:
            self.best_loss = record.held_out_loss
            self.best_step = record.step
            self._since = 0
            if self.folder is not None:
                self._pipe.save(self.folder, keep=1, wait=False)
        self.has_ended = 0 < self._patience <= self._since
        if self.has_ended:
            return STOP
        return None

    def end(self, record: Record) -> None:
        """Restores the best weights, unless the process must leave or the run has failed."""
        if self._since and self.folder is not None and record.ended in ("done", "STOP"):
            self._pipe.load(self.folder, weights_only=True)


class EMA:
    """The exponential moving average of the weights: average ← decay · average + (1 − decay) · weights after each step.

    Evaluations use it, and so does whatever runs inside `evaluating()`, such as a save. Its first value is that of the
    weights when it is made.

    Args:
        pipe: that is trained: by a synchronous schedule, with all its stages whole on the device.
        decay: of the average.

    Attributes:
        moving: the averages by the names of their weights; see `Callbacks`.

    Raises:
        PlanError: the schedule is asynchronous, stages are spilled, or copies share their weights.
    """

    every = 1

    @checked()
    def __init__(self, pipe: Trained, decay: Share = 0.999) -> None:
        shares = pipe.plan.shard == "weights"
        if shares or not pipe.schedule.is_synchronous or any(worker.spilling for worker in pipe.workers):
            raise PlanError(
                "EMA: expected a synchronous schedule and stages that stay on the device, whole: neither spilled nor "
                'shared by copies (shard="weights")'
            )
        self._pipe = pipe
        self.moving = {name: copies[0].detach().clone() for name, copies in self._weights().items()}
        self._average = get_ema_multi_avg_fn(decay)

    def _weights(self) -> dict[str, list[nn.Parameter]]:
        """The copies of each weight that this process trains."""
        found: dict[str, list[nn.Parameter]] = {}
        for worker in self._pipe.workers:
            for stage in worker.owned.values():
                for own in stage:
                    found.setdefault(own.saved_name, []).append(own.parameter)
        return found

    def _pairs(self) -> list[tuple[list[nn.Parameter], torch.Tensor]]:
        """The copies of each weight, and its average.

        Raises:
            PlanError: weights have moved, and their averages have not.
        """
        weights = self._weights()
        if weights.keys() != self.moving.keys():
            raise PlanError(
                "EMA: weights have moved to other processes while the average was not among the callbacks of `fit`; "
                "give it there, or make a new one"
            )
        return [(copies, self.moving[name]) for name, copies in weights.items()]

    def step(self, record: Record) -> None:
        """Adds the new weights to the average."""
        pairs = self._pairs()
        weights = [copies[0].detach() for copies, _ in pairs]
        if pairs:  # a process may train nothing
            self._average([average for _, average in pairs], weights, None)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Puts the average into the model in place of the weights, and restores these."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for copies, average in self._pairs():
            before = copies[0].clone()
            for weight in copies:
                weight.copy_(average)
            average.copy_(before)
