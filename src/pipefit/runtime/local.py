"""All ranks in one process, stepped round-robin: for notebooks, debuggers, tests, and many stages on one GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pipefit.ir.instruction import Indices, Instruction
from pipefit.runtime.microbatches import Feed
from pipefit.runtime.transport import Ending, Message

Key = tuple[Any, ...]


@dataclass
class _Collective:
    """The tensors that the members of a collective have given so far, by rank."""

    members: Indices
    of_rank: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def given(self) -> list[list[Tensor]]:
        """The tensors of each member."""
        return [self.of_rank[rank] for rank in self.members]

    @functools.cached_property
    def sums(self) -> list[Tensor]:
        """The sums, made by the first member that ends, because members then overwrite their tensors."""
        return [functools.reduce(torch.add, column) for column in zip(*self.given, strict=True)]


@dataclass
class Mailbox:
    """The shared state of the ranks: messages by (receiver, sender, kind, stage, micro-batch), and open collectives."""

    messages: dict[Key, Message] = field(default_factory=dict)
    posted: set[Key] = field(default_factory=set)
    collectives: WeakValueDictionary[Key, _Collective] = field(default_factory=WeakValueDictionary)


class LocalTransport:
    """One rank's access to the mailbox; the members of a collective call it with the same key."""

    def __init__(self, rank: int, mailbox: Mailbox) -> None:
        self.rank = rank
        self.mailbox = mailbox
        self.bytes_sent = 0
        self._pass = 0

    def begin(self, feed: Feed) -> None:
        """Begins a pass: its collectives are separate from those of the next."""
        self._pass += 1
        self.bytes_sent = 0

    def forget_pass(self) -> None:
        """Forgets the messages of a pass that failed, before the next one takes them for its own."""
        self.mailbox.messages.clear()
        self.mailbox.posted.clear()

    def send(self, instruction: Instruction, message: Message) -> Ending:
        """Copies, as a real link would, so that neither side can change the other's tensors; ends when it is posted."""
        i = instruction
        leaves = [leaf.clone(memory_format=torch.contiguous_format) for leaf in message.leaves]
        self.bytes_sent += sum(leaf.nbytes for leaf in leaves)
        key = (i.peer, self.rank, i.kind, i.stage, i.mb)
        self.mailbox.messages[key] = message._replace(leaves=leaves)
        return lambda: key in self.mailbox.posted or key not in self.mailbox.messages

    def receive(self, instruction: Instruction, deliver: Callable[[Message], None]) -> Ending:
        """Posts the receive; delivers the message once it is in the mailbox."""
        i = instruction
        key = (self.rank, i.peer, i.kind, i.stage, i.mb)
        self.mailbox.posted.add(key)

        def end() -> bool:
            if key not in self.mailbox.messages:
                return False
            self.mailbox.posted.remove(key)
            deliver(self.mailbox.messages.pop(key))
            return True

        return end

    def all_reduce(self, members: Indices, key: Key, tensors: list[Tensor]) -> Ending:
        """Replaces the members' tensors by their sums."""
        return self._join(members, key, tensors, lambda all_: torch._foreach_copy_(tensors, all_.sums))

    def reduce_scatter(self, members: Indices, key: Key, whole: Tensor, part: Tensor) -> Ending:
        """This member's part of the sum."""
        index = members.index(self.rank)
        parts = slice(index * len(part), (index + 1) * len(part))
        return self._join(members, key, [whole], lambda all_: part.copy_(all_.sums[0][parts]))

    def all_gather(self, members: Indices, key: Key, part: Tensor, whole: Tensor) -> Ending:
        """Gathers the parts of all; this one is copied, since it may be stepped before the last member reads it."""
        given = [part.clone()]
        return self._join(members, key, given, lambda all_: torch.cat([one for (one,) in all_.given], out=whole))

    def _join(
        self, members: Indices, key: Key, tensors: list[Tensor], finish: Callable[[_Collective], object]
    ) -> Ending:
        joined = self.mailbox.collectives.setdefault((self._pass, members, *key), _Collective(members))
        joined.of_rank[self.rank] = tensors

        def end() -> bool:
            if len(joined.of_rank) < len(members):
                return False
            finish(joined)
            return True

        return end
