"""The examples run as their first lines say, and train the same thing however they are started."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALONE = [sys.executable]
RANKS = [sys.executable, "-m", "pipefit", "run", "-n", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = pytest.mark.timeout(240)  # each start loads torch, which takes long on a busy machine


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_script_trains_the_same_alone_and_as_two_processes():
    alone = run(*ALONE, "examples/train_sequential.py")
    assert len(alone.splitlines()) == 5
    assert float(re.findall(r"accuracy ([\d.]+)%", alone)[-1]) > 93
    assert run(*RANKS, "examples/train_sequential.py") == alone


@pytest.mark.slow
def test_torchrun_starts_the_same_script():
    assert run(*TORCHRUN, "examples/train_sequential.py") == run(*ALONE, "examples/train_sequential.py")


def test_a_schedule_of_ones_own_is_proved_drawn_and_run():
    printed = run(*RANKS, "examples/own_schedule.py")
    assert "no violations" in printed and "weights-later: bubble 11.1%" in printed
    first, last = map(float, re.findall(r"loss ([\d.]+) to ([\d.]+)", printed)[0])
    assert last < first / 2


def test_the_training_example_fits_on_a_screen():
    lines = (ROOT / "examples/train_sequential.py").read_text().splitlines()
    code = lines[lines.index('"""', 1) + 1 :]
    assert len([line for line in code if line.strip()]) <= 25
