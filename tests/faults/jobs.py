"""Functions that ranks run in these tests, importable by name."""

import os
from pathlib import Path

import torch
from torch import distributed

from pipefit.runtime.session import current


def listening() -> list[str]:
    """The addresses on which this rank's process listens once the ranks have exchanged data."""
    current()
    distributed.all_reduce(torch.ones(1))
    return sockets()


def sockets() -> list[str]:
    """The local addresses of this process's listening sockets, as hexadecimal digits of the kernel."""
    links = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
    own = {os.readlink(link) for link in links if link.is_symlink()}  # noqa: PTH115
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in own and fields[3] in ("0A", "07"):
                found.append(fields[1].partition(":")[0])
    return found
