"""Precomputed drawings that every page offers: simulating them again for each page would take seconds.

The shelf holds every schedule over ranks in a range of shapes under unit costs (a backward takes two forwards,
messages take no time). `make golden` writes it with the generators and the simulator of all other drawings, and a test
compares it with them.
"""

from __future__ import annotations

import gzip
from functools import cache
from importlib.resources import files

import msgspec
from msgspec.structs import replace

FILE = "shelf.jsonl.gz"
STAGES = (2, 4, 8)
MICROBATCHES = (4, 8, 16, 32)
CHUNKS = (1, 2)


class Stored(msgspec.Struct, frozen=True):
    """A drawing as a page's data: its name, ranks, micro-batches and chunks, and its text."""

    name: str
    p: int
    m: int
    v: int
    text: str = ""

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        """Name and shape, with no slots: no two drawings of a page share them."""
        return self.name, self.p, self.m, self.v, 0


@cache
def shelf() -> tuple[Stored, ...]:
    """The precomputed drawings."""
    lines = gzip.decompress(files("pipefit.draw").joinpath(FILE).read_bytes()).decode().splitlines()
    decoder = msgspec.json.Decoder(Stored)
    return tuple(replace(decoder.decode(line), text=line) for line in lines)


def on_shelf(num_ranks: int, num_microbatches: int, num_chunks: int) -> bool:
    """Returns whether the drawings of a shape are precomputed."""
    return num_ranks in STAGES and num_microbatches in MICROBATCHES and num_chunks in CHUNKS
