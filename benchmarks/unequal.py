"""Devices of unequal speed: the equal cut, the equal split of the batch and the plan, predicted and measured.

A layer only waits, as long as the device of its rank takes for it. So speeds are exact on any machine, and few cores
serve many ranks.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import pipefit as pf
from pipefit.cost import FREE, of_plan
from pipefit.planner import by_hand, plan
from pipefit.planner.simulated import update_s
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current
from pipefit.spec import Device, Layer, Level, Plan, Profile, Topology

FORWARD_S, BACKWARD_S, SAMPLES = 0.030, 0.060, 2
MACHINES = {
    "one A100, two RTX 3090": (1.0, 3.3, 3.3),
    "four fast, four half as fast": (1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0),
}
"""How many times longer than the first device each one takes."""


class Wait(torch.autograd.Function):
    """A layer that takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slowness: float) -> Tensor:
        ctx.slowness = slowness
        time.sleep(FORWARD_S * slowness)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(BACKWARD_S * ctx.slowness)
        return grads[0], None


class Block(nn.Module):
    def __init__(self, slowness: tuple[float, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.slowness = slowness

    def forward(self, x: Tensor) -> Any:
        return Wait.apply(self.linear(x), self.slowness[current().rank])


def profile(num_layers: int) -> Profile:
    """The times of the layers on the first device."""
    layers = (Layer(f"block{i}", FORWARD_S, 0.0, BACKWARD_S, 32.0, 64.0, 80.0) for i in range(num_layers))
    return Profile("waits", SAMPLES, tuple(layers))


def machine(slowness: tuple[float, ...]) -> Topology:
    """The devices on one machine."""
    devices = tuple(Device(flops=1e12 / times) for times in slowness)
    return Topology((Level("machine", len(slowness), 1e9, 1e-4),), devices=devices)


def plans(slowness: tuple[float, ...], num_layers: int, microbatches: int) -> dict[str, Plan]:
    """The plans that are compared."""
    count = len(slowness)
    sizes = {"num_microbatches": microbatches}

    def planned(depths: list[int] | None) -> Plan:
        return plan(
            profile(num_layers),
            machine(slowness),
            global_batch=SAMPLES * microbatches,
            microbatch_sizes=[SAMPLES],
            schedules=["1f1b"],
            depths=depths,
        )

    found = {
        "equal cut": by_hand(num_layers, num_ranks=count, schedule="1f1b", **sizes),
        "equal split": by_hand(num_layers, num_ranks=count, schedule="data-parallel", **sizes),
    }
    if count % 2 == 0:
        found["two pipelines, equal"] = by_hand(num_layers, num_ranks=count, schedule="1f1b", replicas=(2,), **sizes)
        found["two, planned"] = planned([count // 2])
    return found | {"one, planned": planned([count]), "planned": planned(None)}


def seconds(slowness: tuple[float, ...], num_layers: int, chosen: list[Plan], steps: int) -> list[float]:
    """Seconds of an update of each plan, on this rank."""
    found = []
    for one in chosen:
        torch.manual_seed(0)
        pipe = pf.Pipeline(
            nn.Sequential(*(Block(slowness) for _ in range(num_layers))),
            loss=nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, 0.1),
            plan=one,
        )
        x = torch.ones(SAMPLES * one.num_microbatches, 4)
        pipe.step(x, x)
        samples = []
        for _ in range(steps):
            began = time.perf_counter()
            pipe.step(x, x)
            samples.append(time.perf_counter() - began)
        found.append(statistics.median(samples))
    return found


def main(*, layers: int = 8, microbatches: int = 16, steps: int = 2) -> None:
    """Compares the plans on each machine."""
    for name, slowness in MACHINES.items():
        compared = plans(slowness, layers, microbatches)
        chosen = list(compared.values())
        measured = launch(seconds, len(slowness), slowness, layers, chosen, steps, threads=1, quiet=True)[0]
        print(f"{name}: {layers} layers, {microbatches} micro-batches")
        for (title, one), took_s in zip(compared.items(), measured, strict=True):
            cost = of_plan(profile(layers), one, machine(slowness), runtime=FREE)
            predicted_s = update_s(one, cost)[1]
            shape = f"{one.schedule}, stages {[len(stage.layers) for stage in one.partition.stages]}"
            if one.shares:
                shape += f", shares {list(one.shares)}"
            print(f"  {title:20} {predicted_s:6.3f} s predicted  {took_s:6.3f} s measured  {shape}")
