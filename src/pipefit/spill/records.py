"""The form of a record in a disk tier's file: a header of one block, then the payload.

A record that is committed has two copies, written alternately, so that one is always whole: a header names the version
and the checksum of its payload, and a payload that does not have it was cut off while it was written.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import torch

from pipefit.spill.tiers import ALIGNMENT

HEADER_BYTES = ALIGNMENT
_MAGIC = b"pipefit1"
_LAYOUT = struct.Struct("<8sqqI96sI")
_WORDS = ALIGNMENT // 8


class RecordHeader(NamedTuple):
    """The block before a payload.

    Attributes:
        name: of the record.
        version: that the payload holds.
        num_bytes: of the payload.
        checksum: of the payload.
    """

    name: str
    version: int
    num_bytes: int
    checksum: int

    def pack(self) -> bytes:
        """The header's block."""
        body = _LAYOUT.pack(_MAGIC, self.version, self.num_bytes, self.checksum, self.name.encode(), 0)[:-4]
        return (body + struct.pack("<I", zlib.crc32(body))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, block: bytes | bytearray | memoryview) -> RecordHeader | None:
        """Reads a block; None: it is no whole header."""
        body = bytes(block[: _LAYOUT.size])
        magic, version, num_bytes, checksum, name, own = _LAYOUT.unpack(body)
        if magic != _MAGIC or own != zlib.crc32(body[:-4]):
            return None
        return cls(name.rstrip(b"\0").decode(), version, num_bytes, checksum)


def chunk_sum(data: memoryview, seed: int = 0) -> int:
    """A checksum of whole blocks, made to run at the speed of memory: the CRC of the sums of their 64-bit words.

    A block that is missing, old, moved or flipped in a bit changes it; words that change places inside a block do not.
    It works on all of the calling thread's cores, so call it where nothing else computes.

    Args:
        data: writable memory; a multiple of `ALIGNMENT`.
        seed: the sum of what came before, so that pieces give the sum of the whole.
    """
    if not data:
        return seed
    words = torch.frombuffer(data, dtype=torch.int64).view(-1, _WORDS)
    return zlib.crc32(words.sum(1).numpy(), seed)
