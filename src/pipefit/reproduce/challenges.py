"""The lecture on PipeDream's three challenges: partition, schedule, weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipefit.reproduce.clusters import ROOM
from pipefit.reproduce.entry import PIPEDREAM, Bench, Entry, Value, drawn, figure
from pipefit.reproduce.limited_hardware import STALLS, VERTICAL_SYNC
from pipefit.reproduce.pipedream_gpipe import same_version
from pipefit.reproduce.predicted import replicas, speedup
from pipefit.reproduce.steps import Draw, Planned, Python

DECK = "PipeDream in three challenges"

_WHY = {
    "vgg16": "The ring's all-reduce overlaps with computation here; the published figure needs slower links.",
    "gnmt": "The profile's 775 MB of weights for 89 ms of computation make data parallelism slower than measured.",
    "resnet50": "The convention of communication costs decides between hybrids and data parallelism.",
}
_TABLE = {  # model, servers × GPUs: configuration, speed-up over data parallelism
    ("resnet50", "pcie-4x4"): ("16", 1),
    ("resnet50", "nvlink-2x8"): ("16", 1),
    ("vgg16", "pcie-4x4"): ("15-1", 5.28),
    ("vgg16", "nvlink-2x8"): ("15-1", 2.98),
    ("gnmt", "pcie-3x4"): ("straight", 2.95),
    ("gnmt", "nvlink-2x8"): ("16", 1),
}


def _planned(model: str, machine: str) -> Planned:
    size = 128 if model == "resnet50" else 64  # of a device, as in the paper
    return Planned(model, machine, method="pipedream", microbatch_sizes=[size], **ROOM)


def _gain(run: Bench, model: str, machine: str) -> float:
    return float(speedup(run, _planned(model, machine)))


def _in_flight(workers: int, inputs: int) -> Any:
    """Mini-batches in flight at each input replica, of two stages."""
    step = Draw("pipedream", 2, 12, replicas=(inputs, workers - inputs))
    return lambda run: run(step).metrics["peak_inflight"][0]


def _naive_pipelining(run: Bench) -> str:
    """The first rule that PipeDream breaks if its backwards use the newest weights."""

    def tampered() -> Any:
        from msgspec.structs import replace as changed

        from pipefit.ir import Program
        from pipefit.schedules import Shape, generate
        from pipefit.verify import verify

        program = generate("pipedream", Shape(4, 1, num_steps=8))
        ranks = [
            tuple(changed(i, version=i.mb) if i.op.value == "bwd" else i for i in instructions)
            for instructions in program.ranks
        ]
        return verify(Program(program.header, tuple(ranks)))

    report = run(Python("verify(pipedream with backwards on the newest weights)", tampered))
    return str(report.violations[0].rule)


def _weights_per_second(model: str) -> float:
    profile = _planned(model, "pcie-4").question.profile
    return sum(layer.weight_bytes for layer in profile.layers) / sum(layer.total_s for layer in profile.layers)


ENTRIES = (
    replace(STALLS, name="data-parallel-stalls", topic="Limitations of data parallel"),
    Entry(
        "model-and-pipeline",
        "Model parallel training; pipeline parallel",
        "Model parallelism, and the same four workers with pipelining",
        "drawn",
        PIPEDREAM + ", figures 2 and 4",
        (
            Value(
                "times the throughput with pipelining",
                lambda run: (
                    run(Draw("naive", 4, 1)).metrics["period"] / run(Draw("pipedream", 4, 12)).metrics["period"]
                ),
                4,
                "×",
            ),
        ),
        (drawn(Draw("naive", 4, 2)), drawn(Draw("pipedream", 4, 8))),
    ),
    Entry(
        "active-batches",
        "Challenge 2: work scheduling",
        "Active mini-batches: number of workers / replicas of the input stage",
        "drawn",
        PIPEDREAM + ", section 3.2",
        (
            Value(
                "4 workers, 1 input worker", lambda run: run(Draw("pipedream", 4, 12)).metrics["peak_inflight"][0], 4
            ),
            Value("3 workers, 2 input replicas", _in_flight(3, 2), 2, source="⌈3 / 2⌉"),
            Value("4 workers, 2 input replicas", _in_flight(4, 2), 2),
        ),
        (drawn(Draw("pipedream", 2, 8, replicas=(2, 1)), "Round-robin over replicas"),),
    ),
    Entry(
        "naive-pipelining",
        "Challenge 3: effective learning",
        "Naive pipelining uses other weights in the backward than in the forward: the verifier refuses it",
        "drawn",
        PIPEDREAM + ", section 3.3",
        (Value("rule that it breaks", _naive_pipelining, "versions"),),
    ),
    Entry(
        "stashing",
        "Challenge 3: weight stashing",
        "One version for each active mini-batch; the backward takes its forward's",
        "drawn",
        PIPEDREAM + ", section 3.3",
        (
            Value("backward uses its forward's version", lambda run: same_version(run, Draw("pipedream", 4, 8)), True),
            Value(
                "versions",
                lambda run: " ".join(map(str, run(Draw("pipedream", 4, 8)).metrics["weight_versions"])),
                "4 3 2 1",
            ),
        ),
        (drawn(Draw("pipedream", 4, 8), "Weight stashing", follow=4),),
    ),
    replace(VERTICAL_SYNC, name="staleness", topic="Staleness, memory overhead: vertical sync"),
    Entry(
        "pipedream-table",
        "Two takeaways from the table",
        "PipeDream's configurations and speed-ups for ResNet-50, VGG-16 and GNMT-8 on two clusters",
        "computed",
        PIPEDREAM + ", table 1",
        tuple(
            value
            for (model, machine), (configuration, published) in _TABLE.items()
            for step in [_planned(model, machine)]
            for value in (
                Value(
                    f"{model} on {machine}",
                    lambda run, step=step: replicas(run, step),
                    configuration,
                    why="The links of the paper's planner are not given; the answer depends on them.",
                ),
                Value(
                    f"{model} on {machine}: speed-up",
                    lambda run, step=step: speedup(run, step),
                    published,
                    "×",
                    within=0.25,
                    why=_WHY[model],
                ),
            )
        ),
        note="Mini-batches of 64 samples (ResNet-50: 128) for each GPU, as in the paper; memory is not limited.",
    ),
    Entry(
        "takeaways",
        "List two takeaways from the table",
        "Pipelines gain where weights are large for the computation; with faster links between servers they gain less",
        "computed",
        "question of the slides",
        (
            Value(
                "VGG-16 gains more than ResNet-50",
                lambda run: _gain(run, "vgg16", "pcie-4x4") > _gain(run, "resnet50", "pcie-4x4"),
                True,
            ),
            Value(
                "VGG-16 gains more on the slower cluster",
                lambda run: _gain(run, "vgg16", "pcie-4x4") > _gain(run, "vgg16", "nvlink-2x8"),
                True,
            ),
            Value(
                "weights over computation, VGG-16 over ResNet-50",
                lambda run: _weights_per_second("vgg16") / _weights_per_second("resnet50"),
                unit="×",
            ),
        ),
    ),
    Entry(
        "question-other-workloads",
        "Other workloads with pipelined parallelism",
        "Evaluation of a model, forward only: a pipeline whose backwards take no time",
        "drawn",
        "question of the slides",
        (
            Value(
                "bubble, 4 stages, 32 batches", figure(Draw("gpipe", 4, 32, backward=0), "bubble_fraction"), 3 / 35, "%"
            ),
        ),
        (drawn(Draw("gpipe", 4, 12, backward=0), "Forward only"),),
    ),
)
