"""The evaluation of PTD-P: GPTs on A100s by tensor, pipeline and data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from pipefit.reproduce.entry import Bench, Made, Picture, curves, each
from pipefit.reproduce.predicted import falls, gpt_plan, rate, tflops
from pipefit.reproduce.steps import Planned


class Row(NamedTuple):
    """A row of table 1: billions of parameters, shape, machine, TFLOP/s per GPU, and its micro-batch size.

    The last three are from Megatron-LM, examples/sc21/run_table_1.sh.
    """

    billions: float
    heads: int
    hidden: int
    layers: int
    t: int
    p: int
    devices: int
    batch: int
    published: float
    size: int
    schedule: str = "1f1b"
    chunks: int = 1

    @property
    def step(self) -> Planned:
        """Its plan."""
        shape = self.layers, self.hidden, self.heads, self.devices, self.batch, self.t, self.p
        chunks = {"chunks": [self.chunks]} if self.chunks > 1 else {}
        return gpt_plan(*shape, microbatch_sizes=[self.size], schedules=[self.schedule], **chunks)


TABLE_1 = (
    Row(1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 16),
    Row(3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 16),
    Row(7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 16),
    Row(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 8),
    Row(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 4),
    Row(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 2, "interleaved", 3),
    Row(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 2, "interleaved", 2),
    Row(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 1, "interleaved", 2),
    Row(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 1, "interleaved", 3),
    Row(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 1),
)

_BATCHES, _WIDTHS = (32, 128, 512), (2, 4, 8, 16, 32)
_PAIRS = ((2, 32), (4, 16), (8, 8), (16, 4), (32, 2))


def _small(batch: int, t: int = 1, p: int = 1) -> Planned:
    """5.9 billion parameters on 64 GPUs."""
    return gpt_plan(32, 3840, 32, 64, batch, t, p)


def _large(batch: int, t: int, p: int) -> Planned:
    """161 billion parameters on 64 GPUs."""
    return gpt_plan(32, 20480, 128, 64, batch, t, p)


def _chart(
    title: str, x_label: str, over: Sequence[Any], plans: Mapping[str, Callable[[Any], Planned]], **options: Any
) -> Callable[[Bench], Picture]:
    """TFLOP/s per GPU of plans, each a function of x; options as for `curves`."""
    lines = {name: lambda run, x, plan=plan: tflops(run, plan(x)) for name, plan in plans.items()}
    return curves(title, x_label, "TFLOP/s per GPU", over, lines, **options)


def _against_copies(width: str, x_label: str) -> Made:
    """The throughput over one width, where all other GPUs hold copies: it falls."""
    return Made(
        tuple(falls(tflops, [_small(b, **{width: n}) for n in _WIDTHS], 1.005) for b in _BATCHES),
        _chart(
            "5.9 billion parameters on 64 GPUs",
            x_label,
            _WIDTHS,
            {f"batch {b}": lambda n, b=b: _small(b, **{width: n}) for b in _BATCHES},
            log_x=True,
        ),
    )


def _best_pair(run: Bench, batch: int) -> str:
    found = {pair: tflops(run, _large(batch, *pair)) for pair in _PAIRS if run.fits(_large(batch, *pair))}
    t, p = max(found, key=lambda pair: found[pair])
    return f"t = {t}, p = {p}"


def _weak(batch: int, p: int) -> Planned:
    """Three layers of hidden size 20480 for each stage of eight GPUs."""
    return gpt_plan(3 * p, 20480, 128, 8 * p, batch, 8, p)


def _kept(run: Bench, batch: int) -> float:
    """The share of one stage's throughput per GPU that eight stages keep."""
    return tflops(run, _weak(batch, 8)) / tflops(run, _weak(batch, 1))


def _gpt3(batch: int, schedule: str, **more: Any) -> Planned:
    """175 billion parameters on 96 GPUs."""
    return gpt_plan(96, 12288, 96, 96, batch, 8, 12, schedules=[schedule], **more)


def _scattered(run: Bench, batch: int) -> float:
    """Throughput with scatter/gather over that with whole messages."""
    return rate(run, _gpt3(batch, "interleaved")) / rate(run, _gpt3(batch, "interleaved", whole_messages=True))


