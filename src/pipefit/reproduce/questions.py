"""The discussion questions of the lectures, each answered by a run of a few lines."""

from __future__ import annotations

from typing import Any

from pipefit.reproduce.clusters import ROOM
from pipefit.reproduce.entry import Bench, Entry, Value, drawn, figure
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


QUESTIONS = (
    Entry(
        "question-partition",
        "Discussion: improvement of the partition algorithm",
        "What the dynamic program leaves out: memory, latency, the flush; a search over all of them with a simulation",
        "computed",
        "discussion questions of the slides",
        (
            Value(
                "VGG-16 on four GPUs: planned over equal numbers of layers",
                lambda run: (
                    rate(run, Planned("vgg16", "pcie-4", global_batch=1024, **ROOM))
                    / rate(run, Planned("vgg16", "pcie-4", method="uniform", global_batch=1024, **ROOM))
                ),
                unit="×",
            ),
        ),
    ),
    Entry(
        "question-1f1b",
        "Discussion: improvement potential of 1F1B-RR",
        "Backwards in two halves fill the gaps: zero-bubble schedules",
        "drawn",
        "discussion questions of the slides",
        (
            Value("bubble of 1F1B, 4 ranks, 8 micro-batches", figure(Draw("1f1b", 4, 8), "bubble_fraction"), unit="%"),
            Value("bubble of ZB-V", figure(Draw("zb-v", 4, 8, num_chunks=2), "bubble_fraction"), unit="%"),
        ),
        (drawn(Draw("zb-v", 4, 8, num_chunks=2)),),
    ),
    Entry(
        "question-large-layer",
        "Discussion: a layer larger than a device",
        "Tensor parallelism divides the layers, the pipeline divides the model",
        "computed",
        "discussion questions of the slides",
        (
            Value("a layer of 29 billion parameters fits on one 80 GB device", lambda run: run.fits(_wide(1)), False),
            Value("it fits on eight devices that share it", lambda run: run.fits(_wide(8)), True),
        ),
    ),
    Entry(
        "question-mixed-devices",
        "Discussion: devices that differ",
        "A plan for two devices of which one is twice as fast gives it more layers",
        "computed",
        "discussion questions of the slides",
        (
            Value("layers of the slow device", lambda run: _layers_on_mixed(run)[0]),
            Value("layers of the fast device", lambda run: _layers_on_mixed(run)[1]),
            Value("the fast one has more", lambda run: _layers_on_mixed(run)[1] > _layers_on_mixed(run)[0], True),
        ),
    ),
    Entry(
        "question-spark",
        "Discussion: PipeDream and Spark",
        "Both run a graph of tasks; here it is a static program per worker, proved before it runs",
        "drawn",
        "discussion questions of the slides",
        (
            Value(
                "instructions of four workers, 8 micro-batches", lambda run: len(list(run(Draw("1f1b", 4, 8)).program))
            ),
        ),
        (drawn(Draw("1f1b", 4, 8)),),
    ),
    Entry(
        "question-node-failure",
        "Discussion: possible node failures",
        "A run that lost its processes resumes from its checkpoint with the same losses",
        "measured",
        "discussion questions of the slides",
        (
            Value(
                "losses after the resume equal those of an unbroken run",
                lambda run: run(Python("Pipeline(…).save(folder); Pipeline(…).load(folder)", _interrupted)) == 0.0,
                True,
            ),
        ),
    ),
)
