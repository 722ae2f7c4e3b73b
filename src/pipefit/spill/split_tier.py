"""Host and disk as one tier: what fits lies in the host's memory, the rest on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from pipefit.spill.disk import DiskTier
from pipefit.spill.host import HostTier
from pipefit.spill.lanes import Copy
from pipefit.spill.tier_file import Aside, Committed
from pipefit.spill.tiers import Key, TierStore

__all__ = ["SplitTier"]

# Weights are read twice in a step, the others once.
_FIRST = {"weights": 0, "wgrad": 1, "optim": 2}


class SplitTier:
    """Records on two tiers; where each lies is settled when room is made.

    What the host holds does not outlive the process, so a commit copies it to the disk, where it has records like the
    others. A run that goes on finds them there, and may hold more or less of them in the host's memory.

    Args:
        host: takes records until they reach `host_bytes`, weights first.
        disk: takes the rest, and copies of what the host has.
        host_bytes: capacity of the host.
        commits: whether there will be commits; if not, the disk has room for the rest only.
    """

    def __init__(self, host: HostTier, disk: DiskTier, host_bytes: int, commits: bool = True) -> None:
        self.host, self.disk = host, disk
        self._host_bytes, self._commits = host_bytes, commits
        self._home: dict[Key, TierStore] = {}

    @property
    def num_bytes(self) -> int:
        """Of both."""
        return self.host.num_bytes + self.disk.num_bytes

    @property
    def sizes(self) -> dict[Key, int]:
        """See `DiskTier`."""
        return self.disk.sizes

    def reserve(self, sizes: Mapping[Key, int], scratch: Sequence[Key] = ()) -> None:
        """See `TierStore`."""
        rest = self._divide(sizes)
        copied = {key: size for key, size in sizes.items() if self._commits and key not in scratch}
        self.disk.reserve({**copied, **rest}, [key for key in scratch if key in rest])

    def reserve_scratch(self, sizes: Mapping[Key, int]) -> None:
        """See `TierStore`."""
        for key, size in sizes.items():
            tier = self.host if self.host.num_bytes + size <= self._host_bytes else self.disk
            tier.reserve_scratch({key: size})
            self._home[key] = tier

    def _divide(self, sizes: Mapping[Key, int]) -> dict[Key, int]:
        """Settles where each record lies and makes room for the host's; the others'."""
        held: dict[Key, int] = {}
        for key in sorted(sizes, key=lambda key: _FIRST.get(key.kind, 3)):
            if sum(held.values()) + sizes[key] <= self._host_bytes:
                held[key] = sizes[key]
        rest = {key: size for key, size in sizes.items() if key not in held}
        self.host.reserve(held)
        self._home = dict.fromkeys(held, self.host) | dict.fromkeys(rest, self.disk)
        return rest

    def write(self, key: Key, version: int, source: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """See `TierStore`."""
        return self._home[key].write(key, version, source, after)

    def read(self, key: Key, version: int, into: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """See `TierStore`."""
        return self._home[key].read(key, version, into, after)

    def holds(self, key: Key) -> int | None:
        """See `TierStore`."""
        return self._home[key].holds(key)

    def commit(
        self, step: int, version: int, state: bytes, after: Sequence[Copy] = (), aside: Aside | None = None
    ) -> Copy:
        """See `TierStore`. What is written to the host later waits for its copies: the lane keeps the order."""
        held = [key for key in self._copied() if self.host.holds(key) is not None]
        copies = [self.disk.write(key, version, self.host.written(key)) for key in held]
        return self.disk.commit(step, version, state, (*after, *copies), aside)

    def _copied(self) -> list[Key]:
        return [key for key in self.disk.sizes if self._home[key] is self.host]

    def recover(self, at_most: int | None = None) -> Committed:
        """See `DiskTier`."""
        found = self.disk.recover(at_most)
        if not self._home:
            self._divide(self.disk.sizes)
        return found

    def goes_on_from(self, committed: Committed) -> None:
        """See `DiskTier`; what belongs in the host's memory is read into it."""
        self.disk.goes_on_from(committed)
        for key in self._copied():
            self.disk.read(key, committed.version, self.host.record(key)).wait()
            self.host.took(key, committed.version)

    def spare(self) -> Path:
        """See `DiskTier`."""
        return self.disk.spare()

    def cure(self) -> str:
        """See `DiskTier`."""
        return self.disk.cure()

    def close(self) -> None:
        """See `TierStore`."""
        self.host.close()
        self.disk.close()

    def discard(self) -> None:
        """See `DiskTier`."""
        self.host.close()
        self.disk.discard()
