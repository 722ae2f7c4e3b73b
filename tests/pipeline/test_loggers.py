"""Loggers: what they write is what the callbacks were told, also over runs that resume from each other."""

import csv
import errno
import importlib.util
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pipefit as pf
from pipefit.errors import PipefitError
from pipefit.pipeline import loggers
from pipefit.pipeline.callbacks import Record
from pipefit.runtime.launch import launch


def trained(*callbacks, until=4, start=0):
    torch.manual_seed(0)
    pipe = pf.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
        loss=nn.functional.mse_loss,
        optimizer=lambda given: torch.optim.SGD([{"params": given[:1], "lr": 0.2}, {"params": given[1:]}], 0.1),
        stages=2,
        microbatches=2,
        updates=pf.Updates(clip_norm=1.0),
    )
    data = [(torch.ones(4, 4) * step, torch.ones(4, 2)) for step in range(until)]
    pipe.state.num_updates = start
    records = []
    pipe.fit(data[start:], callbacks=[records.append, *callbacks], held_out=data[:1], evaluate_every=2)
    return records


def test_lines_of_json_hold_all_figures(tmp_path):
    records = trained(pf.json_log(tmp_path / "run" / "metrics.jsonl"))
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(entry["step"], "held_out_loss" in entry) for entry in entries] == [
        (1, False), (2, False), (2, True), (3, False), (4, False), (4, True),
    ]  # fmt: skip
    first = records[0]
    assert entries[0] == {
        "step": 1, "loss": first.loss, "seconds": first.seconds, "learning_rates": [0.2, 0.1],
        "gradient_norm": first.gradient_norm, "samples_per_s": first.samples_per_s, "bubble": first.bubble,
        "memory_bytes": list(first.memory_bytes),
    }  # fmt: skip


@pytest.mark.parametrize("end", ["jsonl", "csv"])
def test_a_training_that_resumes_keeps_the_lines_of_earlier_steps(end, tmp_path):
    path = tmp_path / f"metrics.{end}"
    log = {"jsonl": pf.json_log, "csv": pf.csv_log}[end]

    def steps():
        lines = path.read_text().splitlines()
        return [int(row["step"]) for row in (map(json.loads, lines) if end == "jsonl" else csv.DictReader(lines))]

    trained(log(path))
    with path.open("a") as file:
        file.write('{"step": 5, "lo' if end == "jsonl" else "5,0.1")  # cut off
    trained(log(path), start=2, until=6)
    assert steps() == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    trained(log(path), until=2)
    assert steps() == [1, 2, 2]


def test_a_table_has_a_column_for_each_figure(tmp_path):
    records = trained(pf.csv_log(tmp_path / "metrics.csv"))
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[0]["loss"], rows[0]["held_out_loss"], rows[0]["tokens_per_s"]) == (str(records[0].loss), "", "")
    assert rows[0]["learning_rates"] == "0.2" and float(rows[0]["memory_bytes"]) == max(records[0].memory_bytes)
    assert rows[2]["loss"] == "" and float(rows[2]["held_out_loss"]) > 0


def test_event_files_are_read_back_by_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = trained(pf.tensorboard_log(tmp_path))
    records += trained(pf.tensorboard_log(tmp_path), start=2, until=6)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    loss = [(event.step, event.value) for event in found.Scalars("loss")]
    kept = records[:2] + records[4:]
    assert loss == [(record.step, pytest.approx(record.loss, rel=1e-6)) for record in kept]
    assert [event.step for event in found.Scalars("held_out_loss")] == [2, 4, 6]
    assert {"bubble", "samples_per_s", "learning_rates", "gradient_norm"} <= set(found.Tags()["scalars"])


def logged(folder):
    trained(pf.json_log(f"{folder}/metrics.jsonl"))


@pytest.mark.dist
def test_of_several_processes_the_first_writes(tmp_path):
    launch(logged, 2, str(tmp_path), threads=1)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 6 and len(json.loads(lines[0])["memory_bytes"]) == 2


@pytest.mark.parametrize("lost", [21, 22])
def test_another_process_writes_on_where_the_first_one_is_lost(lost, tmp_path, monkeypatch):
    """It once removed the loss of a step of which it only had the evaluation."""
    place = tmp_path / "log.jsonl"
    logs = [pf.json_log(place), pf.json_log(place)]
    session = SimpleNamespace(rank=0)
    monkeypatch.setattr("pipefit.runtime.session.current", lambda: session)
    for step in range(1, 31):
        session.rank = 0
        if step == lost:
            logs.pop(0)
        for log in logs:
            log.step(Record(step, float(step)))
            if step % 2 == 0:
                log.evaluation(Record(step, float(step), held_out_loss=0.5))
            session.rank = 1
    lines = list(loggers.entries_of(place))
    assert [line["loss"] for line in lines if "loss" in line] == list(range(1, 31))
    assert [line["step"] for line in lines if "held_out_loss" in line] == list(range(2, 31, 2))


def test_a_package_that_is_missing_is_named_with_its_command(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(PipefitError, match=f"logging by {name} needs the package {name}: pip install {name}"):
            loggers.log_named(name, tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PipefitError, match="file"):
        trained(pf.csv_log(tmp_path / "file" / "metrics.csv"))


@pytest.fixture
def fills(monkeypatch):
    """Makes the disk full after a number of bytes that are added to files; None: there is room again."""
    room = [None]
    add = io.FileIO.write

    class Full(io.FileIO):
        def write(self, data):
            if room[0] is None:
                return add(self, data)
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            part = bytes(data)[: room[0]]
            room[0] -= len(part)
            return add(self, part)

    usual = Path.open

    def open_(self, mode="r", *args, **kwargs):
        return Full(self, mode) if mode == "ab" else usual(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_)
    return lambda bytes_left: room.__setitem__(0, bytes_left)


@pytest.mark.parametrize("log", [pf.json_log, pf.csv_log])
def test_a_full_disk_ends_no_training_and_the_figures_are_written_when_there_is_room(log, fills, tmp_path, caplog):
    path = tmp_path / "metrics"

    def at(record):
        fills({2: 7, 4: None}.get(record.step, 0 if record.step == 3 else None))

    trained(at, log(path))
    lines = path.read_text().splitlines()
    rows = map(json.loads, lines) if log is pf.json_log else csv.DictReader(lines)
    assert [int(row["step"]) for row in rows] == [1, 2, 2, 3, 4, 4]
    assert caplog.text.count("No space left on device; training goes on") == 1


@pytest.mark.parametrize("damage", ["x\n", '{"stop": 1}\n', "[1]\n", '{"step": "1"}\n', "\xff\n", "[" * 9999 + "\n"])
def test_a_damaged_line_of_a_log_is_left_out_with_a_warning(damage, tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    trained(pf.json_log(path), until=2)
    path.write_bytes(damage.encode("latin-1") + path.read_bytes())
    trained(pf.json_log(path), start=2, until=3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 2, 3, 3]
    assert "metrics.jsonl:1: not the figures of a step; left out" in caplog.text
