"""The checks of `pipefit doctor`, one short function each."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pipefit
from pipefit.errors import CommunicationError, PipefitError, TopologyError
from pipefit.units import format_bytes, format_seconds

_OPTIONAL = {"matplotlib": "plot", "scikit-learn": "data", "optuna": "search"}
_MESSAGE_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
_SHM = Path("/dev/shm")
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: of the thing.
        state: "bad" keeps pipefit from working, "warn" may hurt.
        found: what it is.
        fix: what to do, where something is to be done.
        facts: the same for programs.
    """

    name: str
    found: str
    state: Literal["good", "warn", "bad"] = "good"
    fix: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def all_checks(num_ranks: int, timeout_s: int) -> list[Check]:
    """Every check, in the order in which problems are best fixed."""
    checks = [_versions(), _torch(), _extras(), _cores(), _memory(), _devices(), _backends(), _shared_memory()]
    checks += [_open_files(), _temporary_folder(), _environment()]
    torch_is_there = checks[1].state != "bad"
    return [*checks, _ranks(num_ranks, timeout_s)] if torch_is_there else checks


def _unless(problem: bool, name: str, found: str, fix: str, **facts: Any) -> Check:
    """A check that is good, or warns where there is a problem."""
    return Check(name, found, "warn", fix, facts) if problem else Check(name, found, facts=facts)


def _versions() -> Check:
    facts = {"pipefit": pipefit.__version__, "python": platform.python_version(), "platform": platform.platform()}
    found = f"{facts['pipefit']} on Python {facts['python']}, {platform.system()} {platform.machine()}"
    return Check("pipefit", found, facts=facts)


def _torch() -> Check:
    start = time.perf_counter()
    try:
        import torch
        import torch.distributed as dist
    except ImportError as problem:
        return Check("torch", f"cannot be imported: {problem}", "bad", "pip install torch", {"torch": None})
    seconds = time.perf_counter() - start
    facts = {"torch": torch.__version__, "torch_import_s": seconds}
    if not dist.is_available():
        return Check(
            "torch", f"{torch.__version__} without torch.distributed", "bad", "install an official build", facts
        )
    return Check("torch", f"{torch.__version__}, imported in {format_seconds(seconds)}", facts=facts)


def _extras() -> Check:
    found: dict[str, str | None] = {}
    for name in _OPTIONAL:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    missing = [name for name, number in found.items() if number is None]
    there = ", ".join(f"{name} {number}" for name, number in found.items() if number) or "none"
    extras = ",".join(_OPTIONAL[name] for name in missing)
    fix = f'optional: pip install "pipefit[{extras}]"' if missing else ""
    return Check("extras", there, fix=fix, facts={"extras": found})


def _cores() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    fix = "other programs use the cores: times measured now will be too long"
    found = f"{usable} usable of {os.cpu_count()}, load {load:.1f}"
    return _unless(load > usable, "cores", found, fix, cores=usable, load=load)


def _memory() -> Check:
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    return Check("memory", f"{format_bytes(total)}, {format_bytes(free)} unused", facts={"memory_bytes": total})


def _devices() -> Check:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    counted = {name: names.count(name) for name in names}
    found = ", ".join(f"{number} × {name}" for name, number in counted.items()) or "no GPU: ranks compute on the CPU"
    return Check("devices", found, facts={"gpus": names})


def _backends() -> Check:
    import torch
    import torch.distributed as dist

    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    there = ["gloo"] * gloo + ["nccl"] * nccl
    facts = {"backends": there}
    if not gloo:
        return Check("backends", ", ".join(there) or "none", "bad", "install a build of torch with Gloo", facts)
    if torch.cuda.is_available() and not nccl:
        return Check("backends", "gloo, no nccl", "bad", "install a build of torch with NCCL for these GPUs", facts)
    return Check("backends", ", ".join(there), facts=facts)


