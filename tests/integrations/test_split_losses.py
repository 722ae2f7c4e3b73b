"""The rule by which losses of parts give that of a batch is found with a few samples."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.integrations.split_losses import MEAN, SUM, UNKNOWN, _rule

X = torch.tensor([[1.0], [-2.0], [3.0], [5.0]])
EVERY = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]])
ONE = torch.tensor([[0, 1], [-100, -100], [-100, -100], [-100, -100]])


def summed(x: Tensor, labels: Tensor) -> Tensor:
    counted = labels != -100
    return ((x - labels) ** 2)[counted].sum()


def mean(x: Tensor, labels: Tensor) -> Tensor:
    return summed(x, labels) / (labels != -100).sum().clamp(min=1)


def contrastive(x: Tensor, labels: Tensor) -> Tensor:
    return (x @ x.T).logsumexp(1).mean()


def nothing(x: Tensor, labels: Tensor) -> Tensor:
    return 0 * x.sum()


@pytest.mark.parametrize(
    ("loss", "labels", "rule"),
    [
        (summed, EVERY, SUM),
        (mean, EVERY, MEAN),
        (contrastive, EVERY, UNKNOWN),
        (nothing, EVERY, UNKNOWN),
        (mean, ONE, UNKNOWN),
    ],
)
def test_the_rule_is_the_one_that_fits(loss: Callable[..., Tensor], labels: Tensor, rule: str) -> None:
    def compute_loss(model: nn.Module, inputs: Any, num_items_in_batch: Any) -> Tensor:
        return loss(inputs["x"], inputs["labels"])

    trainer = SimpleNamespace(
        model=nn.Linear(1, 1), compute_loss=compute_loss, _get_num_items_in_batch=lambda batches, device: None
    )
    assert _rule(trainer, {"x": X, "labels": labels}) == rule
