"""Signals in a rank, also while it is blocked inside torch, where Python's own handlers do not run."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing as mp
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ENDING = "ending"
"""A file in the run's folder: the launcher has given up, so ranks need not be given time."""

STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write its Python stack to its `stack_file`, also while it is blocked."""

PASSED_ON = signal.SIGUSR1
"""A request to stop from the launcher, which may come in addition to a signal for the whole process group."""

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a run that was asked to stop."""

_PR_SET_PDEATHSIG = 1
_GRACE_S = 10.0


@contextlib.contextmanager
def handling(handler: Callable[[int, object], None], *numbers: int) -> Iterator[None]:
    """The context with another handler for signals, in a main thread; the handlers before are restored afterwards."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


@dataclass
class Stop:
    """Whether this run was asked to stop (SIGTERM), or its training to end.

    Attributes:
        requested: this process got the request.
        agreed: all ranks know it, since the same step.
        wanted: this process wants the training to end.
        ended: all ranks know that one process does, since the same step.
        numbers: of the signals that this process got.
    """

    requested: bool = False
    agreed: bool = False
    wanted: bool = False
    ended: bool = False
    numbers: list[int] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code of a stopped run."""
        if self.numbers[:1] == [signal.SIGINT]:
            return 128 + signal.SIGINT
        return TERMINATED

    @property
    def leaving(self) -> BaseException:
        """The exception with which a stopped run leaves."""
        return leaving(self.numbers)


def leaving(numbers: Sequence[int]) -> BaseException:
    """The exception with which a run leaves that got these signals."""
    if numbers[:1] == [signal.SIGINT]:
        return KeyboardInterrupt()
    return SystemExit(TERMINATED)


def stack_file(folder: Path, rank: int) -> Path:
    """The file to which a rank writes its stack on request."""
    return folder / f"rank-{rank}.stack"


def answer_with_stack(folder: Path, rank: int) -> None:
    """Lets others request this rank's stack, unless the user has set another handler for the signal."""
    if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
        file = stack_file(folder, rank).open("w", encoding="utf-8")
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=False)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies, so that no rank is left behind."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        os._exit(TERMINATED)


def die_with_launcher(*folders: str) -> None:
    """Ends this process with its launcher, also where its parent in the kernel is the fork server.

    Args:
        folders: temporary ones of the launcher, removed then, because nothing else will.
    """
    die_with_parent()
    if (launcher := mp.parent_process()) is None:
        return

    def watch() -> None:
        wait([launcher.sentinel])
        for folder in filter(None, folders):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(TERMINATED)

    threading.Thread(target=watch, name="pipefit-launcher", daemon=True).start()


def listen(stop: Stop, folder: Path | None, ctrl_c: bool = False) -> Callable[[], None]:
    """Installs the handler of SIGTERM: a stop after the step; the end of the process at a second one or a grace time.

    The grace time is 10 s; PIPEFIT_GRACE_S changes it. A handler that the user has set stays as it is.

    Args:
        stop: takes the request.
        folder: of the run, if a launcher has started it.
        ctrl_c: the same for Ctrl-C.

    Returns:
        What gives the signals their former handlers again.
    """
    if threading.current_thread() is not threading.main_thread():
        return _nothing
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):
        return _nothing
    if ctrl_c and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return _nothing
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    taken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if taken != -1:
        signal.set_wakeup_fd(taken)  # an event loop has it; then SIGTERM keeps its usual meaning
        os.close(reader)
        os.close(writer)
        return _nothing
    numbers = [signal.SIGTERM]
    if ctrl_c:
        numbers.append(signal.SIGINT)
    if folder is not None:
        numbers.append(PASSED_ON)
    before = {number: signal.signal(number, _heard) for number in numbers}
    thread = threading.Thread(target=_serve, args=(reader, stop, folder), name="pipefit-signals", daemon=True)
    thread.start()

    def unlisten() -> None:
        if (current := signal.set_wakeup_fd(-1)) == writer:
            os.close(writer)
            thread.join()  # which ends with the pipe
        else:
            signal.set_wakeup_fd(current)  # somebody else has it since
        for number, handler in before.items():
            if signal.getsignal(number) is _heard:
                signal.signal(number, handler)

    return unlisten


def _nothing() -> None:
    pass


def _heard(*_: object) -> None:
    """Does nothing: the thread reads the signal's number from the pipe."""


def _hold() -> None:
    """Holds signals back while this process forks: the fork has the pipe, too, and the rank would hear of them."""
    _held.before = signal.pthread_sigmask(signal.SIG_BLOCK, _USUAL)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.before)


def _release_fork() -> None:
    """Gives signals their usual meaning in a fork of a rank, such as a worker of a loader."""
    heard = [number for number in _USUAL if signal.getsignal(number) is _heard]
    if heard:
        signal.set_wakeup_fd(-1)
    for number in heard:
        signal.signal(number, _USUAL[number])
    _release()


_USUAL: dict[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    PASSED_ON: signal.SIG_DFL,
}
_held = threading.local()
os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release_fork)


def _serve(reader: int, stop: Stop, folder: Path | None) -> None:
    grace = None
    while data := os.read(reader, 64):
        for number in data:
            if signal.getsignal(number) is not _heard:
                continue  # it is somebody else's now
            # The same one twice: torchrun adds its own to that of a terminal.
            is_ending = folder is not None and (folder / ENDING).exists()
            if is_ending or number in stop.numbers:
                _leave(stop.code)
            stop.numbers.append(number)
            if not stop.requested:
                stop.requested = True
                seconds = float(os.environ.get("PIPEFIT_GRACE_S", _GRACE_S))
                grace = threading.Timer(seconds, _leave, (stop.code,))
                grace.daemon = True
                grace.start()
    os.close(reader)
    if grace is not None:
        grace.cancel()


def _leave(code: int) -> None:
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
