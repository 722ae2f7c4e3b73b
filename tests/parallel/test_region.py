"""Inputs that enter the processes of a tensor-parallel rank."""

import weakref

import torch

from pipefit.parallel.region import Region


def test_an_input_is_entered_once_and_freed_after_its_last_use():
    region = Region(None, 2, 0)
    x = torch.ones(2, 2, requires_grad=True) * 2
    first, second = region.enter(x), region.enter(x)
    assert second is first
    # Without any garbage collection: a cycle would hold the activations of every micro-batch.
    freed = weakref.ref(x)
    del x, first, second
    assert freed() is None
