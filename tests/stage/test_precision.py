"""Mixed precision: a pipeline under autocast computes what one process under autocast computes; one scale for all."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipelines import grouped
from tests.testing.equality_models import make
from torch import Tensor, nn

from pipefit import Pipeline
from pipefit.errors import PipefitError
from pipefit.models.examples import mean_cross_entropy
from pipefit.stage.precision import LossScale

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def float_model(name: str = "wide") -> tuple[nn.Sequential, Callable[[int, int], tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    if name != "wide":
        model, example = make(name)

        def narrower(size: int, seed: int) -> tuple[Tensor, Tensor]:
            x, y = example(size, seed)
            return (x.float() if x.is_floating_point() else x), y

        return model.float(), narrower
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(5)]

    def example(size: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(size, 16, generator=generator), torch.randint(0, 4, (size,), generator=generator)

    return nn.Sequential(*blocks, nn.Linear(16, 4)), example


def descend(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


class One:
    """One process: torch's autocast and GradScaler; what crosses a border of stages is rounded there and widened."""

    def __init__(self, model: nn.Sequential, precision: str, counts: Sequence[int], scale: float | None) -> None:
        self.model, self.half = copy.deepcopy(model), HALF[precision]
        ends = [sum(counts[: index + 1]) for index in range(len(counts))]
        self.borders = set(ends[:-1])
        self.optimizer = descend(list(self.model.parameters()))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        self.scaler = torch.amp.GradScaler("cpu", scale or 1.0, enabled=scale is not None)

    def forward(self, x: Any) -> Any:
        for index, layer in enumerate(self.model):
            if index in self.borders and x.requires_grad:
                x = x.to(self.half).float()
            with torch.autocast("cpu", self.half):
                x = layer(x)
        return x

    def step(self, x: Tensor, y: Tensor, num: int, spoil: Callable[[], None] = lambda: None) -> float:
        total = 0.0
        for part, target in zip(x.tensor_split(num), y.tensor_split(num), strict=True):
            loss = mean_cross_entropy(self.forward(part).float(), target) * (len(target) / len(y))
            self.scaler.scale(loss).backward()
            total += float(loss.detach())
        spoil()
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if not self.scaler.is_enabled() or self.scaler.get_scale() >= before:
            self.scheduler.step()
        return total


def pipeline(model: nn.Module, **options: Any) -> Pipeline:
    settings: dict[str, Any] = {
        "loss": mean_cross_entropy,
        "optimizer": descend,
        "scheduler": lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.7),
        "microbatches": 4,
        **options,
    }
    return Pipeline(model, **grouped(**settings))


def close(pipe: Pipeline, one: One, tolerance: float) -> None:
    wanted = one.model.state_dict()
    for worker in pipe.workers:
        for stage in worker.stages.values():
            for name, tensor in stage.state_dict().items():
                assert torch.allclose(tensor, wanted[name], atol=tolerance), (worker.rank, name)


SHAPES: dict[str, dict[str, Any]] = {
    "1f1b": {"stages": [2, 2, 2]},
    "recomputed": {"stages": [2, 2, 2], "schedule": "gpipe", "recompute": True},
    "interleaved, replicated": {"stages": [2, 1, 2, 1], "schedule": "interleaved", "chunks": 2, "replicas": 2},
    "sharded": {"stages": [4, 2], "replicas": 2, "shard": "optimizer"},
    "data-parallel": {"stages": 2, "schedule": "data-parallel"},
}


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_are_those_of_one_process_under_autocast(shape: str, precision: str) -> None:
    model, example = float_model()
    options = SHAPES[shape]
    counts = options["stages"] if isinstance(options["stages"], list) else [6]
    scale = 1024.0 if precision == "fp16" else None
    one = One(model, precision, counts, scale)
    pipe = pipeline(model, precision=precision, loss_scale=scale, **options)
    for step in range(4):
        x, y = example(11, step)
        assert abs(pipe.step(x, y) - one.step(x, y, 4)) < 1e-6
    # The sums are float32; their order is that of the micro-batches, but for replicas.
    close(pipe, one, 1e-7 if "repl" not in shape and shape not in ("sharded", "data-parallel") else 1e-5)


def test_without_replicas_the_weights_are_the_same_to_the_bit() -> None:
    model, example = float_model()
    one, pipe = One(model, "bf16", [3, 3], None), pipeline(model, precision="bf16", stages=[3, 3])
    for step in range(3):
        x, y = example(8, step)
        one.step(x, y, 4)
        pipe.step(x, y)
    close(pipe, one, 0.0)


