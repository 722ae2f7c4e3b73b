"""Figures of a training while it runs: bubble and memory of every rank after each step, and FLOP for MFU."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipefit.errors import PipefitError
from pipefit.ir.op import COMPUTE_OPS
from pipefit.profiling import analytic_profile, measure_device
from pipefit.runtime.executor import Execution
from pipefit.runtime.session import Session
from pipefit.spec.topology import Device
from pipefit.stage.split import NamedLayer


class StepFigures(NamedTuple):
    """The bubble and memory of the last pass, by rank; by process where each is one.

    Attributes:
        bubble: share of the pass without forward or backward.
        memory_bytes: the most the process has held so far: of its GPU, or resident.
    """

    bubble: tuple[float, ...]
    memory_bytes: tuple[float, ...]

    @classmethod
    def of(cls, figures: Sequence[float]) -> StepFigures:
        """From the sums of the figures that every process gave by `own_figures`."""
        half = len(figures) // 2
        return cls(tuple(figures[:half]), tuple(figures[half:]))


def own_figures(session: Session, runs: Sequence[Execution]) -> list[float]:
    """The part of this process in `StepFigures`, zeros at the places of the others."""
    bubbles = [_bubble(run.compiled.instructions, run.starts, run.ends) for run in runs]
    if not session.is_distributed:
        return [*bubbles, *([_memory_bytes()] + [0.0] * (len(bubbles) - 1))]
    figures = [0.0] * (2 * session.num_ranks)
    figures[session.rank] = bubbles[0]
    figures[session.num_ranks + session.rank] = _memory_bytes()
    return figures


def _bubble(instructions: Sequence[Any], starts: Sequence[float], ends: Sequence[float]) -> float:
    busy = sum(end - start for i, start, end in zip(instructions, starts, ends, strict=True) if i.op in COMPUTE_OPS)
    whole = max(ends, default=0.0) - min(starts, default=0.0)
    return 1 - busy / whole if whole > 0 else 0.0


def _memory_bytes() -> float:
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


class ModelFlop(NamedTuple):
    """The basis of MFU: FLOP of the model, forward and backward once, over the FLOP per second of the devices.

    Attributes:
        flop_per_sample: of forward and backward of the model, a replay not counted.
        flops: FLOP per second that all ranks together reach.
        convention: the way both were found, in words.
    """

    flop_per_sample: float
    flops: float
    convention: str

    def mfu(self, samples_per_s: float) -> float:
        """The share of the devices' FLOP that goes into the model."""
        return samples_per_s * self.flop_per_sample / self.flops


def count_flop(
    layers: Sequence[NamedLayer],
    example: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor],
    num_ranks: int,
    known: Device | None = None,
    device: str = "",
) -> ModelFlop | None:
    """Counts the model's FLOP on tensors without data; those of the device come from its data sheet or are measured.

    Args:
        layers: of the whole model.
        example: (input, target).
        loss: as in training.
        num_ranks: of the run.
        known: with its peak FLOP per second, where a topology gives them.
        device: where ranks compute, "" for the best there is.

    Returns:
        None where the model's FLOP cannot be counted.
    """
    x, y = example
    # On a device of one FLOP per second, seconds are FLOP.
    one = Device(flops=1.0, efficiency=1.0)
    try:
        count = analytic_profile([(layer.name, layer.module) for layer in layers], x, one, loss, y)
    except (PipefitError, RuntimeError, NotImplementedError, TypeError):
        return None
    total = sum(layer.total_s for layer in count.layers) + count.loss_s
    if not total:
        return None
    flops, how = (known.flops, "the data sheet's") if known is not None and known.flops else (0.0, "")
    if not flops:
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        flops, how = measure_device(place, threads=None, repeats=3).flops, "those that a large matrix product reaches"
    convention = f"model FLOP, forward and backward once, over {how}, {flops / 1e9:.0f} GFLOP/s per rank"
    return ModelFlop(total / count.microbatch_size, flops * num_ranks, convention)
