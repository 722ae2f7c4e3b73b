"""Searches with `ask` and `tell`, which choose the values of the next trial, such as Optuna."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from pipefit.study.trial import StudyError, Values


class Search(Protocol):
    """Chooses trials while the study runs."""

    def ask(self) -> Values | None:
        """The values of a further trial; None: none now (it is called again when a trial has ended)."""

    def tell(self, values: Values, score: float | None) -> None:
        """Takes the score of a chosen trial, lower is better; None: it failed."""

    def again(self, values: Values) -> None:
        """Takes values chosen before the study was resumed: `tell` follows, `ask` must not return them again."""


class OptunaSearch:
    """Lets an Optuna study choose: `OptunaSearch(optuna.create_study(), suggest, num_trials=20)`.

    Optuna is not needed by pipefit and not imported here.

    Args:
        study: an Optuna study that minimises.
        suggest: from an Optuna trial to values, as `{"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}`.
        num_trials: number of trials to choose.

    Raises:
        StudyError: the Optuna study maximises.
    """

    def __init__(self, study: Any, suggest: Callable[[Any], Values], num_trials: int) -> None:
        if getattr(getattr(study, "direction", None), "name", "") == "MAXIMIZE":
            raise StudyError(
                "scores of trials are losses: expected an Optuna study that minimises, got one that maximises"
            )
        self._study = study
        self._suggest = suggest
        self._left = num_trials
        self._open: list[tuple[Values, int]] = []

    def ask(self) -> Values | None:
        """Optuna's next suggestion."""
        if self._left <= 0:
            return None
        self._left -= 1
        trial = self._study.ask()
        values = dict(self._suggest(trial))
        self._open.append((values, trial.number))
        return values

    def tell(self, values: Values, score: float | None) -> None:
        """Passes the score on; a failed trial is reported as failed."""
        index = next(i for i, (known, _) in enumerate(self._open) if known == values)
        _, number = self._open.pop(index)
        if score is None:
            state = importlib.import_module("optuna.trial").TrialState.FAIL
        else:
            state = None
        self._study.tell(number, score, state=state, skip_if_finished=True)

    def again(self, values: Values) -> None:
        """Finds the trial in Optuna's own storage, if it was kept; else adds a trial with these values.

        Raises:
            StudyError: Optuna does not suggest these values: there are more of them, or others.
        """
        self._left -= 1
        taken = {number for _, number in self._open}
        for known in self._study.get_trials(deepcopy=False):
            if known.number not in taken and dict(known.params) == dict(values):
                self._open.append((dict(values), known.number))
                return
        self._study.enqueue_trial(dict(values))
        trial = self._study.ask()
        if dict(self._suggest(trial)) != dict(values):
            raise StudyError(
                f"{dict(values)}: Optuna suggests other values for this trial; are they named as it names them?"
            )
        self._open.append((dict(values), trial.number))