def _sized(batch: int, size: int) -> Planned:
    """91 billion parameters on 64 GPUs, t = p = 8."""
    return gpt_plan(64, 10880, 128, 64, batch, 8, 8, microbatch_sizes=[size], memory="200 GB")


def days(run: Bench, step: Planned, tokens: float) -> float:
    """Days of training on so many tokens of sequences of 2,048."""
    return tokens / 2048 / rate(run, step) / 86400


_GPT3 = gpt_plan(96, 12288, 96, 1024, 1536, 8, 8, schedules=["interleaved"])
_ALONE = Planned(
    "gpt:layers=96,hidden=12288,heads=96", "pcie-1", global_batch=8, depths=[1], recompute="layer", memory="10 TB"
)
_NEXT = TABLE_1[-1].step


def _gain(run: Bench, batch: int) -> float:
    return rate(run, _gpt3(batch, "interleaved")) / rate(run, _gpt3(batch, "1f1b"))


def _by_formula(run: Bench) -> float:
    """8·T·P/(n·X), with our X."""
    return 8 * 300e9 * 174.6e9 / (1024 * tflops(run, _GPT3) * 1e12) / 86400


def _alone(run: Bench) -> float:
    """Years of a single V100 without limit of memory, with the replays that 8·T·P counts."""
    return days(run, _ALONE, 300e9) / 365


MADE: Mapping[str, Made] = {
    "tensor-versus-pipeline": Made(
        each(_best_pair, (32, 128)),
        _chart(
            "161 billion parameters on 64 GPUs",
            "t, p",
            [f"{t}, {p}" for t, p in _PAIRS],
            {f"batch {b}": lambda pair, b=b: _large(b, *map(int, pair.split(", "))) for b in (32, 128)},
        ),
    ),
    "data-versus-pipeline": _against_copies("p", "depth p, copies 64/p"),
    "data-versus-tensor": _against_copies("t", "tensor width t, copies 64/t"),
    "weak-scaling": Made(
        (lambda run: _kept(run, 128) > _kept(run, 8), lambda run: _kept(run, 8)),
        _chart(
            "Weak scaling, t = 8",
            "depth p",
            (1, 2, 4, 8),
            {f"batch {b}": lambda p, b=b: _weak(b, p) for b in (8, 128)},
            log_x=True,
        ),
    ),
    "interleaved-gain": Made(
        (lambda run: _gain(run, 12) > 1, lambda run: _gain(run, 12) > _gain(run, 36) > _gain(run, 60)),
        _chart(
            "175 billion parameters on 96 GPUs",
            "batch",
            (12, 24, 36, 48, 60),
            {"interleaved": partial(_gpt3, schedule="interleaved"), "1F1B": partial(_gpt3, schedule="1f1b")},
        ),
    ),
    "microbatch-size": Made(
        (lambda run: max((1, 2, 4, 8), key=lambda size: rate(run, _sized(512, size))),),
        _chart(
            "91 billion parameters on 64 GPUs",
            "micro-batch size",
            (1, 2, 4, 8),
            {f"batch {b}": partial(_sized, b) for b in (128, 512)},
            log_x=True,
        ),
    ),
    "end-to-end": Made(
        each(lambda run, row: tflops(run, row.step), TABLE_1),
        _chart(
            "PTD-P, table 1",
            "billion parameters",
            [row.billions for row in TABLE_1],
            {"ours": {row.billions: row.step for row in TABLE_1}.__getitem__},
            published={"PTD-P": [row.published for row in TABLE_1]},
            log_x=True,
        ),
    ),
    "training-days": Made(
        (
            lambda run: days(run, _GPT3, 300e9),
            lambda run: days(run, _NEXT, 450e9),
            _by_formula,
            _alone,
            lambda run: tflops(run, _ALONE),
        )
    ),
    "scatter-gather": Made(
        (lambda run: _scattered(run, 60) - 1, lambda run: _scattered(run, 60) > _scattered(run, 12)),
        _chart(
            "175 billion parameters on 96 GPUs, interleaved",
            "batch",
            (12, 24, 36, 48, 60),
            {
                "scatter/gather": partial(_gpt3, schedule="interleaved"),
                "whole messages": partial(_gpt3, schedule="interleaved", whole_messages=True),
            },
        ),
    ),
}
