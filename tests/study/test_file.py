"""Study files, read or refused."""

from pathlib import Path

import pytest

import pipefit
import pipefit as pf
from pipefit.errors import PipefitError
from pipefit.study.file import grid, load_study, study_of
from pipefit.study.stopping import Halving, Median, Patience
from pipefit.study.trial import OPTIMIZERS, StudyError, StudySpec, Trial, file_name

EXAMPLE = Path(__file__).parents[2] / "examples/study.toml"


def test_the_example_is_a_study_of_twelve():
    spec = load_study(EXAMPLE)
    assert len(spec.trials) == 12 and spec.workers == 2 and spec.stop == Halving(first=15, factor=2)
    assert spec.device_bytes == 3 * 2**20
    assert {(trial.lr, trial.options["width"]) for trial in spec.trials} == {
        (lr, width) for lr in (1e-2, 3e-3, 1e-3, 3e-4) for width in (64, 128, 256)
    }


def test_trials_take_what_is_shared_then_their_own_then_the_grid():
    spec = study_of(
        {
            "model": "mlp",
            "steps": 7,
            "options": {"layers": 3},
            "trials": [{"name": "a", "lr": 0.5}, {"name": "b", "steps": 9, "options": {"width": 8}}],
            "grid": {"seed": [1, 2]},
        }
    )
    assert [trial.name for trial in spec.trials] == ["a-seed=1", "a-seed=2", "b-seed=1", "b-seed=2"]
    assert [trial.steps for trial in spec.trials] == [7, 7, 9, 9]
    assert spec.trials[0].lr == 0.5 and spec.trials[2].options == {"layers": 3, "width": 8}
    assert spec.trials[3].values == {"steps": 9, "width": 8, "seed": 2}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"wokers": 2}, "unknown key 'wokers'; did you mean workers?"),
        ({"polcy": "lrtf"}, "did you mean policy"),
        ({"trials": [{"name": "a", "step": 3}]}, r"trials\[0\]: unknown key 'step'; did you mean steps"),
        ({"grid": {"lrr": [1]}}, "grid: unknown key 'lrr'; did you mean lr"),
        ({"grid": 3}, "grid: expected a table of lists"),
        ({"grid": {}}, "grid: expected a table of lists"),
        ({"grid": {"lr": 3}}, "grid: lr: expected a list of values, .* got 3"),
        ({"grid": {"lr": []}}, r"grid: lr: expected a list of values, .* got \[\]"),
        ({"grid": {"lr": {"a": [1]}}}, "grid: lr: expected a list of values"),
        ({"grid": {"options": [{"width": 8}]}}, "grid: options: .* as in options.width = "),
        ({"grid": {"lr.x": [1]}}, "grid: lr.x: options of the model are given by name"),
        ({"grid": {"lr": ["a"]}}, "trial lr=a: lr: expected a number"),
        ({"grid": {"lr": [0.1, 0.2, 0.1]}}, "t00-lr=0.1 and t02-lr=0.1 are the same training: change a value, or"),
        ({"trials": [{"name": "a", "lr": 0.1}, {"name": "b", "lr": 0.1}]}, "a and b are the same training"),
        ({"trials": []}, r"expected \[\[trials\]\]"),
        ({"trials": [{"name": 3}]}, "name: expected text, got 3"),
        ({"name": 3}, "name: expected text, got 3"),
        ({"output": 3}, "output: expected text, got 3"),
        ({"data": 3}, "data: expected text, a tuple of texts or a function"),
        ({"data": [3]}, "data: expected text, a tuple of texts or a function"),
        ({"model": 3}, "model: expected text or a function, got 3"),
        ({"optimizer": "adma"}, "optimizer: unknown 'adma'; did you mean adam"),
        ({"optimizer": 3}, "optimizer: expected text or a function, got 3"),
        ({"policy": ["lrtf"]}, "policy: expected text"),
        ({"stop": {"rule": ["median"]}}, "stop: unknown rule"),
        ({"batch": 2, "microbatches": 4}, "batch: 2 samples are too few for 4 micro-batches"),
        ({"policy": "lrft"}, "unknown policy 'lrft'; did you mean lrtf"),
        ({"workers": 0}, "workers: expected a whole number of at least 1, got 0"),
        ({"workers": 1.5}, "workers: expected a whole number"),
        ({"steps": 0}, "steps: expected a whole number of at least 1"),
        ({"lr": "fast"}, "lr: expected a number"),
        ({"lr": -1}, "lr: expected a number"),
        ({"tier": "tape"}, r"tier: expected one of (disk, host|host, disk), got 'tape'"),
        ({"device_memory": "2 potatoes"}, "device_memory: expected a quantity in bytes"),
        ({"device_memory": "0 MiB"}, "device_memory: expected more than 0 bytes"),
        ({"stop": {"rule": "medain"}}, "stop: unknown rule 'medain'; did you mean median"),
        ({"stop": {"rule": "median", "evry": 3}}, "stop: unknown key 'evry'; did you mean every"),
        ({"stop": {"rule": "halving", "factor": 1}}, "factor: expected a whole number of at least 2, got 1"),
        ({"stop": {"every": 3}}, "expected a table with rule ="),
        ({"options": 3}, "options: expected a table"),
        ({"trials": {"a": 1}}, r"expected \[\[trials\]\]"),
        ({"trials": [{"name": "a"}, {"name": "a"}]}, "two trials are called a"),
    ],
)
def test_a_mistake_is_one_message_that_names_the_place(data, words):
    with pytest.raises(PipefitError, match=words) as problem:
        study_of({"model": "mlp", **data}, "mine.toml")
    assert str(problem.value).startswith("mine.toml") and "\n" not in str(problem.value)


