"""Batch norms of every kind train in a pipeline as in plain torch."""

import contextlib
import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stage.norms import CHANNELS, KINDS, LENGTH, ONLY_WHOLE, ByHand
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from pipefit import Pipeline
from pipefit.errors import ModelError
from pipefit.spec.options import Parallelism

STEPS = 3
Data = list[tuple[Tensor, Tensor]]


def model_of(names: Sequence[str], nested: bool = False) -> nn.Sequential:
    """Four layers or more: each norm is behind a linear layer."""
    torch.manual_seed(len(names))
    blocks = [nn.Sequential(nn.Linear(LENGTH, LENGTH), (KINDS | ONLY_WHOLE)[name]()) for name in names]
    middle = [nn.Sequential(*blocks)] if nested else [layer for block in blocks for layer in block]
    return nn.Sequential(nn.Linear(LENGTH, LENGTH), *middle, nn.Tanh(), nn.Linear(LENGTH, 2)).double()


def data(samples: int) -> Data:
    generator = torch.Generator().manual_seed(samples)

    def one(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return [(2 * one(samples, CHANNELS, LENGTH) + 1, one(samples, CHANNELS, 2)) for _ in range(STEPS)]


def pipeline(model: nn.Module, num_microbatches: int, **options: object) -> Pipeline:
    return Pipeline(
        copy.deepcopy(model),
        loss=F.mse_loss,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        microbatches=num_microbatches,
        **{"stages": 2, "parallelism": Parallelism(ranks=2)} | options,  # type: ignore[arg-type]
    )


def trained(
    model: nn.Module, batches: Data, num_microbatches: int, **options: object
) -> tuple[list[float], dict[str, Tensor]]:
    pipe = pipeline(model, num_microbatches, **options)
    losses = [pipe.step(*batch) for batch in batches]
    weights: dict[str, Tensor] = {}
    for worker in pipe.workers:
        for stage in worker.stages.values():
            weights |= {name: value.clone() for name, value in stage.state_dict().items()}
    pipe.close()
    return losses, weights


def notes(norm: nn.Module, given: tuple[Tensor], seen: dict[nn.Module, list[Tensor]]) -> None:
    seen.setdefault(norm, []).append(given[0].detach())


@contextlib.contextmanager
def inputs_of(norms: Sequence[nn.Module]) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """The inputs of norms in the forwards of a context, in order."""
    seen: dict[nn.Module, list[Tensor]] = {}
    hooks = [
        norm.register_forward_pre_hook(lambda module, given: notes(module, given, seen), prepend=True) for norm in norms
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def plain_torch(model: nn.Module, batches: Data, num_microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    """Accumulates gradients; then each norm runs once more, on the micro-batches of the mini-batch together."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats and m.training]
    norms = [norm for norm in norms if not isinstance(norm, ByHand)]
    losses = []
    for x, y in batches:
        total, calls = 0.0, []
        for part, wanted in zip(x.tensor_split(num_microbatches), y.tensor_split(num_microbatches), strict=True):
            before = {norm: [b.clone() for b in norm.buffers(recurse=False)] for norm in norms}
            with inputs_of(norms) as seen:
                loss = F.mse_loss(model(part), wanted) * (len(part) / len(x))
            loss.backward()
            total += loss.item()
            calls.append(seen)
            for norm, kept in before.items():
                for buffer, value in zip(norm.buffers(recurse=False), kept, strict=True):
                    buffer.copy_(value)
        for norm in norms:
            for together in zip(*(seen[norm] for seen in calls), strict=True):
                with torch.no_grad():
                    norm(torch.cat(together))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model.state_dict()


def assert_same(got: tuple[list[float], dict[str, Tensor]], wanted: tuple[list[float], dict[str, Tensor]]) -> None:
    assert got[0] == pytest.approx(wanted[0], rel=1e-9)
    assert got[1].keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        torch.testing.assert_close(
            got[1][name], value, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


@given(
    names=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4),
    nested=st.booleans(),
    num_microbatches=st.integers(1, 3),
    samples=st.integers(6, 9),
)
@settings(max_examples=40, deadline=None)
def test_any_batch_norms_train_as_in_plain_torch(
    names: list[str], nested: bool, num_microbatches: int, samples: int
) -> None:
    model, batches = model_of(names, nested), data(samples)
    assert_same(trained(model, batches, num_microbatches), plain_torch(model, batches, num_microbatches))


@pytest.mark.parametrize("name", sorted(KINDS | ONLY_WHOLE))
def test_with_one_micro_batch_a_norm_of_any_kind_is_plain_torch(name: str) -> None:
    model, batches = model_of([name, "act after", name]), data(7)
    whole = copy.deepcopy(model)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(whole(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_same(trained(model, batches, 1), (losses, whole.state_dict()))


@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_replay_changes_no_running_average(recompute: str, nested: bool) -> None:
    names = [name for name in sorted(KINDS) if name not in ("no norm", "instance")]
    model, batches = model_of(names, nested), data(6)
    got = trained(model, batches, 2, parallelism=Parallelism(ranks=2, recompute=recompute))
    assert_same(got, plain_torch(model, batches, 2))


@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize("name", ["no norm", "instance"])
def test_a_forward_that_changes_another_buffer_is_not_replayed(recompute: str, name: str) -> None:
    model, batches = model_of([name, name], nested=True), data(6)
    with pytest.raises(ModelError, match=r"changes the buffer 1\.0\.1\.running_mean, so it cannot be replayed"):
        trained(model, batches, 2, stages=[2, 2], parallelism=Parallelism(ranks=2, recompute=recompute))


class Checkpointed(nn.Module):
    """The user's own replays."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_replays_of_the_users_own_code_change_no_running_average() -> None:
    inner, batches = model_of(["act after", "plain", "reads"], nested=True), data(7)
    whole = copy.deepcopy(inner)
    inner[1] = Checkpointed(inner[1])
    losses, weights = trained(inner, batches, 2)
    assert_same((losses, {name.replace("1.inner", "1"): value for name, value in weights.items()}),
                plain_torch(whole, batches, 2))  # fmt: skip


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "1f1b"])
def test_replicas_add_up_the_statistics_of_their_micro_batches(schedule: str) -> None:
    model, batches = model_of(["act after", "twice", "act after, cumulative", "reads"]), data(8)
    spread = Parallelism(ranks=4, replicas=2)
    assert_same(trained(model, batches, 4, schedule=schedule, parallelism=spread), plain_torch(model, batches, 4))


def test_evaluation_uses_the_running_averages_and_changes_none() -> None:
    names = [name for name in sorted(KINDS) if name != "untracked"]
    model, batches = model_of(names), data(6)
    pipe = pipeline(model, 2)
    pipe.fit(batches)
    whole = copy.deepcopy(model)
    whole.load_state_dict(pipe.state_dict())
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    wanted = F.mse_loss(whole.eval()(batches[0][0]), batches[0][1]).item()
    assert float(pipe.evaluate(batches[:1])) == pytest.approx(wanted, rel=1e-10)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
    pipe.close()


def test_a_closed_pipeline_leaves_the_classes_of_the_model() -> None:
    model, batches = model_of(sorted(KINDS)), data(6)
    classes = [type(module) for module in model.modules()]
    pipe = Pipeline(model, loss=F.mse_loss, optimizer=torch.optim.SGD, stages=1, microbatches=2)
    pipe.fit(batches)
    pipe.close()
    assert [type(module) for module in model.modules()] == classes
    assert all(type(buffer) is Tensor for buffer in model.buffers())


def test_averages_that_are_changed_after_the_norm_are_refused() -> None:
    class Clamps(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            normal = super().forward(x)
            self.running_var.clamp_(min=0.5)  # type: ignore[union-attr]
            return normal

    model = nn.Sequential(nn.Linear(LENGTH, LENGTH), Clamps(CHANNELS), nn.Linear(LENGTH, 2)).double()
    with pytest.raises(ModelError, match="Clamps changes its running averages itself, and torch's batch norm does too"):
        trained(model, data(6), 2)


def test_a_norm_over_all_processes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(LENGTH, LENGTH), nn.SyncBatchNorm(CHANNELS), nn.Linear(LENGTH, 2)).double()
    with pytest.raises(ModelError, match=r"nn\.SyncBatchNorm .*use nn\.BatchNorm2d"):
        trained(model, data(6), 2)


def own_statistics(x: Tensor, norm: nn.BatchNorm1d) -> Tensor:
    """The definition, which has a value for one sample too."""
    assert norm.weight is not None
    return (x - x.mean(0)) / (x.var(0, correction=0) + norm.eps).sqrt() * norm.weight + norm.bias


@pytest.mark.parametrize("kind", ["plain", "act before"])
def test_a_channel_of_one_value_becomes_its_bias_and_counts_for_the_averages(kind: str) -> None:
    """Five samples in three micro-batches: the last one holds a single sample."""
    model = nn.Sequential(nn.Linear(3, CHANNELS), KINDS[kind](), nn.Linear(CHANNELS, 2)).double()
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d) and norm.momentum is not None
    nn.init.normal_(norm.bias)
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    losses, weights = trained(model, [(x, y)], 3)

    hidden = model[0](x)
    hidden, factor = (F.silu(hidden), 2) if kind == "act before" else (hidden, 1)
    normal = torch.cat([factor * own_statistics(part, norm) for part in hidden.tensor_split(3)])
    torch.testing.assert_close(normal[4], factor * norm.bias)
    assert losses[0] == pytest.approx(F.mse_loss(model[2](normal), y).item())
    torch.testing.assert_close(weights["1.running_mean"], norm.momentum * hidden.mean(0))
    wanted = 1 - norm.momentum + norm.momentum * hidden.var(0)
    torch.testing.assert_close(weights["1.running_var"], wanted)


@pytest.mark.parametrize(
    ("centre", "micro_batches", "parallelism"),
    [
        (1.8e11, 1, Parallelism(ranks=2)),
        (1.8e11, 4, Parallelism(ranks=2)),
        (1e4, 4, Parallelism(ranks=4, replicas=2)),
    ],
)
def test_the_variance_of_large_values_that_are_alike_is_that_of_torch(centre, micro_batches, parallelism):
    """As a difference of sums of squares it was -479,348 where torch has 0.81, and evaluation gave NaN."""
    x = centre + torch.arange(32, dtype=torch.float64).view(8, 4).remainder(5) / 64
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    want = nn.BatchNorm1d(4).double()
    want(x)
    pipe = Pipeline(
        model,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.0),
        stages=2,
        microbatches=micro_batches,
        parallelism=parallelism,
    )
    pipe.step(x, torch.zeros(8, 2, dtype=torch.float64))
    torch.testing.assert_close(pipe.state_dict()["0.running_var"], want.running_var, rtol=1e-6, atol=1e-6)
