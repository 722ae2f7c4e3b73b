"""What a tier does when a write is torn, a folder goes away, or there is no room: one message, and nothing is lost."""

import contextlib
import errno
import json
import os
import shutil

import pytest
import torch
from torch import nn

from pipefit import Pipeline
from pipefit.errors import PipefitError, TierError
from pipefit.run.config import RunConfig
from pipefit.run.tier_records import with_tier
from pipefit.spec.options import Parallelism, Spilled, from_flat
from pipefit.spill import tier_file as tierfile
from pipefit.spill.arena import aligned
from pipefit.spill.parked import ParkedTensors
from pipefit.spill.tier_file import record_sum
from pipefit.spill.tier_store import TierStore
from pipefit.spill.tiers import Key

SIZE = 3 * 4096
A, B = Key(0, "weights"), Key(1, "weights")


def filled(value):
    tensor = aligned(SIZE)
    tensor.fill_(value)
    return tensor


def read(tier, key, version):
    into = aligned(SIZE)
    tier.read(key, version, into).wait()
    return int(into[0]), int(into[-1])


def found(tier, **how):
    """Step and state that a tier recovers."""
    commit = tier.recover(**how)
    return commit.step, commit.state


def written(folder, steps=2):
    """A tier of two records with some committed steps; record contents are the step's number."""
    tier = TierStore(folder)
    tier.reserve({A: SIZE, B: SIZE})
    for step in range(1, steps + 1):
        writes = [tier.write(key, 10 + step, filled(step)) for key in (A, B)]
        tier.commit(step, {"at": step}, writes).wait()
    return tier


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_read_waits_for_the_write_of_its_version(on_disk, tmp_path):
    tier = TierStore(tmp_path if on_disk else None)
    tier.reserve({A: SIZE})
    for version in range(20):
        tier.write(A, version, filled(version))
        assert read(tier, A, version) == (version, version)
    tier.close()


def test_a_version_that_is_not_there_is_refused(tmp_path):
    tier = written(tmp_path)
    with pytest.raises(TierError, match="version 7 is needed"):
        read(tier, A, 7)
    tier.close()


def test_a_run_goes_on_from_the_step_it_committed_last(tmp_path):
    written(tmp_path).close()
    tier = TierStore(tmp_path)
    assert found(tier) == (2, {"at": 2})
    assert read(tier, A, 12) == read(tier, B, 12) == (2, 2)
    tier.close()


def test_what_was_written_after_the_commit_is_rolled_back(tmp_path):
    tier = written(tmp_path)
    tier.write(A, 13, filled(3)).wait()
    tier.close()
    tier = TierStore(tmp_path)
    assert tier.recover()[0] == 2
    assert read(tier, A, 12) == (2, 2)
    tier.close()


@pytest.mark.parametrize("cut", [0, 1, 4096, 8192, SIZE])
def test_a_write_that_was_cut_off_anywhere_loses_nothing(tmp_path, cut):
    """Step 3 overwrites the copy of step 1; whatever part of it arrived, step 2 is whole."""
    tier = written(tmp_path)
    at = tier._records[A].disk
    tier.close()
    with tier.files.path.open("r+b") as file:
        file.seek(at.position(1 - at.copy))
        file.write(bytes([3]) * cut)
    tier = TierStore(tmp_path)
    assert tier.recover()[0] == 2
    assert read(tier, A, 12) == (2, 2)
    tier.close()


def flip(tier, place):
    """Flips a bit of a closed tier's file."""
    with tier.files.path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("offset", [0, 20, 5000, SIZE - 1])
def test_a_flipped_bit_is_found_and_the_step_before_taken_while_that_is_whole(tmp_path, offset):
    tier = written(tmp_path)
    at = tier._records[A].disk
    tier.close()
    flip(tier, at.position(at.copy) + offset)
    tier = TierStore(tmp_path)
    assert found(tier) == (1, {"at": 1})
    assert read(tier, A, 11) == read(tier, B, 11) == (1, 1)
    tier.close()
    flip(tier, at.position(1 - at.copy) + offset)
    tier = TierStore(tmp_path)
    with pytest.raises(TierError, match="does not have its checksum; resume from a checkpoint"):
        tier.recover()
    tier.close()


