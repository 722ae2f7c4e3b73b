"""One process per rank, over `torch.distributed`: Gloo on CPUs, NCCL on GPUs.

Every send and receive is asynchronous. Shapes are agreed on once: the first activation of each shape on a link is
announced by its contract, from which both ends know what all later ones look like; nothing is negotiated again until
the shapes of the data change (a ragged last batch, another sequence length).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.errors import ModelError
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Kind
from pipefit.runtime.transport import Handle, Message
from pipefit.simulate import FEW_SENDS
from pipefit.stage.payload import Contract

_MAX_LEAVES = 64


class DistributedTransport:
    """This rank's messages and reductions.

    Sends are kept, with their tensors, until the receiver must have them: its answer has arrived, or more than a few
    later messages to it are under way; under a schedule whose receivers are busy with other stages meanwhile
    (breadth-first), as many more as that takes. The verifier has proven that no order of waiting on sends can block a
    program.

    Args:
        rank: its number.
        num_stages: of the model.
        device: where it computes.
        link_groups: whether each direction of a link gets a process group of its own; on a GPU it does anyway.

    Attributes:
        bytes_sent: of all activations and gradients so far.
        max_open_sends: messages of one kind to a rank that may be under way before the oldest is waited for.
    """

    def __init__(self, rank: int, num_stages: int, device: torch.device, link_groups: bool = False) -> None:
        self.rank = rank
        self._has_link_groups = link_groups or device.type == "cuda"
        self.device = device
        self.bytes_sent = 0
        self.max_open_sends = FEW_SENDS
        self._stages = num_stages
        self._world: dist.ProcessGroup = dist.group.WORLD
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._made: dict[tuple[int, object], Contract] = {}
        self._announced: dict[tuple[int, int, object], Contract] = {}
        self._told: set[tuple[int, int, object]] = set()
        # Announced in this pass, and no answer to such a message has come yet.
        self._unproven: set[tuple[int, int, object]] = set()
        self._signatures: Sequence[object] = ()
        self._open: dict[tuple[int, str], deque[_Sent]] = {}
        self._deferred: dict[int, deque[_Receive]] = {}
        # Every link of the programs so far, and how this rank reaches the other end of its own.
        self._known_links: set[tuple[int, int]] = set()
        self._links: dict[tuple[int, int], tuple[dist.ProcessGroup, int]] = {}
        self._parity = 0

    def allow_sends(self, unposted: int) -> None:
        """A program leaves so many messages under way before their receives are posted."""
        self.max_open_sends = max(self.max_open_sends, FEW_SENDS + unposted)

    def prepare(self, member_sets: Sequence[tuple[int, ...]], links: Sequence[tuple[int, int]]) -> None:
        """Makes the process groups of a program's reductions and links; every rank must call it with the same ones.

        With NCCL each direction of a pair has a group of its own: NCCL runs what two ranks exchange in one stream, in
        order, where a send waits for its receive, so the directions would block each other. With Gloo they may share
        one, but then share a connection and its lock, for which a rank that sends and the thread that receives turn.

        Torch names a group by how many the process has made, members or not: a rank that makes one more or less than
        another meets nobody under the names of all later ones, and waits. So what exists is remembered for all ranks.
        """
        for link in sorted(set(links) - self._known_links) if self._has_link_groups else ():
            self._known_links.add(link)
            group = dist.new_group(sorted(link))
            if self.rank in link:
                peer = link[0] if link[1] == self.rank else link[1]
                self._links[link] = group, dist.get_group_rank(group, peer)
        for members in sorted(set(member_sets)):
            if members not in self._groups:
                whole = len(members) == dist.get_world_size()
                self._groups[members] = self._world if whole else dist.new_group(list(members))

    def let_work_finish(self) -> None:
        """Gloo's threads take a core when it is free or offered, and not from a rank that computes (Linux).

        One that takes it while the rank holds the lock of their connection turns in `epoll_wait` for that lock until
        the scheduler ends its turn, some milliseconds later: 2 to 16 % of the steps of a small convolutional network.
        """
        tasks = Path("/proc/self/task")
        for thread in tasks.iterdir() if tasks.is_dir() and self.device.type == "cpu" else ():
            # It may have ended, or a sandbox may forbid it.
            with contextlib.suppress(OSError):
                if "gloo" in (thread / "comm").read_text():
                    os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))

    def begin(self, signatures: Sequence[object]) -> None:
        """A pass begins."""
        self._signatures = signatures
        self._parity ^= 1
        self._unproven.clear()

    def send(self, instruction: Instruction, message: Message) -> None:
        """Starts to send the leaves of a message."""
        i = instruction
        leaves = [leaf.contiguous() for leaf in message.leaves]
        sent = _Sent(i.stage, i.mb, [], [leaves])
        if i.kind == Kind.ACT:
            self._agree(i, message, sent)
        first = self._tag(i)
        group, peer = self._links.get((self.rank, i.peer), (self._world, i.peer))
        for offset, leaf in enumerate(leaves):
            sent.works.append(group.send([leaf], peer, first + offset))
            self.bytes_sent += leaf.nbytes
        queue = self._open.setdefault((i.peer, i.kind), deque())
        queue.append(sent)
        # A receiver that has not learnt a contract yet posts later than its program says: until an answer shows that it
        # has, waiting here could mean that both ends wait for each other.
        while len(queue) > self.max_open_sends and not any(peer == i.peer for peer, _, _ in self._unproven):
            queue.popleft().finish()

    def _agree(self, i: Instruction, message: Message, sent: _Sent) -> None:
        """Holds an activation to its contract, and announces the contract to a receiver that has not seen it."""
        signature = self._signatures[i.mb]
        contract = Contract.of(message.leaves, message.flags, message.structure)
        known = self._made.setdefault((i.stage, signature), contract)
        if known != contract:
            raise ModelError(
                f"stage {i.stage} gave {contract} for micro-batch {i.mb}, but {known} for an earlier input of the same "
                "shape; a stage's output may depend only on the shape of the model's input"
            )
        if len(contract.leaves) > _MAX_LEAVES:
            raise ModelError(
                f"the output of stage {i.stage} has {len(contract.leaves)} tensors, at most {_MAX_LEAVES} can be sent; "
                "stack some of them"
            )
        if (i.peer, i.stage, signature) not in self._told:
            self._told.add((i.peer, i.stage, signature))
            self._unproven.add((i.peer, i.stage, signature))
            self._post_what_can_be()
            text = torch.frombuffer(bytearray(contract.to_bytes()), dtype=torch.uint8)
            head = torch.tensor([text.numel(), i.mb])
            sent.held.extend((text, head))
            tag = self._announcement_tag(i.stage)
            sent.works.extend((self._world.send([head], i.peer, tag), self._world.send([text], i.peer, tag + 1)))

    def receive(self, instruction: Instruction) -> _Receive:
        """Posts a receive.

        One whose shapes are not known yet is posted when it is waited for, and so are those behind it on the same link:
        without tags, receives must be posted in the sender's order.
        """
        receive = _Receive(self, instruction)
        waiting = self._deferred.setdefault(instruction.peer, deque())
        if waiting or not receive.try_to_post():
            waiting.append(receive)
        return receive

    def post_deferred(self, receive: _Receive) -> None:
        """Posts the deferred receives of a link up to this one, learning their shapes on the way."""
        waiting = self._deferred[receive.instruction.peer]
        while not receive.is_posted:
            if waiting[0].try_to_post():
                waiting.popleft()
            else:
                self.learn(waiting[0].instruction)
                self._post_what_can_be()

    def _post_what_can_be(self) -> None:
        """Shapes have become known: posts the deferred receives of every link, in order, as far as that goes."""
        for waiting in self._deferred.values():
            while waiting and waiting[0].try_to_post():
                waiting.popleft()

    def contract_of(self, i: Instruction) -> Contract | None:
        """The contract of a value that will arrive, if it is known already."""
        signature = self._signatures[i.mb]
        if i.kind == Kind.ACT:
            return self._announced.get((i.peer, i.stage, signature))
        return self._made.get((i.stage, signature))

    def learn(self, i: Instruction) -> None:
        """Receives the next announcement of a stage's activations."""
        tag = self._announcement_tag(i.stage)
        head = torch.zeros(2, dtype=torch.int64)
        self._world.recv([head], i.peer, tag).wait()
        text = torch.empty(int(head[0]), dtype=torch.uint8)
        self._world.recv([text], i.peer, tag + 1).wait()
        signature = self._signatures[int(head[1])]
        self._announced[i.peer, i.stage, signature] = Contract.from_bytes(text.numpy().tobytes())

    def post(self, i: Instruction, contract: Contract) -> tuple[list[Tensor], list[Any]]:
        """Buffers for the leaves of a message, and their receives under way."""
        wanted = contract.leaves if i.kind == Kind.ACT else [leaf for leaf in contract.leaves if leaf[2]]
        buffers = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype, _ in wanted]
        first = self._tag(i)
        group, peer = self._links.get((i.peer, self.rank), (self._world, i.peer))
        return buffers, [group.recv([buffer], peer, first + k) for k, buffer in enumerate(buffers)]

    def delivered(self, kind: str, stage: int, mb: int) -> None:
        """Lets go of a send whose receiver has answered, and of all before it on the same link."""
        if self._unproven and kind == Kind.ACT:
            known = (stage, self._signatures[mb])
            self._unproven = {key for key in self._unproven if key[1:] != known}
        for (_, sent_kind), queue in self._open.items():
            if sent_kind == kind and any((sent.stage, sent.mb) == (stage, mb) for sent in queue):
                while (sent := queue.popleft()) and (sent.stage, sent.mb) != (stage, mb):
                    sent.finish()
                sent.finish()

    def all_reduce(self, members: tuple[int, ...], key: tuple[object, ...], tensors: list[Tensor]) -> Handle:
        """Starts to sum tensors over some ranks: a single one where it is, several of one type in one message."""
        group = self._groups[members]
        if len(tensors) == 1 and tensors[0].is_contiguous():
            return InPlace(dist.all_reduce(tensors[0], group=group, async_op=True))
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        flats = [torch.cat([tensor.reshape(-1) for tensor in own]) for own in by_type.values()]
        works = [dist.all_reduce(flat, group=group, async_op=True) for flat in flats]
        return _Flattened(list(by_type.values()), flats, works)

    def reduce_scatter(
        self, members: tuple[int, ...], key: tuple[object, ...], whole: Tensor, part: Tensor
    ) -> InPlace | _Scattered:
        """Starts to sum a flat tensor over some ranks, each of which gets its part where it lies in the whole.

        Gloo would sum all of a copy on every rank, so there parts are exchanged and each rank adds up its own.
        """
        group = self._groups[members]
        if whole.device.type == "cuda":
            return InPlace(dist.reduce_scatter_single(part, whole, group=group, async_op=True))
        given = torch.empty_like(whole)
        return _Scattered(dist.all_to_all_single(given, whole, group=group, async_op=True), given, part)

    def all_gather(self, members: tuple[int, ...], key: tuple[object, ...], part: Tensor, whole: Tensor) -> InPlace:
        """Starts to join the parts of some ranks."""
        return InPlace(dist.all_gather_single(whole, part, group=self._groups[members], async_op=True))

    def finish(self) -> None:
        """Waits for every send under way."""
        for queue in self._open.values():
            while queue:
                queue.popleft().finish()

    def _tag(self, i: Instruction) -> int:
        message = ((i.mb % 4096) * self._stages + i.stage) * 2 + self._parity
        return (message * 2 + (i.kind == Kind.GRAD)) * _MAX_LEAVES

    def _announcement_tag(self, stage: int) -> int:
        return 4096 * self._stages * 4 * _MAX_LEAVES + 2 * stage


