"""The cells of a comparison: a strategy at a number of micro-batches, with the model and data that all cells share."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Any

import torch

from pipefit.compare.comparison import Refusal
from pipefit.compare.settings import ALL, STRATEGIES, WHOLE, CompareConfig
from pipefit.compare.strategies import DataParallel, OneProcess, ScheduledPipeline, Trainer, Waiting, plan_of
from pipefit.compare.torch_pipeline import TorchPipeline
from pipefit.errors import DataError, PipefitError, nearest
from pipefit.models import ModelBundle, build, parse_options
from pipefit.models.examples import Batch
from pipefit.planner import by_hand
from pipefit.profiling.agreed import agreed_profile
from pipefit.profiling.tensors import tensors_of
from pipefit.profiling.workload import Workload
from pipefit.run.config import num_cores
from pipefit.run.observer import Say
from pipefit.run.optimizers import make_optimizer
from pipefit.run.sources import source_of
from pipefit.runtime.microbatches import largest_part
from pipefit.runtime.session import Session, current
from pipefit.spec import Partition, Profile
from pipefit.stage.split import named_layers

_LEAST_BATCHES = 32
_MOST_BATCHES = 64
_SEGMENT = 32
"""Least micro-batches in a repetition of a schedule without a flush, which fills and drains once."""


@dataclass
class Cell:
    """A strategy at one number of micro-batches, and its measurements.

    Attributes:
        strategy: its name.
        num_microbatches: per update.
        trainer: the strategy as it runs on this rank.
        steps: updates of one repetition that are measured.
        warm_up: updates before them.
        seconds: per update, of each repetition.
        busy: share of the time that each rank computed, of each repetition.
        bubbles: of each repetition.
        losses: of every update.
        rise: bytes by which this rank's memory rises in an update; None: not reported.
    """

    strategy: str
    num_microbatches: int
    trainer: Trainer
    steps: int
    warm_up: int = 0
    seconds: list[float] = field(default_factory=list)
    busy: list[list[float]] = field(default_factory=list)
    bubbles: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    rise: float | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.strategy} m={self.num_microbatches}"


@dataclass(frozen=True)
class Task:
    """The model and data of all cells.

    Attributes:
        config: the settings.
        work: the model and its training.
        description: of the model, in one line.
        source: name of the data.
        batches: of every cell, in the same order.
        profiles: of the model, by the number of micro-batches; each repetition adds one.
        partition: layers of each stage, one stage per rank.
    """

    config: CompareConfig
    work: Workload
    description: str
    source: str
    batches: list[Batch]
    profiles: dict[int, list[Profile]]
    partition: Partition


def make_task(config: CompareConfig, session: Session) -> Task:
    """Builds the model, takes the data and profiles the layers; every rank makes the same call.

    Raises:
        PipefitError: an unknown strategy or model, or data or stages that do not fit.
    """
    for name in config.names:
        if name not in STRATEGIES:
            raise PipefitError(f"unknown strategy {name!r}; {nearest(name, (*STRATEGIES, ALL))}")
    torch.manual_seed(config.seed)
    bundle = build(config.model, **parse_options(config.option, config.model))
    source, batches = _batches(config, bundle)
    counts = [num for num in config.microbatches if num <= config.batch]
    if not counts:
        raise DataError(f"a batch of {config.batch} cannot be split into {list(config.microbatches)} micro-batches")
    work = Workload(
        named_layers(bundle.layers),
        bundle.loss,
        make_optimizer(config.optimizer, config.lr),
        torch.device("cpu"),
        batches[0],
    )
    profiles = {}
    for num in counts:
        size = largest_part(batches[0][0], num)
        profiles[num] = [agreed_profile(work, [size], session, repeats=5, warmup=1)]
    middle = counts[len(counts) // 2]
    balanced = by_hand(
        len(work.layers),
        num_ranks=session.num_ranks,
        schedule="1f1b",
        num_microbatches=1,
        stages=config.stages or None,
        profile=profiles[middle][0],
    )
    return Task(config, work, bundle.describe(), source, batches, profiles, balanced.partition)


def _batches(config: CompareConfig, bundle: ModelBundle) -> tuple[str, list[Batch]]:
    """The name of the data and their batches; random ones where no data are given and the usual ones do not fit."""
    count = max(min(config.steps * (config.repeats + 2), _MOST_BATCHES), _LEAST_BATCHES)
    expected = _shapes(bundle.example(1, 0))
    for names in (config.data,) if config.data else ((), ("synthetic",)):
        try:
            source = source_of(bundle, names, config.batch, config.seed)
        except DataError:
            if names:
                raise
            continue
        endless = chain.from_iterable(repeat(source.batches))
        batches = list(islice(endless, count))
        if _shapes(batches[0]) == expected:
            return source.name, batches
    raise DataError(f"{source.name}: one sample is {_shapes(batches[0])}, {bundle.name} takes {expected}")


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    """The shapes of one sample."""
    return [tuple(tensor.shape[1:]) for tensor in tensors_of(batch)]


def build_cells(task: Task, say: Say) -> tuple[list[Cell], list[Refusal]]:
    """Builds every cell. All ranks refuse the same ones, because they check the same data."""
    config = task.config
    cells = []
    refused = []
    for name in config.names:
        for num in (1,) if name in WHOLE else config.microbatches:
            say(f"building {name}, {num} micro-batches")
            try:
                if num > config.batch:
                    raise DataError(f"a batch of {config.batch} samples cannot be split into {num} micro-batches")
                trainer = _trainer(name, num, task)
                cells.append(Cell(name, num, trainer, _steps(trainer, num, config)))
            except PipefitError as problem:
                refused.append(Refusal(name, num, str(problem)))
    return cells, refused


def _steps(trainer: Trainer, num: int, config: CompareConfig) -> int:
    """Updates of a repetition: a schedule that fills and drains only once needs enough to reach its steady state."""
    if isinstance(trainer, ScheduledPipeline) and not trainer.pipe.schedule.is_synchronous:
        return max(config.steps, -(-_SEGMENT // num))
    return config.steps


def _trainer(name: str, num: int, task: Task) -> Trainer:
    work = task.work
    kind = STRATEGIES[name]
    ranks = current().num_ranks
    if kind == "single" and current().rank > 0:
        return Waiting()
    if kind == "single":
        return OneProcess(work, num, num_cores() if name == "all-threads" else 1)
    if kind == "ddp":
        if task.config.batch < ranks:
            raise DataError(f"a batch of {task.config.batch} samples is too small for {ranks} ranks")
        return DataParallel(work, num)
    if kind == "torch":
        return TorchPipeline(work, task.partition, num, name)
    plan = plan_of(name, num, task.partition, task.profiles[num][0], task.config.chunks)
    return ScheduledPipeline(work, plan, task.config.seed)
