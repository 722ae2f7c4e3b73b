"""The files of a trial between two turns: its tier, the commit with the next turn, and the losses so far.

    trial.tier      records: weights, optimizer states and gradients of shards, data between them, buffers
    trial.commit    the last turn that is done, with the place of each record; replaced atomically
    losses          of each step done

All carry checksums. A turn is done when its commit is in place: a worker killed before that has changed nothing.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import torch

from pipefit.checkpoint.manifest import Optimization
from pipefit.checkpoint.resident import Row
from pipefit.errors import DamageError, TierError
from pipefit.spill.lanes import Lanes
from pipefit.spill.tier_file import Commit, read_commits
from pipefit.spill.tier_store import TierStore
from pipefit.study.trial import Evaluations, Figures, Progress

_NAME = "trial"
_LOSSES = "losses"
_ENTRY = struct.Struct("<qddI")


class Resident(msgspec.Struct, forbid_unknown_fields=True):
    """The part of a shard's state that its records do not hold.

    Attributes:
        rows: of its records of resident tensors.
        optimization: of its optimizer and learning-rate schedule; empty where nothing trains.
        known: states that its optimizer has made.
    """

    rows: list[Row]
    optimization: list[Optimization]
    known: list[int]


class TrialState(msgspec.Struct, forbid_unknown_fields=True):
    """The state of a trial between two turns, in addition to its records; the step is the commit's.

    Attributes:
        counts: layers of each shard.
        figures: as found when the trial was admitted.
        turn: the next one of the step.
        loss: of the current step, once its last shard is done.
        norms: of the current step, norms of gradients by shard, where they are clipped.
        squares: their sum of squares, once all are known.
        flags: (shard, shapes, flags of its outputs with gradients).
        reached: of each shard, the weights that have a gradient on the tier.
        parked: tensors on the tier, as `ParkedTensors.describe` gives them.
        payloads: (kind, shard, micro-batch, flags, structure) of data between shards.
        residents: of each shard.
        places: of the tensors that stay on the device, as `ParkedTensors.describe` gives them.
    """

    counts: list[int]
    figures: Figures
    turn: int = 0
    loss: float = 0.0
    norms: dict[int, list[float]] = {}
    squares: list[float] = []
    flags: list[tuple[int, str, list[bool]]] = []
    reached: dict[int, list[int]] = {}
    parked: list[Any] = []
    payloads: list[tuple[str, int, int, list[bool], str | None]] = []
    residents: dict[int, Resident] = {}
    places: list[Any] = []


def open_tier(folder: Path, device: torch.device) -> TierStore:
    """The tier of a trial, whose copies the caller makes.

    Several workers may have it open; the study gives a trial to one of them at a time.

    Raises:
        TierError: the folder cannot be used.
    """
    return TierStore(folder, _NAME, Lanes(device, threaded=False), device, shared=True)


def commit_mark(folder: Path) -> tuple[int, int]:
    """A mark of the last commit of a trial; it differs from that of any other commit."""
    found = (folder / f"{_NAME}.commit").stat()
    return found.st_ino, found.st_mtime_ns


def state_of(commit: Commit) -> TrialState:
    """The state that was committed.

    Raises:
        DamageError: it is of another form.
    """
    try:
        return msgspec.convert(commit.state, TrialState, str_keys=True)
    except msgspec.ValidationError as problem:
        raise DamageError(f"the state of step {commit.step} cannot be read: {problem}") from None


def read_state(folder: Path) -> tuple[int, TrialState] | None:
    """Step and state of a trial; None: it was never admitted.

    Raises:
        DamageError: the commit is damaged.
    """
    commits = read_commits(folder, _NAME)
    try:
        if commits:
            return (commits[0].step, state_of(commits[0]))
        return None
    except DamageError as problem:
        raise DamageError(f"{folder / _NAME}.commit: {problem}") from None


def write_loss(folder: Path, step: int, loss: float, held_out: float = math.nan) -> None:
    """Writes the loss of a step, and that on held-out data after it; writing it again changes nothing.

    Raises:
        TierError: it cannot be written.
    """
    entry = struct.pack("<qdd", step, loss, held_out)
    try:
        handle = os.open(folder / _LOSSES, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(handle, entry + struct.pack("<I", zlib.crc32(entry)), step * _ENTRY.size)
        finally:
            os.close(handle)
    except OSError as problem:
        raise TierError(f"{folder / _LOSSES}: cannot be written: {problem.strerror}") from None


def read_losses(folder: Path, num_steps: int) -> tuple[list[float], Evaluations]:
    """The losses of the steps that are done, and (step, loss) of the evaluations on held-out data, steps from 1.

    Raises:
        DamageError: the file is damaged.
        TierError: it cannot be read.
    """
    path = folder / _LOSSES
    try:
        if num_steps:
            data = path.read_bytes()
        else:
            data = b""
    except OSError as problem:
        raise TierError(f"{path}: cannot be read: {problem.strerror}") from None
    # Of what is missing, one entry is enough to be found damaged.
    size = min(num_steps * _ENTRY.size, (len(data) // _ENTRY.size + 1) * _ENTRY.size)
    data = data[:size].ljust(size, b"\0")
    losses = []
    held_out = []
    for step, (number, loss, other, checksum) in enumerate(_ENTRY.iter_unpack(data)):
        if number != step or checksum != zlib.crc32(data[step * _ENTRY.size :][: _ENTRY.size - 4]):
            raise DamageError(f"{path}: damaged at step {step + 1} (it does not have the checksum it states)")
        losses.append(loss)
        if not math.isnan(other):
            held_out.append((step + 1, other))
    return losses, held_out


def read_progress(folder: Path) -> Progress:
    """The progress of a trial at its last commit; its start if there is none.

    Raises:
        DamageError: the commit, or the file of losses, is damaged.
    """
    found = read_state(folder)
    if found:
        return Progress(found[1].turn, *read_losses(folder, found[0]))
    return Progress(0, [], [])
