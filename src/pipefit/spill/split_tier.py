"""Host and disk as one tier: records that fit lie in the host's memory, the rest on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pipefit.spec.sealed import FileEntry
from pipefit.spill.disk import DiskTier
from pipefit.spill.host import HostTier
from pipefit.spill.lanes import Copy
from pipefit.spill.tier_file import Commit
from pipefit.spill.tiers import OPTIM, WEIGHTS, WGRAD, Key, TierStore

# Weights are read twice in a step, the others once.
_FIRST = {WEIGHTS: 0, WGRAD: 1, OPTIM: 2}


class SplitTier:
    """Records on two tiers; where each lies is settled when room is made.

    The host's memory does not outlive the process, so a commit copies its records to the disk, where they have room
    like the others. A run that resumes finds them there, and may hold more or fewer of them in the host's memory.

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
        self.files = disk.files

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
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
        self,
        step: int,
        state: Mapping[str, Any],
        after: Sequence[Copy] = (),
        tensors: FileEntry | bytes | None = None,
    ) -> Copy:
        """See `DiskTier`. Later writes to the host wait for its copies: the lane keeps the order."""
        held = [(key, version) for key in self._copied() if (version := self.host.holds(key)) is not None]
        copies = [self.disk.write(key, version, self.host.written(key)) for key, version in held]
        return self.disk.commit(step, state, (*after, *copies), tensors)

    def _copied(self) -> list[Key]:
        """The records in the host's memory that commits copy to the disk."""
        return [key for key in self.disk.sizes if self._home[key] is self.host]

    def recover(self, at_most: int | None = None) -> Commit:
        """See `DiskTier`."""
        found = self.disk.recover(at_most)
        if not self._home:
            self._divide(self.disk.sizes)
        return found

    def resume_from(self, commit: Commit) -> None:
        """See `DiskTier`; records that belong in the host's memory are read into it."""
        self.disk.resume_from(commit)
        for key in self._copied():
            if key in commit.records:
                version = commit.records[key].version
                self.disk.read(key, version, self.host.record(key)).wait()
                self.host.set_version(key, version)

    def close(self, discard: bool = False) -> None:
        """See `TierStore`."""
        self.host.close()
        self.disk.close(discard)
