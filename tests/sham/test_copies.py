"""Copies of a step to the second GPU, counted: batches are pinned once, and large ones do not wait for computation."""

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from tests.gpu import plain
from tests.pipelines import grouped
from torch import nn

from pipefit import Pipeline
from pipefit.stage import accelerator

pytestmark = pytest.mark.gpu

DEVICE = "cuda:1"


def pipeline(**options: Any) -> Pipeline:
    settings = {"stages": 3, "optimizer": plain.sgd, "microbatches": 4, "device": DEVICE} | options
    return Pipeline(plain.network(), loss=nn.functional.cross_entropy, **grouped(**settings))


def test_a_batch_is_pinned_once_for_all_its_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: Counter[tuple[int, ...]] = Counter()

    def counting(tensor: torch.Tensor, device: torch.device, work: Any = accelerator.pinned_copy) -> torch.Tensor:
        if not tensor.is_pinned():
            pinned[tuple(tensor.shape)] += 1
        return work(tensor, device)

    monkeypatch.setattr(accelerator, "pinned_copy", counting)
    x, y = plain.batches()[0]
    pipeline().step(x, y)
    assert pinned == {tuple(x.shape): 1, tuple(y.shape): 1}


def test_a_batch_with_gaps_in_memory_is_copied_without_a_wait() -> None:
    x, y = plain.batches()[0]
    with_gaps = torch.cat([x, x], 1)[:, : x.shape[1]]
    pipe = pipeline()
    pipe.step(with_gaps, y)
    waits = sys.modules["sham_driver"].waits
    waits.clear()
    pipe.step(with_gaps, y)
    assert waits == {"runtime/finite.py _read: copy to host": 3}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_copies_ahead_have_an_order_and_the_numbers_of_plain_torch(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = []

    def noting(stream: Any, work: Any = accelerator.on_stream) -> Any:
        streams.append(stream)
        return work(stream)

    monkeypatch.setattr(accelerator, "AHEAD_BYTES", 0)
    monkeypatch.setattr(accelerator, "on_stream", noting)
    pipe = pipeline(schedule=schedule)
    losses = [pipe.step(x, y) for x, y in plain.batches()]
    expected, _ = plain.trained(plain.network(), plain.batches(), plain.sgd)
    assert losses == pytest.approx(expected, rel=plain.TOLERANCE)
    assert len(streams) == len(losses) * 4 * 2  # input and target of each micro-batch
    assert len({stream.stream_id for stream in streams}) == 1
