"""Random values in files that carry checksums, which are right again: read, or refused with one message."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.faults.shapes import batches, pipeline
from tests.faults.test_fuzz import CASES, JSON, MANY, PATHS, check_answer, replaced, toml_value
from tests.study.cases import MLP, SMALL

from pipefit.checkpoint.manifest import read_manifest
from pipefit.errors import PipefitError
from pipefit.pipeline.resume import committed_step, recorded_plan
from pipefit.spec.sealed import seal
from pipefit.study.execute.folder import StudyFolder
from pipefit.study.execute.open_trial import OpenTrial
from pipefit.study.execute.runner import take_turn
from pipefit.study.execute.trial_files import read_progress
from pipefit.study.trial import StudySpec, Trial


def checkpoint(folder):
    """A checkpoint, and what loads it."""
    pipe = pipeline("1f1b", folder)
    pipe.fit(batches()[:1])
    path = pipe.save(folder)

    def load():
        read_manifest(path)
        pipe.load(path)

    return path / "manifest.json", load


def tier(name):
    """A file of a disk tier, and what resumes from it."""

    def made(folder):
        pipe = pipeline("spilled", folder)
        pipe.fit(batches()[:1])
        pipe.close()
        return folder / "tier" / name, lambda: (committed_step(folder / "tier"), recorded_plan(folder / "tier", 0))

    return made


def study(folder):
    """The file of a study, and what resumes it."""
    spec = StudySpec((Trial(**SMALL, **MLP),), output=str(folder / "study"))
    StudyFolder(spec, resume=False).close()
    return folder / "study" / "study.json", lambda: StudyFolder(spec, resume=True).close()


def turn(folder):
    """The place of a trial between two turns, and what reads it."""
    opened = OpenTrial(0, Trial(**SMALL, **MLP), folder, torch.device("cpu"))
    take_turn(opened)
    opened.close()
    (folder / "trial.before").unlink(missing_ok=True)
    return folder / "trial.commit", lambda: read_progress(folder)


RECORDS = {
    "a checkpoint's manifest": checkpoint,
    "a commit of a disk tier": tier("rank-0.commit"),
    "the facts of a disk tier": tier("rank-0.json"),
    "a study's state": study,
    "a trial's state": turn,
}


def change(trial, fault, file, read, path, value):
    whole = file.read_text()
    data = json.loads(whole)
    del data["checksum"]
    try:
        changed = replaced(data, path, value)
        if not isinstance(changed, dict) or not changed:
            return
        file.write_text(seal(changed, indent=1))
        read()
        trial(fault, "", well=True)
    except PipefitError as problem:
        # A tier has two commits, of which the message names the step or the folder.
        trial(fault, str(problem), well=True, named=str(file.parent) in str(problem) or "state of step" in str(problem))
    except Exception as problem:
        trial(fault, f"{path} = {value!r}: {problem!r}", well=False)
    finally:
        file.write_text(whole)


@pytest.mark.parametrize(
    "cases", [pytest.param(CASES, id="some"), pytest.param(MANY, id="many", marks=pytest.mark.faults)]
)
@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.slow
def test_a_random_value_under_a_right_checksum(kind, cases, trial, tmp_path):
    file, read = RECORDS[kind](tmp_path)
    fault = f"a random value in {kind}"
    cases(given(PATHS, JSON)(lambda path, value: change(trial, fault, file, read, path, value)))()


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("a checkpoint's manifest", [5, 0, 2], 3),
        ("a checkpoint's manifest", [5, 0, 0, 0], {}),
        ("a commit of a disk tier", [1], "nan"),
        ("a commit of a disk tier", [1, 0], []),
        ("a commit of a disk tier", [2, 7], "9.3e244"),
        ("the facts of a disk tier", [0], None),
        ("a trial's state", [2], {}),
        ("a trial's state", [3], 10**400),
    ],
)
@pytest.mark.slow
def test_values_that_were_not_understood_are_named(kind, path, value, trial, tmp_path):
    file, read = RECORDS[kind](tmp_path)
    change(trial, f"a random value in {kind}", file, read, path, value)


# ---- files of a run, options -----------------------------------------------------------------------------------------


@pytest.fixture
def done(tmp_path, monkeypatch):
    """The folder of a run that has ended, as the working directory."""
    monkeypatch.chdir(tmp_path)
    from pipefit.cli import main

    small = "train --model mlp --data synthetic --steps 2 --transport local --batch 4 -o run".split()
    assert main(small) == 0
    return tmp_path / "run"


@pytest.mark.parametrize(
    "cases", [pytest.param(CASES, id="some"), pytest.param(MANY, id="many", marks=pytest.mark.faults)]
)
@pytest.mark.slow
# Curves of numbers as large as a float can be have labels that leave no room; matplotlib only warns.
@pytest.mark.filterwarnings("ignore:constrained_layout not applied")
def test_a_random_value_in_the_files_of_a_run(cases, trial, done, capsys):
    def values(name, path, value):
        file = done / name
        whole = file.read_text()
        lines = whole.splitlines() if name.endswith("l") else [whole]
        lines[0] = json.dumps(replaced(json.loads(lines[0]), path, value))
        file.write_text("\n".join(lines))
        check_answer(trial, "a random value in the files of a run", ["report", "run"])
        file.write_text(whole)
        capsys.readouterr()

    names = st.sampled_from(["run.json", "plan.json", "metrics.jsonl"])
    cases(given(names, PATHS, JSON)(values))()


@pytest.mark.parametrize(
    "cases", [pytest.param(CASES, id="some"), pytest.param(MANY, id="many", marks=pytest.mark.faults)]
)
@pytest.mark.slow
def test_random_options_in_a_file(cases, trial, tmp_path, monkeypatch):
    monkeypatch.setattr("pipefit.cli.train._trained", refuse)
    file = tmp_path / "options.toml"

    def options(chosen):
        file.write_text("\n".join(f"{name} = {toml_value(value)}" for name, value in chosen.items()))
        check_answer(trial, "random options in a file", ["train", "--config", str(file)])

    names = st.sampled_from(["model", "data", "steps", "lr", "ranks", "batch", "option", "schedule", "clip-norm", "x"])
    cases(given(st.dictionaries(names, JSON, max_size=4))(options))()


def refuse(*_):
    raise PipefitError("the run would start now")
