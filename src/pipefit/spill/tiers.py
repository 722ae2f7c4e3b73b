"""Tiers: where records lie that are not on the device. A record is the flat bytes of one stage's weights or states.

    device (slots)  ⇄  host (one pinned buffer)  ⇄  disk (one preallocated file)

Versions count weight updates since training began. A store holds one version of each record to read; the disk keeps
the one before beside it until the next is written, so that a write that is cut off loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from pipefit.ir.spill import GRAIN_BYTES
from pipefit.spill.lanes import Copy
from pipefit.spill.tier_file import Aside

__all__ = ["ALIGNMENT", "Key", "TierStore"]

ALIGNMENT = GRAIN_BYTES
"""Bytes to which records, slots and positions in files are aligned."""


class Key(NamedTuple):
    """Names a record of a store.

    Attributes:
        stage: whose it is.
        kind: "weights", "optim", "wgrad", "act" or "input".
        mb: micro-batch of an activation or input; −1 otherwise.
    """

    stage: int
    kind: str
    mb: int = -1

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}" + (f", micro-batch {self.mb}" if self.mb >= 0 else "")


class TierStore(Protocol):
    """Keeps records. All sizes are multiples of `ALIGNMENT`; sources and targets are flat uint8 tensors so aligned."""

    @property
    def num_bytes(self) -> int:
        """What it occupies."""

    def reserve(self, sizes: Mapping[Key, int], scratch: Sequence[Key] = ()) -> None:
        """Makes room for all records at once, before the first is written.

        Args:
            sizes: bytes of each.
            scratch: those that live within a step only, and need not outlast the run.

        Raises:
            TierError: there is not enough room.
        """

    def reserve_scratch(self, sizes: Mapping[Key, int]) -> None:
        """Makes room for further records that live within a step only; what a key had before is forgotten.

        Raises:
            TierError: there is not enough room.
        """

    def write(self, key: Key, version: int, source: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Starts to write a version; it is committed, and may be read, once the copy has ended."""

    def read(self, key: Key, version: int, into: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Starts to read a version, after its write and after all of `after`."""

    def holds(self, key: Key) -> int | None:
        """The version that was written last (or is being written); None: none yet."""

    def commit(
        self, step: int, version: int, state: bytes, after: Sequence[Copy] = (), aside: Aside | None = None
    ) -> Copy:
        """All records as written so far belong to `step`, with what else must be known to go on from there.

        Args:
            step: weight updates done.
            version: of the records.
            state: for `recover`.
            after: the writes since the last commit; if one of them fails, so does the commit.
            aside: a file that belongs to the step too.
        """

    def close(self) -> None:
        """Lets go of it; a disk keeps its file."""
