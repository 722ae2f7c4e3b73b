"""One process per rank, over `torch.distributed`: Gloo on CPUs, NCCL on GPUs.

Every send and receive is asynchronous. Shapes are agreed on once: the first activation of each shape is preceded by
its contract, from which both ends know what all later ones look like; nothing is negotiated again until the shapes of
the data change (a ragged last batch, another sequence length).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

import torch
from pipefit.errors import ModelError
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Kind
from pipefit.ir.program import Header
from pipefit.runtime.transport import Message
from pipefit.stage.payload import Contract
from torch import Tensor

__all__ = ["DistributedTransport"]

_MAX_LEAVES = 64
_MAX_OPEN_SENDS = 4
_ANNOUNCE = 2 * _MAX_LEAVES
"""Tags of a message: activation leaves, gradient leaves, then the two parts of an announcement."""
_TAGS = _ANNOUNCE + 2
ContractKey = tuple[int, object]


class DistributedTransport:
    """This rank's messages and reductions.

    Sends are kept, with their tensors, until the receiver must have them: its answer has arrived, or more than a few
    later messages to it are under way. The verifier has proven that no order of waiting on sends can block a program.
    """

    def __init__(
        self, rank: int, num_stages: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank = rank
        self.device = device
        self._stages = num_stages
        self._world: dist.ProcessGroup = group or dist.group.WORLD  # type: ignore[assignment]
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._contracts: dict[ContractKey, Contract] = {}
        self._fresh: set[object] = set()
        self._seen: set[object] = set()
        self._signatures: Sequence[object] = ()
        self._open: dict[tuple[int, str], deque[tuple[tuple[int, int], list[Any], object]]] = {}
        self._parity = 0
        self.bytes_sent = 0

    def prepare(self, header: Header, member_sets: Sequence[tuple[int, ...]]) -> None:
        """Makes the process groups of a program's reductions; every rank must call it with the same sets."""
        for members in sorted(set(member_sets)):
            if members not in self._groups:
                whole = len(members) == dist.get_world_size()
                self._groups[members] = self._world if whole else dist.new_group(list(members))

    def begin(self, signatures: Sequence[object]) -> None:
        """A pass begins; shapes not seen in earlier passes will be announced during all of it."""
        self._signatures = signatures
        self._fresh = set(signatures) - self._seen
        self._seen |= self._fresh
        self._parity ^= 1

    def send(self, instruction: Instruction, message: Message) -> None:
        """Starts to send the leaves of a message."""
        i = instruction
        works: list[Any] = []
        leaves = [leaf.contiguous() for leaf in message.leaves]
        first = self._tag(i, 0)
        held: list[object] = [leaves]
        if i.kind == Kind.ACT:
            self._agree(i, message, works, held)
        for offset, leaf in enumerate(leaves):
            works.append(self._world.send([leaf], i.peer, first + offset))
            self.bytes_sent += leaf.nbytes
        queue = self._open.setdefault((i.peer, i.kind), deque())
        queue.append(((i.stage, i.mb), works, held))
        while len(queue) > _MAX_OPEN_SENDS:
            _finish(queue.popleft())

    def _agree(self, i: Instruction, message: Message, works: list[Any], held: list[object]) -> None:
        """Announces the contract of an activation whose shapes are new; checks it against the contract otherwise."""
        key = (i.stage, self._signatures[i.mb])
        contract = Contract.of(message.leaves, message.flags, message.structure)  # type: ignore[arg-type]
        known = self._contracts.setdefault(key, contract)
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
        if key[1] in self._fresh:
            text = torch.frombuffer(bytearray(contract.to_bytes()), dtype=torch.uint8)
            size = torch.tensor([text.numel()])
            held += [text, size]
            tag = self._tag(i, _ANNOUNCE)
            works += [self._world.send([size], i.peer, tag), self._world.send([text], i.peer, tag + 1)]

    def receive(self, instruction: Instruction) -> _Receive:
        """Posts a receive; one whose shapes are not known yet is posted when it is waited for."""
        receive = _Receive(self, instruction)
        receive.try_to_post()
        return receive

    def contract_of(self, i: Instruction) -> Contract | None:
        """The contract of a value that will arrive, if it is known already."""
        signature = self._signatures[i.mb]
        if i.kind == Kind.ACT and signature in self._fresh:
            return None
        return self._contracts.get((i.stage, signature))

    def learn(self, i: Instruction) -> None:
        """Receives the announcement that precedes an activation."""
        tag = self._tag(i, _ANNOUNCE)
        size = torch.zeros(1, dtype=torch.int64)
        self._world.recv([size], i.peer, tag).wait()
        text = torch.empty(int(size), dtype=torch.uint8)
        self._world.recv([text], i.peer, tag + 1).wait()
        self._contracts[i.stage, self._signatures[i.mb]] = Contract.from_bytes(text.numpy().tobytes())

    def post(self, i: Instruction, contract: Contract) -> tuple[list[Tensor], list[Any]]:
        """Buffers for the leaves of a message, and their receives under way."""
        wanted = contract.leaves if i.kind == Kind.ACT else [leaf for leaf in contract.leaves if leaf[2]]
        buffers = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype, _ in wanted]
        first = self._tag(i, 0)
        return buffers, [self._world.recv([buffer], i.peer, first + k) for k, buffer in enumerate(buffers)]

    def delivered(self, kind: str, stage: int, mb: int) -> None:
        """Lets go of a send whose receiver has answered, and of all before it on the same link."""
        for (_, sent), queue in self._open.items():
            if sent == kind and any(entry[0] == (stage, mb) for entry in queue):
                while (entry := queue.popleft())[0] != (stage, mb):
                    _finish(entry)
                _finish(entry)

    def all_reduce(self, members: tuple[int, ...], key: tuple[object, ...], tensors: list[Tensor]) -> _Reduction:
        """Starts to sum tensors over some ranks, those of one type in one message."""
        buckets: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            buckets.setdefault(tensor.dtype, []).append(index)
        group = self._groups[members]
        flats = [torch.cat([tensors[index].reshape(-1) for index in indices]) for indices in buckets.values()]
        works = [dist.all_reduce(flat, group=group, async_op=True) for flat in flats]
        return _Reduction(tensors, list(buckets.values()), flats, works)

    def finish(self) -> None:
        """Waits for every send under way."""
        for queue in self._open.values():
            while queue:
                _finish(queue.popleft())

    def _tag(self, i: Instruction, offset: int) -> int:
        kind = _MAX_LEAVES if i.kind == Kind.GRAD and offset < _ANNOUNCE else 0
        return (((i.mb % 4096) * self._stages + i.stage) * 2 + self._parity) * _TAGS + kind + offset