class _Sent(NamedTuple):
    """A message under way, with everything that must stay alive until it is done."""

    stage: int
    mb: int
    works: list[Any]
    held: list[object]

    def finish(self) -> None:
        for work in self.works:
            work.wait()


class _Receive:
    """A receive under way, or one that still waits for its contract."""

    def __init__(self, transport: DistributedTransport, instruction: Instruction) -> None:
        self.instruction = instruction
        self._transport = transport
        self._posted: tuple[Contract, list[Tensor], list[Any]] | None = None

    @property
    def is_posted(self) -> bool:
        """Whether its buffers are open."""
        return self._posted is not None

    def try_to_post(self) -> bool:
        """Posts the buffers if their shapes are known."""
        contract = self._transport.contract_of(self.instruction)
        if contract is not None:
            self._posted = (contract, *self._transport.post(self.instruction, contract))
        return self.is_posted

    def ready(self) -> bool:
        """`wait` may block: the process has nothing else to run."""
        return True

    def wait(self) -> Message:
        """The message."""
        i = self.instruction
        if self._posted is None:
            self._transport.post_deferred(self)
        assert self._posted is not None
        contract, buffers, works = self._posted
        for work in works:
            work.wait()
        # What this answers has arrived, if it was sent from here.
        if i.kind != Kind.ACT:
            self._transport.delivered(Kind.ACT.value, i.stage, i.mb)
            self._transport.delivered(Kind.GRAD.value, i.stage + 1, i.mb)
            return Message(buffers, [], None)
        self._transport.delivered(Kind.ACT.value, i.stage - 1, i.mb)
        return Message(buffers, [flag for _, _, flag in contract.leaves], contract.structure)


