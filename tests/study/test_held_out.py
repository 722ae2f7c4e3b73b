"""Trials are judged on data that they are not trained on."""

import json
from dataclasses import replace

import pytest
import torch
from tests.study.cases import CPU, MLP
from torch import nn

import pipefit as pf
from pipefit.errors import DataError
from pipefit.study.execute.admission import recipe_of
from pipefit.study.execute.open_trial import OpenTrial
from pipefit.study.execute.runner import take_turn
from pipefit.study.execute.trial_files import read_losses
from pipefit.study.trial import StudyError, StudySpec, Trial

pytestmark = pytest.mark.slow

DIGITS = Trial("digits", **MLP, data=("digits",), batch=8, microbatches=3, steps=5, evaluate=2, lr=1e-2)


def by_pipeline(trial):
    """What `Pipeline.evaluate` gives after the steps that are due."""
    recipe = recipe_of(trial)
    pipe = pf.Pipeline(
        nn.Sequential(*(layer.module for layer in recipe.layers)),
        loss=recipe.training.loss,
        stages=1,
        optimizer=recipe.training.optimizer,
        microbatches=trial.microbatches,
        updates=pf.Updates(seed=trial.seed),
    )
    found = []
    for step in range(trial.steps):
        pipe.step(*recipe.batch_at(step))
        is_due = (step + 1) % trial.evaluate == 0 or step + 1 == trial.steps
        if is_due:
            found.append((step + 1, pipe.evaluate(recipe.held_out())))
    return found


@pytest.mark.parametrize("shards", [1, 3])
def test_a_trial_is_evaluated_as_a_pipeline_is_and_trains_as_without(shards, tmp_path):
    trial = replace(DIGITS, shards=shards)
    opened = [OpenTrial(0, trial, tmp_path / "judged", CPU) for _ in range(2)]
    count = trial.steps * opened[0].state.figures.num_turns
    reports = [take_turn(opened[number % 2]) for number in range(count)]
    found = read_losses(tmp_path / "judged", trial.steps)[1]
    assert found == by_pipeline(trial)
    assert [r.held_out for r in reports if r.held_out == r.held_out] == [value for _, value in found]
    other = OpenTrial(0, replace(trial, evaluate=0), tmp_path / "plain", CPU)
    for _ in range(count):
        take_turn(other)
    plain = read_losses(tmp_path / "plain", trial.steps)
    assert read_losses(tmp_path / "judged", trial.steps)[0] == plain[0]
    assert not plain[1]


def own(name, lr, **more):
    def data(step):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 4, generator=generator)
        return x, x.sum(1, keepdim=True)

    return Trial(
        name, model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), loss=nn.functional.mse_loss,
        data=data, held_out=lambda: [data(1000), data(1001)], microbatches=2, optimizer="sgd", lr=lr,
        **{"steps": 6, "evaluate": 2, **more},
    )  # fmt: skip


def test_the_best_trial_is_that_with_the_best_loss_on_held_out_data(tmp_path):
    # The second is trained on targets that are nearly nothing, so its loss is small and says little.
    easy = replace(own("easy", 1e-3), data=lambda step: (torch.zeros(6, 4), torch.zeros(6, 1)))
    result = pf.study([own("good", 0.1), easy], workers=1, output=tmp_path / "s")
    assert result["easy"].last_loss < result["good"].last_loss
    assert result.best == "good"
    assert result["good"].score == result["good"].held_out[-1][1]
    assert [step for step, _ in result["good"].held_out] == [2, 4, 6]
    lines = (tmp_path / "s" / "trials" / "good" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line).get("held_out") for line in lines][1::2] == [value for _, value in result["good"].held_out]


@pytest.mark.parametrize(
    "rule",
    [{"rule": "halving", "first": 2, "factor": 2}, {"rule": "median", "min_steps": 2, "every": 2, "min_trials": 1}],
)
def test_rules_can_look_at_held_out_data(rule, tmp_path):
    trials = [own(f"lr-{lr}", lr, steps=4) for lr in (0.1, 1e-6)]
    result = pf.study(trials, workers=1, policy="round-robin", stop={**rule, "on": "held-out"}, output=tmp_path / "s")
    assert result["lr-0.1"].status == "finished" and result["lr-1e-06"].status == "stopped"


def test_patience_counts_steps_without_a_better_evaluation(tmp_path):
    rule = {"rule": "patience", "patience": 3, "least": 1.0, "on": "held-out"}
    result = pf.study([own("slow", 1e-6, steps=20)], workers=1, stop=rule, output=tmp_path / "s")
    assert result["slow"].status == "stopped" and result["slow"].steps == 6


@pytest.mark.parametrize(
    ("trials", "stop", "words"),
    [
        ((own("a", 0.1), replace(own("b", 0.1), evaluate=0, held_out=None)), None, "set it for all"),
        ((replace(own("a", 0.1), evaluate=0, held_out=None),), "patience", "needs trials that evaluate"),
        ((own("a", 0.1, evaluate=4),), "halving", "evaluate must divide it"),
    ],
)
def test_what_cannot_be_judged_is_refused(trials, stop, words):
    from pipefit.study.file import rule_of

    with pytest.raises(StudyError, match=words):
        StudySpec(trials, stop=None if stop is None else rule_of({"rule": stop, "on": "held-out"}))


def test_half_an_evaluation_is_refused():
    from pipefit.study.file import rule_of

    with pytest.raises(StudyError, match="give both or neither"):
        own("a", 0.1, evaluate=0)
    with pytest.raises(StudyError, match="on: expected one of loss, held-out, got 'both'"):
        rule_of({"rule": "median", "on": "both"})
    with pytest.raises(DataError, match="synthetic data has no held-out part"):
        recipe_of(Trial("a", **MLP, data=("synthetic",), evaluate=2))
