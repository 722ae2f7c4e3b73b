"""Models of many kinds in a graph: each trains as by torch on data of other scales, or is refused by name."""

import random

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

import pipefit as pf
from pipefit.errors import DataError, ModelError
from tests.cutting.plain_torch import check_trains_as_torch

pytestmark = pytest.mark.slow


class Skip(nn.Module):
    """Four layers with a way around two of them, so that there is no list of blocks to cut between."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.out = (nn.Linear(6, 6) for _ in range(4))
        self.prepare()

    def prepare(self):
        """Adds the modules of a kind."""

    def begin(self, x):
        """The first part of the forward, on the batch."""
        return x

    def change(self, h):
        """The middle part of the forward."""
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
def test_a_batch_that_cannot_be_split_by_samples_trains_only_whole(kind, batches):
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


class NormAct(nn.BatchNorm1d):
    """As timm's: norm and activation in one module, with children that may have weights."""

    def __init__(self, channels, act, **options):
        super().__init__(channels, **options)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.2, self.eps)
        return self.act(self.drop(x))


class Norms(Skip):
    """Norms of several kinds."""

    def prepare(self):
        self.one, self.two = NormAct(6, nn.PReLU()), NormAct(6, nn.SiLU(inplace=True), momentum=0.4)
        self.three = nn.utils.parametrizations.weight_norm(nn.BatchNorm1d(6, momentum=None), dim=0)

    def change(self, h):
        return self.three(self.two(self.one(h)))


