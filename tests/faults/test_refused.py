"""File systems that refuse: full, without inodes, read-only, forbidden, broken. One message, and nothing is lost."""

import errno
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from tests.faults.test_flips import written
from torch import nn

from pipefit import Pipeline
from pipefit.cli import main
from pipefit.errors import PipefitError
from pipefit.runtime.outcomes import outcome_of
from pipefit.spec import Plan
from pipefit.spill.arena import aligned
from pipefit.spill.tier_store import TierStore
from pipefit.spill.tiers import Key
from pipefit.study.execute.folder import StudyFolder
from pipefit.study.trial import StudySpec, Trial

pytestmark = pytest.mark.slow

REFUSALS = {
    "a full disk": errno.ENOSPC,
    "a used-up quota": errno.EDQUOT,
    "a read-only file system": errno.EROFS,
    "no permission": errno.EACCES,
    "a broken disk": errno.EIO,
}
FAULTS = [pytest.param(fault, marks=[pytest.mark.faults] * (fault != "a full disk")) for fault in REFUSALS]
KEY, SIZE = Key(0, "weights"), 4096


def pipeline() -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(
        [nn.Linear(40, 40), nn.Linear(40, 2)],
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        microbatches=1,
    )


def step(pipe: Pipeline) -> float:
    return pipe.step(torch.ones(2, 40), torch.ones(2, 2))


def refuse(monkeypatch, number, call, after):
    """From the `after`-th call on, a function of the file system fails with an error number."""
    owner, name = call
    original, count = getattr(owner, name), []

    def refusing(*args, **kwargs):
        count.append(1)
        if len(count) > after:
            raise OSError(number, os.strerror(number), *(str(a) for a in args[:1] if isinstance(a, str | Path)))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, refusing)
    return count


CALLS = [(os, "fsync"), (Path, "mkdir"), (Path, "rename"), (Path, "replace"), (tempfile, "mkstemp"), (os, "ftruncate")]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_is_refused_at_any_call_loses_nothing(fault, trial, tmp_path, monkeypatch):
    whole = pipeline()
    expected = [step(whole) for _ in range(3)]
    for call in CALLS:
        for after in range(12):
            place = tmp_path / f"{call[1]}-{after}"
            pipe = pipeline()
            step(pipe)
            pipe.save(place)
            step(pipe)
            said = ""
            with monkeypatch.context() as patched:
                count = refuse(patched, REFUSALS[fault], call, after)
                try:
                    pipe.save(place)
                except PipefitError as problem:
                    said = str(problem)
            if len(count) <= after:
                break
            again = pipeline()
            found = again.load(place).step
            losses = [step(again) for _ in range(3 - found)]
            # After the rename the checkpoint is whole, though the folder could not be forced to the disk.
            trial(
                f"{fault} during a save",
                (call[1], after, said),
                well=bool(said),
                named=str(place) in said,
                resumed=losses == expected[found:],
            )


@pytest.mark.parametrize("fault", FAULTS)
def test_other_files_that_cannot_be_written_are_named(fault, trial, tmp_path, monkeypatch):
    (tmp_path / "files").mkdir()
    written(tmp_path / "files")
    plan = Plan.load(tmp_path / "files" / "plan.json")

    def tier(place):
        opened = TierStore(place)
        try:
            opened.reserve({KEY: SIZE})
            opened.commit(1, {}, [opened.write(KEY, 1, aligned(SIZE))]).wait()
        finally:
            opened.close()

    def study(place):
        StudyFolder(StudySpec((Trial(model="mlp"),), output=str(place)), resume=False).close()

    writers = {"a plan": lambda place: plan.save(place / "plan.json"), "a disk tier": tier, "a study": study}
    for noun, write in writers.items():
        for call in CALLS:
            place = tmp_path / f"{noun}-{call[1]}"
            said = None
            with monkeypatch.context() as patched:
                count = refuse(patched, REFUSALS[fault], call, 0)
                try:
                    write(place)
                except PipefitError as problem:
                    said = str(problem)
                except Exception as problem:
                    trial(f"{fault}: {noun}", repr(problem), well=False)
            if count:
                trial(f"{fault}: {noun}", (call[1], said), well=said is not None, named=str(place) in (said or ""))


@pytest.fixture
def tiny(tmp_path):
    """A file system of 64 KiB and a few inodes; only root can mount one."""
    place = tmp_path / "tiny"
    place.mkdir()
    options = "size=64k,nr_inodes=12"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_really_full_keeps_the_checkpoint_before(trial, tiny):
    pipe = pipeline()
    losses, said = [], []
    for _ in range(6):
        losses.append(step(pipe))
        try:
            pipe.save(tiny)
        except PipefitError as problem:
            said.append(str(problem))
    again = pipeline()
    found = again.load(tiny).step
    named = bool(said) and all(str(tiny) in text and "full" in text for text in said)
    trial(
        "a full tmpfs",
        said,
        well=bool(said),
        named=named,
        resumed=[step(again) for _ in range(6 - found)] == losses[found:],
    )


def test_a_file_system_without_inodes_is_named(trial, tiny, capsys):
    for number in range(20):
        try:
            (tiny / f"file-{number}").write_text("")
        except OSError:
            break
    else:
        raise AssertionError("the inodes did not run out")
    code = main(["draw", "1f1b", "-p", "2", "-m", "2", "-o", str(tiny / "a.svg")])
    said = capsys.readouterr().err
    trial("no inodes", said, well=code == 2, named=str(tiny) in said)
    try:
        pipeline().save(tiny / "run")
        trial("no inodes", "saved", well=False)
    except PipefitError as problem:
        trial("no inodes", str(problem), well=True, named=str(tiny) in str(problem))


def test_two_studies_or_tiers_in_one_folder_are_refused(trial, tmp_path):
    spec = StudySpec((Trial(model="mlp"),), output=str(tmp_path / "study"))
    first = StudyFolder(spec, resume=False)
    with pytest.raises(PipefitError) as refused:
        StudyFolder(spec, resume=True)
    trial("two runs in one folder", str(refused.value), well=True, named=str(tmp_path) in str(refused.value))
    first.close()
    tier = TierStore(tmp_path)
    with pytest.raises(PipefitError) as refused:
        TierStore(tmp_path)
    trial("two runs in one folder", str(refused.value), well=True, named=str(tmp_path) in str(refused.value))
    tier.close()


def test_an_error_is_reported_where_its_log_is_on_a_full_disk():
    """The rank once died of the full disk, and its own error was in no message."""

    def refuse() -> None:
        raise PipefitError("the cause")

    kind, problem = outcome_of(refuse, (), Path("/dev/full"))
    assert kind == "refused" and str(problem) == "the cause"
