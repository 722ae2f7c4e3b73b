"""The lecture on pipeline parallelism and its combination with tensor and data parallelism."""

from __future__ import annotations

from typing import Any

from pipefit.reproduce.entry import PTDP, Bench, Entry, Value, drawn, figure
from pipefit.reproduce.evaluation import EVALUATION
from pipefit.reproduce.predicted import gpt_plan, memory_gb
from pipefit.reproduce.steps import Draw, Planned

DECK = "Pipelines and three dimensions of parallelism"

_EIGHT = gpt_plan(96, 12288, 96, 8, 8, 1, 8, memory="1 TB")


def _weights_gb(run: Bench, step: Planned) -> list[float]:
    profile = step.question.profile
    stages = run(step).partition.stages
    return [sum(profile.layers[index].weight_bytes for index in stage.layers) / 1e9 for stage in stages]


def _ratio(name: str, microbatches: int, **options: Any) -> Any:
    return figure(Draw(name, 4, microbatches, **options), "bubble_over_ideal")


ENTRIES = (
    Entry(
        "gpt-3-in-memory",
        "Inter-layer model parallelism",
        "GPT-3's weights over 8 devices: 350 GB / 8 = 43.75 GB, less than 80 GB",
        "computed",
        "slide",
        (
            Value("weights of GPT-3, 2 bytes each", lambda run: sum(_weights_gb(run, _EIGHT)), 350, "GB", 0.02),
            Value("weights of a device, on average", lambda run: sum(_weights_gb(run, _EIGHT)) / 8, 43.75, "GB", 0.02),
            Value("weights of the fullest device", lambda run: max(_weights_gb(run, _EIGHT)), unit="GB"),
            Value("training it with Adam takes, on the fullest device", lambda run: memory_gb(run, _EIGHT), unit="GB"),
        ),
        note="The weights alone fit; gradients and the states of Adam need 7 times as much again.",
    ),
    Entry(
        "inter-layer",
        "Issues with simple inter-layer parallelism",
        "Only one of four devices computes at a time",
        "drawn",
        "slide",
        (Value("idle share", figure(Draw("naive", 4, 1), "bubble_fraction"), 3 / 4, "%"),),
        (drawn(Draw("naive", 4, 1)),),
    ),
    Entry(
        "bubble-fraction",
        "How do we quantify bubbles? Improving efficiency",
        "Bubble over ideal time, (p − 1)/m, with p = 4 and m = 8",
        "drawn",
        "slide: (p − 1)·(t_f + t_b) / (m·t_f + m·t_b)",
        (
            Value("p = 4, m = 8", _ratio("gpipe", 8), 3 / 8, "%"),
            Value("1F1B has the same", _ratio("1f1b", 8), 3 / 8, "%"),
            Value("p = 4, m = 16", _ratio("gpipe", 16), 3 / 16, "%"),
            Value("p = 2, m = 8", figure(Draw("gpipe", 2, 8), "bubble_over_ideal"), 1 / 8, "%"),
        ),
        (drawn(Draw("gpipe", 4, 8)),),
    ),
    Entry(
        "1f1b-memory",
        "Pipeline parallelism with 1F1B schedule",
        "1F1B keeps p micro-batches at most, GPipe all of them; the bubble is the same",
        "drawn",
        "slide",
        (
            Value("in flight, GPipe", lambda run: max(run(Draw("gpipe", 4, 8)).metrics["peak_inflight"]), 8),
            Value("in flight, 1F1B", lambda run: max(run(Draw("1f1b", 4, 8)).metrics["peak_inflight"]), 4),
        ),
        (drawn(Draw("gpipe", 4, 8)), drawn(Draw("1f1b", 4, 8))),
    ),
    Entry(
        "interleaved-bubble",
        "Can we reduce the pipeline bubble?",
        "Stages in v parts: bubble 1/v·(p − 1)/m, for more messages",
        "drawn",
        "slide; " + PTDP + ", section 2.2",
        (
            Value("v = 2, p = 4, m = 8", _ratio("interleaved", 8, num_chunks=2), 3 / 16, "%"),
            Value("v = 4, p = 4, m = 8", _ratio("interleaved", 8, num_chunks=4), 3 / 32, "%"),
            Value(
                "messages, v = 2 over v = 1",
                lambda run: (
                    run(Draw("interleaved", 4, 8, num_chunks=2)).metrics["messages"]
                    / run(Draw("1f1b", 4, 8)).metrics["messages"]
                ),
                7 / 3,
                "×",
                source="(v·p − 1)/(p − 1) borders between ranks",
            ),
        ),
        (drawn(Draw("1f1b", 4, 8)), drawn(Draw("interleaved", 4, 8, num_chunks=2))),
    ),
    Entry(
        "tensor-and-pipeline-bubble",
        "Performance analysis of combined parallelism",
        "With more tensor parallelism there are fewer stages: bubble (n/t − 1)/m",
        "drawn",
        PTDP + ", section 3.2",
        tuple(
            Value(
                f"n = 16, m = 16, t = {t}",
                figure(Draw("1f1b", 16 // t, 16), "bubble_over_ideal"),
                (16 / t - 1) / 16,
                "%",
            )
            for t in (1, 2, 4, 8)
        ),
    ),
    *EVALUATION,
)
