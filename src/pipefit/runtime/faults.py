"""The faults of a run and the recoveries from them: a line of JSON for each, in a file of the run's folder.

{"fault": "rank 1 failed at …", "start": 0, "time": …}                       by the launcher
{"resumed": 30, "source": "memory", "start": 1, "ranks": 4, "lost": 0, …}    by rank 0, after its next step
{"entered": 4, "step": 40, "start": 1, …}                                    by a rank, after a process has entered
{"move": "layer 3 …", "why": …, "step": 50, "start": 1, …}                   by rank 0, after layers have moved
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipefit.spec.files import JsonObject
from pipefit.units import counted, format_seconds

_FILE = "faults.jsonl"

IN_PLACE = "the ranks that are left"
"""The source of a training that has resumed without a restart."""

REPAIRED = "repair"
RESTARTED = "restart"
GREW = "entry"
MOVED = "move"
LOST = "fault"

_ELSEWHERE = "processes were lost or added; torchrun has started all ranks again"


def note(folder: Path, time_s: float, **facts: Any) -> None:
    """Adds a line with the time (Unix seconds); a full disk does not end the run."""
    with contextlib.suppress(OSError), (folder / _FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({**facts, "time": time_s}) + "\n")


def forget(folder: Path) -> None:
    """Removes the lines of an earlier run in the same folder."""
    (folder / _FILE).unlink(missing_ok=True)


def noted(folder: Path) -> list[JsonObject]:
    """The lines in the order in which they were written; damaged ones are left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in (folder / _FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


class Event(NamedTuple):
    """Something that happened to a run.

    Attributes:
        step: the last step before it; None: not known.
        kind: `REPAIRED`, `RESTARTED`, `GREW`, `MOVED`, or `LOST` where nothing is known.
        what: it was.
        done: about it, and the cost; "": nothing.
    """

    step: int | None
    kind: str
    what: str
    done: str


def events_of(lines: Sequence[Mapping[str, Any]]) -> list[Event]:
    """The events of a run in words, in the order of the lines; a fault with the recovery from it."""
    whole = [line for line in lines if isinstance(line.get("start"), int)]
    recoveries = {line["start"] - 1: line for line in whole if "resumed" in line}
    found = []
    for line in whole:
        if "move" in line:
            found.append(_moved(line))
        elif "entered" in line:
            what = "a process that was started again has entered"
            found.append(Event(line["step"], GREW, what, f"after step {line['step']} on {line['entered']} ranks"))
        elif "fault" in line:
            found.append(_resumed(str(line["fault"]), recoveries.pop(line["start"], None)))
    elsewhere = [_resumed(_ELSEWHERE, line) for line in recoveries.values()]
    return found + elsewhere


def _moved(line: Mapping[str, Any]) -> Event:
    before = format_seconds(line["before_s"])
    after = format_seconds(line["after_s"])
    seconds = format_seconds(line["seconds"])
    return Event(
        line["step"], MOVED, f"{line['move']}: {line['why']}", f"{before} to {after} per step; it took {seconds}"
    )


def _resumed(fault: str, line: Mapping[str, Any] | None) -> Event:
    if line is None:
        return Event(None, LOST, fault, "")
    kind = RESTARTED
    if line["source"] == IN_PLACE:
        kind = REPAIRED
    done = f"resumed after step {line['resumed']} from {line['source']} on {line['ranks']} ranks"
    if "plan" in line:
        done += f" ({line['plan']})"
    done += f"; {counted(line['lost'], 'step')} done again"
    if "seconds" in line:
        done += f", {format_seconds(line['seconds'])} to the next finished step"
    return Event(line["resumed"] + line["lost"], kind, fault, done)
