"""`pipefit doctor`: the machine's hardware and software, a test of communication, and problems with their fixes."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pipefit
from pipefit.cli.answer import Answer, code_of, picked
from pipefit.cli.nodes import UNCLEAR, compare_nodes, counted_names, link_text, measured_links, verdict
from pipefit.cli.options import Count, Json, Ranks
from pipefit.cli.version import version_of
from pipefit.errors import CommunicationError, PipefitError
from pipefit.spec.files import JsonObject
from pipefit.spec.host import usable_bytes
from pipefit.units import columns, format_bytes, format_seconds

_OPTIONAL = {"matplotlib": "plot", "optuna": "search"}
_MARKS = {"good": "+", "warn": "!", "bad": "x"}
_SHM = Path("/dev/shm")
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class _Check:
    """One check.

    Attributes:
        name: of the checked property.
        state: "bad" prevents pipefit from working, "warn" may slow it down.
        found: its value.
        fix: the remedy, if one is needed.
        facts: the same for programs.
    """

    name: str
    found: str
    state: Literal["good", "warn", "bad"] = "good"
    fix: str = ""
    facts: JsonObject = field(default_factory=dict)


def command(
    *,
    ranks: Ranks = 2,
    timeout: Count = 60,
    folder: Path = Path(),
    gpu: bool = False,
    json: Json = False,
) -> Answer:
    """Report what this machine has, whether ranks can communicate, and what to fix.

    Example: pipefit doctor

    Exit code 1: a problem prevents pipefit from working here. A line marked ! is a warning.

    Under torchrun the machines are compared: versions, devices, clocks, links, and whether they share a folder.

    Args:
        ranks: Processes of the self-test.
        timeout: Seconds after which the self-test fails.
        folder: Under torchrun: for checkpoints, which all machines should share; with --gpu: for the report; default:
            the working folder.
        gpu: Try the GPUs, in at most five minutes: speed, overlap, equality of training, predictions, messages, deaths.
    """
    if gpu:
        return _examined(folder)
    if all(name in os.environ for name in _LAUNCHER):
        return compare_nodes(folder)
    found = [*_software(), *_machine()]
    # Without torch no ranks are started.
    if all(check.state != "bad" for check in found if check.name in ("torch", "backends")):
        found.append(_ranks(ranks, timeout))
    problems = [check for check in found if check.state == "bad"]
    facts: JsonObject = {}
    for check in found:
        facts |= check.facts
    data = {
        "ok": not problems,
        "checks": [picked(check, "name", "state", "found", "fix") for check in found],
        "facts": facts,
    }
    rows = []
    for check in found:
        rows.append((_MARKS[check.state], check.name, check.found))
        if check.fix:
            rows.append(("", "", f"fix: {check.fix}"))
    return Answer(data, "\n".join([*columns(rows), "", verdict(len(problems))]), code_of(not problems))


def _examined(folder: Path) -> Answer:
    """The examination of the GPUs; a line for each part as it ends."""
    from pipefit.testing import gpu_report

    def said(name: str, figures: JsonObject) -> None:
        print(f"{name}: {gpu_report.result_of(figures)}, {format_seconds(figures['took_s'])}", file=sys.stderr)

    report = gpu_report.examine(folder, on_part=said)
    problems = gpu_report.problems_of(report)
    written = [folder / gpu_report.REPORT, folder / gpu_report.PAGE]
    return Answer(report, "\n".join(problems or ["All is well."]), code_of(not problems), written)


def _unless(problem: bool, name: str, found: str, fix: str, **facts: Any) -> _Check:
    """A check that passes, or warns if there is a problem."""
    if problem:
        return _Check(name, found, "warn", fix, facts)
    return _Check(name, found, facts=facts)


def _software() -> Iterator[_Check]:
    """Python, torch and its backends, devices, optional packages."""
    facts: JsonObject = {
        "pipefit": pipefit.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    found = f"{facts['pipefit']} on Python {facts['python']}, {platform.system()} {platform.machine()}"
    yield _Check("pipefit", found, facts=facts)
    start = time.perf_counter()
    try:
        import torch
        import torch.distributed as dist
    except ImportError as problem:
        yield _Check("torch", f"cannot be imported: {problem}", "bad", "pip install torch", {"torch": None})
        return
    seconds = time.perf_counter() - start
    facts = {"torch": torch.__version__, "torch_import_s": seconds}
    yield _Check("torch", f"{torch.__version__}, imported in {format_seconds(seconds)}", facts=facts)
    from pipefit.stage import accelerator

    gpus = accelerator.names()
    yield _Check("devices", counted_names(gpus) or "no GPU: ranks compute on the CPU", facts={"gpus": gpus})
    backends = []
    if dist.is_available():
        there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
        backends = [name for name in there if there[name]]
    lacks = {"gloo"}
    if gpus:
        lacks.add("nccl")
    lacks -= set(backends)
    facts = {"backends": backends}
    if lacks:
        fix = f"install an official build of torch with {' and '.join(sorted(lacks))}"
        yield _Check("backends", ", ".join(backends) or "none", "bad", fix, facts)
    else:
        yield _Check("backends", ", ".join(backends), facts=facts)
    extras = {name: version_of(name) for name in _OPTIONAL}
    known = [f"{name} {number}" for name, number in extras.items() if number]
    missing = [extra for name, extra in _OPTIONAL.items() if extras[name] is None]
    fix = ""
    if missing:
        fix = f'optional: pip install "pipefit[{",".join(missing)}]"'
    yield _Check("extras", ", ".join(known) or "none", fix=fix, facts={"extras": extras})


def _machine() -> Iterator[_Check]:
    """Cores, memory, and the system's limits for a process."""
    from pipefit.run.config import num_cores

    usable = num_cores()
    load = os.getloadavg()[0]
    found = f"{usable} usable of {os.cpu_count()}, load {load:.1f}"
    fix = "other programs use the cores: times measured now will be too long"
    yield _unless(load > usable, "cores", found, fix, cores=usable, load=load)
    total = usable_bytes()
    free = min(total, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    yield _Check("memory", f"{format_bytes(total)}, {format_bytes(free)} unused", facts={"memory_bytes": total})
    free = 0
    if _SHM.exists():
        free = shutil.disk_usage(_SHM).free
    fix = "data loaders with workers need more: start a container with --shm-size=1g"
    yield _unless(free < 256 * 2**20, "shared memory", f"{format_bytes(free)} free", fix, shm_bytes=free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65536
    if hard > 0:
        most = min(hard, most)
    fix = f"ulimit -n {most}"
    yield _unless(soft < 1024, "open files", f"at most {soft}", fix, open_files=soft)
    try:
        place = tempfile.gettempdir()
        free = shutil.disk_usage(place).free
        yield _Check("temporary folder", f"{place}, {format_bytes(free)} free", facts={"tmp_free_bytes": free})
    except OSError as problem:
        yield _Check("temporary folder", str(problem), "bad", "set TMPDIR to a folder you may write to")
    left = [name for name in _LAUNCHER if name in os.environ]
    fix = f"outside torchrun these make a process wait for others: unset {' '.join(left)}"
    yield _unless(bool(left), "environment", ", ".join(left) or "nothing special", fix, launcher_variables=left)


def _ranks(num_ranks: int, timeout_s: int) -> _Check:
    name = f"{num_ranks} ranks"
    try:
        with _deadline(timeout_s):
            start = time.perf_counter()
            links = _start_ranks(num_ranks)
            seconds = time.perf_counter() - start
    except TimeoutError:
        fix = "look for a firewall on the loopback interface (ip link show lo), or a machine far too busy"
        return _Check(name, f"no answer within {timeout_s} s", "bad", fix)
    except (PipefitError, CommunicationError, OSError, RuntimeError) as problem:
        return _Check(name, f"failed: {problem}", "bad", "see the log; is the loopback interface up (ip link show lo)?")
    found = f"start, communicate and end in {format_seconds(seconds)}"
    facts = {"selftest_s": seconds}
    if not links:
        return _Check(name, f"{found}; {UNCLEAR}", "warn", "measure when the machine is quiet", facts)
    figures = {key: links[0][key] for key in ("latency_s", "bandwidth_bytes_per_s")}
    return _Check(name, f"{found}; loopback {link_text(**figures)}", facts=facts | figures)


def _start_ranks(num_ranks: int) -> list[JsonObject]:
    from pipefit.runtime.launch import launch

    return launch(measured_links, num_ranks, threads=1, quiet=True)[0]


@contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the body after some seconds, so that ranks that hang do not block the doctor."""
    from pipefit.runtime.signals import handling

    def late(*_: object) -> None:
        raise TimeoutError

    with handling(late, signal.SIGALRM):
        signal.alarm(seconds)
        try:
            yield
        finally:
            signal.alarm(0)
