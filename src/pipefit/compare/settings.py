"""The settings of a comparison; its fields are the options of `pipefit compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipefit.spec.arguments import NotNegative, Number, Seed
from pipefit.spec.options import Checked, setting

STRATEGIES = {
    "one-thread": "single",
    "all-threads": "single",
    "accumulate": "single",
    "ddp": "ddp",
    "data-parallel": "schedule",
    "naive": "schedule",
    "gpipe": "schedule",
    "1f1b": "schedule",
    "interleaved": "schedule",
    "breadth-first": "schedule",
    "zb-h1": "schedule",
    "pipedream": "schedule",
    "pipedream-2bw": "schedule",
    "torch-gpipe": "torch",
    "torch-1f1b": "torch",
}
"""Every strategy with its kind, in the order of the table."""

USUAL = ("one-thread", "accumulate", "ddp", "gpipe", "1f1b", "interleaved", "zb-h1", "torch-1f1b")
"""The strategies that are compared where none are named."""

ALL = "all"

WHOLE = ("one-thread", "all-threads")
"""Strategies that take the whole batch at once."""


@dataclass(frozen=True)
class CompareConfig(Checked):
    """A comparison."""

    model: str = setting(
        "gpt", "A built-in model (gpt, mlp, convnet), or your own as package.module:factory or file.py:factory."
    )
    option: str = setting("", "Options of the model, like layers=8,hidden=256; may be repeated.", typed="words")
    data: Sequence[str] = setting(
        (),
        "Data sets: text, digits, synthetic, or your own text files; default: the data that suits the model, or "
        "random data.",
        typed="texts",
    )
    strategies: str = setting(
        "",
        "Names with commas between them, measured in this order, or all; default: eight that differ most.",
        typed="words",
    )
    microbatches: Sequence[int] = setting(
        (4, 8), "Numbers of micro-batches per update, like 1,2,16; default: 4,8.", "-m", typed="numbers"
    )
    batch: Number = setting(32, "Samples per update.")
    steps: Number = setting(4, "Updates of one repetition; a schedule without a flush drains only at their end.")
    repeats: Number = setting(3, "Repetitions of everything; medians are shown.")
    limit: NotNegative = setting(
        2.0, "Minutes after which no further row or repetition begins, once there is a row; 0: no limit."
    )
    stages: Sequence[int] = setting(
        (), "Layers of each stage, like 3,3; default: balanced by a profile.", typed="numbers"
    )
    chunks: Number = setting(2, "Stages per rank of the looped schedules.", "-v")
    optimizer: Literal["adamw", "adam", "sgd"] = setting("adamw", "Of every strategy.")
    lr: NotNegative = setting(1e-3, "Learning rate.")
    seed: Seed = setting(0, "Of weights, the order of the data, and dropout.")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of `strategies`."""
        given = dict.fromkeys(name.strip() for name in self.strategies.split(",") if name.strip())
        if list(given) == [ALL]:
            return tuple(STRATEGIES)
        return tuple(given) or USUAL
