"""Host and disk as one tier: what fits lies in the host's memory, the rest on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from pipefit.memory.disk import DiskTier
from pipefit.memory.host import HostTier
from pipefit.memory.lanes import Copy
from pipefit.memory.tiers import Key, TierStore

__all__ = ["SplitTier"]

# Weights are read twice in a step, the others once.
_FIRST = {"weights": 0, "wgrad": 1, "optim": 2}


class SplitTier:
    """Records on two tiers; where each lies is settled when room is made.

    Args:
        host: takes records until they reach `host_bytes`, weights first.
        disk: takes the rest.
        host_bytes: capacity of the host.
    """

    def __init__(self, host: HostTier, disk: DiskTier, host_bytes: int) -> None:
        self.host, self.disk = host, disk
        self._host_bytes = host_bytes
        self._home: dict[Key, TierStore] = {}

    @property
    def num_bytes(self) -> int:
        """Of both."""
        return self.host.num_bytes + self.disk.num_bytes

    def reserve(self, sizes: Mapping[Key, int], scratch: Sequence[Key] = ()) -> None:
        """See `TierStore`."""
        held: dict[Key, int] = {}
        for key in sorted(sizes, key=lambda key: _FIRST.get(key.kind, 3)):
            if sum(held.values()) + sizes[key] <= self._host_bytes:
                held[key] = sizes[key]
        rest = {key: size for key, size in sizes.items() if key not in held}
        self.host.reserve(held)
        self.disk.reserve(rest, [key for key in scratch if key in rest])
        self._home = dict.fromkeys(held, self.host) | dict.fromkeys(rest, self.disk)

    def write(self, key: Key, version: int, source: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """See `TierStore`."""
        return self._home[key].write(key, version, source, after)

    def read(self, key: Key, version: int, into: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """See `TierStore`."""
        return self._home[key].read(key, version, into, after)

    def holds(self, key: Key) -> int | None:
        """See `TierStore`."""
        return self._home[key].holds(key)

    def commit(self, step: int, version: int, state: bytes, after: Sequence[Copy] = ()) -> Copy:
        """Finds out whether the disk still takes what is written; what the host holds does not outlive the process."""
        return self.disk.commit(step, version, state, after)

    def close(self) -> None:
        """See `TierStore`."""
        self.host.close()
        self.disk.close()

    def discard(self) -> None:
        """See `DiskTier`."""
        self.host.close()
        self.disk.discard()
