"""The examination of a machine with GPUs, with the CPU in their place: all but the figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipefit.errors import PipefitError
from pipefit.testing import gpu_parts, gpu_report
from pipefit.testing.gpu_parts import PARTS, Part


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipefitError, match="expected a GPU that torch can use"):
        gpu_report.examine(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.dist
@pytest.mark.long
def test_every_part_gives_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = {name: replace(part, deadline_s=10 * part.deadline_s) for name, part in PARTS.items()}
    monkeypatch.setattr(gpu_report, "PARTS", patient)
    seen = []
    report = gpu_report.examine(tmp_path, "cpu", lambda name, _: seen.append(name))
    assert seen == list(PARTS)
    failed = {name: figures for name, figures in report["parts"].items() if "failed" in figures}
    assert failed == {}
    parts = report["parts"]
    assert set(parts["schedules"]["equal"].values()) == {True} and len(parts["schedules"]["equal"]) == 7
    assert set(parts["deaths"]["faults"]) == {"dies", "stands still"}
    assert "exit code 9" in parts["deaths"]["faults"]["dies"]["message"]
    assert list(parts["ahead"]["products_s"]) == ["0", "1", "2", "4", "8"]
    assert json.loads((tmp_path / gpu_report.REPORT).read_text()) == report
    page = (tmp_path / gpu_report.PAGE).read_text()
    assert all(f"## {name}" in page for name in PARTS)


def test_a_part_that_hangs_or_fails_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of the child are its own: here a deadline that none can keep, and a name that it does not know."""
    hangs = Part(gpu_parts.rates, "what never ends", 0.01)
    monkeypatch.setattr(gpu_report, "PARTS", {"rates": hangs, "unknown": Part(gpu_parts.rates, "an error", 60)})
    report = gpu_report.examine(tmp_path, "cpu")
    assert report["parts"]["rates"]["failed"] == "not done after 0.01 s"
    assert report["parts"]["unknown"]["failed"] == "ended with exit code 1"
    assert "KeyError: 'unknown'" in report["parts"]["unknown"]["output"]
    assert len(gpu_report.problems_of(report)) == 2
    assert "what never ends" in (tmp_path / gpu_report.PAGE).read_text()


def test_parts_that_need_two_gpus_are_left_out_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_report, "num_ranks", lambda device: 1)
    monkeypatch.setattr(gpu_report, "_alone", lambda *_: {"problems": ["a finding"]})
    report = gpu_report.examine(tmp_path, "cpu")
    left_out = {name for name, figures in report["parts"].items() if "left_out" in figures}
    assert left_out == {"links", "ahead", "deaths"}
    assert gpu_report.result_of(report["parts"]["links"]) == "left out: needs 2 GPUs"
    assert gpu_report.result_of(report["parts"]["rates"]) == "1 to look at"