class InPlace(NamedTuple):
    """A collective under way that leaves its result where it belongs."""

    work: Any

    def ready(self) -> bool:
        """`wait` may block."""
        return True

    def wait(self) -> None:
        """Blocks until the result is there."""
        self.work.wait()


class _Scattered(NamedTuple):
    """Parts under way to those who add them up."""

    work: Any
    given: Tensor
    part: Tensor

    def ready(self) -> bool:
        """`wait` may block."""
        return True

    def wait(self) -> None:
        """Adds up this rank's part."""
        self.work.wait()
        first, *others = self.given.view(-1, len(self.part))
        self.part.copy_(first)
        for other in others:
            self.part.add_(other)


class _Flattened(NamedTuple):
    """Sums under way, of tensors that share flat buffers."""

    tensors: list[list[Tensor]]
    flats: list[Tensor]
    works: list[Any]

    def ready(self) -> bool:
        """`wait` may block."""
        return True

    def wait(self) -> None:
        """Copies the sums from the flat buffers to the tensors."""
        for own, flat, work in zip(self.tensors, self.flats, self.works, strict=True):
            work.wait()
            parts = flat.split([tensor.numel() for tensor in own])
            torch._foreach_copy_(own, [part.view_as(tensor) for part, tensor in zip(parts, own, strict=True)])
