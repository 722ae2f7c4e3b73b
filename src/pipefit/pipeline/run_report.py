"""The time of a run by operation, in words and pictures, and the bytes that its processes moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pipefit.ir.op import COMPUTE_OPS, Op
from pipefit.runtime.collectives import exchange
from pipefit.runtime.session import Session
from pipefit.spec import Plan
from pipefit.stage.accelerator import peak_bytes
from pipefit.timeline import Timeline, bottleneck, by_kind
from pipefit.units import format_bytes, format_seconds

SHOWN = {op.value for op in (*COMPUTE_OPS, Op.LOSS, Op.STEP, Op.HOST_STEP, Op.FETCH, Op.EVICT)}
"""Operations whose times are reported; messages and bookkeeping are only in the timelines."""


class Traffic(NamedTuple):
    """Bytes of the last step, of each process.

    Attributes:
        sent_bytes: activations and gradients to other ranks.
        inside_bytes: to the processes that share its rank, as a ring sends them: sums inside tensor-parallel layers,
            and gathers of messages that came in pieces.
    """

    sent_bytes: list[float]
    inside_bytes: list[float]


@dataclass(frozen=True)
class PipelineReport:
    """The last measured passes of a pipeline.

    Attributes:
        timeline: of these passes.
        plan: of the run.
        peak_memory_bytes: peak memory of each process: of its GPU, or resident.
        held_bytes: peak bytes of tensors of each process in one pass; []: not measured.
        traffic: bytes that each process has moved in the last pass.
        compile_s: seconds that each process has spent in compiling layers since it was started; 0: it compiled none.
    """

    timeline: Timeline
    plan: Plan
    peak_memory_bytes: list[float]
    traffic: Traffic
    held_bytes: list[float]
    compile_s: list[float]

    @classmethod
    def of(
        cls,
        timeline: Timeline,
        plan: Plan,
        session: Session,
        moved: tuple[float, float],
        held: float | None,
        compile_s: float,
        device: torch.device,
    ) -> PipelineReport:
        """Returns the figures of all processes, from those of this one. Every process must call it."""
        if held is None:
            held = math.nan
        rows = exchange(session, [*moved, peak_bytes(device), held, compile_s])
        sent, inside, peak, tensors, compiled = map(list, zip(*rows, strict=True))
        if any(map(math.isnan, tensors)):
            tensors = []
        return cls(timeline, plan, peak, Traffic(sent, inside), tensors, compiled)

    def __str__(self) -> str:
        measured = self.timeline
        ranks = range(len(measured.program.ranks))
        busy = " ".join(f"{measured.utilisation(rank):.0%}" for rank in ranks)
        period = format_seconds(measured.period_s)
        lines = [
            f"{self.plan.schedule} on {len(ranks)} ranks, {self.plan.num_microbatches} micro-batches: "
            f"{period} per step, bubble {measured.bubble_fraction:.1%}, busy {busy}",
            f"peak memory per process: {_of_each(format_bytes, self.peak_memory_bytes)}",
        ]
        if host := bottleneck(measured):
            lines.append(host)
        if self.held_bytes:
            lines.append(f"tensors at most: {_of_each(format_bytes, self.held_bytes)}")
        lines.append(f"sent to other ranks: {_of_each(format_bytes, self.traffic.sent_bytes)}")
        if self.plan.tensor > 1:
            lines.append(f"moved inside each rank: {_of_each(format_bytes, self.traffic.inside_bytes)}")
        if any(self.compile_s):
            lines.append(f"compiled in {_of_each(format_seconds, self.compile_s)}")
        lines.append(f"{'what':<14}{'median':>10}{'total':>10}{'count':>8}")
        kinds = by_kind(measured)
        for op, stage in sorted(kinds, key=lambda key: (key[1], key[0])):
            if op in SHOWN:
                times = kinds[op, stage]
                name = op
                if stage >= 0:
                    name += f" s{stage}"
                total = format_seconds(times.total_s)
                lines.append(f"{name:<14}{format_seconds(times.median_s):>10}{total:>10}{times.num_times:>8}")
        return "\n".join(lines)


def _of_each(form: Callable[[float], str], values: Sequence[float]) -> str:
    return ", ".join(map(form, values))
