"""The folder in the machine's memory that a launcher keeps for the restarts of its ranks.

    launcher        pipefit-new-…, locked ─► pipefit-memory-… ─► removed at the end of the run
    next launcher   each pipefit-memory-… that nobody has locked ─► removed: its launcher was killed

A folder has its name only once it is locked, and a lock ends with its process, so no folder of a living run is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipefit.runtime.meeting import SHARED
from pipefit.spec.lock import locked

_NAME = "pipefit-memory-"
_NEW = "pipefit-new-"
_LOCK = "lock"


@contextlib.contextmanager
def memory_folder() -> Iterator[str]:
    """A private folder in the machine's memory, or else among temporary files, which outlives ranks."""
    if os.access(SHARED, os.W_OK):
        shared = SHARED
    else:
        shared = None
    if shared is not None:  # where every file system has locks
        _remove_abandoned(shared)
    new = Path(tempfile.mkdtemp(prefix=_NEW, dir=shared))
    made = new.with_name(new.name.replace(_NEW, _NAME, 1))
    with (new / _LOCK).open("w") as lock:
        locked(lock)
        new.rename(made)
        try:
            yield str(made)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _remove_abandoned(shared: Path) -> None:
    """Removes the folders of this user's runs that were killed as a whole."""
    for folder in shared.glob(f"{_NAME}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
                continue
            with (folder / _LOCK).open("rb") as lock:
                if locked(lock):
                    shutil.rmtree(folder, ignore_errors=True)
