"""A run's claim to its folder: one run at a time writes there, and every process of it sees the same folder."""

from __future__ import annotations

import contextlib
import os
import platform
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipefit.errors import PipefitError
from pipefit.spec.lock import locked

if TYPE_CHECKING:
    from pipefit.runtime.session import Session

LOCK = ".lock"
"""The file that rank 0 locks. The kernel frees the lock when the process ends, however it ends; the file stays."""


@contextlib.contextmanager
def claimed(folder: str, session: Session) -> Iterator[None]:
    """The context of a run that writes into a folder; every rank enters it. "": the run writes nowhere.

    Raises:
        PipefitError: on every rank: another run has the folder, it cannot be written, or some rank does not see it.
    """
    from pipefit.runtime.collectives import agree, attempt

    with contextlib.ExitStack() as stack:
        if folder and not session.is_outside:
            mark = f"{platform.node()} {os.getpid()} {uuid.uuid4().hex}"
            made = attempt(lambda: _lock(Path(folder), mark, stack) if session.rank == 0 else mark)
            mark = agree(session, made)[0]
            agree(session, attempt(lambda: _see(Path(folder), mark)))
        try:
            yield
        except PipefitError:
            if folder and session.rank == 0:
                _leave_nothing(Path(folder))
            raise


def _leave_nothing(folder: Path) -> None:
    """Removes the lock of a run that was refused, and its folder if there is nothing else."""
    if {path.name for path in folder.iterdir()} <= {LOCK, "logs"}:
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink()
            folder.rmdir()


def check_free(folder: Path) -> None:
    """Refuses a folder that a run has; the launcher asks before it opens the logs of its ranks there."""
    if (folder / LOCK).exists():
        with contextlib.ExitStack() as stack:
            _lock(folder, "", stack)


def _lock(folder: Path, mark: str, stack: contextlib.ExitStack) -> str:
    """Locks the folder until the stack closes, and leaves the mark in the file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context((folder / LOCK).open("a+", encoding="utf-8"))
    except OSError as problem:
        raise PipefitError(f"{folder}: cannot be written: {problem.strerror or problem}") from None
    if not locked(file):
        file.seek(0)
        host, process = [*file.read().split(), "?", "?"][:2]
        raise PipefitError(
            f"{folder}: another run writes into this folder (process {process} on {host}): wait for its end, or give "
            f"another folder with -o"
        )
    file.truncate(0)
    file.write(mark)
    file.flush()
    return mark


def _see(folder: Path, mark: str) -> None:
    """Checks that this process sees what rank 0 has written."""
    try:
        os.listdir(folder.parent)  # noqa: PTH208 - a network file system asks its server anew
        seen = (folder / LOCK).read_text(encoding="utf-8")
    except OSError:
        seen = ""
    if seen != mark:
        raise PipefitError(
            f"{folder}: {platform.node()} does not see what rank 0 on {mark.split()[0]} writes there: checkpoints need "
            f"a folder that all machines share; give one with -o, or train without -o, and without checkpoints"
        )
