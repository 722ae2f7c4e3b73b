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


LEAVING = """
import atexit, os, sys, torch
from torch import nn
import pipefit as pf
from pipefit.runtime import session

def tell():  # as the last: what is registered first runs last, and pipe still lives
    os.write(1, f"left {calls() is None}\\n".encode())  # in one piece: the other rank writes to the same pipe

atexit.register(tell)
torch.manual_seed(0)
layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
pipe = pf.Pipeline(layers, microbatches=2, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, 0.1))
calls = session.current().calls
pipe.step(torch.ones(4, 2), torch.ones(4, 2))
if sys.argv[1] == "early" and pipe.rank == 0:
    os._exit(0)
"""


@pytest.mark.parametrize("how", ["well", "early"])
def test_a_rank_that_ends_has_ended_the_threads_of_its_calls_also_where_another_is_gone(tmp_path, how):
    """Such a thread gives back a tensor while Python ends, and the process aborts: seldom, on a busy machine."""
    script = tmp_path / "script.py"
    script.write_text(LEAVING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2] / "src")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout.split()) == (0, ["left", "True"] * (1 if how == "early" else 2)), (
        ended.stderr
    )
