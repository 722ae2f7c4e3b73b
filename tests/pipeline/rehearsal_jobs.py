"""What ranks run in the tests of rehearsals: the same models, data and plans as the rehearsal of each rank."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pipefit import Pipeline
from pipefit.models import convnet, gpt
from pipefit.models.examples import mean_cross_entropy
from pipefit.planner import by_hand
from pipefit.runtime.microbatches import feed_of
from pipefit.spec import Plan
from pipefit.spec.options import Updates

GPT = {"layers": 4, "hidden": 32, "heads": 2, "vocab": 64, "context": 16}


class Many(nn.Module):
    """An output of more tensors than can be sent."""

    def forward(self, x: Tensor) -> Any:
        return (x, *(x + number for number in range(64)))


class Added(nn.Module):
    def forward(self, payload: Any) -> Tensor:
        return torch.stack(payload).sum(0)


class Positive(nn.Module):
    """An output whose shape depends on numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class Norms(nn.Module):
    """Frozen weights, a buffer, and a weight that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.linear.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    if kind == "many":
        return nn.Sequential(nn.Linear(8, 8), Many(), Added(), nn.Linear(8, 8))
    if kind == "positive":
        return nn.Sequential(nn.Linear(8, 8), Positive(), nn.Identity(), nn.Identity())
    if kind == "norms":
        return nn.Sequential(*(Norms() for _ in range(4)))
    if kind == "convnet":
        return convnet()
    return gpt(**GPT)


def batch(kind: str, size: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind == "gpt":
        words = torch.randint(0, GPT["vocab"], (2, size, GPT["context"]), generator=generator)
        return words[0], words[1]
    if kind == "convnet":
        return torch.randn(size, 1, 8, 8, generator=generator), torch.zeros(size, dtype=torch.int64)
    x = torch.randn(size, 8, generator=generator)
    return x, x


def loss(kind: str) -> Any:
    if kind == "positive":
        return lambda output, target: output.sum()
    if kind in ("gpt", "convnet"):
        return mean_cross_entropy
    return nn.functional.mse_loss


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9, foreach=False)


def plan(kind: str, num_layers: int | None = None, **shape: Any) -> Plan:
    return by_hand(num_layers or len(model(kind)), **({"schedule": "1f1b", "num_microbatches": 4} | shape))


def pipeline(kind: str, made: Plan, clip: float | None = None) -> Pipeline:
    updates = Updates(clip_norm=clip)
    return Pipeline(model(kind), loss=loss(kind), optimizer=sgd, plan=made, updates=updates)


def moved(kind: str, shapes: list[dict[str, Any]], clip: float | None) -> list[tuple[float, float]]:
    """Bytes that this process sends in a real update: to other ranks, and inside its rank."""
    found = []
    for shape in shapes:
        pipe = pipeline(kind, plan(kind, **shape), clip)
        steps = 8
        pipe.fit([batch(kind)] * steps)
        sent, inside = pipe.loop.moved_bytes
        if not pipe.schedule.is_synchronous:
            sent /= steps
            inside /= steps
        found.append((sent, inside))
    return found


def step(kind: str, shape: dict[str, Any], size: int) -> None:
    pipeline(kind, plan(kind, **shape)).step(*batch(kind, size))


def held(kind: str, shape: dict[str, Any], size: int) -> tuple[int, int, int]:
    """Bytes of weights and states, and the peak of a later pass, as torch's allocator counts them."""
    pipe = pipeline(kind, plan(kind, **shape))
    pipe.step(*batch(kind, size))
    pipe.step(*batch(kind, size))
    worker = pipe.workers[0]
    feed = feed_of(batch(kind, size), pipe.plan.num_microbatches, 8, "train")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        pipe.engine.run(pipe.program, feed)
    events: Any = watched.profiler
    changes = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    in_use = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        in_use += event.nbytes()
        peak = max(peak, in_use)
    parameters = {id(p): p.nbytes for stage in worker.stages.values() for _, p in stage.named_parameters()}
    optimizers = worker.optimizers.values()
    states = sum(value.nbytes for one in optimizers for state in one.state.values() for value in state.values())
    weights = sum(parameters.values())
    return weights, states, weights + states + peak
