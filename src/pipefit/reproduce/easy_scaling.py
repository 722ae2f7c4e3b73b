"""The lecture on GPipe: easy scaling with micro-batch pipeline parallelism."""

from __future__ import annotations

from dataclasses import replace

from pipefit.reproduce.clusters import COMPUTED, normalized, transformer
from pipefit.reproduce.entry import GPIPE, Bench, Entry, Value, curves, drawn, figure
from pipefit.reproduce.predicted import rate
from pipefit.reproduce.steps import Draw, Planned, Verb

DECK = "GPipe: easy scaling with micro-batches"

_OF = {entry.name: entry for entry in COMPUTED}
_COUNTS = (2, 4, 8, 16)
_COMPARED = Verb(
    "compare", model="gpt", option="layers=4,hidden=256,context=64", ranks=2, batch=32, microbatches=(1, 2, 4, 8),
    strategies="accumulate,naive,gpipe", steps=4, repeats=3,
)  # fmt: skip


def _kept(run: Bench, layers: int, microbatches: int, stages: int, recompute: bool) -> float:
    """Samples × layers whose activations a device holds at its peak, of 32 samples: from the simulated program."""
    drawing = run(Draw("gpipe", stages, microbatches, **({"recompute": True} if recompute else {})))
    saved, kept = (max(drawing.metrics[name]) for name in ("peak_inflight", "kept_inputs"))
    each = 32 / microbatches
    return float(saved * each * layers / stages + kept * each)


def _slow(run: Bench, stages: int) -> float:
    """Samples per second of a Transformer under GPipe over PCIe, without NVLink."""
    return rate(
        run,
        Planned(
            transformer(stages, 32).places[0],
            f"pcie-1x{stages}" if stages <= 4 else "pcie-2x4",
            **transformer(stages, 32).options,
        ),
    )


def _rate(run: Bench, strategy: str, microbatches: int) -> float:
    """Measured samples per second."""
    rows = [row for row in run(_COMPARED)["rows"] if row["strategy"] == strategy]
    return next(float(row["samples_per_s"]) for row in rows if row["num_microbatches"] in (microbatches, 1))


