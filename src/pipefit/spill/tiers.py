"""Tiers: where records lie that are not on the device. A record is the flat bytes of one stage's weights or states.

    device (slots)  ⇄  host (one pinned buffer)  ⇄  disk (one preallocated file)

Each record has a version, which counts weight updates since training began. A store holds one version of each record to
read; the disk keeps the committed one as well until the next is committed, so that a write that is cut off loses
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from pipefit.ir.spill import GRAIN_BYTES
from pipefit.spill.lanes import Copy

ALIGNMENT = GRAIN_BYTES
"""Bytes to which records, slots and positions in files are aligned."""

WEIGHTS, WGRAD, OPTIM = "weights", "wgrad", "optim"
"""Kinds of records that lie in slots while they are on the device."""


class Key(NamedTuple):
    """Names a record of a store.

    Attributes:
        stage: whose it is.
        kind: "weights", "optim", "wgrad", "act", "grad", …
        mb: micro-batch of an activation or gradient; −1 otherwise.
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
        """Bytes that it occupies."""

    def reserve(self, sizes: Mapping[Key, int], scratch: Sequence[Key] = ()) -> None:
        """Makes room for all records at once, before the first is written.

        Args:
            sizes: bytes of each.
            scratch: those that live within a step only, and need not outlive the run.

        Raises:
            TierError: there is not enough room.
        """

    def reserve_scratch(self, sizes: Mapping[Key, int]) -> None:
        """Makes room for further records that live within a step only; what a key had before is forgotten.

        Raises:
            TierError: there is not enough room.
        """

    def write(self, key: Key, version: int, source: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Starts to write a version; it may be read once the copy has ended."""

    def read(self, key: Key, version: int, into: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Starts to read a version, after its write and after all of `after`."""

    def holds(self, key: Key) -> int | None:
        """The version that was written last (or is being written); None: none yet."""

    def close(self, discard: bool = False) -> None:
        """Releases the memory; a disk keeps its files, unless they are discarded: the run has left a checkpoint."""
