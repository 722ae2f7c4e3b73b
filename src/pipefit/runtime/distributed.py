"""One process per rank, over `torch.distributed`: Gloo on CPUs, NCCL on GPUs.

Every send and receive is asynchronous. Shapes are agreed on once: the first activation of each shape on a link is
announced by its contract, from which both ends know the shapes of all later ones. Nothing is negotiated again until the
shapes of the data change (a smaller last batch, another sequence length). A line about each batch goes ahead of its
first activation on a link, so that ranks with different batches find out (`pipefit.runtime.batch_lines`).

With tensor parallelism a rank is several processes:

    rank a = processes (a, 0) (a, 1)        a message from a to b goes from (a, j) to (b, j)
                 │      │                   a piece of a value is the j-th of its t equal parts, flattened
    rank b = processes (b, 0) (b, 1)        the t processes of b gather the whole from each other
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.errors import ModelError
from pipefit.ir.graph import FEW_SENDS
from pipefit.ir.instruction import Indices, Instruction
from pipefit.ir.op import WHOLE_OF, Kind, Op, Reduction
from pipefit.parallel.buckets import resize
from pipefit.parallel.mesh import Mesh
from pipefit.parallel.torch_names import all_gather_single, reduce_scatter_single
from pipefit.parallel.waiting import finish, finish_collectives
from pipefit.runtime.batch_lines import BatchLines
from pipefit.runtime.microbatches import Feed
from pipefit.runtime.tags import Tags
from pipefit.runtime.transport import Ending, Message
from pipefit.stage.accelerator import settle
from pipefit.stage.payload import ONLY_SHAPES, Contract, Structure

_OVER_ALL = (Reduction.NORM, Op.BARRIER.value)
"""Collectives of every process of the run; others are among the processes of equal j of some ranks."""


class DistributedTransport:
    """This process's messages and reductions.

    Sends are kept, with their tensors, until the receiver must have them: its answer has arrived, more than a few later
    messages to it have been sent, or the pass ends. A schedule whose receivers are busy with other stages meanwhile
    (breadth-first) may have more of them. The verifier has proved that no order of waiting on sends can block a
    program.

    Args:
        rank: its number.
        num_stages: of the model.
        device: of the rank.
        mesh: the processes that share the rank.
        link_groups: whether each direction of a link gets its own process group; on a GPU it always does.

    Attributes:
        bytes_sent: of all activations and gradients of the pass.
        max_open_sends: messages of one kind to a rank that may be open before the oldest is waited for.
    """

    def __init__(self, rank: int, num_stages: int, device: torch.device, mesh: Mesh, link_groups: bool = False) -> None:
        self.device = device
        self.bytes_sent = 0
        self.max_open_sends = FEW_SENDS
        self._mesh = mesh
        self._process = rank * mesh.tensor + mesh.index
        self._has_link_groups = link_groups or device.type != "cpu"
        world: Any = dist.group.WORLD
        self._world: dist.ProcessGroup = world
        self._groups: dict[Indices, dist.ProcessGroup] = {}
        # The peers that have received an announcement in this pass.
        self._learning: set[int] = set()
        self._lines = BatchLines(self._process, self._world, Tags.LINES)
        self._feed: Feed = []
        self._open: dict[tuple[int, str], deque[_Sent]] = {}
        self._deferred: dict[int, deque[_Receive]] = {}
        # Every link of the programs so far, and the process groups of this process's own links.
        self._known_links: set[tuple[int, int]] = set()
        self._links: dict[tuple[int, int], tuple[dist.ProcessGroup, int]] = {}
        self._warm: set[tuple[int, int]] = set()
        # Groups that others have made, which have not been used yet.
        self._cold: list[dist.ProcessGroup] = []
        if mesh.region is not None:
            self._cold = [mesh.region.group, self._world]
        self.number_stages(num_stages)

    def number_stages(self, num_stages: int) -> None:
        """Begins with the stages of a plan: contracts about those of another plan, of other layers, are forgotten."""
        self.finish()
        self._tags = Tags(num_stages)
        self._made: dict[tuple[int, str], Contract] = {}
        self._announced: dict[tuple[int, int, str], Contract] = {}
        self._predicted: dict[tuple[int, str], Contract] = {}
        self._told: set[tuple[int, int, str]] = set()

    def prepare(self, member_sets: Sequence[Indices], links: Sequence[tuple[int, int]], unposted: int) -> None:
        """Makes the process groups of a program's reductions and links; every process must call it with the same ones.

        With NCCL each direction of a pair has its own group: NCCL runs the messages of two ranks in one stream, in
        order, where a send waits for its receive, so the directions would block each other. With Gloo they may share
        one, but then they share a connection and its lock, for which the sending rank and the receiving thread compete.

        Torch names a group by the number of groups that the process has made, as a member or not. If one rank made more
        groups than another, the names of all later ones would differ, and the ranks would hang. So every rank records
        the groups of all ranks.

        Args:
            member_sets: the ranks of each reduction.
            links: (sender, receiver).
            unposted: number of messages that the program sends before their receives are posted.
        """
        self.max_open_sends = max(self.max_open_sends, FEW_SENDS + unposted)
        t = self._mesh.tensor
        if self._has_link_groups:
            pairs = {(a * t + j, b * t + j) for a, b in links for j in range(t)}
        else:
            pairs = set()
        for link in sorted(pairs - self._known_links):
            self._known_links.add(link)
            group = dist.new_group(sorted(link))
            if self._process in link:
                if link[1] == self._process:
                    peer = link[0]
                else:
                    peer = link[1]
                self._links[link] = group, dist.get_group_rank(group, peer)
        made = self._cold
        self._cold = []
        for members in sorted(set(member_sets) - self._groups.keys()):
            for j in range(t) if len(members) > 1 else ():
                processes = [rank * t + j for rank in members]
                group = self._world if len(processes) == dist.get_world_size() else dist.new_group(processes)
                if j == self._mesh.index:
                    self._groups[members] = group
                if self._process in processes:
                    made.append(group)
        self._warm_up(made)

    def _warm_up(self, made: Sequence[dist.ProcessGroup]) -> None:
        """Uses new groups once, all ranks in one order: NCCL connects processes at first use, and blocks both.

        So no message or reduction of a program is the first one of its group, and the verifier need not assume that
        the first one blocks its sender.

        Args:
            made: of this process's reductions, and inside its rank.
        """
        if self.device.type == "cpu":
            return
        token = torch.zeros(1, device=self.device)
        for link in sorted(self._links.keys() - self._warm):
            self._warm.add(link)
            group, peer = self._links[link]
            if link[0] == self._process:
                group.send([token], peer, 0).wait()
            else:
                group.recv([token], peer, 0).wait()
        for group in made:
            dist.all_reduce(token, group=group)
        settle(self.device)

    def begin(self, feed: Feed) -> None:
        """Begins a pass."""
        self._feed = feed
        self._tags.parity ^= 1
        self.bytes_sent = 0
        self._learning.clear()
        self._lines.begin(feed)

    # ---- messages --------------------------------------------------------------------------------------------------

    def send(self, instruction: Instruction, message: Message) -> None:
        """Starts to send the leaves of a message, or this process's pieces of them."""
        i = instruction
        kind, to = WHOLE_OF.get(i.kind, i.kind), self._peer(i)
        sent = _Sent((i.stage, i.mb), [], [])
        if kind == Kind.ACT:
            if (line := self._lines.send(i.mb, to)) is not None:
                sent.held.append(line[0])
                sent.works.append(line[1])
            self._agree(i, to, message, sent)
        if kind == i.kind:
            leaves = message.leaves
        else:
            leaves = [self._piece(leaf) for leaf in message.leaves]
        first = self._tag(i, kind)
        group, peer = self._links.get((self._process, to), (self._world, to))
        for offset, leaf in enumerate(leaves):
            leaf = leaf.contiguous()
            sent.held.append(leaf)
            sent.works.append(group.send([leaf], peer, first + offset))
            self.bytes_sent += leaf.nbytes
        queue = self._open.setdefault((to, kind), deque())
        queue.append(sent)
        # A receiver that does not know a contract yet posts later than its program specifies: a wait here could make
        # both ends wait for each other.
        while len(queue) > self.max_open_sends and to not in self._learning:
            queue.popleft().finish()

    def _agree(self, i: Instruction, to: int, message: Message, sent: _Sent) -> None:
        """Checks an activation by its contract, and announces the contract to a receiver that has not seen it."""
        signature = self._feed[i.mb].signature
        assert isinstance(message.structure, Structure)
        contract = Contract.of(message.leaves, message.flags, message.structure)
        known = self._made.setdefault((i.stage, signature), contract)
        if known != contract:
            raise ModelError(
                f"stage {i.stage} gave {contract} for micro-batch {i.mb}, but {known} for an earlier input of the same "
                f"shape; {ONLY_SHAPES}"
            )
        _check_can_be_sent(i.stage, contract)
        if (i.stage, signature) not in self._predicted and (to, i.stage, signature) not in self._told:
            self._told.add((to, i.stage, signature))
            self._learning.add(to)
            self._post_known()
            text = torch.frombuffer(bytearray(contract.to_bytes()), dtype=torch.uint8)
            head = torch.tensor([text.numel(), i.mb])
            sent.held.extend((text, head))
            tag = self._tags.contract(i.stage)
            sent.works.extend((self._world.send([head], to, tag), self._world.send([text], to, tag + 1)))

    def receive(self, instruction: Instruction, deliver: Callable[[Message], None]) -> Ending:
        """Posts a receive; the wait for it delivers the message.

        A receive with unknown shapes is posted when it is waited for, and so are those behind it on the same link:
        without tags, receives must be posted in the sender's order.
        """
        i = instruction
        receive = _Receive(i, WHOLE_OF.get(i.kind, i.kind), self._peer(i), deliver)
        if receive.kind == Kind.ACT:
            self._lines.expect(i.mb, receive.peer)
        self._deferred.setdefault(receive.peer, deque()).append(receive)
        self._post_known()
        return partial(self._arrive, receive)

    def _post_known(self) -> None:
        """Posts the receives of every link in order, up to the first one with unknown shapes."""
        for waiting in self._deferred.values():
            while waiting and (contract := self._contract_of(waiting[0])) is not None:
                self._post(waiting.popleft(), contract)

    def _contract_of(self, receive: _Receive) -> Contract | None:
        """The contract of a value that will arrive; None: not known yet."""
        i = receive.instruction
        signature = self._feed[i.mb].signature
        if receive.kind == Kind.ACT:
            if (i.stage, signature) in self._predicted:
                return self._predicted[i.stage, signature]
            return self._announced.get((receive.peer, i.stage, signature))
        return self._made.get((i.stage, signature))

    def predict(self, contracts: Mapping[tuple[int, str], Contract]) -> None:
        """Takes contracts in advance, of stages by the signatures of micro-batches: a rehearsal hears no announcement.

        Raises:
            ModelError: an output has too many tensors.
        """
        for (stage, _), contract in contracts.items():
            _check_can_be_sent(stage, contract)
        self._predicted.update(contracts)

    def _post(self, receive: _Receive, contract: Contract) -> None:
        """Opens buffers for the leaves of a message, or for pieces of them."""
        i, is_act = receive.instruction, receive.kind == Kind.ACT
        wanted = contract.leaves if is_act else [leaf for leaf in contract.leaves if leaf[2]]
        shapes = [shape for shape, _, _ in wanted]
        if receive.kind == i.kind:
            taken = shapes
        else:
            taken = [self._piece_shape(shape) for shape in shapes]
        types = (dtype for _, dtype, _ in wanted)
        buffers = [torch.empty(s, dtype=d, device=self.device) for s, d in zip(taken, types, strict=True)]
        flags = [flag for _, _, flag in wanted] if is_act else ()
        receive.message = Message(buffers, flags, contract.structure if is_act else None, shapes)
        first = self._tag(i, receive.kind)
        group, peer = self._links.get((receive.peer, self._process), (self._world, receive.peer))
        receive.works = [group.recv([buffer], peer, first + k) for k, buffer in enumerate(buffers)]

    def _arrive(self, receive: _Receive) -> bool:
        """Waits for a message; receives the shapes of those before it on its link, where they are not known."""
        if receive.kind == Kind.ACT:
            self._lines.compare(receive.instruction.mb, receive.peer)
        while receive.message is None:
            self._learn(self._deferred[receive.peer][0])
            self._post_known()
        finish(*receive.works)
        # What this answers has arrived, if it was sent from here.
        i = receive.instruction
        if receive.kind == Kind.ACT:
            self._release(Kind.ACT, i.stage - 1, i.mb)
        else:
            self._release(Kind.ACT, i.stage, i.mb)
            self._release(Kind.GRAD, i.stage + 1, i.mb)
        receive.deliver(receive.message)
        return True

    def _learn(self, receive: _Receive) -> None:
        """Receives the next announcement of a stage's activations."""
        stage, peer = receive.instruction.stage, receive.peer
        tag = self._tags.contract(stage)
        head = torch.zeros(2, dtype=torch.int64)
        finish(self._world.recv([head], peer, tag))
        text = torch.empty(int(head[0]), dtype=torch.uint8)
        finish(self._world.recv([text], peer, tag + 1))
        signature = self._feed[int(head[1])].signature
        self._announced[peer, stage, signature] = Contract.from_bytes(text.numpy().tobytes())

    def _release(self, kind: str, *place: int) -> None:
        """Frees a send whose receiver has answered, and all before it on the same link."""
        for (_, sent_kind), queue in self._open.items():
            if sent_kind == kind and any(sent.place == place for sent in queue):
                while (sent := queue.popleft()).place != place:
                    sent.finish()
                for work in sent.works:
                    # It has ended: the answer is made from all that was sent.
                    work.wait()

    def finish(self) -> None:
        """Waits for every open send."""
        self.end_sends()
        settle(self.device)  # the sends of a GPU still run

    def end_sends(self) -> None:
        """Lets go of what was sent: on a GPU once it has left, elsewhere after a wait until it has."""
        for queue in self._open.values():
            finish(*(work for sent in queue for work in sent.works))
            queue.clear()

    def _peer(self, i: Instruction) -> int:
        return i.peer * self._mesh.tensor + self._mesh.index

    def _piece(self, leaf: Tensor) -> Tensor:
        shape = self._piece_shape(leaf.shape)
        if shape == leaf.shape:
            return leaf
        return leaf.reshape(-1, *shape)[self._mesh.index]

    def _piece_shape(self, whole: torch.Size) -> torch.Size:
        """The shape of a piece; for a tensor that cannot be split evenly the whole shape."""
        size, rest = divmod(math.prod(whole), self._mesh.tensor)
        if rest or not size:
            return whole
        return torch.Size([size])

    def _tag(self, i: Instruction, kind: str) -> int:
        """The tag of the first leaf of a message."""
        batch = self._feed[i.mb].batch
        return self._tags.leaf(i, kind, batch.checksum if batch else 0)

    # ---- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(self, members: Indices, key: tuple[object, ...], tensors: list[Tensor]) -> Ending:
        """Starts to sum tensors over some ranks: a single one in place, several of one type in one message."""
        group = self._world if key[0] in _OVER_ALL else self._groups.get(members)
        if group is None:
            return lambda: True  # the sum over one process
        if len(tensors) == 1 and tensors[0].is_contiguous():
            return _ending(dist.all_reduce(tensors[0], group=group, async_op=True))
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        flats = [torch.cat([tensor.reshape(-1) for tensor in own]) for own in by_type.values()]

        def unpack() -> None:
            for own, flat in zip(by_type.values(), flats, strict=True):
                parts = flat.split([tensor.numel() for tensor in own])
                torch._foreach_copy_(own, [part.view_as(tensor) for part, tensor in zip(parts, own, strict=True)])

        return _ending(*[dist.all_reduce(flat, group=group, async_op=True) for flat in flats], then=unpack)

    def reduce_scatter(self, members: Indices, key: tuple[object, ...], whole: Tensor, part: Tensor) -> Ending:
        """Starts to sum a flat tensor over some ranks, each of which gets its part in place.

        Gloo would sum a whole copy on every rank, so with Gloo parts are exchanged and each rank adds up its own, in
        the order of the ranks. What it gets from the ranks before it and after it comes in two exchanges, so that there
        is no copy of its own term.

        Args:
            members: the ranks.
            key: of the sum; the groups of the ranks keep their sums in order.
            whole: the terms of this rank.
            part: the place, in `whole`, of its part.
        """
        group = self._groups[members]
        if whole.device.type != "cpu":
            return _ending(reduce_scatter_single(part, whole, group=group, async_op=True))
        size = len(part)
        number = dist.get_rank(group)
        lower = [size] * number + [0] * (len(members) - number)
        upper = [size - given for given in lower]
        upper[number] = 0
        below = whole[: sum(lower)]
        above = whole[sum(lower) + size :]
        before = torch.empty_like(below)
        after = torch.empty_like(above)

        def add() -> None:
            terms: list[Tensor] = [*before.view(-1, size), part, *after.view(-1, size)]
            for other in terms[1:]:
                terms[0].add_(other)
            part.copy_(terms[0])
            # A thread of Gloo may hold them for a while.
            resize(before, 0)
            resize(after, 0)

        return _ending(
            dist.all_to_all_single(before, above, lower, upper, group=group, async_op=True),
            dist.all_to_all_single(after, below, upper, lower, group=group, async_op=True),
            then=add,
        )

    def all_gather(self, members: Indices, key: tuple[object, ...], part: Tensor, whole: Tensor) -> Ending:
        """Starts to join the parts of some ranks.

        Gloo would gather into a second whole tensor, so with Gloo each rank sends its part to the others in place.
        """
        group = self._groups[members]
        if whole.device.type != "cpu":
            return _ending(all_gather_single(whole, part, group=group, async_op=True))
        places = whole.chunk(len(members))
        places[dist.get_rank(group)].copy_(part)
        works = []
        for number, place in enumerate(places):
            source = dist.get_global_rank(group, number)
            works.append(dist.broadcast(place, source, group=group, async_op=True))
        return _ending(*works)


class _Sent(NamedTuple):
    """An open send of a stage's micro-batch, with everything that must stay alive until it is done."""

    place: tuple[int, int]
    works: list[Any]
    held: list[Tensor]

    def finish(self) -> None:
        finish(*self.works)


@dataclass
class _Receive:
    """A receive: posted once it has a message, whose buffers are being filled.

    Attributes:
        kind: of the whole value, of which the instruction may name a piece.
        peer: the process that sends.
    """

    instruction: Instruction
    kind: str
    peer: int
    deliver: Callable[[Message], None]
    message: Message | None = None
    works: Sequence[Any] = ()


def _check_can_be_sent(stage: int, contract: Contract) -> None:
    if len(contract.leaves) > Tags.MOST_LEAVES:
        raise ModelError(
            f"the output of stage {stage} has {len(contract.leaves)} tensors, at most {Tags.MOST_LEAVES} can be sent; "
            "stack some of them"
        )


def _ending(*works: Any, then: Callable[[], None] | None = None) -> Ending:
    """Waits for some collectives, and then calls `then`."""

    def end() -> bool:
        finish_collectives(*works)
        if then is not None:
            then()
        return True

    return end
