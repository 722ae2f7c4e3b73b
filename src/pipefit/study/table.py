"""A study's result as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipefit.units import columns, format_bytes, format_seconds

if TYPE_CHECKING:
    from pipefit.study.results import StudyResult

__all__ = ["loss_text", "table_of"]


def loss_text(value: float | None) -> str:
    """A loss for people, those of a trial that diverges in few digits; nothing where there is none.

    >>> [loss_text(0.25), loss_text(4.1827e28), loss_text(None)]
    ['0.2500', '4.183e+28', '']
    """
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def table_of(result: StudyResult) -> str:
    """A study's result for people: a row for each trial, why trials ended, the figures, and where things are."""
    score = "held-out" if any(row.held_out for row in result.trials) else "score"
    head = ("trial", "status", "steps", score, "loss", "shards", "parameters", "busy", "moves")
    rows: list[tuple[str, ...]] = [head]
    for row in result.trials:
        rows.append(
            (
                ("* " if row.name == result.best else "  ") + row.name,
                row.status,
                str(row.steps),
                loss_text(row.score),
                loss_text(row.last_loss),
                str(row.shards or ""),
                f"{row.parameters:,}" if row.parameters else "",
                format_seconds(row.busy_s) if row.busy_s else "",
                str(row.moves),
            )
        )
    lines = [*columns(rows), ""]
    reasons: dict[str, list[str]] = {}
    for row in result.trials:
        if row.reason:
            reasons.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    lines += [f"{', '.join(names)} {reason}" for reason, names in reasons.items()]
    makespan = "makespan since it was resumed" if result.resumed else "makespan"
    measured = f"{makespan} {format_seconds(result.makespan_s)}, lower bound {format_seconds(result.bound_s)}"
    devices = f"{result.num_devices} device{'s' if result.num_devices > 1 else ''}"
    lines.append(f"{result.policy} on {devices}: {measured}, gap {result.gap:.1%}")
    if result.predicted_s is not None:
        lines.append(f"predicted after the first turns, with no trial stopped: {format_seconds(result.predicted_s)}")
    if result.policies:
        others = (f"{name} {format_seconds(s)} ({more:+.1%})" for name, (s, more) in result.policies.items())
        lines.append("on paper, with the turns as they were: " + ", ".join(others))
    largest = max((row.device_bytes for row in result.trials), default=0)
    if largest:
        lines.append(f"the largest shard needs {format_bytes(largest)} on its device")
    width = max(map(len, result.paths), default=0)
    lines += ["", *(f"{name:<{width}}  {path}" for name, path in result.paths.items())]
    return "\n".join(lines)
