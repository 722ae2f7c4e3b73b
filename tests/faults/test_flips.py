"""A flipped bit in any file that is read back: found and named where there is a checksum, elsewhere no traceback."""

import contextlib
import shutil
from pathlib import Path

import pytest
import torch
from tests.study.cases import MLP, SMALL
from torch import nn

from pipefit import Pipeline
from pipefit.checkpoint.manifest import read_manifest
from pipefit.checkpoint.memory import Memory, recall
from pipefit.errors import PipefitError
from pipefit.ir import text
from pipefit.schedules import Shape, generate
from pipefit.spec import Device, Layer, Level, Partition, Placement, Plan, Profile, Topology
from pipefit.spill.tier_file import read_about, read_commits
from pipefit.spill.tier_store import TierStore
from pipefit.spill.tiers import Key
from pipefit.study.execute.folder import StudyFolder
from pipefit.study.execute.trial_files import read_progress, write_loss
from pipefit.study.file import load_study
from pipefit.study.trial import StudySpec, Trial

pytestmark = pytest.mark.slow

HOW_MANY = [pytest.param(40, id="sampled"), pytest.param(None, id="every byte", marks=pytest.mark.faults)]


def flips(file: Path, how_many: int | None):
    """Writes the file with one flipped bit, for each byte or for some; the file is whole again at the end."""
    whole = file.read_bytes()
    step = 1 if how_many is None else max(len(whole) // how_many, 1)
    for index in range(0, len(whole), step):
        data = bytearray(whole)
        data[index] ^= 1 << (index % 8)
        file.write_bytes(data)
        yield f"{file.name}[{index}]"
    file.write_bytes(whole)


def must_be_found(trial, fault, file, read, how_many):
    """Every flip is refused with a message that names the file, and the whole file is read again afterwards."""
    for what in flips(file, how_many):
        said = None
        with contextlib.suppress(Exception):
            try:
                read()
            except PipefitError as problem:
                said = str(problem)
        trial(fault, what, well=said is not None, named=said is not None and file.name in said)
    read()


def must_be_read_or_refused(trial, fault, file, read, how_many):
    """A file for people has no checksum: a flip gives other data, or one message that names the file."""
    for what in flips(file, how_many):
        try:
            read()
            trial(fault, what, well=True)
        except PipefitError as problem:
            trial(fault, what, well=True, named=file.name in str(problem))
        except Exception as problem:
            trial(fault, f"{what}: {problem!r}", well=False)


@pytest.mark.parametrize("how_many", HOW_MANY)
def test_a_checkpoint(trial, tmp_path, how_many):
    torch.manual_seed(0)
    pipe = Pipeline(
        [nn.Linear(2, 2), nn.Linear(2, 2)],
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        microbatches=1,
    )
    pipe.step(torch.ones(2, 2), torch.ones(2, 2))
    path = pipe.save(tmp_path)
    manifest = read_manifest(path)
    fault = "a flipped bit in a checkpoint"
    must_be_found(trial, fault, path / "manifest.json", lambda: read_manifest(path), how_many)
    for entry in manifest.files:
        must_be_found(trial, fault, path / entry.name, lambda entry=entry: entry.check(path), how_many)


@pytest.mark.parametrize("how_many", HOW_MANY)
def test_the_records_of_a_disk_tier(trial, tmp_path, how_many):
    key, size = Key(0, "weights"), 4096
    tier = TierStore(tmp_path)
    tier.reserve({key: size}, about={"model": "mine"})
    from pipefit.spill.arena import aligned

    value = aligned(size)
    value.random_(0, 255)
    tier.commit(1, {"at": 1}, [tier.write(key, 7, value)]).wait()
    tier.close()
    name = next(tmp_path.glob("*.tier")).stem

    def records():
        opened = TierStore(tmp_path)
        try:
            opened.recover()
        finally:
            opened.close()

    def commits():
        if not read_commits(tmp_path, name):
            raise AssertionError("the commit is gone")

    fault = "a flipped bit in a disk tier"
    must_be_found(trial, fault, tmp_path / f"{name}.commit", commits, how_many)
    must_be_found(trial, fault, tmp_path / f"{name}.json", lambda: read_about(tmp_path, name), how_many)
    used = read_commits(tmp_path, name)[0].records[key]
    file = tmp_path / f"{name}.tier"
    whole = file.read_bytes()
    step = 1 if how_many is None else used.num_bytes // how_many
    for index in range(used.position(used.copy), used.position(used.copy) + used.num_bytes, step):
        data = bytearray(whole)
        data[index] ^= 1 << (index % 8)
        file.write_bytes(data)
        try:
            records()
            trial(fault, index, well=False)
        except PipefitError as problem:
            trial(fault, index, well=True, named=file.name in str(problem))
    file.write_bytes(whole)
    records()


@pytest.mark.parametrize("how_many", HOW_MANY)
def test_a_copy_in_memory(trial, tmp_path, how_many):
    """A damaged copy is not taken: the run resumes from an older one, or from a checkpoint."""
    torch.manual_seed(0)
    pipe = Pipeline(
        [nn.Linear(2, 2), nn.Linear(2, 2)],
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        microbatches=1,
    )
    place = tmp_path / "whole"
    place.mkdir()
    copies = Memory(pipe, place, every=1)
    for _ in range(2):
        pipe.step(torch.ones(2, 2), torch.ones(2, 2))
        copies.keep()
    files = sorted(path.relative_to(place) for path in place.rglob("*") if path.is_file())
    assert {path.parts[0] for path in files} == {"step-000001", "step-000002"}
    for name in files:
        for what in flips(place / name, how_many):
            damaged = tmp_path / "damaged"
            shutil.copytree(place, damaged)
            taken = recall(pipe, damaged, least=0)
            expected = 2 if name.parts[0] == "step-000001" else 1
            trial("a flipped bit in a copy in memory", f"{name}: {what}: step {taken}", well=taken == expected)
            shutil.rmtree(damaged)
    assert recall(pipe, place, least=0) == 2


@pytest.mark.parametrize("how_many", HOW_MANY)
def test_the_state_of_a_study(trial, tmp_path, how_many):
    spec = StudySpec((Trial(**SMALL, **MLP),), output=str(tmp_path / "study"))
    folder = StudyFolder(spec, resume=False)
    folder.choose([{"lr": 0.1}])
    folder.close()

    def reopened():
        again = StudyFolder(spec, resume=True)
        try:
            again.chosen()
        finally:
            again.close()

    fault = "a flipped bit in a study"
    must_be_found(trial, fault, tmp_path / "study" / "study.json", reopened, how_many)
    must_be_found(trial, fault, tmp_path / "study" / "chosen.json", reopened, how_many)


@pytest.mark.parametrize("how_many", HOW_MANY)
def test_the_place_of_a_trial_between_two_turns(trial, tmp_path, how_many):
    from pipefit.study.execute.open_trial import OpenTrial
    from pipefit.study.execute.runner import take_turn

    opened = OpenTrial(0, Trial(**SMALL, **MLP), tmp_path, torch.device("cpu"))
    for _ in range(opened.state.figures.num_turns * 2):
        take_turn(opened)
    write_loss(tmp_path, 0, 0.5)
    commit = tmp_path / "trial.commit"
    (tmp_path / "trial.before").unlink(missing_ok=True)
    fault = "a flipped bit in a study"
    must_be_found(trial, fault, commit, lambda: read_progress(tmp_path), how_many)
    must_be_found(trial, fault, tmp_path / "losses", lambda: read_progress(tmp_path), how_many)
    losses = (tmp_path / "losses").read_bytes()
    for size in range(len(losses)):
        (tmp_path / "losses").write_bytes(losses[:size])
        try:
            read_progress(tmp_path)
            trial("a truncated file of a study", size, well=False)
        except PipefitError as problem:
            trial("a truncated file of a study", size, well=True, named="losses" in str(problem))


def written(folder: Path) -> dict[str, tuple[Path, object]]:
    """Files for people, each with its reader."""
    layers = tuple(Layer(name, 1e-3, 1e-3, 1e-3, 1000, 4000, 100) for name in "abc")
    plan = Plan(Partition.from_counts([2, 1]), Placement(((0,), (1,))), "1f1b", 4, options={"group": 1})
    study = folder / "study.toml"
    study.write_text('model = "mlp"\nsteps = 4\nlr = 1e-3\n[grid]\nbatch = [8, 16]\n[stop]\nrule = "patience"\n')
    program = folder / "mine.pipe"
    text.save(generate("1f1b", Shape(2, 2)), program)
    topology = Topology((Level("host", 2, 1e9, 1e-4),), device=Device(memory_bytes=16e3))
    return {
        "a plan": (plan.save(folder / "plan.json"), lambda: Plan.load(folder / "plan.json")),
        "a profile": (Profile("abc", 2, layers).save(folder / "p.json"), lambda: Profile.load(folder / "p.json")),
        "a topology": (topology.save(folder / "t.toml"), lambda: Topology.load(folder / "t.toml")),
        "a program": (program, lambda: text.load(program)),
        "a study file": (study, lambda: load_study(study)),
    }


@pytest.mark.parametrize("how_many", HOW_MANY)
def test_files_for_people(trial, tmp_path, how_many):
    for noun, (file, read) in written(tmp_path).items():
        must_be_read_or_refused(trial, f"a flipped bit in {noun}", file, read, how_many)
    shutil.rmtree(tmp_path)
