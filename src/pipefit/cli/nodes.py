"""`pipefit doctor` under a launcher: the machines of a run side by side, their links, and what to fix."""

from __future__ import annotations

import platform
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median_low
from typing import Any

import pipefit
from pipefit.cli.answer import FINDING, FINE, Answer
from pipefit.spec.host import usable_bytes
from pipefit.units import counted, format_bytes, format_seconds, table, wrapped

_MESSAGE_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
_CLOCK_TRIPS = 9
_CLOCK_S = 1.0
"""Between clocks, in seconds; then times of files and logs no longer order events of two machines."""
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
    nodes = [facts for rank, facts in enumerate(everyone) if facts["node"] not in [e["node"] for e in everyone[:rank]]]
    for facts in nodes:
        theirs = [rank for rank, each in enumerate(everyone) if each["node"] == facts["node"]]
        facts |= {"ranks": theirs, "clock_s": _clock_ahead_s(session.rank, theirs[0])}
        facts["shared"] = all(everyone[rank]["shared"] for rank in theirs)
    if session.is_distributed:
        links = measured_links()
    else:
        links = []
    problems = list(_problems(nodes, folder, bool(mark)))
    bad = [text for state, text in problems if state == "bad"]
    data = {"ok": not bad, "nodes": nodes, "links": links, "folder": str(folder.resolve()), "problems": problems}
    return Answer(data, _text(nodes, links, problems, folder), FINDING if bad else FINE)


def _facts() -> dict[str, Any]:
    """The versions and the hardware of this process's machine, as JSON data."""
    import torch

    from pipefit.run.config import num_cores

    return {
        "node": platform.node(),
        "pipefit": pipefit.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
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


def _clock_ahead_s(rank: int, peer: int) -> float:
    """Seconds by which the clock of a rank is ahead of that of rank 0; every rank calls it.

    Half of a round trip is taken for the way back, as in NTP (RFC 5905, section 8), of the middle of several trips.
    """
    import torch
    import torch.distributed as dist

    ahead = torch.zeros(1, dtype=torch.float64)
    found = []
    for _ in range(_CLOCK_TRIPS if peer else 0):
        if rank == 0:
            began = time.time()
            dist.send(ahead, peer)
            dist.recv(ahead, peer)
            found.append(ahead.item() - (began + time.time()) / 2)
        elif rank == peer:
            dist.recv(ahead, 0)
            ahead[0] = time.time()
            dist.send(ahead, 0)
    if found:
        ahead[0] = median_low(found)
    else:
        ahead[0] = 0.0
    if dist.is_initialized():
        dist.broadcast(ahead, 0)
    return ahead.item()


def measured_links() -> list[dict[str, Any]]:
    """Links inside a machine and between machines; none when the machines are too busy for a measurement.

    Every rank calls it.
    """
    from pipefit.errors import TopologyError
    from pipefit.profiling import measure_links

    try:
        levels = measure_links(sizes=_MESSAGE_BYTES, repeats=10).levels
    except TopologyError:  # larger messages took no longer: every rank sees the same times
        return []
    return [
        {"level": level.name, "bandwidth_bytes_per_s": level.bandwidth_bytes_per_s, "latency_s": level.latency_s}
        for level in levels
    ]


def _problems(nodes: Sequence[dict[str, Any]], folder: Path, writable: bool) -> Iterator[tuple[str, str]]:
    """Differences between the machines: ("bad" or "warn", text)."""
    for name in ("pipefit", "torch", "python", "cuda", "gpus"):
        values = {facts["node"]: facts[name] for facts in nodes}
        if any(value != nodes[0][name] for value in values.values()):
            said = ", ".join(f"{_words(value)} on {node}" for node, value in values.items())
            bad = name in ("pipefit", "torch")
            yield "bad" if bad else "warn", f"{name} differs: {said}" + "; install the same version" * bad
    late = [facts for facts in nodes if abs(facts["clock_s"]) > _CLOCK_S]
    for facts in late:
        yield (
            "warn",
            f"the clock of {facts['node']} differs by {facts['clock_s']:+.1f} s: start a time service (chrony)",
        )
    if not writable:
        yield "warn", f"{folder.resolve()} cannot be written on {nodes[0]['node']}: give another with --folder"
    elif lacking := [facts["node"] for facts in nodes if not facts["shared"]]:
        yield (
            "warn",
            f"{folder.resolve()} is not shared: {', '.join(lacking)} does not see what {nodes[0]['node']} writes; "
            "checkpoints (-o) need a folder that all machines share",
        )


def _words(value: Any) -> str:
    return (", ".join(value) if isinstance(value, list) else str(value or "")) or "none"


def _text(nodes: Sequence[dict[str, Any]], links: Sequence[dict[str, Any]], problems: Any, folder: Path) -> str:
    rows = [_COLUMNS]
    for facts in nodes:
        devices = _words([f"{facts['gpus'].count(name)} × {name}" for name in dict.fromkeys(facts["gpus"])])
        if len(facts["ranks"]) > 1:
            ranks = f"{facts['ranks'][0]}…{facts['ranks'][-1]}"
        else:
            ranks = str(facts["ranks"][0])
        clock = f"{'-' if facts['clock_s'] < 0 else '+'}{format_seconds(abs(facts['clock_s']))}"
        versions = [facts["node"], ranks, facts["pipefit"], facts["python"], facts["torch"]]
        hardware = ["CPU" if devices == "none" else devices, str(facts["cores"]), format_bytes(facts["memory_bytes"])]
        rows.append(
            (*versions, *hardware, clock if facts is not nodes[0] else "0", "shared" if facts["shared"] else "no")
        )
    width = shutil.get_terminal_size((100, 24)).columns
    lines = [f"{counted(len(nodes), 'machine')}; folder {folder.resolve()}", "", *table(rows, width), ""]
    for link in links:
        figures = f"{format_bytes(link['bandwidth_bytes_per_s'])}/s, latency {format_seconds(link['latency_s'])}"
        lines.append(f"links, {'between machines' if link['level'] == 'network' else 'inside a machine'}: {figures}")
    if not links:
        lines.append("links: times of messages vary too much for a measurement")
    for state, text in problems:
        lines += wrapped(f"{'x' if state == 'bad' else '!'}  {text}", width, "   ")
    num_bad = sum(state == "bad" for state, _ in problems)
    return "\n".join([*lines, "", f"{num_bad} to fix, marked x." if num_bad else "All is well."])
