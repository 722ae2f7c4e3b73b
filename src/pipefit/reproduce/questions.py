"""The discussion questions of the lectures, each answered by a run of a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.reproduce.clusters import ROOM
from pipefit.reproduce.entry import Bench, Made, drawn, figure
from pipefit.reproduce.measured import folder
from pipefit.reproduce.predicted import rate
from pipefit.reproduce.steps import Draw, Planned, Python


def _wide(width: int) -> Planned:
    return Planned(
        "gpt:layers=1,hidden=49152,heads=96",
        "dgx-a100-8",
        tensors=[width],
        depths=[1],
        microbatch_sizes=[1],
        global_batch=8,
    )


def _mixed() -> Any:
    from pipefit.planner import gpt_profile, plan
    from pipefit.spec import Device, Level, Topology

    devices = tuple(Device(80e9, flops) for flops in (156e12, 312e12))
    machine = Topology((Level("server", 2, 300e9),), devices[0], devices)
    profile = gpt_profile(24, 2048, 16, device=devices[0])
    return plan(profile, machine, global_batch=64, schedules=["1f1b"], depths=[2], tensors=[1])


def _layers_on_mixed(run: Bench) -> list[int]:
    found = run(Python("plan(gpt_profile(24, 2048, 16, …), Topology(devices=(156 and 312 TFLOP/s)), …)", _mixed))
    return [len(stage.layers) for stage in found.partition.stages]


def _interrupted() -> float:
    """The largest difference of a loss: training that loses its processes after ten steps, and unbroken training."""
    import torch
    from torch import nn

    from pipefit import Pipeline

    def fresh() -> Pipeline:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        adam = torch.optim.Adam
        return Pipeline(
            model, loss=nn.CrossEntropyLoss(), optimizer=lambda own: adam(own, 1e-2), stages=2, microbatches=4
        )

    made = torch.Generator().manual_seed(1)
    batches = [(torch.randn(32, 16, generator=made), torch.randint(4, (32,), generator=made)) for _ in range(20)]
    whole, first, second = fresh(), fresh(), fresh()
    unbroken = [float(whole.step(*batch)) for batch in batches]
    for batch in batches[:10]:
        first.step(*batch)
    first.save(folder() / "checkpoint")
    second.load(folder() / "checkpoint")
    resumed = [float(second.step(*batch)) for batch in batches[10:]]
    return max(abs(a - b) for a, b in zip(unbroken[10:], resumed, strict=True))


MADE: Mapping[str, Made] = {
    "question-partition": Made(
        (
            lambda run: (
                rate(run, Planned("vgg16", "pcie-4", global_batch=1024, **ROOM))
                / rate(run, Planned("vgg16", "pcie-4", method="uniform", global_batch=1024, **ROOM))
            ),
        )
    ),
    "question-1f1b": Made(
        (figure(Draw("1f1b", 4, 8), "bubble_fraction"), figure(Draw("zb-v", 4, 8, num_chunks=2), "bubble_fraction")),
        drawn(Draw("zb-v", 4, 8, num_chunks=2)),
    ),
    "question-large-layer": Made((lambda run: run.fits(_wide(1)), lambda run: run.fits(_wide(8)))),
    "question-mixed-devices": Made(
        (
            lambda run: _layers_on_mixed(run)[0],
            lambda run: _layers_on_mixed(run)[1],
            lambda run: _layers_on_mixed(run)[1] > _layers_on_mixed(run)[0],
        )
    ),
    "question-spark": Made((lambda run: len(list(run(Draw("1f1b", 4, 8)).program)),), drawn(Draw("1f1b", 4, 8))),
    "question-node-failure": Made(
        (lambda run: run(Python("Pipeline(…).save(folder); Pipeline(…).load(folder)", _interrupted)) == 0.0,)
    ),
}
