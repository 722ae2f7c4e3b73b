"""The evaluation of PipeDream and GPipe, predicted: what the first lecture shows, and later ones again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pipefit.reproduce.entry import Bench, Made, Picture, curves, drawn, each
from pipefit.reproduce.predicted import falls, memory_gb, period, rate, sent, stalls
from pipefit.reproduce.steps import Draw, Largest, Planned

ROOM = {"memory": "64 GB"}
MODELS = ("vgg16", "resnet50", "gnmt")


def straight(model: str) -> Planned:
    """A pipeline without replicas on four GPUs."""
    return Planned(model, "pcie-4", method="pipedream", straight=True, **ROOM)


def parallel(model: str, machine: str = "pcie-4") -> Planned:
    """Plain data parallelism, a mini-batch for each device."""
    return Planned(model, machine, schedules=["1f1b"], depths=[1], state_per_weight=1.0, **ROOM)


def _best(model: str) -> Planned:
    return Planned(model, "pcie-4", method="pipedream", **ROOM)


def _one_by_one(run: Bench, model: str) -> float:
    """Samples per second of model parallelism: one mini-batch passes all workers before the next begins."""
    profile = straight(model).question.profile
    return profile.microbatch_size / sum(layer.total_s for layer in profile.layers)


# ------------------------------------------------------------------------------------------- GPipe on accelerators

_SIZES = "hidden=2048,heads=32,vocab=32000,sequence=1024,bytes=4"
_MACHINES = {1: "one-gpu", 8: "dgx-a100-8", 32: "dgx-a100-32", 128: "dgx-a100-128"}


def _fits(count: int, **how: Any) -> Largest:
    """The largest Transformer on so many accelerators of 16 GiB, with 12 bytes for each parameter."""
    options = {"num_microbatches": 32, "recompute": "stage"} | how
    name = f"gpt:layers={count},{_SIZES}"
    return Largest(
        name,
        _MACHINES[count],
        method="uniform",
        schedules=["gpipe"],
        depths=[count],
        memory="16 GiB",
        state_per_weight=1.0,
        global_batch=32,
        **options,
    )


NAIVE_1 = _fits(1, num_microbatches=1, recompute="none")
_LAYERS = {"Naive-1": NAIVE_1} | {f"Pipeline-{count}": _fits(count) for count in _MACHINES}


def transformer(stages: int, microbatches: int) -> Planned:
    """A Transformer of 48 layers, hidden size 2048, under GPipe, which replays every micro-batch."""
    options = {"global_batch": 128, "num_microbatches": microbatches, "depths": [stages], "recompute": "layer"}
    return Planned(f"gpt:layers=48,{_SIZES}", f"tpu-v3-{stages}", method="gpipe", memory="100 TB", **options)


THROUGHPUT = {  # M: normalized throughput at K = 2, 4, 8
    "AmoebaNet": {1: (1, 1.13, 1.38), 4: (1.07, 1.26, 1.72), 32: (1.21, 1.84, 3.48)},
    "Transformer": {1: (1, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)},
}


def normalized(run: Bench, stages: int, microbatches: int) -> float:
    """Throughput over that of two stages with one micro-batch."""
    return rate(run, transformer(stages, microbatches)) / rate(run, transformer(2, 1))


def shares(run: Bench, step: Planned) -> dict[str, float]:
    """The time of a step by its purposes."""
    from pipefit.cost import FREE, of_plan
    from pipefit.schedules.catalogue import program_of
    from pipefit.simulate import simulate
    from pipefit.timeline.breakdown import breakdown

    step = step.but(recompute="stage")
    found, question = run(step), step.question
    cost = of_plan(question.profile.at(found.microbatch_size), found, question.topology, runtime=FREE)
    return breakdown(simulate(program_of(found), cost))


PURPOSES = ("compute", "recompute", "load imbalance", "bubble", "weight update", "set-up")


def _more_in_flight(warmup: int) -> Draw:
    """PipeDream on four workers with fewer or more mini-batches in flight, and messages of half a forward."""
    return Draw("pipedream", 4, 24, latency=0.5, warmup=warmup)


def _least_sent(run: Bench, model: str) -> float:
    """MB per sample of PipeDream's plan, or where that is data parallelism, of the best pipeline."""
    steps = Planned(model, "pcie-4x1", method="pipedream", cost="paper", **ROOM), straight(model)
    return min(sent(run, step) for step in steps if len(run(step).partition.stages) > 1)


def _plain_sent(model: str) -> float:
    """MB per sample of a ring all-reduce of all weights over four devices, each with a mini-batch."""
    profile = straight(model).question.profile
    return 2 * 3 / 4 * sum(layer.wgrad_bytes for layer in profile.layers) / profile.microbatch_size / 1e6


