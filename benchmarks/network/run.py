"""Data parallelism compared with pipelines and hybrids, by real processes on a network as slow as PipeDream's was.

This module builds the laboratory and starts the ranks, each in its own namespace, as torchrun would start one on each
host; their work is in `rank`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.devices import capped, devices_for, put
from benchmarks.network.lab import DEVICE, Lab, laboratory
from benchmarks.network.spec import (
    SCALED,
    ModelResult,
    NetworkConfig,
    NetworkResult,
    Report,
    Scaled,
    Task,
    check,
)
from pipefit.runtime.launch import LaunchError

ROOT = Path(__file__).parents[2]
_PORT = 29400


def network(
    config: NetworkConfig, say: Callable[[str], None] = lambda line: None, scaled: Mapping[str, Scaled] = SCALED
) -> NetworkResult:
    """Builds the laboratory, runs every strategy in it, and takes it away again, also when something fails.

    Args:
        config: the settings.
        say: takes lines about how far it is.
        scaled: the models by name.

    Raises:
        PipefitError: the options have no meaning, or there can be no laboratory here (`netlab.why_not`).
        LaunchError: a rank failed.
    """
    check(config, scaled)
    began = time.perf_counter()
    devices = devices_for(config.ranks, sorted(os.sched_getaffinity(0)))
    with (
        tempfile.TemporaryDirectory(prefix="pipefit-network-") as folder,
        laboratory(config.ranks) as lab,
        capped(devices) as groups,
    ):
        models = {name: scaled[name] for name in config.models}
        task = Task(config, lab.name, models, devices.cores, devices.share, folder)
        path = Path(folder) / "task.json"
        path.write_bytes(msgspec.json.encode(task))
        say(f"{devices.describe()}; starting them in namespaces of their own")
        with _ranks(lab, path, groups) as processes:
            results = tuple(_follow(processes, Path(folder), say))
    return NetworkResult(config, devices.describe(), results, time.perf_counter() - began)


@contextlib.contextmanager
def _ranks(lab: Lab, task: Path, groups: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks' processes, as torchrun would start one on each host; all have ended afterwards."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(lab.num_hosts):
            command = lab.inside(rank, [sys.executable, "-m", "benchmarks.network.rank", str(task)])
            with (task.parent / f"rank-{rank}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=_environment(lab, rank),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE if rank == 0 else log,
                        stderr=log,
                        text=True,
                        start_new_session=True,  # Ctrl-C is for this process, which ends them
                    )
                )
            put(processes[-1].pid, groups[rank])
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _environment(lab: Lab, rank: int) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PIPEFIT_", "TORCHELASTIC_"))}
    return own | {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(lab.num_hosts),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": lab.address(0),
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PIPEFIT_DEADLINE_S": "180",
    }


def _follow(processes: Sequence[subprocess.Popen[str]], folder: Path, say: Callable[[str], None]) -> list[ModelResult]:
    """The results that rank 0 reports, until all ranks have ended."""
    lines: queue.Queue[str] = queue.Queue()
    stream = processes[0].stdout
    assert stream is not None

    def read() -> None:
        with stream:  # its end comes with that of the process, however that ends
            for line in stream:
                lines.put(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    results: list[ModelResult] = []
    while reader.is_alive() or not lines.empty():
        with contextlib.suppress(queue.Empty):
            report = msgspec.json.decode(lines.get(timeout=0.2), type=Report)
            if report.result is not None:
                results.append(report.result)
            else:
                say(report.line)
        _raise_if_failed(processes, folder)
    for process in processes:
        process.wait()
    _raise_if_failed(processes, folder)
    return results


def _raise_if_failed(processes: Sequence[subprocess.Popen[str]], folder: Path) -> None:
    """The rank that failed first is to blame: the others lose their peer a moment later."""
    failed = [rank for rank, process in enumerate(processes) if process.poll()]
    if failed:
        log = folder / f"rank-{failed[0]}.log"
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise LaunchError(
            f"rank {failed[0]} of the laboratory failed (exit code {processes[failed[0]].returncode}): "
            + "\n  ".join(said[-12:])
        )
