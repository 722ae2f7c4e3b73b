"""A loss that reads what a forward leaves beside its output is refused; training leaves no trace of measurements."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipefit as pf
from pipefit.errors import ModelError

LEFT: list[Tensor] = []

Loss = Callable[[Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """A layer with an auxiliary loss, in an attribute or in a global list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, h: Tensor) -> Tensor:
        z = self.linear(h)
        self.aux = z.square().mean()
        return h + torch.tanh(z)


class Lists(Layer):
    def forward(self, h: Tensor) -> Tensor:
        h = super().forward(h)
        LEFT.append(h.mean())
        return h


class Blocks(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h


def flat(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(kind(), kind(), nn.Linear(6, 6))


def plain(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean()


def with_attributes(model: nn.Module) -> Loss:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        return plain(output, y) + sum(one.aux for one in model.modules() if isinstance(one, Layer))

    return loss


class Criterion:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return with_attributes(self.model)(output, y)


def with_method(model: nn.Module) -> Loss:
    return Criterion(model).loss


def with_list(model: nn.Module) -> Loss:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        total = plain(output, y) + sum(LEFT)
        LEFT.clear()
        return total

    return loss


def with_weights(model: nn.Module) -> Loss:
    weight = next(model.parameters())
    return lambda output, y: plain(output, y) + weight.square().sum()


def piped(model: nn.Module, loss: Loss, **options: Any) -> pf.Pipeline:
    return pf.Pipeline(
        model, loss=loss, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1), microbatches=2, **options
    )


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    LEFT.clear()
    return torch.randn(4, 6), torch.randn(4, 6)


ASIDE = [(Layer, with_attributes), (Layer, with_method), (Lists, with_list)]


@pytest.mark.parametrize("make", [flat, Blocks])
@pytest.mark.parametrize(("kind", "loss"), ASIDE)
def test_an_example_shows_that_a_loss_reads_what_a_forward_leaves(make: Any, kind: Any, loss: Any, batch: Any) -> None:
    model = make(kind)
    with pytest.raises(ModelError, match="the loss reads a value that the forward leaves"):
        piped(model, loss(model), stages=2, example=batch)
    assert not LEFT


@pytest.mark.parametrize(("kind", "loss"), ASIDE)
def test_without_an_example_the_first_forward_shows_it(kind: Any, loss: Any, batch: Any) -> None:
    model = flat(kind)
    with pytest.raises(ModelError, match="which the loss has, too"):
        piped(model, loss(model), stages=2).step(*batch)


def test_a_layer_that_reads_a_module_around_it_is_refused_at_the_first_forward(batch: Any) -> None:
    writes = Layer()

    class Reads(Layer):
        def forward(self, h: Tensor) -> Tensor:
            return super().forward(h) * writes.aux.detach()

    with pytest.raises(ModelError, match=r"layer 0 changes 0.*which layer 1 of another stage has, too, in writes"):
        piped(nn.Sequential(writes, Reads()), plain, stages=2).step(*batch)


@pytest.mark.parametrize("stages", [2, "auto"])
def test_measurements_leave_no_trace_in_layers_or_the_loss(stages: Any, batch: Any) -> None:
    class Counts(Lists):
        calls = 0

        def forward(self, h: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(h)

    model = nn.Sequential(Counts(), Counts())
    seen = []

    def loss(output: Tensor, y: Tensor) -> Tensor:
        seen.append(1)
        return plain(output, y)

    pipe = piped(model, loss, stages=stages, example=batch)
    assert not LEFT
    pipe.step(*batch)
    assert [layer.calls for layer in model] == [2, 2]
    assert len(LEFT) == 4
    assert len(seen) == 2


@pytest.mark.parametrize("given", [False, True])
def test_a_loss_with_a_gradient_for_weights_is_refused(given: bool, batch: Any) -> None:
    model = flat(Layer)
    pipe = piped(model, with_weights(model), stages=2, example=batch if given else None)
    with pytest.raises(ModelError, match=r"a gradient for a weight of shape \[6, 6\], which would be lost"):
        pipe.step(*batch)


def test_a_loss_with_weights_of_its_own_is_refused(batch: Any) -> None:
    proxies = nn.Parameter(torch.ones(6))
    pipe = piped(flat(Layer), lambda output, y: plain(output * proxies, y), stages=2)
    with pytest.raises(ModelError, match=r"a gradient for a weight of shape \[6\]"):
        pipe.step(*batch)


def test_a_loss_that_reads_weights_without_their_gradient_trains(batch: Any) -> None:
    model = Blocks(Layer)
    weight = next(model.parameters())
    piped(model, lambda output, y: plain(output, y) + weight.detach().square().sum(), stages=1, example=batch).step(
        *batch
    )


def summed(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().sum()


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    return (output @ y.T).logsumexp(1).mean()


def over_tokens(output: Tensor, y: Tensor) -> Tensor:
    counted = y > 0.5
    return (output - y).square()[counted].mean()


@pytest.mark.parametrize(
    ("loss", "updates", "warns"),
    [
        (plain, pf.Updates(), False),
        (lambda output, y: (plain(output, y), {"error": 1.0}), pf.Updates(), False),
        (summed, pf.Updates(), True),
        (contrastive, pf.Updates(), True),
        (over_tokens, pf.Updates(), True),
        (over_tokens, pf.Updates(weigh=lambda y: float((y > 0.5).sum())), False),
        (plain, pf.Updates(weigh=lambda y: y.abs().sum().item()), True),
    ],
)
def test_an_example_shows_that_a_loss_is_not_the_mean_of_its_parts(
    loss: Loss, updates: pf.Updates, warns: bool, batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    piped(flat(Layer), loss, stages=1, example=batch, updates=updates)
    assert ("the mean of its parts, by their weights, is" in caplog.text) == warns


@pytest.mark.parametrize(("loss", "warns"), [(plain, False), (summed, True), (contrastive, True), (over_tokens, True)])
def test_without_an_example_the_first_samples_show_it(
    loss: Loss, warns: bool, batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = piped(flat(Layer), loss, stages=2)
    pipe.step(*batch)
    pipe.step(*batch)
    assert caplog.text.count("the mean of its parts, by their weights, is") == warns


def test_halves_with_the_same_classes_hide_nothing(caplog: pytest.LogCaptureFixture) -> None:
    weights = torch.tensor([0.1, 1.0, 5.0, 1.0, 1.0, 1.0])
    x = torch.randn(6, 6)
    classes = torch.arange(6) % 3

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, y, weight=weights)

    piped(flat(Layer), loss, stages=1, example=(x, classes))
    assert "the mean of its parts, by their weights, is" in caplog.text


@pytest.mark.parametrize("late", [1, 5])
def test_without_an_example_later_samples_show_it_too(late: int, caplog: pytest.LogCaptureFixture) -> None:
    y = torch.arange(36).view(6, 6) % 3
    y[late, 0] = -100
    pipe = piped(flat(Layer), lambda output, y: nn.functional.cross_entropy(output, y), stages=1)
    for targets in y:
        pipe.step(torch.randn(6, 6), targets)
    assert caplog.text.count("the mean of its parts, by their weights, is") == (late < 4)


def test_the_check_of_a_first_loss_leaves_no_attribute_in_it(batch: Any) -> None:
    def noting(output: Tensor, y: Tensor) -> Tensor:
        attributes = noting.__dict__
        attributes["calls"] = attributes.get("calls", 0) + 1
        return plain(output, y)

    pipe = piped(flat(Layer), noting, stages=1)
    pipe.step(*batch)
    assert noting.__dict__ == {"calls": 2}


CLASSES = torch.tensor([[0, -1, -1], [2, 1, -1], [-1, -1, -1], [1, 1, 2], [-1, -1, -1], [-1, 0, -1]])


WEIGHTS = torch.tensor([0.1, 4.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("parallelism", [pf.Parallelism(), pf.Parallelism(replicas=(2, 1))])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(ignore_index=-1),
        nn.CrossEntropyLoss(ignore_index=-1, label_smoothing=0.1),
        nn.CrossEntropyLoss(WEIGHTS, ignore_index=-1, label_smoothing=0.1),
        nn.NLLLoss(WEIGHTS, ignore_index=-1),
    ],
)
def test_cross_entropy_is_the_mean_of_the_whole_batch_over_targets_that_count(
    parallelism: pf.Parallelism, loss: nn.Module
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 9), nn.Unflatten(1, (3, 3))).double()
    plain_model = copy.deepcopy(model)
    x = torch.randn(6, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        value = loss(plain_model(x), CLASSES)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(value.item())
    pipe = pf.Pipeline(
        model,
        loss=loss,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        stages=2,
        microbatches=4,
        parallelism=parallelism,
    )
    assert [pipe.step(x, CLASSES) for _ in range(3)] == pytest.approx(expected, rel=1e-12)
