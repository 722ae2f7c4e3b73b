"""A worker: a process with a device that does one job at a time, and keeps nothing that must last."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from pipefit.errors import DamageError, PipefitError, TierError
from pipefit.study.trial import Trial

__all__ = ["Order", "Settings", "damage_of", "reason_of", "work"]

_KEPT_BYTES = 1 << 30
"""What a worker keeps of trials between their turns where no limit is given for the device."""


@dataclass
class Settings:
    """What a worker knows from the start.

    Attributes:
        number: of the worker, and of its device.
        threads: for computing.
        device: as torch names it; "": a GPU when there are some, else the CPU.
        capacity_bytes: of the device; 0: no limit.
        folder: where trials have theirs.
        log: what it prints goes there.
        trials: by number.
        define: makes a trial of values, for those that a search chooses later.
        environment: of the study's process.
        held: pipes of other workers, which a fork has and must close.
    """

    number: int
    threads: int
    device: str
    capacity_bytes: float
    folder: Path
    log: Path
    trials: dict[int, Trial]
    define: Callable[[Mapping[str, Any]], Trial] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)


class Order(NamedTuple):
    """What a worker is to do.

    Attributes:
        kind: "admit", "turn", "export" or "close".
        trial: its number.
        name: of the trial, and of its folder.
        what: bytes of room on the tier, turns in a row, or the file to write.
        values: of a trial that a search chose while this worker was at work already.
        alive: the trials that go on; of the others nothing is kept.
    """

    kind: str
    trial: int = -1
    name: str = ""
    what: Any = None
    values: Mapping[str, Any] | None = None
    alive: frozenset[int] = frozenset()


def work(settings: Settings, pipe: Connection) -> None:
    """The process's main function: jobs come over the pipe, and what became of each goes back."""
    # What a fork has brought along is not its to throw away: a group of processes, deleted where its threads are not,
    # waits for them for ever.
    gc.freeze()
    _settle(settings)
    # OpenMP's threads belong to the thread that first computed with several. After a fork they are there on paper only,
    # and that thread would wait for them for ever: another computes.
    thread = threading.Thread(target=_work, args=(settings, pipe), name="pipefit-worker")
    thread.start()
    thread.join()
    os._exit(1)  # it has raised; else it ends the process


def _work(settings: Settings, pipe: Connection) -> None:
    import torch

    from pipefit.runtime.malloc import give_back_freed

    if settings.capacity_bytes:
        give_back_freed()
    torch.set_num_threads(settings.threads)
    # The first optimizer of a process imports torch's compiler, which takes seconds: not in somebody's first turn.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
    import pipefit.study.execute.runner  # noqa: F401

    try:
        device = _device(settings)
    except RuntimeError as problem:
        pipe.send(("unfit", str(problem).splitlines()[0]))
        os._exit(1)
    bench = _Bench(settings, device)
    pipe.send(("ready", os.getpid()))
    while True:
        try:
            order: Order = pipe.recv()
        except (EOFError, OSError):
            break
        if order.kind == "close":
            break
        # Turns in a row are reported one by one; an order that comes meanwhile can only say to end.
        for _ in range(order.what if order.kind == "turn" else 1):
            answer = bench.answer(order)
            sys.stdout.flush()
            sys.stderr.flush()
            try:
                pipe.send(answer)
            except OSError:
                os._exit(1)
            if answer[0] != "turned" or pipe.poll():
                break
    os._exit(0)


def _settle(settings: Settings) -> None:
    """Signals are the study's to answer; the worker ends with it."""
    import multiprocessing as mp

    from pipefit.runtime.signals import die_with, die_with_parent

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # batch systems send it to every process of a job
    die_with_parent()
    if (parent := mp.parent_process()) is not None:
        die_with(parent.sentinel)
    for foreign in settings.held:  # pipes of other workers that a fork has brought along
        foreign.close()
    os.environ.update(settings.environment)
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    handle = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def _device(settings: Settings) -> Any:
    import torch

    asked = torch.device(settings.device) if settings.device else None
    if asked is not None and asked.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU on this machine")
    if asked is not None and (asked.type != "cuda" or asked.index is not None):
        return asked
    if torch.cuda.is_available():
        device = torch.device("cuda", settings.number % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


class _Bench:
    """What the worker has on its device."""

    def __init__(self, settings: Settings, device: Any) -> None:
        self._settings, self._device = settings, device
        self._live: OrderedDict[int, Any] = OrderedDict()

    def answer(self, order: Order) -> tuple[str, int, Any]:
        """Does what it is told: the name of what came of it, the trial's number, and more."""
        for number in self._live.keys() - order.alive - {order.trial}:
            self._drop(number)
        try:
            return self._done(order)
        except DamageError as problem:
            self._drop(order.trial)
            return "failed", order.trial, damage_of(problem)
        except TierError as problem:
            self._drop(order.trial)
            return "tier", order.trial, str(problem)
        except BaseException as problem:
            traceback.print_exc()
            self._drop(order.trial)
            doing = "in a turn" if order.kind == "turn" else "while it was built"
            return "failed", order.trial, reason_of(problem, doing)

    def _done(self, order: Order) -> tuple[str, int, Any]:
        self._make_room(order.trial)
        if order.kind == "export":
            return "exported", order.trial, self._of(order).export(order.what)
        if order.kind == "admit":
            return self._admit(order)
        return "turned", order.trial, self._of(order).turn()

    def _admit(self, order: Order) -> tuple[str, int, Any]:
        from pipefit.study.execute.runner import NoRoomError

        start_s = time.monotonic()
        try:
            found = self._of(order).admit(order.what)
        except NoRoomError as problem:
            self._drop(order.trial)
            return "no-room", order.trial, str(problem)
        return "admitted", order.trial, (found, start_s, time.monotonic())

    def _of(self, order: Order) -> Any:
        from pipefit.study.execute.runner import TrialRunner

        number = order.trial
        if number not in self._live:
            trial, place = self._trial(order), self._settings.folder / order.name
            self._live[number] = TrialRunner(number, trial, place, self._device, self._settings.capacity_bytes)
        self._live.move_to_end(number)
        return self._live[number]

    def _trial(self, order: Order) -> Trial:
        """Told from the start, or made here of what a search has chosen since."""
        if (known := self._settings.trials.get(order.trial)) is not None:
            return known
        assert self._settings.define is not None and order.values is not None
        return self._settings.define(order.values)

    def _make_room(self, number: int) -> None:
        """Under a limit the device holds one shard; else those that had turns last."""
        allowed = 0 if self._settings.capacity_bytes else _KEPT_BYTES
        held = sum(live.held_bytes for live in self._live.values())
        for other, live in self._live.items():
            if held <= allowed:
                break
            if other != number:
                held -= live.held_bytes
                live.forget()

    def _drop(self, number: int) -> None:
        live = self._live.pop(number, None)
        if live is not None:
            live.close()


def damage_of(problem: DamageError) -> str:
    """Why a trial whose state is damaged failed, and what to do."""
    return f"{str(problem).removesuffix('; resume from a checkpoint')}; train it anew, in another study"


def reason_of(problem: BaseException, doing: str) -> str:
    """Why a trial failed, in a line or two."""
    if isinstance(problem, PipefitError):
        return str(problem)
    words = str(problem)
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError" or "allocate memory" in words:
        return f"out of memory: {words.splitlines()[0] if words else 'the process got no more'}"
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if "site-packages" not in f.filename]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(problem).__name__} {doing}: {words or 'without a word'}{place}"
