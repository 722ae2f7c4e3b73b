"""Records on a tier. A record is the flat bytes of one stage's weights, states or other tensors.

    device (slots)  ⇄  host (pinned buffers)  ⇄  disk (one preallocated file)

Each record has a version, which counts weight updates since training began. A store holds one readable version of each
record; the disk keeps the committed one as well until the next is committed, so that an interrupted write loses
nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from pipefit.ir.spill import GRAIN_BYTES

ALIGNMENT = GRAIN_BYTES
"""Bytes to which records, slots and positions in files are aligned."""

WEIGHTS = "weights"
WGRAD = "wgrad"
OPTIM = "optim"
"""Kinds of records that are in slots while they are on the device."""


class Key(NamedTuple):
    """Names a record of a store.

    Attributes:
        stage: of the record.
        kind: "weights", "optim", "wgrad", "act", "grad", …
        mb: micro-batch of an activation or gradient; −1 otherwise.
    """

    stage: int
    kind: str
    mb: int = -1

    def __str__(self) -> str:
        if self.mb >= 0:
            return f"{self.kind} of stage {self.stage}, micro-batch {self.mb}"
        return f"{self.kind} of stage {self.stage}"
