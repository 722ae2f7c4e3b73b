"""Checkpoints that a thread writes while training goes on: the same bytes, whole or not at all, one at a time."""

import errno
import logging
import threading
from itertools import pairwise

import pytest
import torch
from tests.checkpoint.test_checkpoint import _killed_at, adam, batches, dropping, momentum, pipeline, same

import pipefit as pf
from pipefit.checkpoint import commit
from pipefit.errors import PipefitError
from pipefit.pipeline.callbacks import Checkpoints
from pipefit.pipeline.intervals import LEAST_S, Interval
from pipefit.runtime.background import Background
from pipefit.runtime.progress import Progress

pytestmark = pytest.mark.slow


def contents(place):
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.fixture
def gate(monkeypatch):
    """Files are written only once it is open."""
    opened, write = threading.Event(), commit.write_tensors

    def waiting(*args):
        assert opened.wait(300)
        return write(*args)

    monkeypatch.setattr(commit, "write_tensors", waiting)
    return opened


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("optimizer", [adam, momentum])
def test_it_has_the_bytes_of_one_that_training_waits_for(tmp_path, gate, optimizer):
    pipe = pipeline(optimizer=optimizer, scheduler=dropping, clip_norm=1.0)
    pipe.fit(batches(2))
    path = pipe.save(tmp_path / "behind", extra={"a": [1]}, wait=False)
    pipe.fit(batches(2), callbacks=[lambda record: gate.set()])
    assert path == tmp_path / "behind" / "step-000002" and pipe.num_updates == 4
    again = pipeline(optimizer=optimizer, scheduler=dropping, clip_norm=1.0)
    again.fit(batches(2))
    again.save(tmp_path / "waited", extra={"a": [1]})
    assert contents(tmp_path / "behind") == contents(tmp_path / "waited")


def test_training_goes_on_while_it_is_written_and_its_event_names_its_own_step(tmp_path, gate):
    """If a step waited for the files, it would wait for ever."""
    pipe, events = pipeline(), []

    class Listener:
        def step(self, record):
            events.append(("step", record.step))
            if record.step == 5:
                gate.set()

        def checkpoint(self, record):
            events.append(("checkpoint", record.step))
            assert (record.path / "manifest.json").exists() and record.path.name == f"step-{record.step:06d}"

    pipe.fit(batches(6), callbacks=[Listener(), Checkpoints(pipe, tmp_path, every=3)])
    steps = [event for event in events if event[0] == "step"]
    assert steps == [("step", step) for step in range(1, 7)]
    assert [event for event in events if event[0] == "checkpoint"] == [("checkpoint", 3), ("checkpoint", 6)]
    assert events.index(("checkpoint", 3)) > events.index(("step", 5))


@pytest.mark.parametrize("act", ["save", "load", "end"])
def test_the_next_save_a_load_and_the_end_wait_for_it(tmp_path, gate, act):
    pipe = pipeline()
    pipe.fit(batches(1))
    path = pipe.save(tmp_path, wait=False)
    assert not path.exists()
    threading.Timer(0.2, gate.set).start()
    if act == "save":
        pipe.save(tmp_path / "other")
    elif act == "load":
        assert pipe.load(tmp_path).path == path
    else:
        pipe.fit(batches(1))
    assert path.exists() and not pipe.session.background.is_open


def test_one_that_cannot_be_written_is_left_out_and_the_last_one_says_why(tmp_path, monkeypatch, caplog):
    pipe, original = pipeline(), commit.write_tensors
    pipe.save(tmp_path / "run")
    monkeypatch.setattr(commit, "write_tensors", full)

    def mend(record):
        if record.step == 4:
            monkeypatch.setattr(commit, "write_tensors", original)

    with caplog.at_level(logging.WARNING):
        pipe.fit(batches(6), callbacks=[Checkpoints(pipe, tmp_path / "run", every=2), mend])
    assert "step-000002 is not saved, training goes on: " in caplog.text and "the disk is full" in caplog.text
    assert {path.name for path in (tmp_path / "run").iterdir()} - {"step-000004"} == {"step-000000", "step-000006"}
    monkeypatch.setattr(commit, "write_tensors", full)
    with pytest.raises(PipefitError, match="the disk is full"):
        pipe.fit(batches(1), callbacks=[Checkpoints(pipe, tmp_path / "run", every=1)])


def test_what_no_checkpoint_can_hold_is_refused_at_once(tmp_path):
    pipe = pipeline()
    pipe.fit(batches(1))
    pipe.workers[0].stages[0].layers[0].module.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises(PipefitError, match="which safetensors cannot hold"):
        pipe.save(tmp_path, wait=False)
    assert not pipe.session.background.is_open


def test_spilled_stages_are_written_at_once(tmp_path):
    pipe = pipeline(spill=pf.Spilled(step_on="host"), stages=4, chunks=4)
    pipe.fit(batches(1))
    assert pipe.save(tmp_path, wait=False).exists()


def test_a_kill_at_any_call_of_the_file_system_leaves_a_whole_checkpoint(tmp_path):
    pipe = pipeline()
    pipe.fit(batches(1))

    def work(place):
        pipe.fit(batches(1), callbacks=[Checkpoints(pipe, place, every=1, keep=1)])

    steps = set()
    for call in range(1, 200):
        place = tmp_path / str(call)
        pipe.save(place)
        killed = _killed_at(call, lambda place=place: work(place))
        found = pipeline().load(place)
        steps.add(found.step)
        assert not found.skipped
        if not killed:
            break
    assert call > 10 and steps == {1, 2}


