"""The discussion questions of the lectures, each answered by a run of a few lines."""

from __future__ import annotations

from typing import Any

from pipefit.reproduce.entry import Bench
from pipefit.reproduce.measured import folder
from pipefit.reproduce.steps import Python


def _mixed() -> Any:
    from pipefit.planner import gpt_profile, plan
    from pipefit.spec import Device, Level, Topology

    devices = tuple(Device(80e9, flops) for flops in (156e12, 312e12))
    machine = Topology((Level("server", 2, 300e9),), devices[0], devices)
    profile = gpt_profile(24, 2048, 16, device=devices[0])
    return plan(profile, machine, global_batch=64, schedules=["1f1b"], depths=[2], tensors=[1])


def layers_on_mixed(run: Bench, device: int) -> int:
    """Layers of the slow device, 0, or of the fast one, 1."""
    found = run(Python("plan(gpt_profile(24, 2048, 16, …), Topology(devices=(156 and 312 TFLOP/s)), …)", _mixed))
    return len(found.partition.stages[device].layers)


def resumes_alike(run: Bench) -> bool:
    """Whether training that lost its processes has the losses of unbroken training."""
    difference: float = run(Python("Pipeline(…).save(folder); Pipeline(…).load(folder)", _interrupted))
    return difference == 0.0


def _interrupted() -> float:
    """The largest difference of a loss: training that loses its processes after ten steps, and unbroken training."""
    import torch
    from torch import nn

    from pipefit.pipeline.pipeline import Pipeline

    def fresh() -> Pipeline:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        adam = torch.optim.Adam
        return Pipeline(
            model, loss=nn.CrossEntropyLoss(), optimizer=lambda own: adam(own, 1e-2), stages=2, microbatches=4
        )

    made = torch.Generator().manual_seed(1)
    batches = [(torch.randn(32, 16, generator=made), torch.randint(4, (32,), generator=made)) for _ in range(20)]
    whole = fresh()
    first = fresh()
    second = fresh()
    unbroken = [float(whole.step(*batch)) for batch in batches]
    for batch in batches[:10]:
        first.step(*batch)
    first.save(folder() / "checkpoint")
    second.load(folder() / "checkpoint")
    resumed = [float(second.step(*batch)) for batch in batches[10:]]
    return max(abs(a - b) for a, b in zip(unbroken[10:], resumed, strict=True))
