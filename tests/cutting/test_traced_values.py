"""What a graph may hold: each kind of model trains as by torch on data of other scales, or is refused by name."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipefit as pf
from pipefit.errors import DataError
from tests.cutting.plain_torch import check_trains_as_torch

pytestmark = pytest.mark.slow


class Skip(nn.Module):
    """Four layers with a way around two of them, so that there is no list of blocks to cut between."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.out = (nn.Linear(6, 6) for _ in range(4))
        self.prepare()

    def prepare(self):
        """What a kind has in addition."""

    def begin(self, x):
        """What a kind does with the batch."""
        return x

    def change(self, h):
        """What a kind does in the middle."""
        return h

    def forward(self, x):
        h = torch.tanh(self.first(self.begin(x)))
        return self.out(torch.tanh(self.third(self.change(torch.tanh(self.second(h))))) + h)


def numbers(seed, *shape):
    return torch.randn(*(shape or (6, 6)), generator=torch.Generator().manual_seed(seed))


def rows(seed):
    return numbers(seed), numbers(seed + 100)


class OfAGraph(Skip):
    """Two values for each of the edges, as many edges as there are, and features of nodes."""

    def forward(self, x, edges):
        return super().forward(x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]))


def graphs(seed):
    edges = torch.randint(10, (2, 20 + seed), generator=torch.Generator().manual_seed(seed))
    return (numbers(seed, 10, 6), edges), numbers(seed + 1, 10, 6)


class WithPlaces(Skip):
    """Places that all samples have, and a scalar."""

    def forward(self, x, places, time):
        return super().forward(x + places[:, None] * time)


def placed(seed):
    return {"x": numbers(seed, 4, 5, 6), "places": torch.arange(5), "time": torch.tensor(0.3)}, numbers(seed, 4, 5, 6)


@pytest.mark.parametrize(("kind", "batches"), [(OfAGraph, graphs), (WithPlaces, placed)])
def test_a_batch_that_cannot_be_split_by_samples_trains_whole(kind, batches):
    check_trains_as_torch(kind, batches, F.mse_loss)
    x, y = batches(0)
    pipe = pf.Pipeline(kind(), loss=F.mse_loss, optimizer=torch.optim.SGD, example=(x, y), microbatches=2)
    with pytest.raises(DataError, match="trains with microbatches=1"):
        pipe.step(x, y)


def test_a_target_without_samples_is_evaluated_and_trained():
    pipe = pf.Pipeline(
        Skip(),
        loss=lambda o, y: (o.mean() - y) ** 2,
        optimizer=torch.optim.SGD,
        example=rows(0),
        stages=2,
        microbatches=1,
    )
    batch = numbers(1), torch.tensor(0.5)
    assert pipe.evaluate([batch, batch]) == pytest.approx(float(pipe.step(*batch)), rel=1e-6)


class RunningMean(Skip):
    """Changes its buffer in a part without gradients, which reads the batch."""

    def prepare(self):
        self.register_buffer("mean", torch.zeros(6))

    def begin(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x - self.mean


def test_a_part_without_gradients_writes_only_into_what_it_writes():
    check_trains_as_torch(RunningMean, rows, F.mse_loss)