def test_names_cut_short_do_not_become_one():
    spec = study_of({"model": "mlp", "trials": [{"name": "long" * 30}], "grid": {"lr": [0.1, 0.2]}})
    names = {file_name(number, trial) for number, trial in enumerate(spec.trials)}
    assert len(names) == 2 and all(len(name) == 80 for name in names)


def test_the_optimizers_by_name_are_those_of_training():
    source = (Path(pipefit.__file__).parent / "run/optimizers.py").read_text()
    assert all(f'"{name}":' in source for name in OPTIMIZERS)


def test_what_is_given_in_python_is_checked_too():
    with pytest.raises(StudyError, match=r"expected Trial objects, got 'study\.toml'; Study.load reads a study's file"):
        pf.Study("study.toml")
    assert pf.Study([Trial(data="digits")], stop="median").spec.stop == Median()
    assert Trial(data="digits").data == ("digits",)


def test_a_file_of_another_kind_or_none_is_refused(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('format = "pipefit.topology/1"')
    with pytest.raises(StudyError, match=r"format: expected 'pipefit\.study/1'"):
        load_study(path)
    path.write_text("lr = = 3")
    with pytest.raises(StudyError, match="not TOML"):
        load_study(path)
    with pytest.raises(ValueError, match="no such file"):
        load_study(tmp_path / "none.toml")


def test_rules_are_read_with_their_numbers():
    rules = {"median": Median(min_steps=4), "patience": Patience(patience=3, least=0.5), "halving": Halving(factor=3)}
    for rule in rules.values():
        assert study_of({"stop": {"rule": rule.name, **vars(rule)}}).stop == rule


def test_a_grid_has_every_combination_once():
    points = list(grid({"a": [1, 2], "b": "xy", "c": [0]}))
    assert len(points) == 4 and points[1] == {"a": 1, "b": "y", "c": 0}


def test_a_factory_needs_loss_and_data():
    with pytest.raises(StudyError, match="needs loss=… and data=…"):
        Trial(model=lambda: [])


def test_a_study_is_json_even_with_functions():
    import json

    trial = Trial(name="own", model=lambda: [], loss=max, data=lambda step: None, optimizer=sorted)
    data = json.loads(json.dumps(StudySpec((trial,)).as_dict()))
    assert data["trials"][0]["loss"] == "<max>" and data["trials"][0]["data"].startswith("<")
