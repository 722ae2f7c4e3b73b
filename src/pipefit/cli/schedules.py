"""`pipefit schedules`: what there is to choose from."""

from __future__ import annotations

from pipefit.cli.answer import Answer
from pipefit.cli.options import Json

__all__ = ["command"]


def command(*, json: Json = False) -> Answer:
    """List the schedules with their options.

    Example: pipefit schedules
    """
    from pipefit.schedules import find, names

    found = [find(name) for name in names()]
    data = [
        {
            "name": schedule.name,
            "summary": schedule.summary,
            "synchronous": schedule.is_synchronous,
            "chunks": schedule.chunks,
            "options": schedule.options,
        }
        for schedule in found
    ]
    width = max(len(schedule.name) for schedule in found)
    lines = []
    for schedule in found:
        options = " ".join(f"[--option {name}={value}]" for name, value in schedule.options.items())
        tail = " ".join(filter(None, ("[-v CHUNKS]" if schedule.chunks else "", options)))
        lines.append(f"{schedule.name:<{width}}  {schedule.summary}")
        lines += [f"{'':<{width}}  {tail}"] if tail else []
    return Answer({"schedules": data}, "\n".join(lines))
