"""Stages change their inputs in place, and the last one hands out objects of any class."""

import copy
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipefit as pf
from pipefit.errors import ModelError
from tests.cutting.plain_torch import check_trains_as_torch, descend, doubled, made, trained
from tests.cutting.test_traced_values import Added, Skip, numbers, rows

pytestmark = pytest.mark.slow


def test_a_model_that_changes_its_input_leaves_the_batch_as_it_is():
    x, y = rows(0)
    pipe = pf.Pipeline(Added(), loss=F.mse_loss, optimizer=torch.optim.SGD, example=(x, y), stages=2, microbatches=2)
    pipe.step(x, y)
    pipe.evaluate([(x, y)])
    assert torch.equal(x, numbers(0))
    with pytest.raises(ModelError, match="its target too"):
        pipe.step(x, x)


class InPlaceLayer(nn.Module):
    def forward(self, x):
        return F.relu_(x.add_(0.5))


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_stages_may_begin_in_place_by_any_code(recompute):
    def layers():
        return nn.Sequential(
            InPlaceLayer(), nn.Linear(6, 6), InPlaceLayer(), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)
        )

    data = [(doubled(x), doubled(y)) for x, y in map(rows, range(3))]
    wanted, whole = trained(layers, data, F.mse_loss)
    spread = pf.Parallelism(recompute=recompute)
    pipe = pf.Pipeline(
        made(layers), loss=F.mse_loss, optimizer=descend, stages=[2, 2, 2], microbatches=2, parallelism=spread
    )
    given = copy.deepcopy(data)
    assert [float(pipe.step(x, y)) for x, y in given] == pytest.approx(wanted, rel=1e-9)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(given, data, strict=True))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(pipe.state_dict()[name], value, rtol=1e-9, atol=1e-11)


def test_a_layer_that_changes_its_input_is_not_replayed():
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(InPlaceLayer(), nn.Linear(6, 6)), nn.Linear(6, 6))
    spread = pf.Parallelism(recompute="layer")
    pipe = pf.Pipeline(model, loss=F.mse_loss, optimizer=torch.optim.SGD, stages=1, microbatches=2, parallelism=spread)
    with pytest.raises(ModelError, match="layer 1 changes its input in place, so it cannot be replayed"):
        pipe.step(*rows(0))


@dataclass
class Output:
    value: torch.Tensor
    extra: object


class Own:
    """An object of the user's own class, which is no container for torch."""

    def __init__(self, value, extra):
        self.value, self.extra = value, extra


class Handing(Skip):
    kind = Output

    def forward(self, x):
        h = super().forward(x)
        return self.kind(h, [h * 2, "text"])


class HandingOwn(Handing):
    kind = Own


class HandingAfterWriting(Handing):
    """Is cut in its graph."""

    def begin(self, x):
        return x.mul_(2)


def of_both(output, target):
    return F.mse_loss(output.value, target) + output.extra[0].square().mean() + len(output.extra[1])


@pytest.mark.parametrize("kind", [Handing, HandingOwn, HandingAfterWriting])
def test_the_loss_gets_what_the_model_hands_out_of_whatever_class(kind):
    check_trains_as_torch(kind, rows, of_both)
    check_trains_as_torch(lambda: nn.Sequential(nn.Linear(6, 6), kind()), rows, of_both)


class Locked(Skip):
    def forward(self, x):
        return Own(super().forward(x), threading.Lock())


def test_an_output_whose_tensors_cannot_be_found_is_refused():
    with pytest.raises(ModelError, match="holds an object whose tensors cannot be found"):
        pf.cut(Locked(), rows(0)[0])
