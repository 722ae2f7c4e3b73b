"""Losses and gradients that are not numbers: what the weights are afterwards."""

import math

import pytest
import torch
from tests.pipelines import grouped
from torch import nn

import pipefit as pf
from pipefit.errors import NonFiniteLossError, PlanError
from pipefit.spec.options import Updates


class Overflow(torch.autograd.Function):
    """The identity; its gradient is infinite for an input with a large sum."""

    @staticmethod
    def forward(ctx, x):
        ctx.bad = bool((x.abs() > 1e3).any())
        return x.clamp(-1, 1) if ctx.bad else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, math.inf) if ctx.bad else grad


class Overflowing(nn.Module):
    def forward(self, x):
        return Overflow.apply(x)


def model():
    torch.manual_seed(0)
    layers = [
        nn.Linear(4, 8),
        nn.BatchNorm1d(8, affine=False),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Linear(8, 3),
    ]
    return nn.Sequential(*layers).double()


def model_without_averages():
    return nn.Sequential(*[layer for layer in model() if not isinstance(layer, nn.BatchNorm1d)])


def batches(bad=None, value=math.nan, count=5):
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        x, y = torch.randn(8, 4, generator=generator).double(), torch.randint(0, 3, (8,), generator=generator)
        if index == bad:
            x[5] = value
        found.append((x, y))
    return found


def pipeline(model=None, **options):
    settings = {"loss": nn.CrossEntropyLoss(), "optimizer": lambda p: torch.optim.AdamW(p, 0.01), "microbatches": 2}
    return pf.Pipeline(model or globals()["model"](), **grouped(**settings | {"stages": 2} | options))


SYNCHRONOUS = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "clip_norm": 1.0},
    {"schedule": "interleaved", "chunks": 2, "stages": 4},
    {"schedule": "zb-h1"},
    {"schedule": "1f1b", "replicas": 2},
    {"schedule": "1f1b", "replicas": 2, "shard": "optimizer"},
    {"schedule": "spilled", "stages": 3, "clip_norm": 1.0},
]


def _equal(state, other):
    return all(torch.equal(state[name], other[name]) for name in other)


@pytest.mark.parametrize("options", SYNCHRONOUS, ids=lambda o: " ".join(map(str, o.values())))
def test_a_loss_that_is_no_number_leaves_weights_and_statistics_as_before(options, tmp_path):
    pipe, good = pipeline(**options), pipeline(**options)
    with pytest.raises(
        NonFiniteLossError, match="step 4 was not made: the loss of its micro-batches 1 is not"
    ) as error:
        pipe.fit(batches(3), callbacks=[pf.Checkpoints(pipe, tmp_path)])
    assert "the weights are those after step 3" in str(error.value) and str(tmp_path / "step-000003") in str(
        error.value
    )
    good.fit(batches()[:3])
    assert _equal(pipe.state_dict(), good.state_dict())
    resumed = pipeline(**options)
    assert resumed.load(tmp_path).step == 3
    assert resumed.fit(batches()[4:]) == good.fit(batches()[4:]) == pipe.fit(batches()[4:])


@pytest.mark.parametrize("options", SYNCHRONOUS, ids=lambda o: " ".join(map(str, o.values())))
def test_a_batch_that_is_skipped_changes_nothing(options):
    pipe, good = pipeline(**options, nonfinite="skip"), pipeline(**options)
    losses = pipe.fit(batches(2))
    assert [math.isnan(loss) for loss in losses] == [False, False, True, False, False]
    assert good.fit(batches()[:2] + batches()[3:]) == losses[:2] + losses[3:]
    assert _equal(pipe.state_dict(), good.state_dict())


def test_a_gradient_that_is_no_number_is_found_before_any_rank_steps():
    def overflowing():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Overflowing(), nn.Linear(4, 8), nn.Linear(8, 3)).double()

    pipe, good = pipeline(overflowing(), stages=[2, 2]), pipeline(overflowing(), stages=[2, 2])
    with pytest.raises(NonFiniteLossError, match="step 2 was not made: a gradient on the ranks 0 is not finite"):
        pipe.fit(batches(1, 1e9))
    good.fit(batches()[:1])
    assert _equal(pipe.state_dict(), good.state_dict())


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw", "zb-h2", "spilled"])
def test_without_a_common_norm_no_stage_takes_what_is_no_number(schedule):
    pipe = pipeline(schedule=schedule)
    with pytest.raises(NonFiniteLossError):
        pipe.fit(batches(2), 5)
    # Weights of spilled stages are elsewhere.
    owned = [one for worker in pipe.workers if not worker.spilling for own in worker.owned.values() for one in own]
    weights = [one.parameter for one in owned]
    assert all(weight.isfinite().all() for weight in weights)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw", "zb-h2", "spilled"])
def test_every_schedule_can_skip(schedule):
    pipe = pipeline(schedule=schedule, nonfinite="skip")
    losses = pipe.fit(batches(2), 5)
    assert [math.isnan(loss) for loss in losses] == [False, False, True, False, False]
    assert all(value.isfinite().all() for value in pipe.state_dict().values())


def test_the_batch_is_named_where_there_is_a_loader():
    data = batches(3)
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    with pytest.raises(NonFiniteLossError, match="batch 3 of epoch 0, both counted from 0"):
        pipeline().fit(loader)


def test_off_is_found_in_the_loss_after_the_step():
    with pytest.raises(NonFiniteLossError, match="the weights may hold it already"):
        pipeline(nonfinite="off").fit(batches(1))


def test_off_steps_with_finite_gradients_where_a_mean_over_no_labels_is_no_number():
    data = batches(count=1)
    data[0][1][:4] = -100
    # A function of the user's, of which pipefit does not know that labels are ignored.
    options = {"loss": lambda output, target: nn.functional.cross_entropy(output, target), "clip_norm": 1.0}
    pipe, good = pipeline(nonfinite="off", **options), pipeline(nonfinite="off", **options)
    with pytest.raises(NonFiniteLossError):
        pipe.fit(data)
    assert all(value.isfinite().all() for value in pipe.state_dict().values())
    assert not _equal(pipe.state_dict(), good.state_dict())


def test_a_micro_batch_of_weight_0_counts_for_nothing():
    data = batches(count=1)
    data[0][1][:4] = -100
    x, y = data[0]
    pipe = pipeline(weigh=lambda target: float((target != -100).sum()), stages=[1, 4], model=model_without_averages())
    alone = model_without_averages()
    expected = nn.functional.cross_entropy(alone(x[4:]), y[4:])
    expected.backward()
    assert pipe.step(x, y) == pytest.approx(expected.item())
    torch.optim.AdamW(alone.parameters(), 0.01).step()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(pipe.state_dict()[name], value)


def test_an_unknown_policy_is_refused():
    with pytest.raises(PlanError, match="nonfinite: expected one of stop, skip, off, got 'ignore'"):
        pipeline(nonfinite="ignore")
    assert Updates().nonfinite == "stop"
