"""The workers' processes: how they are started, reached, and replaced when they die."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import pickle
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from pipefit.errors import PipefitError
from pipefit.study.execute.device_worker import Order, Settings, work

_START_S = 120.0
_GRACE_S = 10.0


class Pool:
    """One process per device.

    Functions of a user's program that cannot be pickled (closures, classes of a notebook) exist in copies of that
    program only, so its workers are forks. Others come from a server that has torch loaded.

    Args:
        settings: of each worker.
        forked: whether workers are forks.
    """

    def __init__(self, settings: list[Settings], forked: bool) -> None:
        self._settings, self._forked = settings, forked
        if forked:
            self._context: Any = mp.get_context("fork")
        else:
            self._context = mp.get_context("forkserver")
            self._context.set_forkserver_preload(["pipefit.pipeline.preload", "pipefit.study.execute.fork_server"])
        self._processes: list[Any] = [None] * len(settings)
        self._pipes: list[Any] = [None] * len(settings)
        for number in range(len(settings)):
            self._start(number)
        for number in range(len(settings)):
            self._await_start(number)

    def restart(self, number: int, settings: Settings) -> None:
        """A new process in the place of one that died."""
        self._settings[number] = settings
        self._pipes[number].close()
        self._start(number)
        self._await_start(number)

    def _start(self, number: int) -> None:
        ours, theirs = self._context.Pipe()
        inherited = (
            [pipe for pipe in self._pipes if pipe is not None and not pipe.closed] + [ours] if self._forked else []
        )
        settings = replace(self._settings[number], inherited=inherited)
        process = self._context.Process(target=work, args=(settings, theirs), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks of programs with threads
            try:
                process.start()
            except EOFError:
                raise PipefitError(f"worker {number} did not start: the process that starts workers has died") from None
            except (pickle.PicklingError, AttributeError, TypeError) as problem:
                raise PipefitError(f"workers that are no forks need trials that can be pickled: {problem}") from None
        theirs.close()
        self._processes[number], self._pipes[number] = process, ours

    def _await_start(self, number: int) -> None:
        pipe, settings = self._pipes[number], self._settings[number]
        try:
            kind, what = pipe.recv() if pipe.poll(_START_S) else ("silent", None)
        except (EOFError, OSError):
            kind = "died"
        if kind == "unfit":
            raise PipefitError(f"device: {settings.device!r} cannot be used: {what}")
        if kind != "ready":
            raise PipefitError(f"worker {number} did not start; its log: {settings.log}")

    def send(self, number: int, order: Order) -> None:
        """Sends an order to a worker; where that has died, `answers` says so."""
        with contextlib.suppress(OSError):
            self._pipes[number].send(order)

    def answers(self, busy: set[int], timeout_s: float) -> Iterator[tuple[int, tuple[Any, ...] | None]]:
        """(worker, its answer) of those that have one; None instead of an answer: it died."""
        pipes = {self._pipes[number]: number for number in busy}
        for pipe in wait(list(pipes), timeout_s):
            number = pipes[pipe]
            try:
                yield number, pipe.recv()
            except (EOFError, OSError):
                yield number, None

    def answer(self, number: int) -> tuple[Any, ...] | None:
        """The answer of a worker, however long it takes; None: it died."""
        while True:
            for _, answer in self.answers({number}, 1.0):
                return answer

    def how_it_died(self, number: int) -> str:
        """The way a worker ended, for people."""
        self._processes[number].join(2.0)
        code = self._processes[number].exitcode
        if code is None:
            return "no answer"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self, grace_s: float = _GRACE_S) -> None:
        """Ends all workers; those that are busy get a little time."""
        for number in range(len(self._processes)):
            self.send(number, Order("close"))
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
