"""A spilled run that was cut off goes on from the step its disk committed last, as if it had never stopped."""

import errno
import os

import pytest
import torch
from tests.spill.resumed_runs import (
    HALF,
    adagrad,
    adamw,
    batch,
    cut_off,
    dampened,
    halving,
    network,
    pipeline,
    same,
    trained,
    whole,
)
from torch import nn

from pipefit import Pipeline
from pipefit.checkpoint import committed
from pipefit.errors import ModelError, PipefitError, TierError
from pipefit.models import build
from pipefit.pipeline import assembly
from pipefit.pipeline.resume import committed_step
from pipefit.spec.options import Parallelism, Spilled, Updates
from pipefit.spill import tier_file as tierfile

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"clip": None},
        {"optim_slots": 0},
        {"slots": 1},
        {"counts": (1, 1, 1, 1, 1, 1)},
        {"counts": (1, 3, 2), "frozen": 1},
    ],
)
@pytest.mark.parametrize("optimizer", [adamw, dampened, adagrad])
def test_a_run_goes_on_as_if_it_had_never_stopped(tmp_path, optimizer, how):
    losses, state = whole(optimizer=optimizer, **how)
    first = cut_off(tmp_path / "tier", optimizer=optimizer, **how)
    pipe = pipeline(tmp_path / "tier", optimizer=optimizer, resume=True, **how)
    assert pipe.num_updates == 3
    assert first + trained(pipe) == losses
    assert same(pipe.state_dict(), state)
    pipe.close()


@pytest.mark.parametrize("optimizer", [adamw, dampened])
@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize(
    ("every", "later"), [(1, {"host_memory": 2 * HALF}), (2, {"host_memory": HALF}), (2, {"commit_every": 1})]
)
def test_a_run_partly_in_the_hosts_memory_goes_on_from_its_last_commit(tmp_path, optimizer, clip, every, later):
    """Also with another part of its records there, or none."""
    losses, state = whole(optimizer=optimizer, clip=clip)
    tier = tmp_path / "tier"
    first = cut_off(tier, optimizer=optimizer, clip=clip, host_memory=HALF, commit_every=every)
    pipe = pipeline(tier, optimizer=optimizer, clip=clip, resume=True, **later)
    assert pipe.num_updates == 3 // every * every
    assert first[: pipe.num_updates] + trained(pipe) == losses
    assert same(pipe.state_dict(), state)
    pipe.close()


def test_a_disk_only_run_goes_on_partly_in_the_hosts_memory_and_is_cut_off_again(tmp_path):
    losses, state = whole()
    cut_off(tmp_path / "tier")
    pipe = pipeline(tmp_path / "tier", resume=True, host_memory=HALF, commit_every=2)
    trained(pipe, 6)
    pipe.close()
    pipe = pipeline(tmp_path / "tier", resume=True, host_memory=2 * HALF)
    assert pipe.num_updates == 5 and trained(pipe) == losses[5:]
    assert same(pipe.state_dict(), state)
    pipe.close()


def test_ten_steps_lie_between_commits_where_these_copy_the_hosts_memory_or_much_of_the_device(tmp_path, monkeypatch):
    def every(folder, **how):
        pipe = pipeline(tmp_path / folder, **how)
        pipe.close()
        return pipe.workers[0].spilling.commit_every

    assert every("disk") == every("states", optim_slots=0) == 1
    assert every("split", host_memory=HALF) == 10
    assert every("told", host_memory=HALF, commit_every=4) == 4
    monkeypatch.setattr(assembly, "MOST_BYTES", 1000)
    assert every("disk") == 1
    assert every("states", optim_slots=0) == 10


@pytest.mark.parametrize("every", [1, 2])
def test_states_that_stay_on_the_device_lie_aside_when_they_are_many(tmp_path, monkeypatch, every):
    losses, state = whole(optim_slots=0)
    monkeypatch.setattr(committed, "_RECORD_BYTES", 1000)
    how = {"optim_slots": 0, "commit_every": every}
    first = cut_off(tmp_path / "tier", steps=5, **how)
    last = tierfile.read_commits(tmp_path / "tier", "rank-0")[0]
    assert sum("resident" in key.kind for key in last.records) > 3
    pipe = pipeline(tmp_path / "tier", resume=True, **how)
    assert pipe.num_updates == 5 // every * every
    assert first[: pipe.num_updates] + trained(pipe) == losses
    assert same(pipe.state_dict(), state)
    pipe.close()


def test_what_lies_aside_and_was_not_kept_gives_way_to_the_step_before(tmp_path, monkeypatch):
    losses, _ = whole(optim_slots=0)
    monkeypatch.setattr(committed, "_RECORD_BYTES", 1000)
    cut_off(tmp_path / "tier", steps=4, optim_slots=0)
    last = tierfile.read_commits(tmp_path / "tier", "rank-0")[0]
    at = next(at for key, at in last.records.items() if "resident" in key.kind)
    with (tmp_path / "tier" / "rank-0.tier").open("r+b") as file:
        file.seek(at.position(at.copy))
        file.write(b"torn")
    pipe = pipeline(tmp_path / "tier", resume=True, optim_slots=0)
    assert pipe.num_updates == 3 and trained(pipe) == losses[3:]
    pipe.close()


