"""The faults of a run and the recoveries from them: a line of JSON for each, in a file of the run's folder.

{"fault": "rank 1 failed at …", "start": 0, "time": …}                       by the launcher
{"resumed": 30, "source": "memory", "start": 1, "ranks": 4, "lost": 0, …}    by rank 0, after its next step
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipefit.units import counted, format_seconds

_FILE = "faults.jsonl"


def note(folder: Path, time_s: float, **facts: Any) -> None:
    """Adds a line with the time (Unix seconds); a full disk does not end the run."""
    with contextlib.suppress(OSError), (folder / _FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({**facts, "time": time_s}) + "\n")


def forget(folder: Path) -> None:
    """Removes the lines of an earlier run in the same folder."""
    (folder / _FILE).unlink(missing_ok=True)


def noted(folder: Path) -> list[dict[str, Any]]:
    """The lines in the order in which they were written; damaged ones are left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in (folder / _FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def described(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Each fault in words, and what was done and what it cost; "": nothing was done."""
    whole = [line for line in lines if isinstance(line.get("start"), int)]
    faults = {line["start"]: str(line["fault"]) for line in whole if "fault" in line}
    done = {line["start"] - 1: line for line in whole if "resumed" in line}
    elsewhere = "processes were lost or added; torchrun has started all ranks again"
    starts = sorted({*faults, *done})
    return [(faults.get(start, elsewhere), _done(done.get(start))) for start in starts]


def _done(line: Mapping[str, Any] | None) -> str:
    if line is None:
        return ""
    done = f"resumed after step {line['resumed']} from {line['source']} on {line['ranks']} ranks"
    if "plan" in line:
        done += f" ({line['plan']})"
    done += f"; {counted(line['lost'], 'step')} done again"
    if "seconds" in line:
        done += f", {format_seconds(line['seconds'])} to the next finished step"
    return done
