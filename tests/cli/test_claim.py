"""A run's folder belongs to one run at a time, and nothing is written elsewhere."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipefit.cli import main
from pipefit.run.claim import LOCK

pytestmark = pytest.mark.slow

SMALL = ["train", "--model", "convnet", "--steps", "1", "--batch", "4", "--microbatches", "1"]


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_second_run_into_a_folder_is_refused_by_name(ranks, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / LOCK).open("w") as held:
        held.write("node-7 4711 x")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "pipefit", *SMALL, "--ranks", ranks, "-o", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "another run writes into this folder (process 4711 on node-7)" in done.stderr
    assert [path.name for path in folder.iterdir()] == [LOCK]


def test_a_lock_of_a_run_that_has_ended_holds_nobody_up_and_a_refused_run_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main([*SMALL, "--ranks", "1", "--transport", "local", "--data", "none.txt", "-o", "run"]) == 2
        assert "text is for language models" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


@pytest.mark.dist
@pytest.mark.long
def test_nothing_is_written_outside_the_working_folder_and_the_temporary_one(tmp_path):
    home, work, temporary = tmp_path / "home", tmp_path / "work", tmp_path / "temporary"
    for folder in (home, work, temporary):
        folder.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
    # matplotlib keeps a cache of its own.
    environment |= {"HOME": str(home), "TMPDIR": str(temporary), "MPLCONFIGDIR": str(temporary)}
    before = set(Path(tmp_path).iterdir())
    for words in (
        [*SMALL, "--ranks", "2", "-o", "run"],
        ["draw", "1f1b", "-p", "2", "-m", "4", "-o", "a.svg"],
        ["profile", "--model", "convnet", "-o", "p.json"],
        ["cut", "convnet"],
        ["plan", "--profile", "p.json", "--topology", "dgx-a100-1024"],
        ["doctor"],
    ):
        command = [sys.executable, "-m", "pipefit", *words]
        done = subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode in (0, 1), (words, done.stderr)
        assert not list(home.rglob("*")), (words, list(home.rglob("*")))
    assert set(Path(tmp_path).iterdir()) == before
    assert {path.name for path in work.iterdir()} >= {"run", "a.svg"}
