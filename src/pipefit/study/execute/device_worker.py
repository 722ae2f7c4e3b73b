"""A worker: a process with a device that does one job at a time, without persistent state."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipefit.errors import DamageError, PipefitError, TierError
from pipefit.models.factory import place_of
from pipefit.runtime.malloc import give_back_freed
from pipefit.runtime.signals import die_with_launcher
from pipefit.stage import accelerator
from pipefit.study.execute import runner
from pipefit.study.execute.open_trial import OpenTrial
from pipefit.study.simulation import TimedTurn
from pipefit.study.trial import Define, Job, NoRoomError, StudySpec, Trial

_KEPT_BYTES = 1 << 30
"""Bytes of trials that a worker keeps on its device between turns where no limit is given."""


class Settings(NamedTuple):
    """The initial data of a worker.

    Attributes:
        number: the number of the worker, and of its device.
        spec: the study's specification.
        folder: the place of the trials' folders.
        log: file of its output.
        trials: all trials by number.
        define: makes a trial from values that a search chooses later.
    """

    number: int
    spec: StudySpec
    folder: Path
    log: Path
    trials: Sequence[Trial]
    define: Define | None

    @property
    def threads(self) -> int:
        """Threads for computing."""
        return self.spec.threads or max(1, (os.cpu_count() or 1) // self.spec.workers)


class Answer(NamedTuple):
    """The answer to a job.

    Attributes:
        outcome: "done", "no-room" on the tier, "tier" (it has failed) or "failed".
        result: of an admission the figures; the reason where the job is not done.
        turns: the committed ones, or the admission.
    """

    outcome: str
    result: Any = None
    turns: Sequence[TimedTurn] = ()


def work(settings: Settings, pipe: Connection) -> None:
    """The main function of the process: receives jobs over the pipe, and sends answers back."""
    # A fork must not delete the objects of its parent: a process group would wait for ever for missing threads.
    gc.freeze()
    _settle(settings)
    # OpenMP's threads belong to the thread that first computed with several. A fork does not have them, and that thread
    # would wait for them for ever, so another one computes.
    thread = threading.Thread(target=_work, args=(settings, pipe), name="pipefit-worker")
    thread.start()
    thread.join()
    os._exit(1)  # the thread has raised; else it ends the process


def _work(settings: Settings, pipe: Connection) -> None:
    if settings.spec.device_bytes:
        give_back_freed()
    torch.set_num_threads(settings.threads)
    # The first optimizer of a process imports torch's compiler, which takes seconds: not in the first turn.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
    answer = Answer("done")
    try:
        trials = _OpenTrials(settings, _device(settings))
    except RuntimeError as problem:
        answer = Answer("failed", str(problem).splitlines()[0])
    with contextlib.suppress(EOFError, OSError):  # the study has ended
        pipe.send(answer)
        while (job := pipe.recv()).kind != "close":
            answer = trials.answer(job, pipe.poll)
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.send(answer)
    os._exit(0)


def _settle(settings: Settings) -> None:
    """Leaves signals to the study; the worker ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # batch systems send it to every process of a job
    die_with_launcher()
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    handle = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def _device(settings: Settings) -> torch.device:
    if accelerator.is_lost_in_fork():
        raise RuntimeError(
            "the program of this study has asked for the GPU already (to ask whether there is one is enough), which "
            "its workers, forks of it, cannot use then: run the study first, in another program, or from a study file"
        )
    device = torch.device(settings.spec.device or accelerator.default_kind())
    if not accelerator.is_accelerator(device):
        return device
    if device.type != accelerator.kind():
        raise RuntimeError(f"torch sees no GPU for device {device} on this machine")
    if device == torch.device(device.type):
        device = torch.device(device.type, settings.number % torch.accelerator.device_count())
        accelerator.make_current(device)
    return device


class _OpenTrials:
    """The trials that the worker has on its device."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._trials: OrderedDict[int, OpenTrial] = OrderedDict()

    def answer(self, job: Job, is_called: Callable[[], bool]) -> Answer:
        """Does a job; turns end early where `is_called`, because a job that comes meanwhile can only be the end."""
        for number in self._trials.keys() - job.alive - {job.trial}:
            self._drop(number)
        turns = []
        start_s = time.monotonic()
        try:
            self._make_room(job.trial)
            opened = self._opened(job)
            if job.kind == "admit":
                turns.append(TimedTurn(job.trial, -1, -1, 0, start_s, time.monotonic()))
                return Answer("done", opened.state.figures, turns)
            if job.kind == "export":
                runner.export(opened, job.argument)
                return Answer("done")
            while len(turns) < job.argument and not (turns and is_called()):
                turns.append(runner.take_turn(opened))
            return Answer("done", None, turns)
        except NoRoomError as problem:
            outcome = "no-room"
            reason = str(problem)
        except BaseException as problem:
            if isinstance(problem, TierError) and not isinstance(problem, DamageError):
                outcome = "tier"
            else:
                outcome = "failed"
            reason = reason_of(problem, "in a turn" if job.kind == "turn" else "while it was built")
            traceback.print_exc()
        self._drop(job.trial)
        return Answer(outcome, reason, turns)

    def _opened(self, job: Job) -> OpenTrial:
        settings = self._settings
        number = job.trial
        if number not in self._trials:
            if number < len(settings.trials):
                trial = settings.trials[number]
            else:  # a search chose it after this worker began
                assert settings.define is not None and job.values is not None
                trial = settings.define(job.values)
            if job.kind == "admit":
                room = job.argument
            else:
                room = math.inf
            place = settings.folder / job.name
            limit = settings.spec.device_bytes
            self._trials[number] = OpenTrial(number, trial, place, self._device, limit, room)
        self._trials.move_to_end(number)
        return self._trials[number]

    def _make_room(self, number: int) -> None:
        """Releases shards of other trials: under a limit all of them, else those whose last turn is the longest ago."""
        if self._settings.spec.device_bytes:
            allowed = 0
        else:
            allowed = _KEPT_BYTES
        held = sum(opened.held_bytes for opened in self._trials.values())
        for other, opened in self._trials.items():
            if other != number and held > allowed:
                held -= opened.held_bytes
                opened.release()

    def _drop(self, number: int) -> None:
        if opened := self._trials.pop(number, None):
            opened.close()


def reason_of(problem: BaseException, doing: str = "") -> str:
    """The reason why a trial failed, in a line or two; for damaged state with the remedy."""
    if isinstance(problem, DamageError):
        return f"{str(problem).removesuffix('; resume from a checkpoint')}; train it again, in another study"
    if isinstance(problem, PipefitError):
        return str(problem)
    text = str(problem)
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError" or "allocate memory" in text:
        return f"out of memory: {text.splitlines()[0] if text else 'the process got no more'}"
    return f"{type(problem).__name__} {doing}: {text or 'no message'}{place_of(problem)}"
