"""Under torchrun a script resumes by itself: after `--max-restarts`, and on fewer machines with `--nnodes 1:2`."""

import contextlib
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from pipefit.runtime.faults import noted

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "recovering_script.py"


def _agent(options, words, place, **more):
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), str(place), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2] / "src"), **more}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _in_one_process(place, words):
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", [str(SCRIPT), str(place), *words]), contextlib.redirect_stdout(printed):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return json.loads(printed.getvalue().rpartition("]")[0] + "]")


def _printed(*processes):
    spoken = [process.communicate(timeout=550) for process in processes]
    failed = [
        f"{out}\n{problems}" for process, (out, problems) in zip(processes, spoken, strict=True) if process.returncode
    ]
    assert not failed, "\n".join(failed)
    losses, _, ranks = "".join(out for out, _ in spoken).rpartition("]")
    return json.loads(losses + "]"), int(ranks)


def _listens(port):
    with socket.socket() as asking:
        return asking.connect_ex(("localhost", port)) == 0


@pytest.mark.long
def test_max_restarts_resumes_from_the_newest_checkpoint(tmp_path):
    process = _agent(["--standalone", "--max-restarts", "1", "--nproc-per-node", "2"], ["1", "5"], tmp_path / "run")
    assert _printed(process) == (_in_one_process(tmp_path / "one", ["0", "99"]), 2)
    (recovery,) = noted(tmp_path / "run" / "checkpoints")
    assert (recovery["resumed"], recovery["start"], recovery["ranks"]) == (4, 1, 2)


def _two_machines(place, words, **more):
    """Two agents, of which the second begins when the first listens; each has two processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "test"]
    options = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3", *rendezvous]
    first = _agent(options, words, place, **more)
    # The agent that listens at the endpoint must be the one that stays.
    while not _listens(port):
        assert first.poll() is None
        time.sleep(0.1)
    return first, lambda: _agent(options, words, place, **more)


@pytest.mark.long
def test_a_machine_that_is_lost_costs_no_step_where_the_others_have_copies(tmp_path):
    """The agent and the ranks of one of two machines die; the pipeline of the other one resumes from its memory."""
    first, begin_second = _two_machines(tmp_path / "run", ["3", "5", "agent"])
    second = begin_second()
    losses, ranks = _printed(first)
    second.communicate(timeout=60)
    assert second.returncode < 0 and ranks == 2
    assert losses == pytest.approx(_in_one_process(tmp_path / "one", ["0", "99", "agent"]), rel=1e-5)
    (recovery,) = noted(tmp_path / "run" / "checkpoints")
    assert (recovery["resumed"], recovery["source"], recovery["lost"]) == (5, "memory", 0)


@pytest.mark.long
def test_a_machine_that_comes_later_joins_after_a_step(tmp_path):
    """One stage with two copies on the first machine; two stages with two copies each on both."""
    first, begin_second = _two_machines(tmp_path / "run", ["9", "5", "grows"], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    log = tmp_path / "run" / "checkpoints" / "metrics.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 4:
        assert first.poll() is None
        time.sleep(0.1)
    # Either machine may have rank 0, which prints.
    losses, ranks = _printed(first, begin_second())
    assert ranks == 4
    assert losses == pytest.approx(_in_one_process(tmp_path / "one", ["0", "99", "agent"]), rel=1e-5)
    (recovery,) = noted(tmp_path / "run" / "checkpoints")
    assert recovery["resumed"] >= 5 and recovery["lost"] == 0 and recovery["ranks"] == 4
    assert recovery["source"] == "memory"