# ---- the newest are kept ---------------------------------------------------------------------------------------------


def test_the_newest_of_this_training_are_kept_and_those_of_an_earlier_one_are_left_alone(tmp_path):
    def run(count, keep, resume=False):
        pipe = pipeline()
        if resume:
            pipe.load(tmp_path)
        pipe.fit(batches(count), callbacks=[Checkpoints(pipe, tmp_path, every=1, keep=keep)])
        return sorted(path.name for path in tmp_path.iterdir())

    assert run(6, keep=3) == ["step-000004", "step-000005", "step-000006"]
    assert run(3, keep=1) == ["step-000003", "step-000004", "step-000005", "step-000006"]
    assert run(2, keep=2, resume=True) == ["step-000006", "step-000007", "step-000008"][1:]
    assert len(run(5, keep=0)) == 7


# ---- by time ---------------------------------------------------------------------------------------------------------


def trained(seconds_of, copy_s, write_s, share, count):
    """The times of the checkpoints of a training, and at how many steps it looked at the clock."""
    now, step, look, saves, looks = [0.0], 0, 1, [], 0
    interval = Interval(share, lambda: now[0])
    while len(saves) < count:
        now[0] += seconds_of(step) * (look - step)
        step, looks = look, looks + 1
        is_busy = bool(saves) and now[0] < saves[-1] + copy_s + write_s
        due, look = interval.look(step, is_busy, write_s if saves else 0.0)
        assert look > step
        if due:
            saves.append(now[0])
            now[0] += copy_s
            interval.saved(copy_s)
    return saves, looks


@pytest.mark.parametrize("step_s", [0.003, 0.5, 7.0, 200.0])
@pytest.mark.parametrize(("copy_s", "write_s"), [(0.0, 0.0), (0.1, 0.4), (5.0, 20.0), (1.0, 300.0)])
@pytest.mark.parametrize("share", [0.01, 0.03, 1.0])
def test_checkpoints_by_time_take_their_share_and_no_more(step_s, copy_s, write_s, share):
    saves, looks = trained(lambda _: step_s, copy_s, write_s, share, 20)
    gap = max(LEAST_S, (copy_s + write_s) / share)
    assert LEAST_S <= saves[0] <= LEAST_S + 3 * step_s
    gaps = [after - before - copy_s for before, after in pairwise(saves)]
    assert all(gap - 1e-6 <= own <= gap + 2 * step_s + 1e-6 for own in gaps)
    assert 19 * (copy_s + write_s) <= share * (saves[-1] - saves[0]) + 1e-6
    assert looks <= 30 * 20


def test_no_checkpoint_is_due_while_the_last_one_is_written():
    now = [0.0]
    interval = Interval(1.0, lambda: now[0])
    interval.look(1, False, 0.0)
    now[0] = 1000.0
    assert interval.look(1001, True, 0.0) == (False, 1002)
    assert interval.look(1002, False, 0.0) == (True, 1003)


def test_steps_that_become_longer_do_not_put_a_checkpoint_off_for_long():
    saves, _ = trained(lambda step: 0.1 if step < 1000 else 1.0, 0.0, 0.0, 0.03, 10)
    assert max(after - before for before, after in pairwise(saves)) <= 5 * LEAST_S


class Ticking:
    """A clock that goes on by some seconds whenever it is read."""

    def __init__(self, seconds):
        self.now, self.seconds = 0.0, seconds

    def __call__(self):
        self.now += self.seconds
        return self.now


def test_by_default_checkpoints_follow_the_clock(tmp_path):
    def run(schedule="1f1b", count=12):
        pipe = pipeline(schedule=schedule, microbatches=2)
        save = Checkpoints(pipe, tmp_path / schedule, keep=0, share=1.0, clock=Ticking(20.0))
        losses = pipe.fit(batches(count), steps=count, callbacks=[save, lambda record: pipe.session.settle()])
        return pipe, losses, sorted(int(path.name[5:]) for path in (tmp_path / schedule).iterdir())

    pipe, losses, steps = run()
    # The first step ends at 20 s, the fourth one at 80 s; saving reads the clock three times.
    assert steps == [4, 7, 10, 12]
    whole = pipeline(microbatches=2)
    assert whole.fit(batches(12)) == losses and same(pipe, whole)
    # A pause would drain an asynchronous schedule, and so change its numbers.
    assert run("pipedream")[2] == [12]


def test_work_that_never_ends_is_given_up_after_the_loss_of_a_rank(monkeypatch):
    monkeypatch.setattr("pipefit.runtime.background._ABANDON_S", 0.05)
    background, end, told = Background(), threading.Event(), []
    background.start(end.wait, told.append, must_end=False)
    background.abandon()
    assert not background.is_open and not told
    background.start(lambda: "the next", told.append, must_end=False)
    background.settle(Progress())
    end.set()
    background.start(lambda: "complete before the loss", told.append, must_end=False)
    while background.is_busy:
        pass
    background.abandon()
    assert told == ["the next", "complete before the loss"]
