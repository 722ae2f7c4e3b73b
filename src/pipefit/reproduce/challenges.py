"""The lecture on PipeDream's three challenges: partition, schedule, weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.reproduce.clusters import ROOM
from pipefit.reproduce.entry import Bench, Made, drawn, figure
from pipefit.reproduce.pipedream_gpipe import same_version
from pipefit.reproduce.predicted import period, replicas, speedup
from pipefit.reproduce.steps import Draw, Planned, Python

_CELLS = [(model, machine) for model in ("resnet50", "vgg16", "alexnet") for machine in ("pcie-4x4", "nvlink-2x8")]
_CELLS += [("gnmt", "pcie-3x4"), ("gnmt", "nvlink-2x8")]
"""Models and servers × devices of the table."""
_LINKS = {"nvlink-2x8": {"bandwidth": "1.25 GB/s"}}
"""Rate of one connection, where that is less than the port's."""


def _planned(model: str, machine: str, **link: str) -> Planned:
    size = {"resnet50": 128, "alexnet": 256}.get(model, 64)  # of a device, as in the paper
    return Planned(model, machine, method="pipedream", microbatch_sizes=[size], **ROOM, **link)


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
    "pipedream-table": Made(
        tuple(
            lambda run, figure=figure, cell=cell: figure(run, _planned(*cell, **_LINKS.get(cell[1], {})))
            for cell in _CELLS
            for figure in (replicas, speedup)
        )
    ),
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
