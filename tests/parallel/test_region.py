"""Inputs that enter the processes of a tensor-parallel rank."""

import weakref

import pytest
import torch
from torch import nn

from pipefit.parallel.loss import shared_loss
from pipefit.parallel.region import IsolatedRegion, Region


def test_an_input_is_entered_once_and_freed_after_its_last_use():
    region = Region(None, 2, 0)
    x = torch.ones(2, 2, requires_grad=True) * 2
    first, second = region.enter(x), region.enter(x)
    assert second is first
    # Without any garbage collection: a cycle would hold the activations of every micro-batch.
    freed = weakref.ref(x)
    del x, first, second
    assert freed() is None


@pytest.mark.parametrize("target", [-5, 12])
def test_a_target_that_no_process_has_is_refused_as_by_torch(target):
    loss = shared_loss(nn.functional.cross_entropy, IsolatedRegion(None, 2, 0))
    logits, targets = torch.ones(3, 6), torch.tensor([0, 11, target])
    with pytest.raises(IndexError, match=f"from 0 to 11 exist, got .*{target}"):
        loss(logits, targets)
    targets[2] = -100
    assert loss(logits, targets).isfinite()


def test_targets_that_are_odds_need_all_logits():
    loss = shared_loss(nn.functional.cross_entropy, IsolatedRegion(None, 2, 0))
    logits = torch.tensor([[0.0, 1.0]])
    odds = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    wanted = nn.functional.cross_entropy(logits.repeat(1, 2), odds)
    assert torch.equal(loss(logits, odds), wanted)