class _Receive:
    """A receive under way, or one that still waits for its contract."""

    def __init__(self, transport: DistributedTransport, instruction: Instruction) -> None:
        self._transport = transport
        self._instruction = instruction
        self._posted: tuple[Contract, list[Tensor], list[Any]] | None = None

    def try_to_post(self) -> None:
        """Posts the buffers if their shapes are known."""
        contract = self._transport.contract_of(self._instruction)
        if contract is not None:
            self._posted = (contract, *self._transport.post(self._instruction, contract))

    def ready(self) -> bool:
        """`wait` may block: the process has nothing else to run."""
        return True

    def wait(self) -> Message:
        """The message."""
        i = self._instruction
        if self._posted is None:
            if i.kind == Kind.ACT:
                self._transport.learn(i)
                contract = self._transport._contracts[i.stage, self._transport._signatures[i.mb]]
                self._posted = (contract, *self._transport.post(i, contract))
            else:
                self.try_to_post()
        assert self._posted is not None
        contract, buffers, works = self._posted
        for work in works:
            work.wait()
        if i.kind != Kind.ACT:
            self._transport.delivered(Kind.ACT.value, i.stage, i.mb)
            return Message(buffers, [], None)
        return Message(buffers, [flag for _, _, flag in contract.leaves], contract.structure)


class _Reduction:
    """A sum under way."""

    def __init__(self, tensors: list[Tensor], buckets: list[list[int]], flats: list[Tensor], works: list[Any]) -> None:
        self._tensors, self._buckets, self._flats, self._works = tensors, buckets, flats, works

    def ready(self) -> bool:
        """`wait` may block."""
        return True

    def wait(self) -> list[Tensor]:
        """The sums, as views of the flat buffers."""
        result: list[Tensor] = list(self._tensors)
        for indices, flat, work in zip(self._buckets, self._flats, self._works, strict=True):
            work.wait()
            sizes = [self._tensors[index].numel() for index in indices]
            for index, part in zip(indices, flat.split(sizes), strict=True):
                result[index] = part.view_as(self._tensors[index])
        return result


def _finish(entry: tuple[tuple[int, int], list[Any], object]) -> None:
    for work in entry[1]:
        work.wait()
