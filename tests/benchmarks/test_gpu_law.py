"""The measurement of blocks on a GPU, tiny and on a CPU: trials run, and one that fails is a line that says why."""

import time

import pytest
import torch

from benchmarks import gpu_law as bench
from pipefit.cost.roofline import product_s
from pipefit.planner.machines import load_topology

pytest.importorskip("transformers")

MACHINE = load_topology("1xH100").device


def place(until=float("inf")):
    return bench.Place(torch.device("cpu"), MACHINE, 0.0, until)


def test_every_part_is_measured_next_to_the_seconds_that_the_law_predicts():
    rows = [row for part in ("parts", "blocks", "blocking") for row in bench.measure(part, place(), bench.TINY, 64)]
    failed = {row["name"] for row in rows if "failed" in row}
    assert failed == {"attention: cudnn", "attention: memory-efficient"}  # which a CPU has not
    found = {(row["model"], row["name"]): row for row in rows}
    product = found["llama-tiny", "product: down"]
    assert product["law_s"]["of weight"] == product_s(MACHINE, 96, 64, 32)
    whole = found["llama-tiny", "block, replayed"]["law_s"]
    once = found["llama-tiny", "block"]["law_s"]
    assert whole["backward"] == pytest.approx(once["backward"] + once["forward"])
    for row in rows:
        assert len(bench.lines_of(row)) == len(row.get("measured_s", "1"))
        assert all(seconds > 0 for seconds in row.get("measured_s", {}).values())


def test_a_trial_that_fails_is_a_line_and_none_begins_after_the_deadline(monkeypatch):
    def broken():
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(bench, "blocks", lambda place, shapes: [("llama", "block", broken)] * 2)
    rows = list(bench.measure("blocks", place(), {}, 64))
    assert [bench.lines_of(row)[0].split(maxsplit=2)[2] for row in rows] == ["RuntimeError: no such kernel"] * 2
    late = list(bench.measure("blocks", place(until=time.monotonic() - 1), {}, 64))
    assert [row["failed"] for row in late] == ["not measured: no time was left"] * 2
