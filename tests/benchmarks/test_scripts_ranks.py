"""Benchmarks that start ranks, at a tiny size: they run, and count bytes and updates as they should."""

from types import SimpleNamespace

import pytest
from benchmarks.__main__ import MODULES, main
from benchmarks.ddp import ddp
from benchmarks.hybrid import HybridConfig, hybrid
from benchmarks.lean import lean

from benchmarks import spill, study

pytestmark = [pytest.mark.dist, pytest.mark.long]


def test_every_benchmark_is_listed(capsys):
    assert main(["--help"]) == 0
    words = capsys.readouterr().out.split()
    assert set(MODULES) <= set(words)


def test_data_parallelism_and_ddp_alternate_and_make_one_row():
    (row,) = ddp([("mlp", "layers=2,width=16", 8)], [2], steps=1, repeats=3)
    assert row.model == "mlp layers=2,width=16" and row.num_microbatches == 2


def test_every_way_to_share_work_sends_the_bytes_that_it_must():
    tiny = HybridConfig("layers=2,hidden=16,heads=2,context=16", batch=8, microbatches=4, steps=1, repeats=1)
    rows = {row.name: row for row in hybrid(tiny)}
    assert list(rows) == ["tensor", "tensor and sequence", "pipeline", "data", "2-1"]
    activations = 8 * 16 * 16 * 4  # of the whole batch, in float32
    assert rows["pipeline"].sent_bytes == activations and not rows["pipeline"].inside_bytes
    assert rows["tensor"].inside_bytes > 0 and rows["tensor"].sent_bytes == rows["data"].sent_bytes == 0
    assert rows["2-1"].sent_bytes == activations and rows["2-1"].reduced_bytes > 0


def test_an_interrupted_study_is_no_measurement(monkeypatch):
    stopped = SimpleNamespace(run=lambda: SimpleNamespace(interrupted=True))
    monkeypatch.setattr(study, "StudyRun", lambda *_, **__: stopped)
    with pytest.raises(KeyboardInterrupt):
        study.study_policies(["lrtf"])


def test_spilling_is_compared_in_six_ways_and_leaves_no_file(tmp_path):
    _, (row,) = spill.speed(tmp_path, layers=3, hidden=64, tokens=(32,), repeats=1, steps=1)
    assert row.tokens == 32 and row.of_resident == row.resident_s / row.buffered_s
    assert row.limit_s >= row.resident_s and row.host_of_resident == row.resident_s / row.host_s
    assert not list(tmp_path.iterdir())


def test_the_overhead_benchmark_gives_a_row_for_each_contestant():
    rows = lean(4, steps=1, repeats=1, names=("bare loop", "1f1b", "torch 1f1b"))
    assert [row.name for row in rows] == ["bare loop", "1f1b", "torch 1f1b"]
    assert all(0 < row.least <= row.microseconds for row in rows)