def test_a_step_that_others_have_not_committed_can_be_passed_over(tmp_path):
    written(tmp_path, steps=3).close()
    tier = TierStore(tmp_path)
    assert tier.recover().step == 3
    commit = tier.recover(at_most=2)
    assert (commit.step, commit.state) == (2, {"at": 2}) and read(tier, B, 12) == (2, 2)
    tier.resume_from(commit)
    assert [committed.step for committed in tierfile.read_commits(tmp_path, "rank-0")] == [2]
    tier.commit(3, {"at": "again"}, [tier.write(key, 13, filled(33)) for key in (A, B)]).wait()
    tier.close()
    tier = TierStore(tmp_path)
    assert found(tier) == (3, {"at": "again"}) and read(tier, A, 13) == (33, 33)
    with pytest.raises(TierError, match="step 1 is needed, the first one there is 2"):
        tier.recover(at_most=1)
    tier.close()


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-2] + b"?", lambda data: b""])
def test_a_commit_that_is_damaged_gives_way_to_the_one_before(tmp_path, damage):
    written(tmp_path).close()
    path = tmp_path / "rank-0.commit"
    path.write_bytes(damage(path.read_bytes()))
    tier = TierStore(tmp_path)
    assert found(tier) == (1, {"at": 1}) and read(tier, A, 11) == (1, 1)
    tier.close()


@pytest.mark.parametrize("length", [8, 512, 4096, 4 << 20])
def test_a_checksum_knows_parts_that_change_places(length):
    data = bytearray(os.urandom(max(3 * length, 4 * 4096)))
    moved = data[length : 2 * length] + data[:length] + data[2 * length :]
    assert record_sum(memoryview(data), "") != record_sum(memoryview(moved), "")


def test_a_checksum_knows_bits_that_cancel_each_other_in_a_sum():
    data = bytearray(os.urandom(4096))
    data[0] |= 1
    data[8] &= ~1
    other = bytearray(data)
    other[0] &= ~1
    other[8] |= 1
    assert record_sum(memoryview(data), "") != record_sum(memoryview(other), "")


def test_a_checksum_is_the_same_with_any_number_of_threads():
    data = memoryview(os.urandom(9 << 20))
    one = record_sum(data, "here")
    torch.set_num_threads(2)
    assert record_sum(data, "here") == one != record_sum(data, "there")


@pytest.mark.parametrize("other", ["the version before", "another record"])
def test_a_whole_record_in_the_place_of_another_is_found(tmp_path, other):
    tier = written(tmp_path)
    tier.commit(3, {"at": 3}, [tier.write(A, 13, filled(3)), tier.write(B, 13, filled(4))]).wait()
    tier.close()
    now, before = tierfile.read_commits(tmp_path, "rank-0")
    at, wrong = now.records[A], (before.records[A] if other == "the version before" else now.records[B])
    path = tmp_path / "rank-0.tier"
    content = bytearray(path.read_bytes())
    taken = content[wrong.position(wrong.copy) : wrong.position(wrong.copy + 1)]
    content[at.position(at.copy) : at.position(at.copy + 1)] = taken
    path.write_bytes(content)
    tier = TierStore(tmp_path)
    assert found(tier) == (2, {"at": 2})
    tier.close()


def test_files_of_two_ranks_that_have_changed_places_are_refused(tmp_path):
    written(tmp_path).close()
    for path in tmp_path.glob("rank-0.*"):
        path.rename(path.with_name(path.name.replace("0", "1")))
    tier = TierStore(tmp_path, "rank-1")
    with pytest.raises(TierError, match="the files of two ranks have changed places"):
        tier.recover()
    tier.close()


def test_a_folder_that_goes_away_stops_the_next_commit(tmp_path):
    tier = written(tmp_path / "tier")
    shutil.rmtree(tmp_path / "tier")
    with pytest.raises(TierError, match="it held step 2, the last committed; put it back"):
        tier.commit(3, {}).wait()
    tier.close()