def _shared_memory() -> Check:
    if not _SHM.exists():
        return Check("shared memory", "no /dev/shm", "warn", "mount one, for data loaders with workers")
    free = shutil.disk_usage(_SHM).free
    fix = "data loaders with workers need more: start a container with --shm-size=1g"
    return _unless(free < 256 * 2**20, "shared memory", f"{format_bytes(free)} free", fix, shm_bytes=free)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    return _unless(soft < 1024, "open files", f"at most {soft}", fix, open_files=soft)


def _temporary_folder() -> Check:
    place = Path(tempfile.gettempdir())
    try:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
    except OSError as problem:
        return Check(
            "temporary folder", f"{place}: {problem.strerror}", "bad", "set TMPDIR to a folder you may write to"
        )
    free = shutil.disk_usage(place).free
    return Check("temporary folder", f"{place}, {format_bytes(free)} free", facts={"tmp_free_bytes": free})


def _environment() -> Check:
    left = [name for name in _LAUNCHER if name in os.environ]
    if left:
        fix = f"outside torchrun these make a process wait for others: unset {' '.join(left)}"
        return Check("environment", f"{', '.join(left)} set", "warn", fix, {"launcher_variables": left})
    kept = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME") if name in os.environ}
    found = ", ".join(f"{name}={value}" for name, value in kept.items()) or "nothing special"
    return Check("environment", found, facts={"environment": kept})


def _ranks(num_ranks: int, timeout_s: int) -> Check:
    name = f"{num_ranks} ranks"
    try:
        with _deadline(timeout_s):
            start = time.perf_counter()
            links = _start_ranks(num_ranks)
            seconds = time.perf_counter() - start
    except TimeoutError:
        fix = "look for a firewall on the loopback interface (ip link show lo), or a machine far too busy"
        return Check(name, f"no answer within {timeout_s} s", "bad", fix)
    except (PipefitError, CommunicationError, OSError, RuntimeError) as problem:
        return Check(name, f"failed: {problem}", "bad", "see the log; is the loopback interface up (ip link show lo)?")
    if not links:
        found = f"start, talk and end in {format_seconds(seconds)}; times of messages are too uneven to tell"
        return Check(name, found, "warn", "measure when the machine is quiet", {"selftest_s": seconds})
    found = (
        f"start, talk and end in {format_seconds(seconds)}; loopback {format_bytes(links['bandwidth_bytes_per_s'])}/s, "
        f"latency {format_seconds(links['latency_s'])}"
    )
    return Check(name, found, facts={"selftest_s": seconds, **links})


def _start_ranks(num_ranks: int) -> dict[str, float]:
    from pipefit.runtime.launch import launch

    return launch(_exchange, num_ranks, threads=1, quiet=True)[0]


def _exchange() -> dict[str, float]:
    """Sends a known tensor around the ring of all ranks, adds up over all, and times the links.

    Returns:
        latency_s and bandwidth_bytes_per_s; nothing when the machine is too busy to tell.

    Raises:
        CommunicationError: something else arrived than was sent.
    """
    import torch
    import torch.distributed as dist

    from pipefit.profiling import measure_links
    from pipefit.runtime.collectives import sum_table
    from pipefit.runtime.session import current

    rank, world = dist.get_rank(), dist.get_world_size()
    sent = torch.arange(1000, dtype=torch.float64) + rank
    got = torch.empty_like(sent)
    waits = [dist.isend(sent, (rank + 1) % world), dist.irecv(got, (rank - 1) % world)]
    for wait in waits:
        wait.wait()
    if not torch.equal(got, torch.arange(1000, dtype=torch.float64) + (rank - 1) % world):
        raise CommunicationError(f"rank {rank} received something else than rank {(rank - 1) % world} sent")
    total = sum_table(current(), torch.tensor([float(rank)])).item()
    if total != world * (world - 1) / 2:
        raise CommunicationError(f"rank {rank}: the sum over all ranks is {total}")
    try:
        level = measure_links(sizes=_MESSAGE_BYTES, repeats=10).levels[0]
    except TopologyError:  # larger messages took no longer: every rank sees the same times
        return {}
    return {"latency_s": level.latency_s, "bandwidth_bytes_per_s": level.bandwidth_bytes_per_s}


@contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the body after some seconds; ranks that hang must not hang the doctor."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
