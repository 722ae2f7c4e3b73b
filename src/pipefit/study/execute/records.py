"""What a trial keeps between two turns: named tensors and some JSON data in a file, whole or not at all.

A record that changes has two files, written in turn; the trial's cursor says which one counts. So a turn that is cut
off leaves everything as it was before it. Header and checksum are those of the disk tier.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipefit.checkpoint.tensor_files import payload
from pipefit.errors import PipefitError, TierError
from pipefit.spill.records import HEADER_BYTES, RecordHeader, chunk_sum
from pipefit.stage.record_layout import Field, Layout, padded

_BLOCK_BYTES = 4 << 20

__all__ = ["Record", "read_record", "record_bytes", "write_record"]


class Record(NamedTuple):
    """What was read: tensors, all views of one buffer, and what was written beside them."""

    tensors: dict[str, Tensor]
    extra: dict[str, Any]


def record_bytes(tensors: Mapping[str, Tensor]) -> int:
    """What a record of these tensors takes, but for its JSON data."""
    return HEADER_BYTES + Layout(tensors.values()).num_bytes


def write_record(path: Path, version: int, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> int:
    """Writes a record over whatever the file held; its size in bytes.

    Raises:
        TierError: there is no room, or the folder is gone.
    """
    layout = Layout(tensors.values())
    rows = [
        [name, field.start, list(field.shape), str(field.dtype).removeprefix("torch.")]
        for name, field in zip(tensors, layout.fields, strict=True)
    ]
    text = json.dumps({"tensors": rows, "extra": extra}, separators=(",", ":")).encode()
    head = padded(8 + len(text))
    size, checksum = head + layout.num_bytes, 0
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.pwrite(handle, bytes(HEADER_BYTES), 0)  # until the payload is whole there is no record
            position = HEADER_BYTES
            first = memoryview(len(text).to_bytes(8, "little") + text)
            for block in _blocks([(0, first), *_payloads(layout, tensors, head)], size):
                checksum = chunk_sum(block, checksum)
                _write_all(handle, block, position)
                position += len(block)
            os.pwrite(handle, RecordHeader(path.stem[:96], version, size, checksum).pack(), 0)
        finally:
            os.close(handle)
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TierError(f"{path.parent}: the tier is full: no room for {size} bytes") from None
        raise TierError(f"{path}: cannot be written: {problem.strerror}") from None
    return HEADER_BYTES + size


def _payloads(layout: Layout, tensors: Mapping[str, Tensor], start: int) -> Iterator[tuple[int, memoryview]]:
    for field, tensor in zip(layout.fields, tensors.values(), strict=True):
        yield start + field.start, payload(tensor)


def _blocks(parts: Iterable[tuple[int, memoryview]], size: int) -> Iterator[memoryview]:
    """Parts at rising positions, zeros between them, as blocks that follow each other: a record needs no second copy.

    Each block is valid until the next, and all but the last are of the same size.
    """
    room = bytearray(_BLOCK_BYTES)
    begin = 0
    for position, data in parts:
        while data:
            while position >= begin + _BLOCK_BYTES:
                yield memoryview(room)
                room[:], begin = bytes(_BLOCK_BYTES), begin + _BLOCK_BYTES
            count = min(len(data), begin + _BLOCK_BYTES - position)
            room[position - begin : position - begin + count] = data[:count]
            data, position = data[count:], position + count
    while begin < size:
        yield memoryview(room)[: size - begin]
        room[:], begin = bytes(_BLOCK_BYTES), begin + _BLOCK_BYTES


def _write_all(handle: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(handle, data, position)
        data, position = data[written:], position + written


def read_record(path: Path, version: int) -> Record:
    """Reads a record.

    Raises:
        PipefitError: it is torn, or holds another version.
        TierError: it cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            header = RecordHeader.unpack(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"))
            if header is None or header.version != version:
                found = "no whole record" if header is None else f"version {header.version}"
                raise PipefitError(f"{path}: expected version {version} of the trial's state, found {found}")
            buffer = torch.empty(header.num_bytes, dtype=torch.uint8)
            data = memoryview(buffer.numpy())
            at = 0
            while at < len(data) and (count := file.readinto(data[at:])):
                at += count
    except OSError as problem:
        raise TierError(f"{path}: cannot be read: {problem.strerror}") from None
    if at < len(data) or chunk_sum(data) != header.checksum:
        raise PipefitError(f"{path}: does not fit its checksum: the tier did not keep what was written")
    length = int.from_bytes(data[:8], "little")
    found = json.loads(bytes(data[8 : 8 + length]))
    body = buffer[padded(8 + length) :]
    tensors = {
        name: Field(start, torch.Size(shape), getattr(torch, kind)).of(body)
        for name, start, shape, kind in found["tensors"]
    }
    return Record(tensors, found["extra"])
