"""Two nodes on one machine: a torchrun in each of two network namespaces, with a host name of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.network.lab import Lab


def start(lab: Lab, folders: tuple[Path, Path], *words: str, **environment: str) -> list[subprocess.Popen[str]]:
    """Starts `torchrun … WORDS` on each node in its folder; they meet by a rendezvous of kind c10d on the first."""
    hosts = folders[0].parent / f"{folders[0].name}-hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{lab.address(0)} node-0\n{lab.address(1)} node-1\n")
    processes = []
    for node, folder in enumerate(folders):
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=node-0:29500", *words),
        ]
        named = f'mount --bind {hosts} /etc/hosts; hostname node-{node}; exec "$@"'
        command = lab.inside(node, ["unshare", "--uts", "--mount", "sh", "-ec", named, "sh", *torchrun])
        own = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, cwd=folder, env=own, **pipes))
    return processes


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each process, once all have ended."""
    spoken = [process.communicate(timeout=500) for process in processes]
    return [(process.returncode, *both) for process, both in zip(processes, spoken, strict=True)]
