"""The time of a run by operation, in words and pictures, and the bytes that its processes moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipefit.ir.op import COMPUTE_OPS, Op
from pipefit.runtime.collectives import gather_rows
from pipefit.runtime.session import Session
from pipefit.spec import Plan
from pipefit.timeline import Timeline, by_kind, save_trace
from pipefit.units import format_bytes, format_seconds

_SHOWN = {op.value for op in (*COMPUTE_OPS, Op.LOSS, Op.STEP, Op.HOST_STEP, Op.FETCH, Op.EVICT)}


class Traffic(NamedTuple):
    """Bytes of the last step, of each process.

    Attributes:
        sent_bytes: activations and gradients to other ranks.
        inside_bytes: to the processes that share its rank, as a ring sends them: sums inside tensor-parallel layers,
            and gathers of messages that came in pieces.
    """

    sent_bytes: list[float]
    inside_bytes: list[float]


def traffic(session: Session, own: tuple[float, float]) -> Traffic:
    """Returns the figures of all processes, from those of this one. Every process must call it."""
    rows = gather_rows(session, own)
    return Traffic([row[0] for row in rows], [row[1] for row in rows])


@dataclass(frozen=True)
class PipelineReport:
    """The last passes of a pipeline as they were measured.

    Attributes:
        timeline: what ran when.
        plan: of the run.
        peak_memory_bytes: the most each process has held: of its GPU, or resident.
        held_bytes: the most of tensors that each process held at a time in one pass; (): not measured.
        traffic: bytes that each process has moved in the last pass.
    """

    timeline: Timeline
    plan: Plan
    peak_memory_bytes: list[float]
    traffic: Traffic | None = None
    held_bytes: Sequence[float] = ()

    def __str__(self) -> str:
        measured = self.timeline
        ranks = range(len(measured.program.ranks))
        busy = " ".join(f"{measured.utilisation(rank):.0%}" for rank in ranks)
        lines = [
            f"{self.plan.schedule} on {len(ranks)} ranks, {self.plan.num_microbatches} micro-batches: "
            f"{format_seconds(measured.period_s)} per step, bubble {measured.bubble_fraction:.1%}, busy {busy}",
            f"peak memory per process: {', '.join(map(format_bytes, self.peak_memory_bytes))}",
            *([f"tensors at most: {', '.join(map(format_bytes, self.held_bytes))}"] if self.held_bytes else []),
            *self._moved(),
            f"{'what':<14}{'median':>10}{'total':>10}{'count':>8}",
        ]
        for (op, stage), times in sorted(by_kind(measured).items(), key=lambda item: (item[0][1], item[0][0])):
            if op in _SHOWN:
                name = f"{op} s{stage}" if stage >= 0 else op
                lines.append(
                    f"{name:<14}{format_seconds(times.median_s):>10}{format_seconds(times.total_s):>10}{times.num_times:>8}"
                )
        return "\n".join(lines)

    def _moved(self) -> list[str]:
        if self.traffic is None:
            return []
        lines = [f"sent to other ranks: {', '.join(map(format_bytes, self.traffic.sent_bytes))}"]
        if self.plan.tensor > 1:
            lines.append(f"moved inside each rank: {', '.join(map(format_bytes, self.traffic.inside_bytes))}")
        return lines

    def save(self, folder: str | Path) -> dict[str, Path]:
        """Writes the picture, the page and the trace, and says where they are."""
        from pipefit.draw import html, save
        from pipefit.spec.files import write_atomically

        place = Path(folder)
        return {
            "picture": save(self.timeline, place / "measured.svg"),
            "page": write_atomically(place / "measured.html", html(self.timeline)),
            "trace": save_trace(self.timeline, place / "measured.trace.json"),
        }
