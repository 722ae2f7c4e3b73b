"""Buckets of gradients: where gradients go, when reductions start, and what is left behind on the user's parameters."""

import gc

import pytest
import torch
from torch import Tensor, nn

from pipefit.parallel.buckets import GradientBuckets, layout


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))


def hooks(parameters: list[nn.Parameter]) -> int:
    return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in parameters)


@pytest.mark.slow
def test_hooks_go_with_the_buckets_though_the_parameters_stay() -> None:
    parameters = list(model().parameters())
    buckets = GradientBuckets(parameters)
    assert hooks(parameters) == len(parameters)
    del buckets
    gc.collect()
    assert hooks(parameters) == 0


def test_a_backward_that_is_not_the_last_of_an_update_starts_nothing() -> None:
    layers = model()
    buckets = GradientBuckets(list(layers.parameters()))
    started: list[int] = []
    buckets.begin(lambda number, flat: started.append(number))
    layers(torch.ones(1, 256)).sum().backward()
    assert started == []


def test_buckets_are_launched_in_order_with_the_gradients_of_all_micro_batches() -> None:
    layers, alone = model(), model()
    parameters = list(layers.parameters())
    buckets = GradientBuckets(parameters)
    assert [len(bucket.members) for bucket in buckets.buckets] == [8, 8]
    launched: list[tuple[int, Tensor]] = []
    x, y = torch.randn(3, 256), torch.randn(5, 256)
    for _ in range(2):
        layers(x).square().sum().backward()
        buckets.adopt()
        buckets.begin(lambda number, flat: launched.append((number, flat.clone())))
        buckets.watch(lambda: layers(y).square().sum().backward())
        buckets.finish()
        alone(x).square().sum().backward()
        alone(y).square().sum().backward()
        assert [number for number, _ in launched] == [0, 1]
        for (_, flat), bucket in zip(launched, buckets.buckets, strict=True):
            wanted = list(alone.parameters())
            for index, view in zip(bucket.members, bucket.views(flat, parameters), strict=True):
                assert torch.equal(view, wanted[index].grad), index
        launched.clear()
        for parameter in (*parameters, *alone.parameters()):
            parameter.grad = None


def test_gradients_of_buckets_without_memory_are_made_in_their_places() -> None:
    layers, alone = model(), model()
    parameters = list(layers.parameters())
    buckets = GradientBuckets(parameters)
    for _ in range(2):
        buckets.free()
        assert not any(flat.untyped_storage().nbytes() for flat in buckets.flats)
        buckets.hold()
        places = [parameter.grad for parameter in parameters]
        buckets.begin(lambda number, flat: None)
        # The last layer is not reached.
        buckets.watch(lambda: layers[:-1](torch.ones(3, 256)).square().sum().backward())
        assert all(parameter.grad is place for parameter, place in zip(parameters, places, strict=True))
        buckets.finish()
        assert buckets.idle == [14, 15]
        assert buckets.marks.tolist() == [1.0] * 14 + [0.0, 0.0]
        alone[:-1](torch.ones(3, 256)).square().sum().backward()
        for parameter, wanted in zip(parameters[:-2], alone.parameters(), strict=False):
            assert torch.equal(parameter.grad, wanted.grad)
        alone.zero_grad()


def test_a_bucket_is_half_of_all_between_1_and_25_mib() -> None:
    def count(num: int, size: int) -> int:
        return len(layout([torch.empty(size, device="meta") for _ in range(num)]))

    mib = 1 << 18
    assert (count(4, mib // 4), count(8, mib // 2), count(8, 2 * mib), count(20, 10 * mib)) == (1, 2, 2, 7)
