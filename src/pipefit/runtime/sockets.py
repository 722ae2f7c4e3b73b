"""The sockets of process groups, which end the waits of this process when they are shut down.

torch cannot interrupt a wait inside a message of Gloo. The kernel can: a thread shuts down the connections, and a wait
on one ends with Gloo's own error, in whichever thread it is. Those that do not end are left (`parallel.waiting`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_LOOPBACK = "127."


def open_sockets() -> set[int]:
    """The inodes of this process's sockets."""
    return {inode for _, inode in _handles()}


def shut_down(except_for: set[int]) -> None:
    """Shuts down the connections of this process's groups.

    Those are the TCP connections between processes of this machine.

    Args:
        except_for: inodes of sockets that were there before the groups.
    """
    for handle, inode in _handles():
        if inode not in except_for:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle)) as one:
                if _is_connection(one):
                    one.shutdown(socket.SHUT_RDWR)


def _handles() -> Iterator[tuple[int, int]]:
    """The file descriptor and the inode of each socket of this process."""
    for path in Path("/proc/self/fd").iterdir():
        handle = int(path.name)
        with contextlib.suppress(OSError):
            found = os.fstat(handle)
            if stat.S_ISSOCK(found.st_mode):
                yield handle, found.st_ino


def _is_connection(one: socket.socket) -> bool:
    """Returns whether a socket is a TCP connection inside this machine, and does not only listen for some."""
    if one.family != socket.AF_INET or one.type != socket.SOCK_STREAM:
        return False
    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    ends = one.getsockname(), one.getpeername()
    return all(address.startswith(_LOOPBACK) for address, _ in ends)
