"""`pipefit doctor` under a launcher: differences between machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipefit.cli.nodes import _problems, _text

pytestmark = pytest.mark.slow

NODE = {
    "node": "a", "pipefit": "1", "python": "3.11.7", "torch": "2.13.0", "cuda": None, "gpus": [], "cores": 2,
    "memory_bytes": 2**30, "ranks": [0, 1], "clock_s": 0.0, "shared": True,
}  # fmt: skip


def test_machines_that_are_alike_have_no_problem():
    assert list(_problems([NODE, NODE | {"node": "b", "ranks": [2, 3]}], Path(), True)) == []


@pytest.mark.parametrize(
    ("other", "state", "told"),
    [
        ({"torch": "2.10.0"}, "bad", "torch differs: 2.13.0 on a, 2.10.0 on b"),
        ({"python": "3.12.1"}, "warn", "python differs: 3.11.7 on a, 3.12.1 on b"),
        ({"gpus": ["H100"]}, "warn", "gpus differs: none on a, H100 on b"),
        ({"clock_s": -3.0}, "warn", "the clock of b differs by -3.0 s"),
        ({"shared": False}, "warn", "b does not see what a writes"),
    ],
)
def test_a_difference_is_named_with_its_machines(other, state, told, tmp_path):
    nodes = [NODE, NODE | {"node": "b", "ranks": [2, 3]} | other]
    problems = list(_problems(nodes, tmp_path, True))
    assert len(problems) == 1 and problems[0][0] == state and told in problems[0][1]
    shown = _text(nodes, [], problems, tmp_path)
    assert ("1 to fix" in shown) == (state == "bad") and "2…3" in shown


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    ((state, told),) = _problems([NODE], tmp_path, False)
    assert state == "warn" and "cannot be written on a" in told


def test_one_process_of_a_launcher_compares_itself(tmp_path):
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-m", "pipefit", "doctor"]
    done = subprocess.run(
        command, env={**os.environ, **alone}, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    # Gloo of torch 2.10 says on stdout that it is connected.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert lines[0].startswith("1 machine") and not list(tmp_path.iterdir())
