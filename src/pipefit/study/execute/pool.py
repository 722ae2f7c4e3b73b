"""The workers' processes: their start, their jobs, and their replacement when they die."""

from __future__ import annotations

import contextlib
import math
import multiprocessing as mp
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

from pipefit.errors import PipefitError
from pipefit.runtime.launch import fork_server, wait_or_kill
from pipefit.runtime.waits import state_of
from pipefit.runtime.watchdog import deadline_from_environment
from pipefit.study.execute.device_worker import Answer, Settings, work
from pipefit.study.trial import Job

_GRACE_S = 0.5
_STOPPED_S = 60.0


class Pool:
    """One process per device.

    Functions of a user's program that cannot be pickled (closures, classes of a notebook) exist only in copies of that
    program, so its workers are forks. Other workers come from a server that has torch loaded.

    Args:
        settings_of: initial data of a worker, by its number.
        count: number of workers.
        forked: whether workers are forks.

    Attributes:
        idle: workers without a job.
        jobs: the jobs of the other workers; the first job is to start.
    """

    def __init__(self, settings_of: Callable[[int], Settings], count: int, forked: bool) -> None:
        self._settings_of = settings_of
        if forked:
            self._context: Any = mp.get_context("fork")
        else:
            self._context = fork_server()
            self._context.set_forkserver_preload(["pipefit.pipeline.preload", "pipefit.study.execute.fork_server"])
        self.idle: set[int] = set()
        self.jobs: dict[int, Job] = {}
        self._workers: dict[int, tuple[Any, Any]] = {}
        self._stopped_s: dict[int, float] = {}
        given_s = deadline_from_environment()
        if given_s is None:
            self._most_s = _STOPPED_S
        else:
            self._most_s = given_s or math.inf
        for number in range(count):
            self.start(number)

    def start(self, number: int) -> None:
        """Starts a worker, also to replace one that died.

        Raises:
            PipefitError: it cannot be started.
        """
        if number in self._workers:
            self._workers.pop(number)[1].close()
            self._stopped_s.pop(number, None)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(self._settings_of(number), theirs), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks of programs with threads
            try:
                process.start()
            except EOFError:
                raise PipefitError(f"worker {number} did not start: the process that starts workers has died") from None
            except (pickle.PicklingError, AttributeError, TypeError) as problem:
                raise PipefitError(f"workers that are not forks need trials that can be pickled: {problem}") from None
        theirs.close()
        self._workers[number] = process, ours
        self.jobs[number] = Job("start")

    def give(self, number: int, job: Job) -> None:
        """Gives a worker a job; if the worker has died, `answers` reports it."""
        self.idle.discard(number)
        self.jobs[number] = job
        with contextlib.suppress(OSError):
            self._workers[number][1].send(job)

    def answers(self, timeout_s: float) -> Iterator[tuple[int, Job, Answer | None]]:
        """(worker, its job, the answer) of those with an answer; None in place of it: the worker died."""
        pipes = {self._workers[number][1]: number for number in self.jobs}
        ready: list[Any] = wait(list(pipes), timeout_s)
        for pipe in ready:
            number = pipes[pipe]
            job = self.jobs.pop(number)
            try:
                answer = pipe.recv()
            except (EOFError, OSError):
                yield number, job, None
            else:
                self.idle.add(number)
                yield number, job, answer

    def end_stopped(self) -> None:
        """Ends busy workers that have been stopped (SIGSTOP) for too long; `answers` then reports them."""
        now = time.monotonic()
        for number in self.jobs:
            process = self._workers[number][0]
            if state_of(process.pid) != "stopped":
                self._stopped_s.pop(number, None)
            elif now - self._stopped_s.setdefault(number, now) > self._most_s:
                process.kill()

    def how_it_died(self, number: int) -> str:
        """The way a worker ended, for people."""
        process = self._workers[number][0]
        process.join(2.0)
        code = process.exitcode
        if code == -signal.SIGKILL and number in self._stopped_s:
            return f"it was stopped, by SIGSTOP or a debugger, for {self._most_s:g} s; PIPEFIT_DEADLINE_S changes that"
        if code is None:
            return "no answer"
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def close(self) -> None:
        """Ends all workers; those that are busy get a little time."""
        for number in self._workers:
            self.give(number, Job("close"))
        wait_or_kill([process for process, _ in self._workers.values()], _GRACE_S)
        for _, pipe in self._workers.values():
            pipe.close()
