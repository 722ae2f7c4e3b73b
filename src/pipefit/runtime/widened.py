"""The transport of a process that shares its rank with others by tensor parallelism.

rank a = processes (a, 0) (a, 1)        a message from a to b goes from (a, j) to (b, j)
             │      │                   a piece of a value is the j-th of its t equal parts, laid flat
rank b = processes (b, 0) (b, 1)        the t processes of b gather the whole from each other
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import WHOLE_OF, Kind, Op, Reduction
from pipefit.parallel.mesh import Mesh
from pipefit.runtime.distributed import DistributedTransport
from pipefit.runtime.transport import Handle, Message
from pipefit.stage.payload import Contract

_IN_PIECES = "pieces"
"""Marks, in an operand that messages leave empty, an instruction whose tensors travel in pieces."""
_ALL = (-1,)
"""Stands for every process of the run."""


class Pieces(NamedTuple):
    """A message that arrived in pieces.

    Attributes:
        message: its leaves are this process's pieces, flat, or whole where they cannot be divided.
        shapes: of the whole leaves.
    """

    message: Message
    shapes: list[torch.Size]


class TensorTransport(DistributedTransport):
    """Translates ranks to processes, cuts what is sent in pieces, and gathers it.

    Attributes:
        gathered_bytes: that this process has got from the others of its rank to put pieces together.
    """

    def __init__(self, rank: int, num_stages: int, device: torch.device, mesh: Mesh) -> None:
        super().__init__(rank * mesh.tensor + mesh.index, num_stages, device)
        assert mesh.region is not None
        self.gathered_bytes = 0
        self._mesh, self._tensor, self._index = mesh, mesh.tensor, mesh.index
        self._group = mesh.region.group
        self._groups[_ALL] = self._world
        self._translated: dict[Instruction, Instruction] = {}
        self._sending: Message | None = None

    def prepare(self, member_sets: Sequence[tuple[int, ...]], links: Sequence[tuple[int, int]]) -> None:
        """Makes the process groups of reductions among equal j, and of links; every process must call it alike."""
        t = self._tensor
        super().prepare([], [(a * t + j, b * t + j) for a, b in links for j in range(t)])
        for members in sorted(set(member_sets)):
            if members not in self._groups and len(members) > 1:
                for j in range(t):
                    group = dist.new_group([rank * t + j for rank in members])
                    if j == self._index:
                        self._groups[members] = group

    def send(self, instruction: Instruction, message: Message) -> None:
        """Starts to send a message, or this process's pieces of it."""
        i = self._translate(instruction)
        if i.tier == _IN_PIECES:
            self._sending = message
            message = message._replace(leaves=[self._piece(leaf) for leaf in message.leaves])
        super().send(i, message)

    def receive(self, instruction: Instruction) -> Handle:
        """Posts a receive."""
        i = self._translate(instruction)
        handle = super().receive(i)
        return _PiecesHandle(self, i, handle) if i.tier == _IN_PIECES else handle

    def all_reduce(self, members: tuple[int, ...], key: tuple[object, ...], tensors: list[Tensor]) -> Handle:
        """Starts to sum tensors among equal j of some ranks; norms and barriers among all processes."""
        everywhere = key[0] in (Reduction.NORM, Op.BARRIER.value)
        if not everywhere and len(members) == 1:
            return _Nothing()
        return super().all_reduce(_ALL if everywhere else members, key, tensors)

    def gather(self, pieces: Pieces) -> Message:
        """The whole message, from the pieces of all processes of the rank."""
        leaves = [
            leaf if leaf.shape == shape else self._gathered(leaf, shape)
            for leaf, shape in zip(pieces.message.leaves, pieces.shapes, strict=True)
        ]
        return pieces.message._replace(leaves=leaves)

    def _gathered(self, piece: Tensor, shape: torch.Size) -> Tensor:
        whole = piece.new_empty(piece.numel() * self._tensor)
        dist.all_gather_single(whole, piece, group=self._group)
        self.gathered_bytes += whole.nbytes - piece.nbytes
        return whole.view(shape)

    def _piece(self, leaf: Tensor) -> Tensor:
        size = self._piece_size(leaf.shape)
        return leaf if size is None else leaf.reshape(-1)[self._index * size : (self._index + 1) * size]

    def _piece_size(self, shape: torch.Size) -> int | None:
        """Elements of a piece; None where the tensor cannot be divided and travels whole."""
        number = math.prod(shape)
        return None if number % self._tensor or not number else number // self._tensor

    def shapes_of(self, i: Instruction) -> list[torch.Size]:
        """The shapes of the whole leaves of a message that has arrived."""
        contract = self.contract_of(i)
        assert contract is not None
        return [shape for shape, _, flag in contract.leaves if i.kind == Kind.ACT or flag]

    def _translate(self, i: Instruction) -> Instruction:
        """The instruction with processes for ranks and the whole's kind for the piece's."""
        found = self._translated.get(i)
        if found is None:
            peer = i.peer * self._tensor + self._index
            tier = _IN_PIECES if i.kind in WHOLE_OF else ""
            found = Instruction(i.op, i.stage, i.mb, kind=WHOLE_OF.get(i.kind, i.kind), peer=peer, tier=tier)
            self._translated[i] = found
        return found

    # ---- what a plain transport does with the whole ----------------------------------------------------------------

    def _agree(self, i: Instruction, message: Message, sent: Any) -> None:
        """Contracts are about whole values."""
        super()._agree(i, self._sending if i.tier == _IN_PIECES and self._sending is not None else message, sent)

    def post(self, i: Instruction, contract: Contract) -> tuple[list[Tensor], list[Any]]:
        """Buffers for whole leaves, or for pieces of them."""
        if i.tier == _IN_PIECES:
            sizes = [(self._piece_size(shape), shape) for shape, _, _ in contract.leaves]
            shapes = [shape if size is None else torch.Size([size]) for size, shape in sizes]
            leaves = ((shape, *leaf[1:]) for shape, leaf in zip(shapes, contract.leaves, strict=True))
            contract = Contract(contract.structure, tuple(leaves))
        return super().post(i, contract)


class _PiecesHandle:
    """A receive of pieces."""

    def __init__(self, transport: TensorTransport, instruction: Instruction, handle: Handle) -> None:
        self._transport, self._instruction, self._handle = transport, instruction, handle

    def ready(self) -> bool:
        """As the receive."""
        return self._handle.ready()

    def wait(self) -> Pieces:
        """The pieces, and the shapes of what they make."""
        message = self._handle.wait()
        return Pieces(message, self._transport.shapes_of(self._instruction))


class _Nothing:
    """A sum over one process."""

    def ready(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """The tensors hold their sums already."""
