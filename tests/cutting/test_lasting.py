"""State of Python in a forward: what changes from one forward to the next is found and named, and nothing remains."""

import collections
import dataclasses
import functools
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from pipefit.cutting.cut import plain_arguments
from pipefit.cutting.lasting import second_batch
from pipefit.cutting.states import States, kept_outside
from pipefit.errors import ModelError

COUNT = [0]
TOTAL = 0


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)


class Counter(Base):
    steps = 0

    def forward(self, x):
        self.steps += 1
        return self.lin(x) * min(1.0, self.steps / 100)


class OfTheClass(Base):
    steps = 0

    def forward(self, x):
        OfTheClass.steps += 1
        return self.lin(x)


class Global(Base):
    def forward(self, x):
        COUNT[0] += 1
        return self.lin(x)


class GlobalNumber(Base):
    def forward(self, x):
        global TOTAL
        TOTAL += 1
        return self.lin(x)


class Default(Base):
    def forward(self, x, seen=[]):  # noqa: B006
        seen.append(1)
        return self.lin(x) / len(seen)


class Closure(Base):
    def __init__(self):
        super().__init__()
        calls = 0

        def hook(module, given, output):
            nonlocal calls
            calls += 1
            return output * calls

        self.lin.register_forward_hook(hook)

    def forward(self, x):
        return self.lin(x)


class Iterator(Base):
    def __init__(self):
        super().__init__()
        self.number = itertools.count()

    def forward(self, x):
        return self.lin(x) * next(self.number)


class Past(Base):
    def __init__(self):
        super().__init__()
        self.past = collections.deque(maxlen=2)

    def forward(self, x):
        h = self.lin(x)
        self.past.append(h)
        return sum(self.past)


class Object(Base):
    def __init__(self):
        super().__init__()
        self.clock = Clock()

    def forward(self, x):
        self.clock.ticks += 1
        return self.lin(x)


class Clock:
    def __init__(self):
        self.ticks = 0


class Cached(Base):
    def forward(self, x):
        return self.lin(x) * weight_of(random.random())


@functools.cache
def weight_of(key):
    return key


class Numpy(Base):
    def forward(self, x):
        return self.lin(x) * float(np.random.rand())


class OwnGenerator(Base):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return self.lin(x) + torch.randn(4, generator=self.generator)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Counter, r"steps \(1 → 2\)"),
        (OfTheClass, "OfTheClass.steps"),
        (Global, r"global COUNT of .*\[0\]"),
        (GlobalNumber, "global TOTAL"),
        (Default, "a default argument of Default.forward"),
        (Closure, "calls in .*hook"),
        (Iterator, "number changes"),
        (Past, "an earlier forward left"),
        (Object, "clock.ticks"),
        (Cached, "draws from Python's random numbers"),
        (Numpy, "draws from NumPy's random numbers"),
        (OwnGenerator, "generator"),
    ],
)
def test_what_a_forward_leaves_for_the_next_is_named_and_does_not_remain(kind, name):
    model = kind()
    before = dict(vars(model))
    drawn = random.random, random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    with pytest.raises(ModelError, match=name), kept_outside(model):
        second_batch(model, torch.randn(2, 4), plain_arguments)
    assert vars(model) == before
    assert (COUNT, TOTAL, OfTheClass.steps) == ([0], 0, 0)
    assert random.getstate() == drawn[1]
    assert str(np.random.get_state()) == drawn[2]
    assert not getattr(model, "past", ())


class Lazy(Base):
    """A table made at the first call, a last output, buffers of every kind: harmless."""

    def __init__(self):
        super().__init__()
        self.table = None
        self.register_buffer("steps", torch.zeros(()))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(4.0)
        self.steps += 1
        self.last = self.norm(self.lin(x)) + self.table + torch.rand(4)
        return self.last


def test_buffers_and_what_every_forward_makes_anew_may_change():
    model = Lazy()
    x = torch.randn(3, 4)
    other = second_batch(model, x, plain_arguments)
    assert other.shape == x.shape
    assert not torch.equal(other, x)
    assert model.table is None
    assert not hasattr(model, "last")
    assert model.steps == 0


def test_states_are_separate_and_share_weights():
    model = Lazy()
    states = States(model)
    one, two = states.fresh(), states.fresh()
    weight = model.lin.weight
    for state in (one, one, two):
        with states.used(state):
            model(torch.randn(3, 4))
            assert model.lin.weight is weight
    for state, steps in ((one, 2), (two, 1)):
        with states.used(state):
            assert model.steps == steps
            assert model.norm.num_batches_tracked == steps
    assert model.steps == 0


def test_an_attribute_that_cannot_be_copied_is_named():
    model = Base()
    model.source = (n for n in range(3))
    with pytest.raises(ModelError, match=r"Base.source \(generator\) cannot be copied"):
        States(model).fresh()


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: float = 1.0


copy_with = dataclasses.replace


class ReplacesSettings(Base):
    """Its forward names a function of Python's library, which compares with a global of its module by identity."""

    def forward(self, x):
        return self.lin(x) * copy_with(Settings(), scale=2.0).scale


def test_the_library_of_python_works_in_a_state_of_its_own():
    model = ReplacesSettings()
    states = States(model)
    with states.used(states.fresh()):
        made = dataclasses.make_dataclass("Made", [("size", int), ("name", str, "none")])
    assert made(3).name == "none"
