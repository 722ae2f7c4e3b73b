"""The lecture on pipeline parallelism and its combination with tensor and data parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.reproduce.entry import Bench, Made, drawn, figure
from pipefit.reproduce.predicted import gpt_plan, memory_gb
from pipefit.reproduce.steps import Draw, Planned

_EIGHT = gpt_plan(96, 12288, 96, 8, 8, 1, 8, memory="1 TB")


def _weights_gb(run: Bench, step: Planned) -> list[float]:
    profile = step.question.profile
    stages = run(step).partition.stages
    return [sum(profile.layers[index].weight_bytes for index in stage.layers) / 1e9 for stage in stages]


def _ratio(name: str, microbatches: int, **options: Any) -> Any:
    return figure(Draw(name, 4, microbatches, **options), "bubble_over_ideal")


MADE: Mapping[str, Made] = {
    "gpt-3-in-memory": Made(
        (
            lambda run: sum(_weights_gb(run, _EIGHT)),
            lambda run: sum(_weights_gb(run, _EIGHT)) / 8,
            lambda run: max(_weights_gb(run, _EIGHT)),
            lambda run: memory_gb(run, _EIGHT),
        )
    ),
    "inter-layer": Made((figure(Draw("naive", 4, 1), "bubble_fraction"),), drawn(Draw("naive", 4, 1))),
    "bubble-fraction": Made(
        (_ratio("gpipe", 8), _ratio("1f1b", 8), _ratio("gpipe", 16), figure(Draw("gpipe", 2, 8), "bubble_over_ideal")),
        drawn(Draw("gpipe", 4, 8)),
    ),
    "1f1b-memory": Made(
        [figure(Draw(name, 4, 8), "peak_inflight", max) for name in ("gpipe", "1f1b")],
        drawn(Draw("gpipe", 4, 8)),
        drawn(Draw("1f1b", 4, 8)),
    ),
    "interleaved-bubble": Made(
        (
            _ratio("interleaved", 8, num_chunks=2),
            _ratio("interleaved", 8, num_chunks=4),
            lambda run: (
                run(Draw("interleaved", 4, 8, num_chunks=2)).metrics["messages"]
                / run(Draw("1f1b", 4, 8)).metrics["messages"]
            ),
        ),
        drawn(Draw("1f1b", 4, 8)),
        drawn(Draw("interleaved", 4, 8, num_chunks=2)),
    ),
    "tensor-and-pipeline-bubble": Made(
        tuple(figure(Draw("1f1b", 16 // t, 16), "bubble_over_ideal") for t in (1, 2, 4, 8))
    ),
}
