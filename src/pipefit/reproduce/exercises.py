"""The exercises of the course: a question for each chapter, and its answer as pipefit computes it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass

from pipefit.reproduce.entry import Bench, shown
from pipefit.reproduce.ours import make_of
from pipefit.reproduce.record_parts import Record
from pipefit.spec.assets import asset

_WITHIN = 0.01


@dataclass(frozen=True)
class Exercise:
    """A question about a chapter.

    Attributes:
        title: of the chapter.
        question: with one number as its answer.
        hint: shown after a wrong answer.
        ours: the record that computes the answer.
        unit: "%": the answer is given in percent; else it follows the number.
    """

    title: str
    question: str
    hint: str
    ours: Record
    unit: str = ""

    def judge(self, answer: float) -> tuple[str, str]:
        """The verdict ("right" within 1 %, "too small", "too large"), and our answer with its commands."""
        run = Bench()
        ours = float(make_of(self.ours, {})(run))
        if self.unit == "%":
            answer = answer / 100
        text = "\n".join([shown(ours, self.unit), *run.commands])
        if abs(answer - ours) <= _WITHIN * ours:
            return "right", text
        if answer < ours:
            return "too small", text
        return "too large", text


def exercises() -> list[Exercise]:
    """The exercises, in the order of the chapters."""
    records = tomllib.loads(asset("pipefit.reproduce", "exercises.toml"))["exercises"]
    return [Exercise(**record) for record in records]