def test_weights_and_gradients_stay_float32_and_messages_are_half() -> None:
    model, example = float_model()
    pipe = pipeline(model, precision="bf16", stages=[3, 3])
    seen = []
    send = pipe.engine.transports[0].send

    def watched(instruction: Any, message: Any) -> None:
        seen.extend(leaf.dtype for leaf in message.leaves)
        send(instruction, message)

    back = pipe.engine.transports[1].send

    def watched_back(instruction: Any, message: Any) -> None:
        seen.extend(leaf.dtype for leaf in message.leaves)
        back(instruction, message)

    pipe.engine.transports[0].send = watched
    pipe.engine.transports[1].send = watched_back
    pipe.step(*example(8, 0))
    assert len(seen) == 8
    assert set(seen) == {torch.bfloat16}
    states = [state for w in pipe.workers for o in w.optimizers.values() for state in o.state.values()]
    assert {value.dtype for state in states for value in state.values()} == {torch.float32}
    assert {tensor.dtype for tensor in pipe.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("name", ["batch norm", "dropout", "an integer mask beside activations", "tied ends"])
@pytest.mark.parametrize("recompute", [False, True])
def test_replays_and_every_kind_of_model_work_in_half_precision(name: str, recompute: bool) -> None:
    model, example = float_model(name)
    losses = []
    for replay in {False, recompute}:
        pipe = pipeline(copy.deepcopy(model), precision="bf16", stages=[3, 5], recompute=replay)
        losses.append(pipe.fit([example(8, step) for step in range(3)]))
        assert all(loss == loss for loss in losses[-1])
        pipe.close()
    assert losses[0] == losses[-1]


class Overflow(nn.Module):
    """Makes the gradients of the layers before it infinite whenever it is told to."""

    on = False

    def forward(self, x: Tensor) -> Tensor:
        if Overflow.on and x.requires_grad:
            x.register_hook(lambda grad: grad * float("inf"))
        return x + 0.0


SPOILT: dict[str, dict[str, Any]] = {
    "1f1b": {"stages": [3, 3, 1], "scheduler": None},
    "with a scheduler": {"stages": [3, 3, 1]},
    "replicated": {"stages": [3, 4], "replicas": 2},
    "sharded and clipped": {"stages": [3, 4], "replicas": 2, "shard": "optimizer", "clip_norm": 0.5},
}


@pytest.mark.parametrize("shape", SPOILT)
def test_an_overflow_on_one_stage_makes_every_rank_skip(shape: str) -> None:
    model, example = float_model()
    # The spoiler sits in the first stage, so only its gradients overflow; later stages' are finite.
    model.insert(2, Overflow())
    pipe = pipeline(model, precision="bf16", loss_scale=256.0, **SPOILT[shape])
    pipe.step(*example(8, 0))
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    states = copy.deepcopy([o.state_dict() for w in pipe.workers for o in w.optimizers.values()])
    rates = [s.state_dict() for w in pipe.workers for s in w.schedulers.values()]
    Overflow.on = True
    try:
        pipe.step(*example(8, 1))
    finally:
        Overflow.on = False
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    after = [o.state_dict() for w in pipe.workers for o in w.optimizers.values()]
    for old, new in zip(states, after, strict=True):
        for key, state in old["state"].items():
            assert all(torch.equal(value, new["state"][key][name]) for name, value in state.items())
    assert [s.state_dict() for w in pipe.workers for s in w.schedulers.values()] == rates
    assert [worker.scale.scale for worker in pipe.workers if worker.scale] == [128.0] * len(pipe.workers)
    pipe.step(*example(8, 2))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in pipe.state_dict().items())


@pytest.mark.parametrize("schedule", ["pipedream-2bw", "gpipe"])
def test_many_updates_of_one_segment_know_their_scales(schedule: str) -> None:
    """A scale that is far too large: updates are skipped until it fits, and what is then learnt is the same."""
    model, example = float_model()
    batches = [example(8, step) for step in range(12)]
    small = pipeline(copy.deepcopy(model), precision="fp16", loss_scale=64.0, schedule=schedule, stages=[3, 3])
    small.fit(batches)
    huge = pipeline(copy.deepcopy(model), precision="fp16", loss_scale=2.0**22, schedule=schedule, stages=[3, 3])
    huge.fit(batches)
    scales = [worker.scale for worker in huge.workers]
    assert all(scale == scales[0] for scale in scales)
    assert scales[0] is not None
    assert 0 < scales[0].skipped < 12
    assert scales[0].scale == 2.0**22 / 2 ** scales[0].skipped
    assert [worker.scale.skipped for worker in small.workers if worker.scale] == [0, 0]


def test_a_rank_whose_stages_are_frozen_knows_the_scale_too() -> None:
    """It takes no step, and a step is where the others decide."""
    model, example = float_model()
    model[:3].requires_grad_(False)
    pipe = pipeline(model, precision="fp16", loss_scale=2.0**40, stages=[3, 3])
    assert pipe.plan.frozen == 1
    pipe.fit([example(8, step) for step in range(4)])
    scales = [worker.scale.state() for worker in pipe.workers if worker.scale]
    assert scales == [{"scale": 2.0**36, "streak": 0, "skipped": 4}] * 2


def test_the_scale_follows_the_rule_of_torch() -> None:
    one, wanted = LossScale(8.0, interval=3), torch.amp.GradScaler("cpu", 8.0, growth_interval=3)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    for finite in [True, True, True, False, True, False, False, True, True, True, True, True, True]:
        weight.grad = torch.tensor([1.0 if finite else float("nan")])
        wanted.scale(torch.zeros(()))
        wanted.step(optimizer)
        wanted.update()
        one.begin()
        assert one.decide(0, torch.tensor([1.0 if finite else float("nan")])) is finite
        assert one.scale == wanted.get_scale()


def test_a_checkpoint_keeps_the_scale(tmp_path: Path) -> None:
    model, example = float_model()
    pipe = pipeline(model, precision="fp16", loss_scale=2.0**22, stages=[3, 3])
    pipe.fit([example(8, step) for step in range(5)])
    pipe.save(tmp_path)
    other = pipeline(float_model()[0], precision="fp16", stages=[3, 3])
    other.load(tmp_path)
    for mine, theirs in zip(pipe.workers, other.workers, strict=True):
        assert mine.scale is not None
        assert theirs.scale is not None
        assert theirs.scale.state() == mine.scale.state()
    assert other.fit([example(8, 5)]) == pipe.fit([example(8, 5)])


def test_unknown_precisions_are_refused_by_name() -> None:
    with pytest.raises(PipefitError, match=r"dtype: expected one of .*bf16.*got 'bf61'"):
        pipeline(float_model()[0], precision="bf61")
    expected = r"loss_scale: expected a number above 0 and at most 8.50706e\+37 or None, got 0"
    with pytest.raises(PipefitError, match=expected):
        pipeline(float_model()[0], precision="fp16", loss_scale=0.0)
