"""Where a trial stands: one small file that is replaced as a whole. A turn is done when its cursor is in place."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipefit.errors import PipefitError, TierError

__all__ = ["Cursor", "commit", "read_cursor", "read_losses", "write_loss"]

_CURSOR, _LOSSES, _HELD_OUT = "cursor.json", "losses.f64", "held-out.f64"
_DOUBLE = struct.Struct("<d")


class Cursor(msgspec.Struct, forbid_unknown_fields=True):
    """Where a trial stands between two turns.

    Attributes:
        step, turn: the next one.
        counts: layers of each shard.
        versions: of the record of each shard.
        loss: of the step under way, once its last shard is done.
        norms: of the step under way, norms of gradients by shard, where they are clipped.
        flags: which outputs of a shard carry gradients, by shard and shapes.
        parameters, tier_bytes, device_bytes: what was found when it was admitted.
    """

    counts: list[int]
    versions: list[int]
    step: int = 0
    turn: int = 0
    loss: float = 0.0
    norms: dict[str, list[float]] = {}
    flags: dict[str, list[bool]] = {}
    parameters: int = 0
    tier_bytes: int = 0
    device_bytes: float = 0.0


def commit(folder: Path, cursor: Cursor) -> None:
    """Puts a cursor in place. It survives the death of any process; a power cut may take the last ones.

    Raises:
        TierError: it cannot be written.
    """
    temporary = folder / f".{_CURSOR}"
    try:
        temporary.write_bytes(msgspec.json.encode(cursor))
        temporary.replace(folder / _CURSOR)
    except OSError as problem:
        raise TierError(f"{folder}: cannot be written: {problem.strerror}") from None


def read_cursor(folder: Path) -> Cursor | None:
    """The cursor of a trial; None: it was never admitted.

    Raises:
        PipefitError: it is damaged.
    """
    try:
        return msgspec.json.decode((folder / _CURSOR).read_bytes(), type=Cursor)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as problem:
        raise PipefitError(f"{folder / _CURSOR}: cannot be read: {problem}") from None


def write_loss(folder: Path, step: int, loss: float, held_out: bool = False) -> None:
    """Keeps the loss of a step, or that on held-out data after it; writing it again changes nothing."""
    try:
        handle = os.open(folder / (_HELD_OUT if held_out else _LOSSES), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(handle, _DOUBLE.pack(loss), step * _DOUBLE.size)
        finally:
            os.close(handle)
    except OSError as problem:
        raise TierError(f"{folder}: cannot be written: {problem.strerror}") from None


def read_losses(folder: Path, num_steps: int, held_out: bool = False) -> Sequence[float]:
    """The losses of the steps that are done, or those on held-out data: NaN where these were not asked for."""
    if not num_steps:
        return []
    path = folder / (_HELD_OUT if held_out else _LOSSES)
    if held_out and not path.exists():
        return [math.nan] * num_steps
    data = path.read_bytes()
    return [value for (value,) in _DOUBLE.iter_unpack(data[: num_steps * _DOUBLE.size])]
