"""Tiers: where records lie that are not on the device. A record is the flat bytes of one stage's weights or states.

    device (slots)  ⇄  host (one pinned buffer)  ⇄  disk (one preallocated file)

Each record has a version, which counts weight updates since training began. A store holds one version of each record to
read; the disk keeps the committed one as well until the next is committed, so that a write that is cut off loses
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pipefit.ir.spill import GRAIN_BYTES
from pipefit.spec.sealed import FileEntry
from pipefit.spill.lanes import Copy

__all__ = ["ALIGNMENT", "OPTIM", "WEIGHTS", "WGRAD", "DurableTier", "Key", "TierStore"]

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

    def close(self) -> None:
        """Releases the memory; a disk keeps its file."""


class DurableTier(TierStore, Protocol):
    """Keeps records that outlive the process, once they are committed."""

    def commit(
        self,
        step: int,
        state: Mapping[str, Any],
        after: Sequence[Copy] = (),
        tensors: FileEntry | bytes | None = None,
    ) -> Copy:
        """All records as written so far belong to `step`, with what else is needed to resume from there.

        Args:
            step: weight updates done.
            state: JSON data, given back by `recover`.
            after: the writes since the last commit; if one of them fails, so does the commit.
            tensors: a safetensors file that belongs to the step too, or the bytes of one.
        """

    def spare(self) -> Path:
        """The path for a safetensors file of the next commit; the last commit does not name it."""

    def status(self) -> str:
        """A message's end: what is left to resume from."""

    def discard(self) -> None:
        """Closes the tier and removes its files: the run has ended well, and has left a checkpoint."""
