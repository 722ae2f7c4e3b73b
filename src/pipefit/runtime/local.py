"""All ranks in one process, stepped round-robin: for notebooks, debuggers, tests, and many stages on one GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipefit.ir.instruction import Instruction
from pipefit.runtime.transport import Message

Key = tuple[Any, ...]


@dataclass
class Mailbox:
    """The shared state of the ranks: messages by (receiver, kind, stage, micro-batch), and open reductions."""

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
class _Collective:
    """The tensors that the members of a collective have given; `finish` takes the results from it once all have."""

    mailbox: Mailbox
    key: Key
    members: tuple[int, ...]
    finish: Callable[[_Collective], object]

    def ready(self) -> bool:
        return len(self.mailbox.reductions[self.key]) == len(self.members)

    def wait(self) -> None:
        self.finish(self)

    @property
    def given(self) -> list[list[Tensor]]:
        """The tensors of each member."""
        of_rank = self.mailbox.reductions[self.key]
        return [of_rank[rank] for rank in self.members]

    @property
    def sums(self) -> list[Tensor]:
        """The sums, made by the first member that finishes: members then overwrite what they gave."""
        if self.key not in self.mailbox.sums:
            columns = zip(*self.given, strict=True)
            self.mailbox.sums[self.key] = [functools.reduce(torch.add, column) for column in columns]
        return self.mailbox.sums[self.key]


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

    def all_reduce(self, members: tuple[int, ...], key: Key, tensors: list[Tensor]) -> _Collective:
        """The sums replace the tensors."""
        return self._join(members, key, tensors, lambda found: torch._foreach_copy_(tensors, found.sums))

    def reduce_scatter(self, members: tuple[int, ...], key: Key, whole: Tensor, part: Tensor) -> _Collective:
        """This member's part of the sum."""
        index = members.index(self.rank)
        return self._join(members, key, [whole], lambda found: part.copy_(found.sums[0].view(-1, len(part))[index]))

    def all_gather(self, members: tuple[int, ...], key: Key, part: Tensor, whole: Tensor) -> _Collective:
        """The parts of all; a copy of this one, for it may be stepped again before the last member looks."""
        return self._join(
            members, key, [part.clone()], lambda found: torch.cat([one for (one,) in found.given], out=whole)
        )

    def _join(
        self, members: tuple[int, ...], key: Key, tensors: list[Tensor], finish: Callable[[_Collective], object]
    ) -> _Collective:
        full = (self._pass, members, *key)
        self.mailbox.reductions.setdefault(full, {})[self.rank] = tensors
        return _Collective(self.mailbox, full, members, finish)