def _stage_gb(run: Bench, model: str, stage: int) -> float:
    peaks = run(straight(model)).prediction.peak_bytes
    return peaks[stage] / 1e9 if stage < len(peaks) else 0.0


def stall_share(run: Bench, model: str, devices: int) -> float:
    """The share of time that data parallelism waits for messages, on servers of four GPUs and 10 Gbit/s."""
    return stalls(run, parallel(model, "pcie-4" if devices == 4 else f"pcie-{devices // 4}x4"))


def _bars(
    title: str, unit: str, lines: Mapping[str, Callable[[Bench, Any], float]], models: Sequence[str] = MODELS
) -> Callable[[Bench], Picture]:
    return curves(title, "model", unit, models, lines, kind="bar")


MADE: Mapping[str, Made] = {
    "pipedream-over-gpipe": Made(
        (lambda run: period(run, Draw("gpipe", 4, 4, recompute=True)) / 4 / period(run, Draw("pipedream", 4, 12)),)
    ),
    "intra-batch": Made(
        each(lambda run, model: rate(run, straight(model)) > _one_by_one(run, model), (*MODELS, "alexnet")),
        _bars(
            "Four GPUs on PCIe",
            "samples/s",
            {
                "model parallelism": _one_by_one,
                "with pipelining": lambda run, model: rate(run, straight(model)),
                "PipeDream": lambda run, model: rate(run, _best(model)),
            },
            (*MODELS, "alexnet"),
        ),
    ),
    "memory-per-worker": Made(
        each(lambda run, model: memory_gb(run, straight(model)) / memory_gb(run, parallel(model)), MODELS[:2]),
        _bars(
            "Memory of a worker",
            "GB",
            {
                **{f"stage {stage}": partial(_stage_gb, stage=stage) for stage in range(4)},
                "data parallelism": lambda run, model: memory_gb(run, parallel(model)),
            },
            MODELS[:2],
        ),
    ),
    "bytes-per-sample": Made(
        each(lambda run, model: _least_sent(run, model) < _plain_sent(model), ("vgg16", "gnmt", "resnet50")),
        _bars(
            "Bytes per sample on four GPUs",
            "MB",
            {"data parallelism": lambda run, model: _plain_sent(model), "pipeline": _least_sent},
        ),
    ),
    "pipeline-depth": Made(
        (
            falls(period, [_more_in_flight(warmup) for warmup in range(3)]),
            lambda run: run(_more_in_flight(2)).metrics["peak_inflight"][0],
        ),
        drawn(_more_in_flight(1), "As many in flight as workers"),
        drawn(_more_in_flight(2), "Twice as many"),
    ),
    "gpipe-largest": Made(
        (
            *each(lambda run, step: run(step), _LAYERS.values()),
            lambda run: run(_LAYERS["Pipeline-8"]) / run(_LAYERS["Pipeline-1"]),
            lambda run: run(_LAYERS["Pipeline-128"]) / run(_LAYERS["Pipeline-1"]),
        ),
        curves(
            "Layers of the largest Transformer",
            "accelerators",
            "layers",
            (1, 8, 32, 128),
            {"GPipe": lambda run, count: run(_fits(count))},
            {"GPipe": (13, 103, 415, 1663)},
            log_x=True,
        ),
    ),
    "gpipe-throughput": Made(
        (
            *(lambda run, k=k, m=m: normalized(run, k, m) for m in (1, 4, 32) for k in (2, 4, 8)),
            lambda run: normalized(run, 8, 1) > 1.02 * normalized(run, 4, 1) > 1.02**2 * normalized(run, 2, 1),
        ),
        curves(
            "Throughput over that of K = 2, M = 1",
            "partitions K",
            "×",
            (2, 4, 8),
            {f"M = {m}": lambda run, k, m=m: normalized(run, k, m) for m in (1, 4, 32)},
            {f"M = {m}": row for m, row in THROUGHPUT["Transformer"].items()},
        ),
    ),
    "gpipe-overheads": Made(
        (
            lambda run: shares(run, transformer(8, 32))["recompute"] / shares(run, transformer(8, 32))["compute"],
            lambda run: shares(run, transformer(8, 32))["bubble"],
        ),
        curves(
            "Time of a step, 8 partitions",
            "micro-batches",
            "share",
            ("M = 8", "M = 32", "M = 128"),
            {
                name: lambda run, m, name=name: shares(run, transformer(8, int(m.split()[-1])))[name]
                for name in PURPOSES
            },
            kind="bar",
        ),
    ),
    "microbatch-too-small": Made(
        (),
        curves(
            "A Transformer on 8 devices, 128 samples per update",
            "micro-batches",
            "samples/s",
            (2, 4, 8, 16, 32, 64, 128),
            {"GPipe": lambda run, m: rate(run, transformer(8, m))},
            log_x=True,
        ),
    ),
}