def test_a_failed_write_fails_the_commit_and_keeps_the_step_before(tmp_path, monkeypatch):
    tier = written(tmp_path)
    monkeypatch.setattr(tierfile.os, "pwritev", _full)
    write = tier.write(A, 13, filled(3))
    with pytest.raises(TierError, match="No space left on device; the last committed step, 2, is whole"):
        tier.commit(3, {}, [write]).wait()
    monkeypatch.undo()
    tier.close()
    tier = TierStore(tmp_path)
    assert tier.recover()[0] == 2
    tier.close()


def _full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tierfile.os, "posix_fallocate", _full)
    tier = TierStore(tmp_path)
    with pytest.raises(TierError, match=r"needs 48 KiB.*make room, or give another --disk folder"):
        tier.reserve({A: SIZE, B: SIZE})
    tier.close()


def test_two_runs_cannot_use_one_file(tmp_path):
    tier = TierStore(tmp_path)
    with pytest.raises(TierError, match="another run uses it"):
        TierStore(tmp_path)
    tier.close()


@pytest.mark.parametrize("resumes", [False, True])
def test_a_run_that_still_lasts_is_not_taken_for_one_that_was_cut_off(resumes, tmp_path):
    tier = written(tmp_path)
    with pytest.raises(TierError, match="another run uses it"):
        with_tier(from_flat(RunConfig, {"disk": str(tmp_path), "resume": str(tmp_path) if resumes else ""}), 0)
    tier.close()


def test_a_folder_whose_parent_is_missing_is_refused(tmp_path):
    with pytest.raises(TierError, match=r"cannot keep spilled records there: .*/no is not there"):
        TierStore(tmp_path / "no" / "such")


def test_a_host_tier_keeps_to_its_limit():
    tier = TierStore(host_bytes=SIZE)
    with pytest.raises(TierError, match="--host-memory allows 12"):
        tier.reserve({A: SIZE, B: SIZE})
    tier.close()


