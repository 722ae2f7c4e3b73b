"""Models whose layers pass plain values on, for processes too."""

import torch
from torch import nn

import pipefit as pf

VALUES = {"none": None, "yes": True, "count": 3, "one": 1.0, "words": 'é, "quoted"', "nan": float("nan")}


class Begin(nn.Module):
    """Adds plain values, the length of the input among them, to what it computes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)

    def forward(self, x):
        return {"h": torch.tanh(self.inner(x)), "length": len(x), "mode": self.training, **VALUES}


class Middle(nn.Module):
    """Uses values, with their types, and passes them on."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, given):
        for name, value in VALUES.items():
            assert type(given[name]) is type(value) and repr(given[name]) == repr(value)
        assert given["mode"] is self.training
        return (self.inner(given["h"]) * given["length"] / given["count"], given["none"], [given["words"]])


class End(nn.Module):
    """Takes what is left, and gives values with its output."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 2)

    def forward(self, given):
        h, nothing, (words,) = given
        assert nothing is None and words == VALUES["words"]
        return {"out": self.inner(h), "count": 1}


class Fickle(Begin):
    """Gives another value for every micro-batch of odd sum, or counts its calls."""

    def __init__(self, kind="float"):
        super().__init__()
        self.kind, self.calls = kind, 0

    def forward(self, x):
        self.calls += 1
        values = {"float": float(self.calls), "type": 1 if self.calls == 1 else True}
        return super().forward(x) | {"one": values[self.kind]}


def loss(output, target):
    assert output["count"] == 1
    return nn.functional.mse_loss(output["out"], target["y"])


def model(first=Begin):
    torch.manual_seed(0)
    return nn.Sequential(first(), Middle(), End()).double()


def batches(count, size=7):
    generator = torch.Generator().manual_seed(1)
    draw = lambda width: torch.randn(size, width, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(6), {"y": draw(2), "unit": None, "scale": 2}) for _ in range(count)]


def pipeline(first=Begin, **options):
    return pf.Pipeline(
        model(first),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        **{"stages": 3, "microbatches": 2, **options},
    )


def trained(_=None, **options):
    """The losses of a training with batches of two sizes, and a held-out loss."""
    pipe = pipeline(**options)
    return pipe.fit([*batches(2), *batches(2, size=5)], steps=4), pipe.evaluate(batches(1))


def fickle(kind):
    pipeline(lambda: Fickle(kind)).fit(batches(1, size=6))
