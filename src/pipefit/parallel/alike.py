"""Comparison of the batches of different processes: each takes the shapes of what it receives from its own batch.

A message of another size than its buffer would abort the process, or fill the buffer in part. So shapes are compared
before values of a batch are used:

    link of a pipeline               a line about each batch goes ahead of its first activation, and messages of batches
                                     that differ have different tags (`runtime.batch_lines`)
    processes that share a rank      gather a line about each batch before it enters the first layer (`Mesh.check`)
    replicas, which send no data     add a checksum to the losses of their step (`pipeline.losses`)

With the losses all compare some values of the batch, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.errors import DataError
from pipefit.parallel.waiting import collective
from pipefit.stage.record_layout import bytes_of, name_of

LINE = 512  # bytes

_MOST_NAMED = 3
_BITS = 0x3FFF
"""The bits of a checksum that ranks add up: 14, so that sums of squares are exact."""
_SAMPLED = 256
"""Elements of a tensor of a batch that ranks compare: another order or a batch left out changes nearly all of them."""

CURE = (
    "every rank must be given the same batches in full: pipefit itself gives each replica its micro-batches, so use no "
    "DistributedSampler, no drop_last on some ranks only, and no random numbers that depend on the rank"
)


class Shapes(NamedTuple):
    """The shapes of a batch.

    Attributes:
        first: number of its first micro-batch since training began.
        text: types and shapes of its tensors, and its plain values.
        checksum: of the batch and those before it in the same pass.
        values: the same of some values of their tensors; 0: some are on a GPU, which would be waited for.
    """

    first: int
    text: str
    checksum: int
    values: int = 0

    @classmethod
    def of(cls, batch: Any, first: int = 0, before: Shapes | None = None) -> Shapes:
        """The shapes of a batch that comes after another."""
        text = described(batch)
        before = before or NO_BATCH
        checksum = zlib.crc32(text.encode(), before.checksum)
        return cls(first, text, checksum & _BITS, _values(pytree.tree_leaves(batch), before.values))

    @property
    def line(self) -> Tensor:
        """The line that processes compare, (LINE,) bytes: the checksum, and as much of the text as fits."""
        text = f"{self.checksum} {self.text}".encode()
        return torch.frombuffer(bytearray(text.ljust(LINE)[:LINE]), dtype=torch.uint8)


NO_BATCH = Shapes(0, "", 0, 1)


def _values(leaves: Sequence[Any], before: int) -> int:
    """The checksum of some values of a batch and those before it."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if not leaf.is_cpu:
                return 0
            before = sampled_sum(leaf, _SAMPLED, before)
    return before & _BITS


def described(batch: Any) -> str:
    """Types and shapes of the tensors of a batch, and its plain values: "float32[8, 4], int64[8]"."""
    return ", ".join(map(_described_leaf, pytree.tree_leaves(batch)))


def _described_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        if leaf.is_nested:
            raise DataError(
                "a batch has a nested tensor, which can be neither split into micro-batches nor sent: pad it "
                "(torch.nested.to_padded_tensor), and give the model a mask"
            )
        return f"{name_of(leaf.dtype)}{list(leaf.shape)}"
    return repr(leaf)


def content_sum(tensor: Tensor, before: int = 0) -> int:
    """The CRC-32 of the bytes of a tensor, after some others."""
    try:
        content: Any = np.ascontiguousarray(tensor.detach().numpy())
    except (TypeError, RuntimeError):  # of a type that numpy lacks, such as bfloat16, or elsewhere
        content = bytes_of(tensor)
    return zlib.crc32(content, before)


def sampled_sum(tensor: Tensor, most: int, before: int = 0) -> int:
    """The checksum of evenly spread elements of a tensor, about `most` of many, after some others."""
    if tensor.layout != torch.strided:
        return before
    flat = tensor.detach().reshape(-1)
    return content_sum(flat[:: max(1, len(flat) // most)], before)


def differences(found: Mapping[int, Mapping[str, Any]]) -> str:
    """The parts in which ranks differ, with the value of each rank; "": they are alike.

    Args:
        found: the parts of each rank, by name; small values, or the checksums of others.
    """
    lines = []
    for name in dict.fromkeys(name for parts in found.values() for name in parts):
        ranks: dict[str, list[int]] = {}
        for rank, parts in found.items():
            value = parts.get(name)
            words = "none" if value is None else str(value)
            ranks.setdefault(words, []).append(rank)
        if len(ranks) > 1:
            values = [_who_has(own, words) for words, own in ranks.items()]
            lines.append(f"{name}: {', '.join(values)}")
    more = len(lines) - _MOST_NAMED
    if more > 0:
        lines[_MOST_NAMED:] = [f"and {more} more"]
    return "; ".join(lines)


def _who_has(ranks: Sequence[int], value: str) -> str:
    verb = "have"
    if len(ranks) == 1:
        verb = "has"
    return f"{ranks_in_words(ranks)} {verb} {value}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Some ranks in words: "rank 1", "ranks 0, 2 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def check(mine: int, line: Tensor, others: int, other: Tensor) -> None:
    """Compares the lines of two processes.

    Raises:
        DataError: they differ.
    """
    if not torch.equal(line, other):
        (low, one), (high, two) = sorted([(mine, _text(line)), (others, _text(other))])
        if one == two:
            before = " now, and had others before"
        else:
            before = ""
        raise DataError(f"batches of different shapes: rank {low} has {one}, rank {high} has {two}{before}; {CURE}")


def _text(line: Tensor) -> str:
    return bytes(line.tolist()).decode(errors="replace").rstrip().partition(" ")[2]


def compare(shapes: Shapes, group: Any = None) -> None:
    """Compares the batches of all processes of a group (None: of the run).

    Raises:
        DataError: on every one of them with the same message: two differ.
    """
    mine = shapes.line
    lines = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    collective(dist.all_gather, lines, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    for rank, line in zip(ranks, lines, strict=True):
        check(ranks[0], lines[0], rank, line)
