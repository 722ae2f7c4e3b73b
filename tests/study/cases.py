"""Trials for tests of studies, and what they give when an ordinary pipeline runs them alone."""

import torch
from tests.pipelines import grouped

import pipefit as pf
from pipefit.study.execute.admission import recipe_of
from pipefit.study.execute.open_trial import OpenTrial
from pipefit.study.execute.runner import take_turn
from pipefit.study.execute.trial_files import read_losses
from pipefit.study.trial import Trial

CPU = torch.device("cpu")
SMALL = {"data": ("synthetic",), "batch": 6, "microbatches": 2, "steps": 3, "lr": 1e-2}
MLP = {"model": "mlp", "options": {"layers": 4, "width": 16, "dropout": 0.2, "batch_norm": True}}
GPT = {"model": "gpt", "options": {"layers": 2, "hidden": 16, "heads": 2, "context": 8, "dropout": 0.1, "tied": False}}
TIED = {"model": "gpt", "options": {**GPT["options"], "tied": True}}


def alone(trial: Trial) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the ordinary executor, everything resident, in one stage."""
    recipe = recipe_of(trial)
    return by_pipeline(trial, recipe, stages=1, schedule="1f1b")


def by_pipeline(trial, recipe, **how):
    pipe = pf.Pipeline(
        torch.nn.Sequential(*(layer.module for layer in recipe.layers)),
        **grouped(
            loss=recipe.training.loss,
            optimizer=recipe.training.optimizer,
            scheduler=recipe.training.scheduler,
            clip_norm=recipe.training.clip_norm,
            microbatches=trial.microbatches,
            seed=trial.seed,
            **how,
        ),
    )
    losses = [pipe.step(*recipe.batch_at(step)) for step in range(trial.steps)]
    return losses, list(pipe.state_dict().values())


def in_turns(trial: Trial, folder, workers: int = 2) -> list[float]:
    """The trial's losses when every turn falls to another worker than the last."""
    opened = [OpenTrial(0, trial, folder, CPU) for _ in range(workers)]
    for count in range(trial.steps * opened[0].state.figures.num_turns):
        take_turn(opened[count % workers])
    return read_losses(folder, trial.steps)[0]


class Listed:
    """The simplest search: values from a list, with the scores of the trials that have ended."""

    def __init__(self, values):
        self._left = [dict(chosen) for chosen in values]
        self.scores = []

    def ask(self):
        return self._left.pop(0) if self._left else None

    def tell(self, values, score):
        self.scores.append((values, score))

    def again(self, values):
        if dict(values) in self._left:
            self._left.remove(dict(values))
