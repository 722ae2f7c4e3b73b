"""`pipefit schedules`: the list of schedules."""

from __future__ import annotations

from pipefit.cli.answer import Answer, picked
from pipefit.cli.options import Json


def command(*, json: Json = False) -> Answer:
    """List the schedules with their options.

    Example: pipefit schedules
    """
    from pipefit.schedules import find, names
    from pipefit.units import columns

    data = []
    rows = []
    for schedule in map(find, names()):
        facts = picked(schedule, "name", "summary", "chunks", "options")
        data.append(facts | {"synchronous": schedule.is_synchronous})
        options = [f"[--option {name}={value}]" for name, value in schedule.options.items()]
        if schedule.chunks:
            options.insert(0, "[-v CHUNKS]")
        rows.append((schedule.name, schedule.summary))
        if options:
            rows.append(("", " ".join(options)))
    return Answer({"schedules": data}, "\n".join(columns(rows)))
