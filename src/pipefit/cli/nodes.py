"""`pipefit doctor` under a launcher: the machines of a run side by side, their links, and what to fix."""

from __future__ import annotations

import platform
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median_low
from typing import Any

import pipefit
from pipefit.cli.answer import Answer, code_of, picked
from pipefit.spec.files import JsonObject
from pipefit.spec.host import usable_bytes
from pipefit.units import counted, format_bytes, format_seconds, table, terminal_width, wrapped

_MESSAGE_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
_CLOCK_ROUNDS = 9
_CLOCK_S = 1.0
"""Between clocks, in seconds; then times of files and logs no longer order events of two machines."""
UNCLEAR = "times of messages vary too much for a measurement"
_COLUMNS = ("node", "ranks", "pipefit", "python", "torch", "devices", "cores", "memory", "clock", "folder")


def compare_nodes(folder: Path) -> Answer:
    """The table of all machines; every rank of the launcher calls it, and rank 0 shows the answer.

    Args:
        folder: that the machines should share.
    """
    from pipefit.runtime.collectives import exchange, from_first
    from pipefit.runtime.session import current

    session = current()
    mark = from_first(session, lambda: _marked(folder))
    everyone = exchange(session, _facts() | {"shared": bool(mark) and (folder / mark).is_file()})
    if session.rank == 0 and mark:
        (folder / mark).unlink()
    nodes: dict[str, JsonObject] = {}
    for rank, facts in enumerate(everyone):
        first = nodes.setdefault(facts["node"], facts | {"ranks": []})
        first["ranks"].append(rank)
        first["shared"] = first["shared"] and facts["shared"]
    # All read their clocks as they leave an exchange; of the first round they do not, so the middle one counts.
    clocks = [exchange(session, time.time()) for _ in range(_CLOCK_ROUNDS)]
    for facts in nodes.values():
        rank = facts["ranks"][0]
        facts["clock_s"] = median_low(times[rank] - times[0] for times in clocks)
    links = []
    if session.is_distributed:
        links = measured_links()
    found = list(nodes.values())
    problems = list(_problems(found, folder, bool(mark)))
    is_good = all(state != "bad" for state, _ in problems)
    data = {"ok": is_good, "nodes": found, "links": links, "folder": str(folder.resolve()), "problems": problems}
    return Answer(data, _text(found, links, problems, folder), code_of(is_good))


def _facts() -> JsonObject:
    """The versions and the hardware of this process's machine, as JSON data."""
    import torch

    from pipefit.run.config import num_cores
    from pipefit.stage import accelerator

    gpus = accelerator.names()
    cuda = None
    if gpus:
        cuda = torch.version.cuda
    return {
        "node": platform.node(),
        "pipefit": pipefit.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": cuda,
        "gpus": gpus,
        "cores": num_cores(),
        "memory_bytes": usable_bytes(),
    }


def _marked(folder: Path) -> str:
    """The name of a new file in the folder; "": it cannot be written."""
    path = folder / f".pipefit-doctor-{uuid.uuid4().hex[:8]}"
    with suppress(OSError):
        path.touch()
        return path.name
    return ""


def measured_links() -> list[JsonObject]:
    """Links inside a machine and between machines; none when the machines are too busy for a measurement.

    Every rank calls it.
    """
    from pipefit.errors import TopologyError
    from pipefit.profiling import measure_links

    try:
        levels = measure_links(sizes=_MESSAGE_BYTES, repeats=10).levels
    except TopologyError:  # larger messages took no longer: every rank sees the same times
        return []
    found = []
    for level in levels:
        found.append({"level": level.name, **picked(level, "bandwidth_bytes_per_s", "latency_s")})
    return found


def _problems(nodes: Sequence[JsonObject], folder: Path, writable: bool) -> Iterator[tuple[str, str]]:
    """Differences between the machines: ("bad" or "warn", text)."""
    first = nodes[0]
    for name in ("pipefit", "torch", "python", "cuda", "gpus"):
        if all(facts[name] == first[name] for facts in nodes):
            continue
        each = ", ".join(f"{_words(facts[name])} on {facts['node']}" for facts in nodes)
        if name in ("pipefit", "torch"):
            yield "bad", f"{name} differs: {each}; install the same version"
        else:
            yield "warn", f"{name} differs: {each}"
    for facts in nodes:
        if abs(facts["clock_s"]) > _CLOCK_S:
            off = f"{facts['clock_s']:+.1f} s"
            yield "warn", f"the clock of {facts['node']} differs by {off}: start a time service (chrony)"
    place = folder.resolve()
    lacking = [facts["node"] for facts in nodes if not facts["shared"]]
    if not writable:
        yield "warn", f"{place} cannot be written on {first['node']}: give another with --folder"
    elif lacking:
        yield (
            "warn",
            f"{place} is not shared: {', '.join(lacking)} does not see what {first['node']} writes; checkpoints (-o) "
            "need a folder that all machines share",
        )


def _words(value: Any) -> str:
    if isinstance(value, list):
        value = ", ".join(value)
    return str(value or "none")


def counted_names(names: Sequence[str]) -> str:
    """Names with their numbers: 2 × H100, 1 × A100."""
    return ", ".join(f"{number} × {name}" for name, number in Counter(names).items())


def link_text(bandwidth_bytes_per_s: float, latency_s: float) -> str:
    """The figures of a link."""
    return f"{format_bytes(bandwidth_bytes_per_s)}/s, latency {format_seconds(latency_s)}"


def _text(nodes: Sequence[JsonObject], links: Sequence[JsonObject], problems: Any, folder: Path) -> str:
    width = terminal_width()
    rows = [_COLUMNS, *(_row(facts, facts is nodes[0]) for facts in nodes)]
    lines = [f"{counted(len(nodes), 'machine')}; folder {folder.resolve()}", "", *table(rows, width), ""]
    for link in links:
        where = "inside a machine"
        if link["level"] == "network":
            where = "between machines"
        lines.append(f"links, {where}: {link_text(link['bandwidth_bytes_per_s'], link['latency_s'])}")
    if not links:
        lines.append(f"links: {UNCLEAR}")
    marks = {"bad": "x", "warn": "!"}
    for state, text in problems:
        lines += wrapped(f"{marks[state]}  {text}", width, "   ")
    num_bad = sum(state == "bad" for state, _ in problems)
    return "\n".join([*lines, "", verdict(num_bad)])


def verdict(num_bad: int) -> str:
    """The last line, for so many problems to fix."""
    if num_bad:
        return f"{num_bad} to fix, marked x."
    return "All is well."


def _row(facts: JsonObject, is_first: bool) -> tuple[str, ...]:
    ranks = str(facts["ranks"][0])
    if len(facts["ranks"]) > 1:
        ranks += f"…{facts['ranks'][-1]}"
    clock = "0"
    if not is_first:
        clock = f"+{format_seconds(facts['clock_s'])}"
        if facts["clock_s"] < 0:
            clock = f"-{format_seconds(-facts['clock_s'])}"
    shared = "no"
    if facts["shared"]:
        shared = "shared"
    versions = [facts[name] for name in ("pipefit", "python", "torch")]
    hardware = [counted_names(facts["gpus"]) or "CPU", str(facts["cores"]), format_bytes(facts["memory_bytes"])]
    return (facts["node"], ranks, *versions, *hardware, clock, shared)