def test_a_disk_that_fills_while_states_are_set_aside_ends_the_run_with_one_message(tmp_path, monkeypatch):
    losses, _ = whole(optim_slots=0)
    monkeypatch.setattr(committed, "_RECORD_BYTES", 1000)
    pipe = pipeline(tmp_path / "tier", optim_slots=0)
    trained(pipe, 2)
    pipe.settle()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full)
        with pytest.raises(TierError, match="No space left on device; the last committed step, 2, is whole"):
            trained(pipe)
    pipe.close()
    pipe = pipeline(tmp_path / "tier", optim_slots=0, resume=True)
    assert trained(pipe) == losses[2:]
    pipe.close()


def test_a_model_that_draws_its_layers_goes_on_with_what_it_had(tmp_path):
    def built(**how):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        return Pipeline(
            model,
            loss=nn.functional.cross_entropy,
            optimizer=adamw,
            stages=[1, 1, 1],
            microbatches=3,
            spill=Spilled(**how),
            parallelism=Parallelism(chunks=3),
        )

    one = built()
    losses = trained(one)
    pipe = built(disk=tmp_path / "tier")
    trained(pipe, 3)
    pipe.close()
    pipe = built(disk=tmp_path / "tier", resume=True)
    assert trained(pipe) == losses[3:]
    assert same(pipe.state_dict(), one.state_dict())


def test_a_scaled_loss_and_weights_that_stages_share_go_on(tmp_path):
    def built(**how):
        torch.manual_seed(0)
        bundle = build("gpt", layers=2, hidden=16, heads=2, context=8, vocab=32, dropout=0.1)
        return Pipeline(
            bundle.layers,
            loss=bundle.loss,
            optimizer=adamw,
            stages=4,
            microbatches=2,
            precision="fp16",
            spill=Spilled(**how),
            parallelism=Parallelism(chunks=4),
            updates=Updates(scheduler=halving),
        ), bundle

    one, bundle = built()
    batches = [bundle.example(4, seed) for seed in range(5)]
    losses = [one.step(*pair) for pair in batches]
    pipe, _ = built(disk=tmp_path / "tier")
    first = [pipe.step(*pair) for pair in batches[:2]]
    pipe.close()
    pipe, _ = built(disk=tmp_path / "tier", resume=True)
    assert first + [pipe.step(*pair) for pair in batches[2:]] == losses
    assert pipe.loss_scale.state() == one.loss_scale.state()
    assert same(pipe.state_dict(), one.state_dict())
    pipe.close()


def ranks_of_two(folder=None, **how):
    return Pipeline(
        network(),
        loss=nn.functional.cross_entropy,
        optimizer=adamw,
        stages=[2, 2, 1, 1],
        microbatches=4,
        schedule="breadth-first",
        spill=Spilled(disk=folder, **how),
        parallelism=Parallelism(chunks=2),
    )


def test_ranks_go_on_from_the_last_step_that_all_have_committed(tmp_path, monkeypatch):
    one = ranks_of_two()
    losses = trained(one)
    pipe = ranks_of_two(tmp_path / "tier")
    trained(pipe, 3)
    true = tierfile.TierFile.commit

    def failing(file, commit):
        if file.path.stem == "rank-1":
            raise TierError("the machine of rank 1 is gone")
        true(file, commit)

    monkeypatch.setattr(tierfile.TierFile, "commit", failing)
    with pytest.raises(TierError, match="rank 1 is gone"):
        trained(pipe)
    monkeypatch.undo()
    pipe.close()
    steps = [tierfile.read_commits(tmp_path / "tier", f"rank-{rank}")[0].step for rank in (0, 1)]
    assert steps == [4, 3]
    pipe = ranks_of_two(tmp_path / "tier", resume=True)
    assert pipe.num_updates == 3
    assert trained(pipe) == losses[3:]
    assert same(pipe.state_dict(), one.state_dict())
    pipe.close()


def test_a_step_is_only_begun_once_all_ranks_have_committed_the_one_before(tmp_path):
    pipe = ranks_of_two(tmp_path / "tier")
    for step in range(3):
        pipe.step(*batch(step))
        found = [tierfile.read_commits(tmp_path / "tier", f"rank-{rank}")[0].step for rank in (0, 1)]
        assert found == [step + 1, step + 1]
    pipe.close()


def test_a_loaded_checkpoint_is_committed_before_its_first_step(tmp_path):
    one = pipeline()
    losses = trained(one)
    pipe = pipeline(tmp_path / "tier")
    trained(pipe, 3)
    pipe.save(tmp_path / "saved", extra={"data": 7})
    pipe.close()
    pipe = pipeline(tmp_path / "other")
    pipe.load(tmp_path / "saved")
    pipe.load(tmp_path / "saved")
    pipe.close()
    pipe = pipeline(tmp_path / "other", resume=True)
    assert pipe.num_updates == 3 and pipe.resumed_notes == {"data": 7}
    assert trained(pipe) == losses[3:]
    pipe.close()


