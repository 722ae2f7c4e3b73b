"""All ranks in one process, stepped in turn: for notebooks, debuggers, tests, and many stages on one GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipefit.ir.instruction import Instruction
from pipefit.runtime.transport import Message

__all__ = ["LocalTransport", "Mailbox"]

Key = tuple[Any, ...]


@dataclass
class Mailbox:
    """What the ranks of one process share: messages by (receiver, kind, stage, micro-batch), and open reductions."""

    messages: dict[Key, Message] = field(default_factory=dict)
    reductions: dict[Key, dict[int, list[Tensor]]] = field(default_factory=dict)
    sums: dict[Key, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Receive:
    mailbox: Mailbox
    key: Key

    def ready(self) -> bool:
        return self.key in self.mailbox.messages

    def wait(self) -> Message:
        return self.mailbox.messages.pop(self.key)


@dataclass(frozen=True)
class _Reduction:
    mailbox: Mailbox
    key: Key
    members: tuple[int, ...]

    def ready(self) -> bool:
        return len(self.mailbox.reductions[self.key]) == len(self.members)

    def wait(self) -> list[Tensor]:
        """The sums, made by the first who asks: members then overwrite what they gave."""
        given = self.mailbox.reductions[self.key]
        sums = self.mailbox.sums.get(self.key)
        if sums is None:
            columns = zip(*(given[rank] for rank in self.members), strict=True)
            sums = self.mailbox.sums[self.key] = [functools.reduce(torch.add, column) for column in columns]
        return sums


@dataclass(frozen=True)
class _Placed:
    """A sum that goes where it belongs, or a part of it."""

    reduction: _Reduction
    target: Tensor
    part: int = -1

    def ready(self) -> bool:
        return self.reduction.ready()

    def wait(self) -> None:
        (total,) = self.reduction.wait()
        if self.part >= 0:
            total = total[self.part * len(self.target) : (self.part + 1) * len(self.target)]
        self.target.copy_(total)


@dataclass(frozen=True)
class _Joined:
    """Parts that are put side by side."""

    reduction: _Reduction
    target: Tensor

    def ready(self) -> bool:
        return self.reduction.ready()

    def wait(self) -> None:
        given = self.reduction.mailbox.reductions[self.reduction.key]
        torch.cat([given[rank][0] for rank in self.reduction.members], out=self.target)


class LocalTransport:
    """One rank's access to the mailbox."""

    def __init__(self, rank: int, mailbox: Mailbox) -> None:
        self.rank = rank
        self.mailbox = mailbox
        self.bytes_sent = 0
        self._pass = 0

    def begin(self, signatures: Sequence[object]) -> None:
        """Reductions of one pass must not meet those of the next."""
        self._pass += 1
        for book in (self.mailbox.reductions, self.mailbox.sums):
            for key in [key for key in book if key[0] < self._pass - 1]:
                del book[key]

    def send(self, instruction: Instruction, message: Message) -> None:
        """Copies, as a real link would: neither side can then change what the other holds."""
        i = instruction
        leaves = [leaf.clone(memory_format=torch.contiguous_format) for leaf in message.leaves]
        self.bytes_sent += sum(leaf.nbytes for leaf in leaves)
        self.mailbox.messages[i.peer, self.rank, i.kind, i.stage, i.mb] = message._replace(leaves=leaves)

    def receive(self, instruction: Instruction) -> _Receive:
        """Nothing to post: the mailbox has room."""
        i = instruction
        return _Receive(self.mailbox, (self.rank, i.peer, i.kind, i.stage, i.mb))

    def delivered(self, kind: str, stage: int, mb: int) -> None:
        """Nothing is held after a send."""

    def all_reduce(self, members: tuple[int, ...], key: tuple[object, ...], tensors: list[Tensor]) -> _Reduction:
        """Waits, without blocking, until every member has given its tensors."""
        full = (self._pass, members, *key)
        self.mailbox.reductions.setdefault(full, {})[self.rank] = tensors
        return _Reduction(self.mailbox, full, members)

    def all_reduce_in_place(self, members: tuple[int, ...], key: tuple[object, ...], tensor: Tensor) -> _Placed:
        """The sum, where the tensor was."""
        return _Placed(self.all_reduce(members, key, [tensor]), tensor)

    def reduce_scatter(self, members: tuple[int, ...], key: tuple[object, ...], whole: Tensor, part: Tensor) -> _Placed:
        """This member's part of the sum."""
        return _Placed(self.all_reduce(members, key, [whole]), part, members.index(self.rank))

    def all_gather(self, members: tuple[int, ...], key: tuple[object, ...], part: Tensor, whole: Tensor) -> _Joined:
        """The parts of all; a copy of this one, for it may be stepped again before the last member looks."""
        return _Joined(self.all_reduce(members, key, [part.clone()]), whole)