def _pipeline(folder, **how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return Pipeline(
        model,
        loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.Adam(p, 0.01),
        stages=[1, 1, 1],
        microbatches=2,
        spill=Spilled(disk=folder, **how),
        parallelism=Parallelism(chunks=3),
    )


# A part in the host's memory is copied to the disk at commits; activations are written to it during a step.
HOW = [{}, {"host_memory": 2 * 4096, "commit_every": 1}, {"slots": 1, "activations": True}]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("moment", [0, 1, 2, 3])
def test_training_stops_with_one_message_when_the_disk_fills(tmp_path, monkeypatch, moment, how):
    pipe = _pipeline(tmp_path / "tier", **how)
    x = torch.randn(4, 4)
    pipe.step(x, x)
    pipe.settle()
    calls = iter(range(100))
    true = os.pwritev
    monkeypatch.setattr(tierfile.os, "pwritev", lambda *args: _full() if next(calls) >= moment else true(*args))
    with pytest.raises(PipefitError, match="No space left on device; the last committed step, 1, is whole"):
        for _ in range(3):
            pipe.step(x, x)
    monkeypatch.undo()
    pipe.close()
    tier = TierStore(tmp_path / "tier")
    assert tier.recover()[0] == 1
    tier.close()


def test_no_room_for_activations_is_said_in_the_first_step(tmp_path, monkeypatch):
    pipe = _pipeline(tmp_path / "tier", slots=1, activations=True)
    x = torch.randn(4, 4)
    with monkeypatch.context() as patch:
        patch.setattr(tierfile.os, "posix_fallocate", _full)
        with pytest.raises(PipefitError, match="make room, or give another --disk folder"):
            pipe.step(x, x)
    pipe.close()


@pytest.mark.parametrize("how", HOW)
def test_training_stops_when_the_folder_goes_away(tmp_path, how):
    pipe = _pipeline(tmp_path / "tier", **how)
    x = torch.randn(4, 4)
    pipe.step(x, x)
    pipe.settle()
    shutil.rmtree(tmp_path / "tier")
    with pytest.raises(PipefitError, match="No such file or directory; it held step 1, the last committed"):
        for _ in range(3):
            pipe.step(x, x)
    pipe.close()


def test_an_optimizer_that_needs_a_closure_is_refused(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    with pytest.raises(PipefitError, match="cannot be spilled"):
        Pipeline(
            model,
            loss=nn.functional.mse_loss,
            optimizer=lambda p: torch.optim.LBFGS(p),
            stages=2,
            microbatches=2,
            spill=Spilled(disk=tmp_path),
            parallelism=Parallelism(chunks=2),
        )


# ---- several processes one after another -----------------------------------------------------------------------------


def test_records_with_one_copy_and_versions_of_their_own_are_found_by_the_next_process(tmp_path):
    """The folder of a trial: each turn opens it, writes some records, commits them together, and closes it."""
    how = {"name": "trial", "shared": True}
    tier = TierStore(tmp_path, **how)
    tier.reserve({A: SIZE, B: SIZE}, [B], {"shards": 2})
    tier.commit(0, {"turn": 0}, [tier.write(A, 7, filled(7)), tier.write(B, 1, filled(1))]).wait()
    tier.close()

    tier = TierStore(tmp_path, **how)
    assert tier.recover(check=False).state == {"turn": 0}
    assert tierfile.read_about(tmp_path, "trial") == {"shards": 2}
    parked = ParkedTensors(tier, torch.device("cpu"))
    left = [torch.randn(3, 5).T, torch.arange(4, dtype=torch.int32)]
    act, empty = Key(1, "act", 0), Key(1, "grad", 0)
    writes = [tier.write(A, 8, filled(8)), parked.write(act, left), parked.write(empty, [])]
    tier.commit(1, {"turn": 1, "parked": parked.describe()}, writes).wait()
    tier.write(A, 9, filled(9)).wait()  # of a turn that was cut off
    tier.close()

    tier = TierStore(tmp_path, **how)
    state = tier.recover(check=False).state
    assert (tier.holds(A), tier.holds(B)) == (8, 1)
    assert read(tier, A, 8) == (8, 8) and read(tier, B, 1) == (1, 1)
    parked = ParkedTensors(tier, torch.device("cpu"))
    parked.restore(json.loads(json.dumps(state["parked"])))
    for _ in range(2):
        copy, tensors = parked.read(act, keep=True)
        copy.wait()
        assert all(map(torch.equal, tensors(), left)) and tensors()[0].stride() == left[0].stride()
    copy, tensors = parked.read(empty)
    copy.wait()
    assert tensors() == [] and [row[:3] for row in parked.describe() if row[4] is not None] == [list(act)]
    tier.close()


def test_any_damage_to_a_folder_is_reported_as_such(tmp_path):
    written(tmp_path / "whole").close()
    for path in sorted((tmp_path / "whole").iterdir()):
        content = path.read_bytes()
        step = 11 if len(content) < 5000 else 4099
        for index in [*range(0, len(content), step), None]:
            folder = tmp_path / "damaged"
            shutil.copytree(tmp_path / "whole", folder)
            data = bytearray(content if index is not None else content[:-1])
            if index is not None:
                data[index] ^= 1 << (index % 8)
            (folder / path.name).write_bytes(data)
            tier = TierStore(folder)
            with contextlib.suppress(TierError):
                assert found(tier) in ((1, {"at": 1}), (2, {"at": 2}))
            tier.close()
            shutil.rmtree(folder)


def test_a_folder_of_another_version_is_refused_by_its_name(tmp_path):
    written(tmp_path).close()
    for name in ("rank-0.commit", "rank-0.before"):
        (tmp_path / name).write_bytes(b'{"format": "pipefit.tier/4", "step": 2, "records": []}')
    tier = TierStore(tmp_path)
    with pytest.raises(TierError, match=r"has format pipefit\.tier/4, this version of pipefit reads pipefit\.tier/6"):
        tier.recover()
    tier.close()
