"""Models whose blocks leave values for other blocks, or for other batches."""

import collections
import functools
import weakref

import torch
from torch import nn

WIDTH = 6


class Block(nn.Module):
    """A block that calls a function of itself and its input before its layer, and one after it."""

    def __init__(self, before=None, after=None):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.before, self.after = before, after

    def forward(self, h, *args, **kwargs):
        if self.before is not None:
            h = self.before(self, h, *args, **kwargs)
        h = torch.tanh(self.lin(h)) + 0.5 * h
        if self.after is not None:
            h = self.after(self, h)
        return h


class Host(nn.Module):
    """Five blocks in a list; block 1 leaves something, block 3 finds it."""

    def __init__(self, leaves=None, finds=None, blocks=5, **others):
        super().__init__()
        self.embed, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.blocks[1].after, self.blocks[3].before = leaves, finds
        self.__dict__["box"] = collections.defaultdict(list)
        for block in self.blocks:
            block.__dict__["host"] = self

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def keeps(value):
    """A function that leaves a value of the activations in an attribute of the block."""

    def leave(block, h):
        block.kept = value(h)
        return h

    return leave


def finds(use):
    def find(block, h):
        return use(h, block.host.blocks[1].kept)

    return find


def in_attribute():
    return Host(keeps(lambda h: h.detach().mean()), finds(lambda h, kept: h + kept))


def with_its_graph():
    return Host(keeps(lambda h: h.mean()), finds(lambda h, kept: h + kept))


def truth_that_is_false_in_the_example():
    return Host(keeps(lambda h: bool(h.norm() > 40)), finds(lambda h, kept: -h if kept else h))


def mask_that_is_false_in_the_example():
    return Host(keeps(lambda h: h > 3), finds(lambda h, kept: h.masked_fill(kept, 0.0)))


def count_that_is_0_in_the_example():
    return Host(keeps(lambda h: int((h > 3).sum())), finds(lambda h, kept: h * (1 + kept)))


def in_a_list():
    def leave(block, h):
        block.host.box["list"][:] = [h.detach()]
        return h

    return Host(leave, lambda block, h: h + block.host.box["list"][0])


def in_a_deque():
    past = collections.deque(maxlen=1)

    def leave(block, h):
        past.append(h.detach())
        return h

    return Host(leave, lambda block, h: h + past[0])


KEPT = {}


TRUTH = False


def in_a_global():
    def leave(block, h):
        KEPT["h"] = h.detach()
        return h

    return Host(leave, lambda block, h: h + KEPT["h"])


def in_a_global_truth():
    def leave(block, h):
        global TRUTH
        TRUTH = bool(h.norm() > 40)
        return h

    return Host(leave, lambda block, h: -h if TRUTH else h)


def in_a_class():
    class Kept(Block):
        last = None

    def leave(block, h):
        Kept.last = h.detach()
        return h

    model = Host(leave, lambda block, h: h + Kept.last)
    model.blocks[2] = Kept()
    return model


def in_a_closure():
    last = None

    def leave(block, h):
        nonlocal last
        last = h.detach()
        return h

    return Host(leave, lambda block, h: h + last)


def in_a_weak_reference():
    def leave(block, h):
        block.kept = h
        block.host.box["ref"] = weakref.ref(h)
        return h

    return Host(leave, lambda block, h: h + block.host.box["ref"]())


def in_a_default_argument():
    def leave(block, h, kept=KEPT_BY_DEFAULT):
        kept["h"] = h.detach()
        return h

    return Host(leave, lambda block, h: h + KEPT_BY_DEFAULT["h"])


KEPT_BY_DEFAULT = {}


@functools.cache
def scale_of(key):
    return []


def in_a_cache():
    def leave(block, h):
        scale_of("key")[:] = [h.detach().mean()]
        return h

    return Host(leave, lambda block, h: h * scale_of("key")[0])


def by_a_hook():
    model = Host()

    def keep(module, given, output):
        model.box["hook"] = [output.detach()]

    def add(module, given):
        return (given[0] + model.box["hook"][0],)

    model.blocks[1].register_forward_hook(keep)
    model.blocks[3].register_forward_pre_hook(add)
    return model


class LastCall(Host):
    """Its own code keeps what it made in the forward before."""

    def forward(self, x):
        h = self.embed(x)
        if getattr(self, "last", None) is not None:
            h = h + self.last.mean()
        for block in self.blocks:
            h = block(h)
        self.last = h.detach()
        return self.head(h)


def first_batch_is_kept():
    def once(block, h):
        if not hasattr(block, "first"):
            block.first = h.detach().mean()
        return h - block.first

    return Host(once)


def counter():
    def count(block, h):
        block.steps = getattr(block, "steps", 0) + 1
        return h * min(1.0, block.steps / 10)

    return Host(count)


def counter_without_an_effect_yet():
    def count(block, h):
        block.steps = getattr(block, "steps", 0) + 1
        return h if block.steps < 20 else 2 * h

    return Host(count)