@pytest.mark.parametrize("after", [2, 3, 4])
def test_the_place_in_a_loader_is_committed_with_each_step(tmp_path, after):
    def loader():
        return torch.utils.data.DataLoader([(x, y) for x, y in zip(*batch(0), strict=True)], 4, shuffle=True)

    def small(folder=None, **how):
        return pipeline(folder, microbatches=2, **how)

    pipe = small()
    losses = pipe.fit(loader(), steps=9)
    pipe.close()
    pipe = small(tmp_path / "tier")
    pipe.fit(loader(), steps=after)
    pipe.close()
    pipe = small(tmp_path / "tier", resume=True)
    assert pipe.fit(loader(), steps=9 - after) == losses[after:]
    pipe.close()


def test_notes_come_back(tmp_path):
    pipe = pipeline(tmp_path / "tier")
    pipe.notes = lambda: {"position": pipe.num_updates * 2}
    trained(pipe, 3)
    pipe.close()
    assert committed_step(tmp_path / "tier") == 3
    pipe = pipeline(tmp_path / "tier", resume=2)
    assert pipe.resumed_notes == {"position": 4} and pipe.num_updates == 2
    pipe.close()


def test_a_disk_that_was_full_is_gone_on_from_when_there_is_room(tmp_path, monkeypatch):
    losses, _ = whole()
    cut_off(tmp_path / "tier", steps=2)
    pipe = pipeline(tmp_path / "tier", resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(tierfile.os, "pwritev", _full)
        with pytest.raises(TierError, match="No space left on device; the last committed step, 2, is whole"):
            trained(pipe)
    pipe.close()
    pipe = pipeline(tmp_path / "tier", resume=True)
    assert trained(pipe) == losses[2:]
    pipe.close()


def _full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"width": 24}, r"model 0.weight was float32\[16, 8\], is float32\[24, 8\]"),
        ({"counts": (2, 3, 1)}, "plan partition stages 0 layers was"),
        ({"counts": (4, 2)}, "plan partition stages 2 layers was .*, is nothing"),
        ({"microbatches": 2}, "plan num_microbatches was 3, is 2"),
        ({"seed": 4}, "training seed was 3, is 4"),
        ({"clip": None}, "training clip_norm was 0.5, is null"),
        ({"about": {"--lr": 0.2}}, "--lr was 0.1, is 0.2"),
        ({"optimizer": dampened}, "optimizer kind was AdamW, is SGD"),
        ({"optimizer": lambda p: torch.optim.AdamW(p, 0.02)}, "optimizer lr was 0.01, is 0.02"),
    ],
)
def test_another_run_is_told_what_differs(tmp_path, changes, told):
    about = {"about": {"--lr": 0.1}}
    cut_off(tmp_path / "tier", **about)
    before = {path.name: path.read_bytes() for path in (tmp_path / "tier").iterdir()}
    with pytest.raises(PipefitError, match=told):
        pipeline(tmp_path / "tier", resume=True, **{**about, **changes})
    assert {path.name: path.read_bytes() for path in (tmp_path / "tier").iterdir()} == before


def test_where_nothing_was_committed_there_is_nothing_to_go_on_from(tmp_path):
    assert committed_step(tmp_path / "tier") is None
    with pytest.raises(TierError, match="no step was committed there; start a new run"):
        pipeline(tmp_path / "tier", resume=True)
    with pytest.raises(PipefitError, match="needs disk="):
        pipeline(resume=True)


def test_a_run_without_commits_leaves_nothing_to_go_on_from(tmp_path):
    def room(folder, **how):
        cut_off(folder, host_memory=HALF, **how)
        return (folder / "rank-0.tier").stat().st_size

    assert room(tmp_path / "tier", commit_every=0) + 2 * HALF <= room(tmp_path / "other")
    assert committed_step(tmp_path / "tier") is None


def test_a_reason_that_a_step_cannot_be_gone_on_from_is_told(tmp_path, monkeypatch):
    def reason(*_):
        raise ModelError("its schedule cannot be told")

    monkeypatch.setattr(committed, "optimization_of", reason)
    cut_off(tmp_path / "tier")
    assert committed_step(tmp_path / "tier") is None
    with pytest.raises(
        TierError, match=r"no run can resume from the state of step 3: its schedule .* resume from a checkpoint"
    ):
        pipeline(tmp_path / "tier", resume=True)


def test_a_record_that_was_not_kept_is_found(tmp_path):
    pipe = pipeline(tmp_path / "tier")
    trained(pipe, 3)
    at = next(iter(pipe.workers[0].spilling.tier._records.values())).disk
    pipe.close()
    with (tmp_path / "tier" / "rank-0.tier").open("r+b") as file:
        for copy in (0, 1):
            file.seek(at.position(copy))
            file.write(b"torn")
    with pytest.raises(TierError, match="does not have its checksum; resume from a checkpoint"):
        pipeline(tmp_path / "tier", resume=True)
