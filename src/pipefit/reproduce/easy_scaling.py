"""The lecture on GPipe: easy scaling with micro-batch pipeline parallelism."""

from __future__ import annotations

from collections.abc import Mapping

from pipefit.errors import InfeasibleError
from pipefit.reproduce.clusters import normalized, transformer
from pipefit.reproduce.entry import Bench, Made, curves, drawn, each, figure
from pipefit.reproduce.predicted import rate
from pipefit.reproduce.steps import Draw, Planned, Verb

_COUNTS = (2, 4, 8, 16)
_COMPARED = Verb(
    "compare", model="gpt", option="layers=4,hidden=256,context=64", ranks=2, batch=32, microbatches=(1, 2, 4, 8),
    strategies="accumulate,naive,gpipe", steps=4, repeats=2, limit=10,
)  # fmt: skip


def _kept(run: Bench, layers: int, microbatches: int, stages: int, recompute: bool) -> float:
    """Samples × layers whose activations a device holds at its peak, of 32 samples: from the simulated program."""
    drawing = run(Draw("gpipe", stages, microbatches, **({"recompute": True} if recompute else {})))
    saved, kept = (max(drawing.metrics[name]) for name in ("peak_inflight", "kept_inputs"))
    each = 32 / microbatches
    return float(saved * each * layers / stages + kept * each)


def _slow(run: Bench, stages: int) -> float:
    """Samples per second of a Transformer under GPipe over PCIe, without NVLink."""
    plan, machine = transformer(stages, 32), f"pcie-1x{stages}" if stages <= 4 else "pcie-2x4"
    return rate(run, Planned(plan.places[0], machine, **plan.options))


def _rate(run: Bench, strategy: str, microbatches: int) -> float:
    """Measured samples per second."""
    for row in run(_COMPARED)["rows"]:
        if row["strategy"] == strategy and row["num_microbatches"] == microbatches:
            return float(row["samples_per_s"])
    raise InfeasibleError(f"{strategy} with {microbatches} micro-batches was not measured")


MADE: Mapping[str, Made] = {
    "vanilla-waste": Made(
        tuple(figure(Draw("naive", k, 2), "bubble_fraction") for k in _COUNTS),
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
    "gpipe-bubble": Made(
        tuple(figure(Draw("gpipe", 4, m), "bubble_fraction") for m in _COUNTS),
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
    "checkpointing-memory": Made(
        (lambda run: _kept(run, 32, 8, 4, False), lambda run: _kept(run, 32, 8, 4, True)),
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
    "slow-links": Made(
        each(lambda run, k: _slow(run, k) / _slow(run, 2), (2, 4, 8)),
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
    "microbatch-ablation": Made(
        (
            lambda run: _rate(run, "gpipe", 4) > _rate(run, "gpipe", 1),
            lambda run: _rate(run, "gpipe", 4) > _rate(run, "naive", 4),
        ),
        curves(
            "A small Transformer on two processes",
            "micro-batches",
            "samples/s",
            (1, 2, 4, 8),
            {name: lambda run, m, name=name: _rate(run, name, m) for name in ("accumulate", "naive", "gpipe")},
        ),
    ),
}
