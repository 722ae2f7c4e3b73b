"""The settings of a comparison; the fields are the options of `pipefit compare`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CompareConfig"]


@dataclass(frozen=True)
class CompareConfig:
    """A comparison.

    Attributes:
        model: built-in name or pkg.mod:factory.
        options: of the model, as "layers=8,hidden=256".
        data: as for a training run; (): the data that the model is made for, random where they do not fit.
        strategies: names from `STRATEGIES`; (): all.
        microbatches: numbers of micro-batches per update; strategies that do not split the batch are measured once.
        batch: samples per update.
        steps: updates of one repetition; a schedule without a flush drains only at their end.
        repeats: repetitions of every cell; medians are taken.
        limit_s: no further repetition begins that would end later than this, after the first; 0: no limit.
        stages: layer counts of one stage per rank; (): balanced by a profile.
        chunks: stages per rank of the looped schedules.
        segment: micro-batches that a schedule without a flush runs in a repetition, at least: it fills and drains once.
        optimizer: "adamw", "adam" or "sgd".
        lr: learning rate.
        seed: of weights, data and dropout.
    """

    model: str = "gpt"
    options: str = ""
    data: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    microbatches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    batch: int = 32
    steps: int = 4
    repeats: int = 3
    limit_s: float = 600.0
    stages: tuple[int, ...] = ()
    chunks: int = 2
    segment: int = 32
    optimizer: str = "adamw"
    lr: float = 1e-3
    seed: int = 0
