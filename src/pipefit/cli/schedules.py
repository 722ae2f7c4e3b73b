"""`pipefit schedules`: the list of schedules."""

from __future__ import annotations

from pipefit.cli.answer import Answer
from pipefit.cli.options import Json


def command(*, json: Json = False) -> Answer:
    """List the schedules with their options.

    Example: pipefit schedules
    """
    from pipefit.schedules import find, names
    from pipefit.units import columns

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
    rows = []
    for schedule in found:
        options = (f"[--option {name}={value}]" for name, value in schedule.options.items())
        tail = " ".join((*["[-v CHUNKS]"] * bool(schedule.chunks), *options))
        rows.append((schedule.name, schedule.summary))
        if tail:
            rows.append(("", tail))
    return Answer({"schedules": data}, "\n".join(columns(rows)))
