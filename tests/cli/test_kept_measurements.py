"""`pipefit train` measures a model once on a quiet machine, and never keeps what it measured on a busy one."""

import json
import os
from pathlib import Path

import pytest

from pipefit.cli import main
from pipefit.profiling.machine import CpuUse
from pipefit.spec import Profile

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("small_probes")]

SMALL = {"--model": "mlp", "--option": "layers=3,width=16", "--steps": "2", "--batch": "8", "--ranks": "2"}
ONCE_MORE = "measuring once more"


def train(*more: str) -> int:
    """Runs the small training in this process, with other or further options."""
    options = SMALL | dict(zip(more[::2], more[1::2], strict=True))
    return main(["train", *(word for pair in options.items() for word in pair), "--transport", "local"])


def kept() -> list[Path]:
    return sorted((Path(os.environ["XDG_CACHE_HOME"]) / "pipefit").glob("*"))


@pytest.fixture
def others(monkeypatch) -> list[float]:
    """Cores that other programs took before each reading of the machine, in order; none before all further ones."""
    cores: list[float] = []
    last = [CpuUse(0.0, 0.0, 0.0, 0.0)]

    def now() -> CpuUse:
        busy_s, idle_s, own_s, at_s = last[0]
        taken = cores.pop(0) if cores else 0.0
        last[0] = CpuUse(busy_s + 10 * taken, idle_s + (0 if taken else 20), own_s, at_s + 10)
        return last[0]

    monkeypatch.setattr(CpuUse, "now", now)
    return cores


def test_a_second_run_uses_the_measurement_of_the_first_and_says_so(tmp_path, capsys, others):
    assert train("-o", str(tmp_path / "one")) == 0
    assert "kept in" not in capsys.readouterr().out
    [file] = kept()
    assert train("-o", str(tmp_path / "two"), "--schedule", "gpipe", "--lr", "0.1") == 0
    out = capsys.readouterr().out
    assert f"kept in {file}" in out and "--measure again" in out
    profiles = [Profile.load(tmp_path / name / "profile.json") for name in ("one", "two")]
    assert profiles[0] == profiles[1]


def test_measure_again_measures_and_replaces_what_was_kept(capsys, others):
    assert train() == 0
    [file] = kept()
    before = file.stat().st_mtime_ns
    capsys.readouterr()
    assert train("--measure", "again") == 0
    assert "kept in" not in capsys.readouterr().out
    assert kept() == [file] and file.stat().st_mtime_ns > before


@pytest.mark.parametrize("more", ["--batch 16", "--option layers=4,width=16", "--optimizer sgd", "--precision bf16"])
def test_another_model_or_batch_is_measured(more, capsys, others):
    assert train() == 0 and train(*more.split()) == 0
    assert "kept in" not in capsys.readouterr().out
    assert len(kept()) == 2


def test_on_a_busy_machine_layers_are_measured_once_more_and_the_quieter_one_is_kept(capsys, others):
    others += [0, 1.5]  # before and after a measurement
    assert train() == 0
    out = capsys.readouterr().out
    assert out.count(ONCE_MORE) == 1 and "other programs took 1.5 cores" in out
    assert "as busy" not in out and len(kept()) == 1


def test_what_was_measured_on_a_busy_machine_is_named_at_the_end_and_not_kept(tmp_path, capsys, others):
    others += [0, 1.5, 0, 0.9]
    assert train("-o", str(tmp_path)) == 0
    capsys.readouterr()
    notes = json.loads((tmp_path / "run.json").read_text())["result"]["notes"]
    assert any("0.9 cores" in note and "as busy" in note for note in notes)
    assert kept() == []
    others += [0, 0.7, 0, 0.9]
    assert train() == 0
    out = capsys.readouterr().out
    assert "0.7 cores while the layers were measured, twice" in out and out.count(ONCE_MORE) == 1
    assert kept() == []


def test_programs_that_were_busy_during_the_training_are_named_next_to_its_figures(capsys, others):
    assert train() == 0
    others += [0, 0, 1.1]  # before the layers, which are known, and around the training
    capsys.readouterr()
    assert train() == 0
    assert "1.1 cores during the training" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "folder"])
def test_a_damaged_file_counts_as_none(damage, capsys, others):
    assert train() == 0
    [file] = kept()
    content = file.read_bytes()
    if damage == "folder":
        file.unlink()
        file.mkdir()
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "bit":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        file.write_bytes(b"")
    capsys.readouterr()
    assert train() == 0
    assert "kept in" not in capsys.readouterr().out
    if damage != "folder":
        assert train() == 0
        assert "kept in" in capsys.readouterr().out


def test_a_cache_that_cannot_be_written_only_means_that_nothing_is_kept(tmp_path, monkeypatch, capsys, others):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert train() == 0


def test_a_quick_run_measures_nothing_and_refuses_to_measure_again(capsys, others):
    words = [word for pair in SMALL.items() for word in pair]
    assert main(["train", *words, "--transport", "local", "--quick"]) == 0 and kept() == []
    assert main(["train", *words, "--transport", "local", "--quick", "--measure", "again"]) == 2
    assert "--quick measures nothing" in capsys.readouterr().err
