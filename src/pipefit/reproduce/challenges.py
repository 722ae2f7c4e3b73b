"""The lecture on PipeDream's three challenges: partition, schedule, weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipefit.reproduce.clusters import ROOM
from pipefit.reproduce.entry import Bench, Made, Scalar, drawn, figure
from pipefit.reproduce.pipedream_gpipe import same_version
from pipefit.reproduce.predicted import period, replicas, speedup, speedup_by_hand
from pipefit.reproduce.steps import Draw, Planned, Python

_CELLS = [(model, machine) for model in ("resnet50", "vgg16", "alexnet") for machine in ("pcie-4x4", "nvlink-2x8")]
_CELLS += [("gnmt", "pcie-3x4"), ("gnmt", "nvlink-2x8")]
"""Models and servers × devices of the table."""

_SIZES = {"resnet50": 128, "alexnet": 256}
"""Samples of a mini-batch on a device, where these are not 64, as in the paper."""

_AUTHORS = {
    "vgg16": ((34, 7), (15, 1)),
    "alexnet": ((17, 6), (15, 1)),
    "gnmt": ((4, 2, 2, 4, 3, 7, 6, 5, 5, 2), (1, 1, 1, 1, 1, 1, 1, 1, 3, 1)),
}
"""The authors' own pipelines on 16 devices, and on 12 for GNMT: layers and devices of every stage.

Source: runtime/image_classification/models/{vgg16,alexnet}/gpus=16 and runtime/translation/models/gnmt/gpus=12 of their
repository: the modules of the stages, whose layers are those of the profiles, and hybrid_conf.json.
"""


def _planned(model: str, machine: str) -> Planned:
    return Planned(model, machine, method="pipedream", microbatch_sizes=[_SIZES.get(model, 64)], **ROOM)


def _gain(run: Bench, model: str, machine: str) -> float:
    return speedup(run, _planned(model, machine))


def _authors_gain(run: Bench, model: str, machine: str) -> float:
    return speedup_by_hand(run, _planned(model, machine), *_AUTHORS[model])


def _cell(model: str, machine: str) -> list[Callable[[Bench], Scalar]]:
    """The configuration and its speed-up, and that of the authors' pipeline, where theirs is one."""
    made: list[Callable[[Bench], Scalar]] = [
        lambda run: replicas(run, _planned(model, machine)),
        lambda run: _gain(run, model, machine),
    ]
    if model in _AUTHORS and (model, machine) != ("gnmt", "nvlink-2x8"):
        made.append(lambda run: _authors_gain(run, model, machine))
    return made


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


MADE: Mapping[str, Made] = {
    "model-and-pipeline": Made(
        (lambda run: period(run, Draw("naive", 4, 1)) / period(run, Draw("pipedream", 4, 12)),),
        drawn(Draw("naive", 4, 2)),
        drawn(Draw("pipedream", 4, 8)),
    ),
    "active-batches": Made(
        (lambda run: run(Draw("pipedream", 4, 12)).metrics["peak_inflight"][0], _in_flight(3, 2), _in_flight(4, 2)),
        drawn(Draw("pipedream", 2, 8, replicas=(2, 1)), "Round-robin over replicas"),
    ),
    "naive-pipelining": Made((_naive_pipelining,)),
    "stashing": Made(
        (
            lambda run: same_version(run, Draw("pipedream", 4, 8)),
            lambda run: " ".join(map(str, run(Draw("pipedream", 4, 8)).metrics["weight_versions"])),
        ),
        drawn(Draw("pipedream", 4, 8), "Weight stashing", follow=4),
    ),
    "pipedream-table": Made([value for cell in _CELLS for value in _cell(*cell)]),
    "takeaways": Made(
        (
            lambda run: _gain(run, "vgg16", "pcie-4x4") > _gain(run, "resnet50", "pcie-4x4"),
            lambda run: _gain(run, "vgg16", "pcie-4x4") > _gain(run, "vgg16", "nvlink-2x8"),
            lambda run: _weights_per_second("vgg16") / _weights_per_second("resnet50"),
        )
    ),
    "question-other-workloads": Made(
        (figure(Draw("gpipe", 4, 32, backward=0), "bubble_fraction"),),
        drawn(Draw("gpipe", 4, 12, backward=0), "Forward only"),
    ),
}