ENTRIES = (
    Entry(
        "vanilla-waste",
        "Vanilla model parallelism: problems",
        "The share of wasted GPU time, (K − 1)/K, grows to 1 with the number of GPUs",
        "drawn",
        "slide: 1 − K·(t_f + t_b) / (K²·(t_f + t_b)) = (K − 1)/K",
        tuple(Value(f"K = {k}", figure(Draw("naive", k, 2), "bubble_fraction"), (k - 1) / k, "%") for k in _COUNTS),
        (
            drawn(Draw("naive", 4, 1)),
            curves(
                "Wasted GPU time of model parallelism",
                "GPUs K",
                "share",
                _COUNTS,
                {"simulated": lambda run, k: run(Draw("naive", k, 2)).metrics["bubble_fraction"]},
                {"(K − 1)/K": [(k - 1) / k for k in _COUNTS]},
            ),
        ),
    ),
    Entry(
        "gpipe-bubble",
        "GPipe: batch parallelism",
        "The bubble (K − 1)/(M + K − 1): more micro-batches, smaller bubble",
        "drawn",
        "slide: 1 − K·M·(t_f + t_b) / (K·(M + K − 1)·(t_f + t_b))",
        tuple(
            Value(f"K = 4, M = {m}", figure(Draw("gpipe", 4, m), "bubble_fraction"), 3 / (m + 3), "%") for m in _COUNTS
        ),
        (
            drawn(Draw("gpipe", 4, 4)),
            curves(
                "Bubble of GPipe, K = 4",
                "micro-batches M",
                "share",
                _COUNTS,
                {"simulated": lambda run, m: run(Draw("gpipe", 4, m)).metrics["bubble_fraction"]},
                {"(K − 1)/(M + K − 1)": [3 / (m + 3) for m in _COUNTS]},
            ),
        ),
    ),
    Entry(
        "checkpointing-memory",
        "Gradient checkpointing; TL;DR",
        "Activations: O(N·L/K·d) without checkpointing, O(N + L/K·N/M) with it",
        "drawn",
        GPIPE + ", section 2.3; slide",
        (
            Value(
                "N = 32, L = 32, K = 4, M = 8: samples × layers, without",
                lambda run: _kept(run, 32, 8, 4, False),
                32 * 32 / 4,
            ),
            Value(
                "with checkpointing",
                lambda run: _kept(run, 32, 8, 4, True),
                32 + 32 / 4 * 32 / 8,
                why="The last micro-batch goes backward at once: its input is not kept, so 7/8·N in place of N.",
            ),
        ),
        (
            curves(
                "Activations of a device, N = 32, K = 4, M = 8",
                "layers L",
                "samples × layers",
                (8, 16, 32, 64, 128),
                {
                    "without": lambda run, layers: _kept(run, layers, 8, 4, False),
                    "with checkpointing": lambda run, layers: _kept(run, layers, 8, 4, True),
                },
                {
                    "N·L/K": [32 * layers / 4 for layers in (8, 16, 32, 64, 128)],
                    "N + L/K·N/M": [32 + layers / 4 * 32 / 8 for layers in (8, 16, 32, 64, 128)],
                },
            ),
            drawn(Draw("gpipe", 4, 8, recompute=True)),
        ),
    ),
    replace(_OF["gpipe-overheads"], name="time-step-breakdown", topic="Table 4: time step breakdown"),
    replace(_OF["gpipe-largest"], name="memory-scaling", topic="Evaluations, research question 1"),
    replace(_OF["gpipe-throughput"], name="fast-links", topic="Evaluations, research question 2: NVLink enabled"),
    Entry(
        "slow-links",
        "Evaluations, research question 2: NVLink disabled",
        "Throughput by partitions with M = 32, without fast links between the GPUs",
        "computed",
        GPIPE + ", table 3",
        tuple(
            Value(f"Transformer, K = {k}", lambda run, k=k: _slow(run, k) / _slow(run, 2), published, "×", 0.25)
            for k, published in ((2, 1), (4, 1.8), (8, 3.3))
        ),
        (
            curves(
                "Throughput over that of K = 2, M = 32",
                "partitions K",
                "×",
                (2, 4, 8),
                {
                    "slow links": lambda run, k: _slow(run, k) / _slow(run, 2),
                    "fast links": lambda run, k: normalized(run, k, 32) / normalized(run, 2, 32),
                },
                {"slow links": (1, 1.8, 3.3), "fast links": (1, 3.4 / 1.8, 6.3 / 1.8)},
            ),
        ),
        "The row of AmoebaNet is not computed: no profile of its layers is published.",
    ),
    Entry(
        "microbatch-ablation",
        "Notebook demo: number of micro-batches, three strategies",
        "A small Transformer on this machine: one process, naive model parallelism, GPipe by micro-batches",
        "measured",
        "slide: more micro-batches, faster training; GPipe performs best",
        (
            Value(
                "GPipe is faster with 4 micro-batches than with 1",
                lambda run: _rate(run, "gpipe", 4) > _rate(run, "gpipe", 1),
                True,
                why="Two cores, and other programs on them.",
            ),
            Value(
                "GPipe is faster than naive model parallelism",
                lambda run: _rate(run, "gpipe", 4) > _rate(run, "naive", 4),
                True,
                why="Two cores, and other programs on them.",
            ),
        ),
        (
            curves(
                "A small Transformer on two processes",
                "micro-batches",
                "samples/s",
                (1, 2, 4, 8),
                {name: lambda run, m, name=name: _rate(run, name, m) for name in ("accumulate", "naive", "gpipe")},
            ),
        ),
    ),
)
