"""Drawings that every page offers, made ahead: simulating them anew for each page would take seconds.

The shelf holds every schedule in a range of shapes under the lectures' costs (a backward takes two forwards, messages
take no time). It is written by `make golden` from the same generators and the same simulator that draw everything
else, and a test holds it against them.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

import msgspec

from pipefit.draw.encode import Entry, to_text

__all__ = ["CHUNKS", "FILE", "MICROBATCHES", "STAGES", "Stored", "on_shelf", "pack", "shelf"]

FILE = "shelf.jsonl.gz"
STAGES, MICROBATCHES, CHUNKS = (2, 4, 8), (4, 8, 16, 32), (1, 2)


class _Shape(msgspec.Struct, frozen=True):
    """What the page tells drawings apart by."""

    name: str
    p: int
    m: int
    v: int


class Stored(msgspec.Struct, frozen=True):
    """An encoded drawing: its name, ranks, micro-batches and chunks, and the text for the page."""

    name: str
    p: int
    m: int
    v: int
    text: str

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What no two drawings of a page share."""
        return self.name, self.p, self.m, self.v


@cache
def shelf() -> tuple[Stored, ...]:
    """The drawings made ahead."""
    lines = gzip.decompress(files("pipefit.draw").joinpath(FILE).read_bytes()).decode().splitlines()
    decoder = msgspec.json.Decoder(_Shape)
    shapes = map(decoder.decode, lines)
    return tuple(Stored(own.name, own.p, own.m, own.v, line) for own, line in zip(shapes, lines, strict=True))


def on_shelf(num_ranks: int, num_microbatches: int, num_chunks: int) -> bool:
    """Whether the drawings of a shape were made ahead."""
    return num_ranks in STAGES and num_microbatches in MICROBATCHES and num_chunks in CHUNKS


def pack(entries: Iterable[Entry]) -> bytes:
    """The file of a shelf: a line of JSON each, compressed; the same entries always give the same bytes."""
    text = "".join(to_text(entry) + "\n" for entry in entries)
    return gzip.compress(text.encode(), mtime=0)
