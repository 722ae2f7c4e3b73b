"""Side channels: a layer leaves a value where a later one finds it, past the arguments and results of forwards."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.hand import WIDTH, Block, Host, Shelf
from tests.zoo.specimen import vectors

put = Shelf("channels")


class Box:
    """A place outside all modules."""

    def __init__(self) -> None:
        self.value: Any = None


class Leaves(Block):
    """Leaves its activation, or a function of it, in an attribute of an object."""

    def __init__(self, box: Any, name: str = "value", detached: bool = True, make: Any = None) -> None:
        super().__init__()
        self.__dict__["box"] = box
        self.name, self.detached, self.make = name, detached, make

    def forward(self, h: Tensor) -> Tensor:
        kept = h.detach() if self.detached else h
        setattr(self.box, self.name, self.make(kept) if self.make else kept)
        return super().forward(h)


class Finds(Block):
    """Adds what it finds there."""

    def __init__(self, box: Any, name: str = "value", read: Any = None) -> None:
        super().__init__()
        self.__dict__["box"] = box
        self.name, self.read = name, read

    def forward(self, h: Tensor) -> Tensor:
        value = getattr(self.box, self.name)
        return super().forward(h + (self.read(value) if self.read else value))


def between(leaves: nn.Module, finds: nn.Module) -> Host:
    return Host(Block(), leaves, Block(), Block(), finds, Block())


@put("detached tensor in an object")
def detached() -> nn.Module:
    box = Box()
    return between(Leaves(box), Finds(box))


@put("tensor with its graph in an object")
def with_graph() -> nn.Module:
    box = Box()
    return between(Leaves(box, detached=False), Finds(box))


@put("number in an object")
def number() -> nn.Module:
    box = Box()
    return between(Leaves(box, make=lambda h: float(h.mean())), Finds(box))


@put("bool in an object")
def truth() -> nn.Module:
    box = Box()
    return between(Leaves(box, make=lambda h: bool(h.norm() > 5)), Finds(box, read=lambda value: 1.0 if value else 0.0))


@put("list that grows and is cleared")
class Listed(Host):
    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(5)))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            self.seen.append(h)
        return self.head(h + self.seen[0] + self.seen[2])


class Appends(Block):
    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.__dict__["seen"] = seen

    def forward(self, h: Tensor) -> Tensor:
        self.seen.append(h.detach())
        return super().forward(h)


class Pops(Block):
    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.__dict__["seen"] = seen

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) + self.seen.pop()


@put("stack of a list that blocks share")
def stack() -> nn.Module:
    seen: list[Tensor] = []
    return Host(Block(), Appends(seen), Appends(seen), Block(), Pops(seen), Pops(seen))


GLOBAL: dict[str, Any] = {}


class LeavesInGlobal(Block):
    def forward(self, h: Tensor) -> Tensor:
        GLOBAL["gate"] = torch.sigmoid(h).mean(1, keepdim=True)
        return super().forward(h)


class FindsInGlobal(Block):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) * GLOBAL["gate"]


@put("global dict with a graph")
def in_global() -> nn.Module:
    return between(LeavesInGlobal(), FindsInGlobal())


class LeavesOnClass(Block):
    gate: Any = None

    def forward(self, h: Tensor) -> Tensor:
        LeavesOnClass.gate = h.detach().sigmoid()
        return super().forward(h)


class FindsOnClass(Block):
    def forward(self, h: Tensor) -> Tensor:
        assert LeavesOnClass.gate is not None
        return super().forward(h * LeavesOnClass.gate)


@put("class attribute")
def on_class() -> nn.Module:
    return between(LeavesOnClass(), FindsOnClass())


@put("closure")
def closure() -> nn.Module:
    kept = None

    class Keeps(Block):
        def forward(self, h: Tensor) -> Tensor:
            nonlocal kept
            kept = h.detach()
            return super().forward(h)

    class Uses(Block):
        def forward(self, h: Tensor) -> Tensor:
            return super().forward(h + kept)

    return between(Keeps(), Uses())


CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("zoo", default=None)
LOCAL = threading.local()


class LeavesInContext(Block):
    def forward(self, h: Tensor) -> Tensor:
        CONTEXT.set(h.detach())
        LOCAL.scale = h.detach().abs().amax(1, keepdim=True)
        return super().forward(h)


class FindsInContext(Block):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h + CONTEXT.get() / LOCAL.scale)


@put("context variable and thread-local")
def in_context() -> nn.Module:
    return between(LeavesInContext(), FindsInContext())


@put("attribute of the parent module")
class OfParent(Host):
    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(5)))
        self.residual: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for place, block in enumerate(self.blocks):
            if place == 1:
                self.residual = h
            if place == 4:
                h = h + self.residual
            h = block(h)
        return self.head(h)


class WritesBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        self.scale = h.detach().abs().mean(0)
        return super().forward(h)


class ReadsBuffer(Block):
    def __init__(self, other: WritesBuffer) -> None:
        super().__init__()
        self.__dict__["other"] = other

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h / (1 + self.other.scale))


@put("buffer of an earlier block, assigned")
def buffer_of_another() -> nn.Module:
    writes = WritesBuffer()
    return between(writes, ReadsBuffer(writes))


class WritesInBuffer(WritesBuffer):
    def forward(self, h: Tensor) -> Tensor:
        self.scale.copy_(h.detach().abs().mean(0))
        return Block.forward(self, h)


@put("buffer of an earlier block, written in place")
def buffer_written() -> nn.Module:
    writes = WritesInBuffer()
    return between(writes, ReadsBuffer(writes))


@put("forward hook that keeps an activation")
def kept_by_hook() -> nn.Module:
    box = Box()
    first = Block()
    first.register_forward_hook(lambda module, given, output: setattr(box, "value", output))
    return between(first, Finds(box))


@put("forward pre-hook that adds an earlier activation")
def added_by_hook() -> nn.Module:
    box = Box()
    last = Block()
    last.register_forward_pre_hook(lambda module, given: (given[0] + box.value,))
    return between(Leaves(box, detached=False), last)


@put("features by hooks, for a last layer that takes them all")
class Features(Host):
    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(4)))
        self.features: dict[int, Tensor] = {}
        for place, block in enumerate(self.blocks):
            block.register_forward_hook(lambda module, given, output, at=place: self._keep(at, output))
        self.all = nn.Linear(4 * WIDTH, 3)

    def _keep(self, place: int, output: Tensor) -> None:
        self.features[place] = output

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return self.all(torch.cat([self.features[place] for place in range(4)], 1))


class WritesInto(Block):
    """Writes into a tensor that the forward of the model holds."""

    def forward(self, h: Tensor, notes: Tensor) -> Tensor:
        notes[:, 0] = h.detach().mean(1)
        return super().forward(h)


@put("notes tensor that blocks write into")
class Notes(Host):
    def __init__(self) -> None:
        super().__init__(*(WritesInto() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        notes = torch.zeros(len(x), 2, dtype=x.dtype)
        for block in self.blocks:
            h = block(h, notes)
            notes[:, 1] += notes[:, 0]
        return self.head(h) + notes[:, 1:]


@put("attribute on a tensor")
class OnTensor(Host):
    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        skip = h
        h = self.blocks[1](self.blocks[0](h))
        h.skip = skip
        after = self.blocks[2](h)
        return self.head(self.blocks[3](after) + h.skip)


class KeyedCache(Block):
    """A cache by a key that is the same in every micro-batch."""

    def __init__(self, cache: dict[str, Tensor], key: str) -> None:
        super().__init__()
        self.__dict__["cache"] = cache
        self.key = key

    def forward(self, h: Tensor) -> Tensor:
        found = self.cache.get(self.key)
        if found is None or found.shape != h.shape:
            found = self.cache[self.key] = h.detach()
        return super().forward(h + found)


@put("cache filled by the first micro-batch of each size", not_by_hand="the first micro-batch is part of every other")
def first_is_kept() -> nn.Module:
    cache: dict[str, Tensor] = {}
    return Host(Block(), KeyedCache(cache, "a"), Block(), KeyedCache(cache, "a"), Block())


@put("auxiliary losses in a list, summed at the end")
class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.losses = []
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            self.losses.append(h.square().mean())
        return self.head(h), torch.stack(self.losses).sum()


class WithLoss(Block):
    """Keeps a loss of its own in an attribute."""

    aux: Any = None

    def forward(self, h: Tensor) -> Tensor:
        self.aux = h.square().mean()
        return super().forward(h)


@put("auxiliary losses in attributes of the blocks")
class Collected(Host):
    def __init__(self) -> None:
        super().__init__(*(WithLoss() for _ in range(4)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), sum(block.aux for block in self.blocks)


class Counted(Block):
    """Keeps the number of large activations."""

    def __init__(self, box: Box) -> None:
        super().__init__()
        self.__dict__["box"] = box

    def forward(self, h: Tensor) -> Tensor:
        self.box.value = int((h.abs() > 0.8).sum())
        return super().forward(h)


@put("count of large activations in an object")
def count() -> nn.Module:
    box = Box()
    return between(Counted(box), Finds(box, read=lambda value: 0.01 * value))


@put("tensor in a parent's dict, without a cut between", vectors(8))
class WithinBlocks(Host):
    """Each block has a channel of its own: no border is between writer and reader."""

    def __init__(self) -> None:
        boxes = [Box() for _ in range(4)]
        super().__init__(*(nn.Sequential(Leaves(box, detached=False), Finds(box)) for box in boxes))


@put("sequential with a channel between its layers")
def in_sequential() -> nn.Module:
    box = Box()
    return nn.Sequential(nn.Linear(8, WIDTH), Leaves(box), Block(), Block(), Finds(box), nn.Linear(WIDTH, 3))


@put("sequential with a channel that has a graph")
def graph_in_sequential() -> nn.Module:
    box = Box()
    leaves, finds = Leaves(box, detached=False), Finds(box)
    return nn.Sequential(nn.Linear(8, WIDTH), leaves, Block(), Block(), finds, nn.Linear(WIDTH, 3))


@put(
    "value of the last micro-batch is read by an earlier layer", not_by_hand="each micro-batch waits for the one before"
)
def backwards() -> nn.Module:
    box = Box()
    box.value = torch.zeros((), dtype=torch.float64)
    leaves = Leaves(box, make=lambda h: h.mean())
    return Host(Block(), Finds(box), Block(), Block(), leaves, Block())


SPECIMENS = put.specimens
