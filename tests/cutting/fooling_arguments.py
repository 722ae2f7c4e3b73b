"""Models whose own code makes what blocks get, changes it, or decides which blocks run."""

import functools

import torch
from torch import nn

from tests.cutting.fooling_states import WIDTH, Host


class Own(Host):
    """Its own code between the blocks does what a subclass says."""

    def forward(self, x):
        h = self.embed(x)
        return self.head(self.body(h, x))


class MaskForLater(Own):
    def body(self, h, x):
        mask = h.norm(dim=-1, keepdim=True) > 30
        for block in self.blocks:
            h = block(h, mask) if block is self.blocks[3] else block(h)
        return h


def masked(block, h, mask):
    return h.masked_fill(mask, 0.0)


def mask_that_crosses():
    return MaskForLater(None, masked)


class CountForLater(Own):
    def body(self, h, x):
        count = (h.abs() > 20).sum()
        for block in self.blocks:
            h = block(h, count) if block is self.blocks[3] else block(h)
        return h


def divided(block, h, count):
    return h / (1 + count)


def count_that_crosses():
    return CountForLater(None, divided)


class TruthForLater(Own):
    def body(self, h, x):
        for block in self.blocks:
            h = block(h, bool(h.norm() > 100)) if block is self.blocks[3] else block(h)
        return h


def truth_that_is_an_argument():
    return TruthForLater(None, lambda block, h, truth: -h if truth else h)


class Branch(Own):
    """Whether a whole layer runs depends on the activations."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def body(self, h, x):
        for block in self.blocks[:3]:
            h = block(h)
        if h.norm() > 30:
            h = h + self.extra(h)
        for block in self.blocks[3:]:
            h = block(h)
        return h


class BranchOnTheBatch(Branch):
    def body(self, h, x):
        for block in self.blocks[:3]:
            h = block(h)
        if x.norm() > 30:
            h = h + self.extra(h)
        for block in self.blocks[3:]:
            h = block(h)
        return h


class SkipsABlock(Own):
    def body(self, h, x):
        for number, block in enumerate(self.blocks):
            if number != 2 or x.norm() < 30:
                h = block(h)
        return h


class ZeroGate(Own):
    """The gate is 0 at first, so that what it multiplies has no effect on the example."""

    def __init__(self):
        super().__init__()
        self.gate = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in self.blocks)

    def body(self, h, x):
        first = h
        for gate, block in zip(self.gate, self.blocks, strict=True):
            h = h + gate * block(h)
        return h + 0.1 * first


class ZeroInside(Host):
    """Blocks return what they are given, at first."""

    def __init__(self):
        super().__init__(blocks=5)
        for block in self.blocks:
            block.scale = nn.Parameter(torch.zeros(()))
            block.forward = functools.partial(self.scaled, block)

    @staticmethod
    def scaled(block, h):
        return h + block.scale * block.lin(h)

    def forward(self, x):
        h = first = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h + torch.sin(first))


class WritesInBatch(Host):
    def forward(self, x):
        return super().forward(x.mul_(2))


class WritesInMask(Own):
    """A block changes a mask of the batch in place; a later one uses it."""

    def body(self, h, x):
        mask = (x.mean(-1, keepdim=True) > 50).double()
        for block in self.blocks:
            h = block(h, mask) if block in (self.blocks[1], self.blocks[3]) else block(h)
        return h


def mask_changed_in_place():
    def change(block, h, mask):
        mask += (h.detach().norm(dim=-1, keepdim=True) > 30).double()
        return h

    model = WritesInMask()
    model.blocks[1].before = change
    model.blocks[3].before = lambda block, h, mask: h * (1 + mask)
    return model


class TiedByHand(Host):
    """The head is the embedding's weight, used directly."""

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h) + (h @ self.embed.weight).sum(-1, keepdim=True)


class OthersWeight(Host):
    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h @ self.blocks[0].lin.weight)


class DictOfContext(Own):
    """Blocks talk by a dict that is their argument."""

    def body(self, h, x):
        context = {}
        for block in self.blocks:
            h = block(h, context)
        return h


def dict_of_context():
    def write(block, h, context):
        context["kept"] = h.detach() > 20
        return h

    model = DictOfContext()
    for block in self_and_others(model):
        block.before = lambda block, h, context: h
    model.blocks[1].before = write
    model.blocks[3].before = lambda block, h, context: h.masked_fill(context["kept"], 0.0)
    return model


def self_and_others(model):
    return list(model.blocks)


class InPlace(Own):
    """Blocks that begin in place."""

    def body(self, h, x):
        for block in self.blocks:
            h = block(h)
        return h


def begins_in_place():
    model = InPlace()
    for block in model.blocks:
        block.before = lambda block, h: h.mul_(0.5)
    return model


class RunningMean(Host):
    """Buffers of blocks, in place and anew."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.register_buffer("mean", torch.zeros(WIDTH))

        def centre(block, h):
            block.mean = 0.9 * block.mean + 0.1 * h.detach().mean(0)
            return h - block.mean

        self.blocks[1].before = self.blocks[4].before = centre


class InitialisesWeights(Host):
    def __init__(self):
        super().__init__()
        self.blocks[2].ready = False

        def initialise(block, h):
            if not block.ready:
                block.lin.bias.data.copy_(-h.detach().mean(0))
                block.ready = True
            return h

        self.blocks[2].before = initialise


class ReplacesWeights(Host):
    """Is the same for every batch, so that only the address of the weight shows it."""

    def forward(self, x):
        weight = self.blocks[2].lin.weight
        weight.data = weight.data.clamp(-0.2, 0.2)
        return super().forward(x)


class Parts(Host):
    """Its blocks are also in a plain list, in another order."""

    def __init__(self):
        super().__init__()
        self.order = [self.blocks[k] for k in (0, 2, 1, 4, 3)]

    def forward(self, x):
        h = self.embed(x)
        for block in self.order:
            h = block(h)
        return self.head(h)


class ReadsAverages(Host):
    """Running averages move once in a step, not with every micro-batch as in plain torch."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return super().forward(self.norm(x) + self.norm.running_mean)
