"""Start-up times: of the verbs that never load torch, and of ranks from the preloaded fork server."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import NamedTuple

from pipefit.runtime.launch import launch
from pipefit.runtime.session import current
from pipefit.units import format_seconds

VERBS = (
    "--help",
    "schedules",
    "draw 1f1b -p 8 -m 64",
    "draw 1f1b -p 8 -m 64 --json",
    "draw interleaved -p 4 -m 16 -v 2 --json",
)


class StartRow(NamedTuple):
    """How long something took.

    Attributes:
        what: was begun.
        seconds: median.
        least: the fastest.
    """

    what: str
    seconds: float
    least: float


def start(repeats: int = 5) -> list[StartRow]:
    """Times the verbs in processes of their own, and launches of two ranks."""
    times: dict[str, list[float]] = {}
    commands = {"python -c pass": ["-c", "pass"], "import pipefit": ["-c", "import pipefit"]}
    commands |= {f"pipefit {verb}": ["-m", "pipefit", *verb.split()] for verb in VERBS}
    for _ in range(repeats):
        for what, arguments in commands.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            times.setdefault(what, []).append(time.perf_counter() - began)
    for index in range(repeats + 1):
        what = "two ranks, further ones" if index else "two ranks, the first (loads torch)"
        began = time.perf_counter()
        launch(_nothing, 2, threads=1, quiet=True)
        times.setdefault(what, []).append(time.perf_counter() - began)
    return [StartRow(what, statistics.median(found), min(found)) for what, found in times.items()]


def _nothing() -> int:
    return current().rank


def main(repeats: int = 5) -> None:
    """Prints medians and the fastest of each."""
    for row in start(repeats):
        print(f"{row.what:<46} {format_seconds(row.seconds):>9}, least {format_seconds(row.least)}")
