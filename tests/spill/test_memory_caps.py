"""Spilling under a cap on the device's memory."""

import re

import pytest
import torch
from tests.pipelines import grouped
from tests.spill.small_runs import adamw, network, same, sgd
from torch import nn

from pipefit import Pipeline
from pipefit.errors import InfeasibleError, PlanError
from pipefit.models import build
from pipefit.spec.options import Spilled, Updates

pytestmark = [pytest.mark.usefixtures("small_probes"), pytest.mark.slow]


def capped(cap):
    bundle = build("gpt", layers=6, hidden=32, heads=2, context=8, vocab=32, tied=False)
    example = bundle.example(4, 0)
    pipe = Pipeline(
        bundle.layers, loss=bundle.loss, optimizer=adamw, microbatches=2, example=example, spill=Spilled(cap)
    )
    return pipe, example


def test_a_cap_cuts_the_model_so_that_it_is_kept():
    pipe, example = capped("1 MiB")
    assert pipe.workers[0].spilling.arena.num_bytes < pipe.plan.spill.peak_bytes <= 2**20
    pipe.step(*example)
    pipe.close()


def test_a_cap_that_is_too_small_names_the_smallest_that_works():
    with pytest.raises(InfeasibleError) as refusal:
        capped("100 kB")
    smallest = re.search(r"the smallest cap that works is ([\d.]+ KiB)", str(refusal.value)).group(1)
    pipe, example = capped(smallest)
    pipe.step(*example)
    pipe.close()


MLP = {"layers": 6, "width": 64, "inputs": 64}


GPT = {"layers": 3, "hidden": 32, "heads": 2, "context": 16, "vocab": 64}


@pytest.mark.parametrize(
    ("name", "options", "optimizer", "keep", "cap"),
    [
        ("gpt", {**GPT, "tied": False, "dropout": 0.1}, adamw, "auto", 400 * 1024),
        ("gpt", {**GPT, "tied": False}, adamw, "none", 450 * 1024),
        ("gpt", {**GPT, "tied": True}, sgd, "auto", 500 * 1024),
        ("mlp", MLP, adamw, "auto", 150 * 1024),
    ],
    ids=["gpt", "gpt-replayed", "gpt-tied", "mlp"],
)
def test_a_tiny_model_takes_no_more_than_its_plan_claims(name, options, optimizer, keep, cap):
    torch.manual_seed(0)
    bundle = build(name, **options)
    pipe = Pipeline(
        bundle.layers,
        loss=bundle.loss,
        optimizer=optimizer,
        microbatches=4,
        example=bundle.example(8, 0),
        spill=Spilled(cap, keep=keep),
        updates=Updates(clip_norm=1.0),
    )
    for number in range(2):
        pipe.step(*bundle.example(8, number))
    assert pipe.plan.spill is not None and pipe.held_bytes is not None
    [claimed] = pipe.plan.prediction.peak_bytes
    # Bookkeeping is as much as tensors here; it is counted too.
    assert 0.5 * claimed < pipe.held_bytes <= claimed <= cap
    pipe.close()


def test_a_model_that_fits_is_not_spilled():
    pipe, example = capped("1 GiB")
    assert pipe.plan.spill is None and pipe.workers[0].spilling is None
    pipe.step(*example)


def test_a_cap_needs_an_example():
    with pytest.raises(PlanError, match="example"):
        Pipeline(network(), loss=nn.functional.cross_entropy, optimizer=adamw, spill=Spilled("1 GiB"))


@pytest.mark.parametrize("cap", ["420 KiB", "700 KiB"])
def test_under_a_cap_stages_keep_their_activations_as_far_as_they_fit_and_train_alike(cap):
    def model():
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8)))

    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(48, 96, generator=generator) for _ in range(3)]
    more = {"loss": nn.functional.mse_loss, "optimizer": adamw, "microbatches": 3, "seed": 3}
    one = Pipeline(model(), **grouped(stages=1, **more))
    other = Pipeline(model(), **grouped(example=(batches[0], batches[0]), spill=Spilled(cap), **more))
    assert other.plan.spill.keeps
    for x in batches:
        assert one.step(x, x) == other.step(x, x)
    assert same(one.state_dict(), other.state_dict())
    other.close()
