"""The lock of a file: it ends with the process that has it, however that ends."""

from __future__ import annotations

import fcntl
from typing import IO, Any


def locked(file: IO[Any] | int) -> bool:
    """Locks an open file until it is closed; returns False if another process has locked it.

    On a file system without locks nobody is refused.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
