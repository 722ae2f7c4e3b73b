"""Three processes of unequal speed: the equal cut against the cut by speed, predicted and measured.

    pipefit run -n 3 examples/mixed_devices.py

A layer here only waits, so the speeds are exact on any machine, however many cores it has: rank 0 waits 30 ms for a
forward and 60 ms for a backward, the others 3.3 times as long, as an RTX 3090 takes 3.3 times as long as an A100.
"""

import time

import torch
from torch import nn

from pipefit import Parallelism, Pipeline
from pipefit.planner import plan
from pipefit.runtime.session import current
from pipefit.spec import Device, Layer, Level, Profile, Topology

FORWARD_S, BACKWARD_S = 0.030, 0.060
SLOWER = 3.3
LAYERS, MICROBATCHES, STEPS = 10, 8, 2


class Wait(torch.autograd.Function):
    """A layer that takes its time."""

    @staticmethod
    def forward(ctx, x, times):
        ctx.times = times
        time.sleep(FORWARD_S * times)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(BACKWARD_S * ctx.times)
        return grad, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Wait.apply(self.linear(x), 1.0 if current().rank == 0 else SLOWER)


def profile() -> Profile:
    """The times of the layers on the fast device."""
    layers = (Layer(f"block{i}", FORWARD_S, 0.0, BACKWARD_S, 64.0, 64.0, 80.0) for i in range(LAYERS))
    return Profile("waits", 4, tuple(layers))


def machine() -> Topology:
    """One device that is 3.3 times as fast as the two others."""
    fast, slow = Device(flops=1e12), Device(flops=1e12 / SLOWER)
    return Topology((Level("desk", 3, 1e9, 1e-4),), devices=(fast, slow, slow))


def measured(counts: list[int]) -> float:
    """Seconds of an update with so many layers on each rank."""
    torch.manual_seed(0)
    pipe = Pipeline(
        nn.Sequential(*(Block() for _ in range(LAYERS))),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        stages=counts,
        microbatches=MICROBATCHES,
        parallelism=Parallelism(ranks=3),
    )
    x = torch.ones(4 * MICROBATCHES, 4)
    pipe.step(x, x)
    began = time.perf_counter()
    for _ in range(STEPS):
        pipe.step(x, x)
    return (time.perf_counter() - began) / STEPS


def main() -> None:
    options = {"global_batch": 4 * MICROBATCHES, "microbatch_sizes": [4]}
    equal = plan(profile(), machine(), method="uniform", **options)
    by_speed = plan(profile(), machine(), schedules=["1f1b"], depths=[3], **options)
    for name, made in (("equal", equal), ("by speed", by_speed)):
        counts = [len(stage.layers) for stage in made.partition.stages]
        seconds = measured(counts)
        if current().rank == 0:
            predicted = f"{made.prediction.period_s:.3f} s per update predicted"
            print(f"cut {name:8} {counts}: {predicted}, {seconds:.3f} s measured")


if __name__ == "__main__":
    main()
