"""The examples run as their first lines say, and train the same thing however they are started."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiny_models import llama_folder

from pipefit.cli import main

pytestmark = [pytest.mark.dist, pytest.mark.long]

ROOT = Path(__file__).parents[2]
TRAINING = ROOT / "examples/train_sequential.py"


@pytest.fixture(scope="module")
def single_process() -> str:
    """Returns the output of the script with all its ranks in one process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(TRAINING), run_name="__main__")
    return printed.getvalue()


def by_two_processes(script: Path, logs: Path) -> str:
    """Returns the output of rank 0, which with --json goes to its log."""
    assert main(["run", "-n", "2", "--json", "--logs", str(logs), str(script)]) == 0
    return (logs / "rank-0.log").read_text()


def test_one_script_trains_the_same_in_one_process_and_in_two(single_process, tmp_path):
    assert len(single_process.splitlines()) == 5
    assert float(re.findall(r"accuracy ([\d.]+)%", single_process)[-1]) > 93
    assert by_two_processes(TRAINING, tmp_path) == single_process


@pytest.mark.slow
def test_torchrun_starts_the_same_script(single_process):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(TRAINING)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout) == (0, single_process), done.stderr


def test_a_schedule_of_ones_own_is_proved_drawn_and_run(tmp_path):
    printed = by_two_processes(ROOT / "examples/own_schedule.py", tmp_path)
    assert "no violations" in printed and "weights-later: bubble 11.1%" in printed
    first, last = map(float, re.findall(r"loss ([\d.]+) to ([\d.]+)", printed)[0])
    assert last < first / 2


@pytest.mark.parametrize("name", ["vit", "own_module", "finetune", "lora"])
def test_models_of_any_kind_train_as_their_examples_say(name, tmp_path):
    llama_folder(tmp_path / "model")
    (tmp_path / "text.txt").write_text("One and one is two. " * 400)
    folder, text, out = (str(tmp_path / part) for part in ("model", "text.txt", "out"))
    words = {"finetune": [folder, text, out], "lora": [folder, out]}.get(name, [])
    script = ROOT / f"examples/{name}.py"
    assert len(script.read_text().splitlines()) < 30
    assert main(["run", "-n", "2", "--json", "--logs", str(tmp_path), str(script), *words]) == 0
    losses = re.findall(r"loss ([\d.]+)", (tmp_path / "rank-0.log").read_text())
    lasts = re.findall(r"→ ([\d.]+)", (tmp_path / "rank-0.log").read_text())
    assert float((lasts or losses)[-1]) < float(losses[0])
    assert not words or (tmp_path / "out" / "tokenizer.json").is_file()


def test_the_training_example_fits_on_a_screen():
    lines = TRAINING.read_text().splitlines()
    code = lines[lines.index('"""', 1) + 1 :]
    assert len([line for line in code if line.strip()]) <= 25