class RunningMean(Skip):
    """Changes its buffer in a part without gradients, which reads the batch."""

    def prepare(self):
        self.register_buffer("mean", torch.zeros(6))

    def begin(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x - self.mean


class Centred(nn.Module):
    """Replaces its buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, h):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class Inside(Skip):
    """A layer that replaces its buffer; names that a graph's module has as well."""

    def prepare(self):
        self.graph, self.code = nn.Linear(6, 6), Centred()

    def change(self, h):
        return self.code(self.graph(h))


class Codebook(Skip):
    """Vector quantisation; the codes follow what they are chosen for."""

    def prepare(self):
        self.register_buffer("code", torch.randn(5, 6))
        self.register_buffer("size", torch.ones(5))

    def change(self, h):
        nearest = torch.cdist(h, self.code).argmin(1)
        chosen = self.code[nearest]
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(nearest, 5).to(h.dtype)
                self.size.mul_(0.9).add_(0.1 * one_hot.sum(0))
                self.code.mul_(0.9).add_(0.1 * one_hot.t() @ h / self.size[:, None])
        return h + (chosen - h).detach()


class SpectralNorms(Skip):
    """The old one, whose weight is an attribute with a graph."""

    def prepare(self):
        self.first, self.third = (nn.utils.spectral_norm(nn.Linear(6, 6)) for _ in range(2))


class WeightNorm(Skip):
    """The old one."""

    def prepare(self):
        self.second = nn.utils.weight_norm(nn.Linear(6, 6))


class Rectified(Skip):
    """Begins in place, by a function."""

    def begin(self, x):
        return F.relu_(x)


class RectifiedByModule(Skip):
    """Begins in place, by a module."""

    def prepare(self):
        self.act = nn.ReLU(inplace=True)

    def begin(self, x):
        return self.act(x)


class Added(Skip):
    """Begins with an assignment in place, and uses the batch again at its end."""

    def forward(self, x):
        x += 1
        return super().forward(x) + x


class Views(Skip):
    """Writes into a view of what crosses."""

    def change(self, h):
        h = h * 2
        h[:, 0] += 1
        return h


class MaskOfValues(Skip):
    """Writes where a mask of activations is."""

    def change(self, h):
        h = h.clone()
        mask = h[:, 0] > 0.1
        h[mask] = h[mask] * 2
        return h


class Selected(Skip):
    """A number of rows that depends on activations."""

    def change(self, h):
        return h + h[h.norm(dim=-1) > 0.9].sum(0)


class Where(Skip):
    """A choice that is a tensor."""

    def change(self, h):
        return torch.where(h.detach().std() > 0.5, h, h * 2)


class Number(Skip):
    """A number of activations in Python."""

    def change(self, h):
        return h * h.detach().abs().max().item()


class OfBatch(Skip):
    """Python decides by the batch, which every stage has."""

    def forward(self, x):
        return super().forward(x if x.max() < 5 else -x)


class Sizes(Skip):
    """Python reads the number of samples."""

    def change(self, h):
        return h * h.shape[0] + torch.arange(h.shape[0]).to(h)[:, None]


class UnusedInput(Skip):
    """Has an input, and weights, that it does not use."""

    def prepare(self):
        self.idle = nn.Linear(3, 3)

    def forward(self, x, idle):
        return super().forward(x)


def with_idle(seed):
    x, y = rows(seed)
    return (x, numbers(seed, 6, 2)), y


class Replayed(Skip):
    """Replays a part."""

    def change(self, h):
        return torch.utils.checkpoint.checkpoint(lambda a: torch.tanh(self.second(a)), h, use_reentrant=False)


class ReplayedOld(Skip):
    """Replays a part, in the old way, whose graph has no gradients."""

    def change(self, h):
        return torch.utils.checkpoint.checkpoint(lambda a: torch.tanh(self.second(a)), h, use_reentrant=True)


class Hooked(Skip):
    """A hook after a module, and one on a weight's gradient."""

    def prepare(self):
        self.second.register_forward_hook(lambda module, given, output: output * 2)
        self.third.weight.register_hook(lambda grad: grad * 2)


EXACT = [
    (OfAGraph, graphs), (WithPlaces, placed), (UnusedInput, with_idle),
    *((kind, rows) for kind in (
        Norms, RunningMean, Inside, Codebook, SpectralNorms, WeightNorm, Rectified, RectifiedByModule, Added, Views,
        MaskOfValues, Selected, Where, Number, OfBatch, Sizes, Replayed, ReplayedOld, Hooked,
    )),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("kind", "batches"), EXACT)
def test_it_trains_as_torch_does_on_other_data(kind, batches):
    check_trains_as_torch(kind, batches, F.mse_loss)


class Deciding(Skip):
    def change(self, h):
        return h if h.sum() > 0 else -h


class Reading(Skip):
    def change(self, h):
        return h * (2 if h.mean().item() > 0 else 1)


class Chance(Skip):
    def change(self, h):
        return h if random.random() > 0.5 else -h


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Rounding(Skip):
    """Is a graph only without its own gradient, and has a value that goes around every block."""

    def forward(self, x):
        h = self.first(x)
        return self.out(self.third(_Rounded.apply(self.second(h) * 3)) + h)


class Forces(Skip):
    def forward(self, x):
        x = x.detach().requires_grad_(True)
        energy = super().forward(x).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


class Doubling(Skip):
    def prepare(self):
        self.second.register_full_backward_hook(lambda module, given, grads: (given[0] * 2,))


class Counting(Skip):
    def prepare(self):
        self.count = 0

    def change(self, h):
        self.count += 1
        return h * min(1.0, self.count / 10)


class Remembering(Skip):
    def prepare(self):
        self.seen = None

    def change(self, h):
        if self.seen is None:
            self.seen = h.detach().clone()
        return h - self.seen.mean(0)


class Clamping(Skip):
    def change(self, h):
        with torch.no_grad():
            self.third.weight.clamp_(-0.2, 0.2)
        return h


class Exporting(Skip):
    def begin(self, x):
        x += 0
        return x

    def change(self, h):
        return h * 0.5 if torch.compiler.is_exporting() else h


class _Noted(torch.autograd.Function):
    """Adds up gradients in a buffer, for logs."""

    @staticmethod
    def forward(ctx, h, sums):
        ctx.sums = sums
        return h.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.sums.add_(grad.abs().mean())
        return grad, None


class Noting(Skip):
    def prepare(self):
        self.register_buffer("sums", torch.zeros(()))

    def change(self, h):
        return _Noted.apply(h, self.sums)


class OfNumpy(Skip):
    def change(self, h):
        return h * float(h.detach().numpy().mean())


class Packed(Skip):
    """Packs sequences by their lengths."""

    def prepare(self):
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x, lengths):
        h = torch.tanh(self.first(x))
        packed = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.out(torch.tanh(self.second(padded)) + h)


def sequences(seed):
    return (numbers(seed, 4, 5, 6), torch.tensor([5, 4, 3, 2])), numbers(seed + 1, 4, 5, 6)


@pytest.mark.parametrize(
    ("kind", "batches", "message"),
    [
        (Deciding, rows, r"Could not guard on data-dependent expression.*if h.sum\(\) > 0.*Give cuts="),
        (Reading, rows, "Could not guard on data-dependent expression"),
        (Chance, rows, "Python's random numbers"),
        (Counting, rows, "count .*changes at every forward"),
        (Remembering, rows, "an earlier forward left"),
        (Clamping, rows, "third.weight"),
        (Exporting, rows, "differs from the whole model's"),
        (Noting, rows, "a buffer that the backward of the model's code writes"),
        (OfNumpy, rows, "OfNumpy"),
        (Forces, rows, "torch.autograd.grad, which its graph would lose"),
        (Doubling, rows, "second has a backward hook"),
        (Packed, sequences, "Packed cannot be cut"),
    ],
)
def test_what_no_trace_can_follow_is_refused_with_the_reason(kind, batches, message, capfd):
    with pytest.raises(ModelError, match=message):
        pf.cut(kind(), batches(0)[0])
    assert capfd.readouterr() == ("", "")
