"""The measurement: every cell lives in the same processes, and repetitions go round them in turns.

Whatever slows the machine down for a while then slows all cells alike. Ranks meet at a barrier before and after each
turn; one that has nothing to do waits there, blocked in the kernel.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from pipefit.compare.found import Comparison, Refusal, Row
from pipefit.compare.peer import TorchPipeline
from pipefit.compare.pipelines import ScheduledPipeline, plan_of
from pipefit.compare.prediction import Foretelling, Foretold, Turn
from pipefit.compare.settings import CompareConfig
from pipefit.compare.strategies import (
    STRATEGIES,
    Batch,
    DataParallel,
    OneProcess,
    Strategy,
    Subject,
    Trainer,
    num_cores,
    processor_s,
)
from pipefit.compare.update_memory import rise_bytes
from pipefit.errors import DataError, PipefitError, nearest
from pipefit.models import ModelBundle, build, parse_options
from pipefit.planner import by_hand
from pipefit.profiling.clock import half_interquartile_range
from pipefit.run.config import RunConfig
from pipefit.run.optimizers import make_optimizer
from pipefit.run.sources import source_of
from pipefit.runtime.collectives import gather_rows
from pipefit.runtime.session import Session, current
from pipefit.spec import Partition, Profile
from pipefit.stage.split import named_layers
from pipefit.units import format_seconds

__all__ = ["compare_on_ranks"]

Say = Callable[[str], None]

_KEPT_LOSSES = 4
_LEAST_MICROBATCHES = 32


@dataclass
class Cell:
    """A strategy at one number of micro-batches, and what has been measured of it."""

    strategy: Strategy
    num_microbatches: int
    trainer: Trainer
    steps: int
    seconds: list[float] = field(default_factory=list)
    busy: list[list[float]] = field(default_factory=list)
    used: list[list[float]] = field(default_factory=list)
    bubbles: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    rise: float | None = None
    foretold: Foretold | None = None


def compare_on_ranks(config: CompareConfig, say: Say = lambda line: None) -> Comparison:
    """Compares on this rank; every rank of the run calls it alike and gets the same answer.

    Args:
        config: what is asked.
        say: takes a line about how far it is; only rank 0's need do anything.

    Raises:
        PipefitError: an unknown strategy or model, or nothing that can be measured.
    """
    session = current()
    wanted = _strategies(config.strategies)
    torch.manual_seed(config.seed)
    bundle = build(config.model, **parse_options(config.options, config.model))
    source, batches = _batches(config, bundle)
    subject = Subject(
        lambda: copy.deepcopy(bundle.layers), bundle.loss, _optimizer(config), session.num_ranks, session.rank
    )
    say("profiling the model at every micro-batch size, and the links")
    counts = [num for num in config.microbatches if num <= config.batch]
    if not counts:
        raise DataError(f"a batch of {config.batch} cannot be cut into {list(config.microbatches)} micro-batches")
    foretelling = Foretelling.begin(subject, batches[0], counts, session, config)
    partition = _partition(subject, config, foretelling.profiles[counts[len(counts) // 2]])
    cells, refused = _cells(config, wanted, subject, partition, foretelling.profiles, say)
    # The model's pace is taken for each number between its cells.
    cells.sort(key=lambda cell: cell.num_microbatches)
    if not cells:
        raise PipefitError("nothing can be measured: " + "; ".join(item.reason for item in refused[:3]))
    # What is there now stays: looking through all of it again at every turn would take longer than the turn.
    gc.collect()
    gc.freeze()
    _repeat(cells, batches, config, session, foretelling, say)
    say("memory of every cell")
    for cell in cells:
        cell.rise = rise_bytes(lambda cell=cell: cell.trainer.train(batches[: cell.steps]))
        about = (cell.strategy.name, cell.trainer, cell.num_microbatches, cell.steps, cell.turns)
        cell.foretold = foretelling.of(*about)
    gc.unfreeze()
    samples = config.batch * min(len(cell.losses) for cell in cells) if session.rank == 0 else 0
    result = Comparison(
        model=bundle.describe(),
        data=source,
        num_ranks=session.num_ranks,
        batch=config.batch,
        samples=samples,
        repeats=len(cells[0].seconds),
        layer_counts=tuple(len(stage.layers) for stage in partition.stages),
        rows=[_row(cell, config, session) for cell in cells],
        refused=refused,
    )
    return result.with_speedups()


def _repeat(
    cells: list[Cell], batches: list[Batch], config: CompareConfig, session: Session, foretelling: Foretelling, say: Say
) -> None:
    """Goes round the cells, once to warm up and then as often as is asked and the time allows."""
    started = time.monotonic()
    for cell in cells:
        if isinstance(cell.trainer, ScheduledPipeline):
            foretelling.follow(cell.num_microbatches, cell.trainer.plan)
    for turn in range(config.repeats + 1):
        turning = f"repetition {turn} of {config.repeats}" if turn else "warming up"
        say(f"{turning}, {len(cells)} cells in turns")
        foretelling.calibrate()
        num, before = 0, None
        for index, cell in enumerate(cells):
            where = f"{index + 1} of {len(cells)}, {cell.strategy.name} m={cell.num_microbatches}"
            share = (turn + index / len(cells)) / (config.repeats + 1)
            say(f"measuring: {turning}, {where}{_left(time.monotonic() - started, share) if turn else ''}")
            if num != cell.num_microbatches:
                num, before = cell.num_microbatches, foretelling.pace(cell.num_microbatches)
            _measure(cell, batches, session, keep=turn > 0)
            after = foretelling.pace(num)
            if turn and before and after:
                cell.turns.append(Turn(before, after))
            before = after
        spent_s = max(_shared(time.monotonic() - started, session))
        if config.limit_s and 0 < turn < config.repeats and spent_s * (turn + 2) / (turn + 1) > config.limit_s:
            say(f"another repetition would take more than {format_seconds(config.limit_s)}: {turn} must do")
            break


def _strategies(names: Sequence[str]) -> list[Strategy]:
    for name in names:
        if name not in STRATEGIES:
            raise PipefitError(f"unknown strategy {name!r}; {nearest(name, STRATEGIES)}")
    return [strategy for name, strategy in STRATEGIES.items() if not names or name in names]


def _optimizer(config: CompareConfig) -> Any:
    return make_optimizer(config.optimizer, config.lr)


def _batches(config: CompareConfig, bundle: ModelBundle) -> tuple[str, list[Batch]]:
    """Batches that every cell trains on in the same order, and their name; random ones where the data do not fit."""
    run = RunConfig(model=config.model, data=config.data, batch=config.batch, seed=config.seed)
    count = max(min(config.steps * (config.repeats + 2), 64), _LEAST_MICROBATCHES)
    example = bundle.example(1, 0)
    try:
        source = source_of(run, bundle)
        found = list(islice(source.endless(), count))
        fits = _shapes(found[0]) == _shapes(example)
    except DataError:
        if config.data:
            raise
        fits = False
    if not fits and config.data:
        raise DataError(
            f"{', '.join(config.data)}: one sample is {_shapes(found[0])}, {bundle.name} takes {_shapes(example)}"
        )
    if not fits:
        source = source_of(RunConfig(model=config.model, data=("synthetic",), batch=config.batch, seed=0), bundle)
        found = list(islice(source.endless(), count))
    return source.name, found


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    """The shapes of one sample."""
    return [tuple(leaf.shape[1:]) for leaf in torch.utils._pytree.tree_leaves(batch)]


def _partition(subject: Subject, config: CompareConfig, profile: Profile) -> Partition:
    layers = named_layers(subject.make())
    return by_hand(
        len(layers),
        num_ranks=subject.num_ranks,
        schedule="1f1b",
        num_microbatches=1,
        stages=config.stages or None,
        profile=profile,
    ).partition


def _cells(
    config: CompareConfig,
    wanted: list[Strategy],
    subject: Subject,
    partition: Partition,
    profiles: dict[int, Profile],
    say: Say,
) -> tuple[list[Cell], list[Refusal]]:
    """Builds every cell. All ranks refuse alike, since what they look at is the same."""
    cells, refused = [], []
    for strategy in wanted:
        for num in config.microbatches if strategy.cut else (1,):
            say(f"building {strategy.name}, {num} micro-batches")
            try:
                if num > config.batch:
                    raise DataError(f"a batch of {config.batch} samples cannot be cut into {num} micro-batches")
                trainer = _trainer(strategy, num, config, subject, partition, profiles)
                cells.append(Cell(strategy, num, trainer, _steps(trainer, num, config)))
            except PipefitError as problem:
                refused.append(Refusal(strategy.name, num, str(problem)))
    return cells, refused


def _left(spent_s: float, share: float) -> str:
    """The time that is left when this share is done, as people say it."""
    return f", about {format_seconds(float(f'{spent_s * (1 / share - 1):.2g}'))} left"


def _steps(trainer: Trainer, num: int, config: CompareConfig) -> int:
    """Updates of a turn: a schedule that fills and drains only once must be given enough to be in its rhythm."""
    if isinstance(trainer, ScheduledPipeline) and not trainer.pipe.schedule.is_synchronous:
        return max(config.steps, -(-config.segment // num))
    return config.steps


def _trainer(
    strategy: Strategy,
    num: int,
    config: CompareConfig,
    subject: Subject,
    partition: Partition,
    profiles: dict[int, Profile],
) -> Trainer:
    if strategy.kind == "single":
        return OneProcess(subject, num, num_cores() if strategy.name == "all-threads" else 1)
    if strategy.kind == "ddp":
        if config.batch < subject.num_ranks:
            raise DataError(f"a batch of {config.batch} samples is too small for {subject.num_ranks} ranks")
        return DataParallel(subject, num)
    if strategy.kind == "torch":
        return TorchPipeline(subject, partition, num, strategy.name)
    plan = plan_of(subject, strategy.name, num, partition, profiles[num], config.chunks)
    return ScheduledPipeline(subject, plan, config.seed)


def _measure(cell: Cell, batches: list[Batch], session: Session, keep: bool) -> None:
    """One turn of a cell: a few updates in a row, between two barriers."""
    done = len(cell.losses)
    mine = [batches[(done + index) % len(batches)] for index in range(cell.steps)]
    gc.collect()
    gc.disable()
    dist.barrier()
    began, used = time.perf_counter(), processor_s()
    losses = cell.trainer.train(mine)
    used = processor_s() - used
    dist.barrier()
    seconds = time.perf_counter() - began
    gc.enable()
    if session.rank == 0:
        cell.losses += losses
    else:
        cell.losses += [0.0] * len(mine)
    if not keep:
        return
    cell.seconds.append(seconds / cell.steps)
    cell.used.append(_shared(used / cell.steps, session))
    if isinstance(cell.trainer, ScheduledPipeline):
        timeline = cell.trainer.timeline(cell.steps)
        cell.busy.append([timeline.busy_s(rank) / seconds for rank in range(session.num_ranks)])
        cell.bubbles.append(timeline.bubble_fraction)
    else:
        cell.busy.append([share * cell.steps / seconds for share in cell.used[-1]])


def _shared(value: float, session: Session) -> list[float]:
    """A number of every rank, on every rank."""
    return [row[0] for row in gather_rows(session, [value])]


def _row(cell: Cell, config: CompareConfig, session: Session) -> Row:
    """The figures of a cell; every rank must ask, and rank 0's count."""
    own = [cell.rise if cell.rise is not None else -1.0, cell.trainer.state_bytes]
    rises, states = zip(*gather_rows(session, own), strict=True)
    peaks = tuple(a + b for a, b in zip(rises, states, strict=True)) if min(rises) >= 0 else ()
    middle, foretold = statistics.median(cell.seconds), cell.foretold
    seen = cell.losses[: config.steps * (config.repeats + 1)]
    return Row(
        strategy=cell.strategy.name,
        num_microbatches=cell.num_microbatches,
        step_s=middle,
        samples_per_s=config.batch / middle,
        bubble=statistics.median(cell.bubbles) if cell.bubbles else None,
        bubble_predicted=foretold.bubble if foretold else None,
        predicted_step_s=foretold.median_s if foretold else None,
        predicted_over_measured=foretold.over(cell.seconds) if foretold else None,
        pace=statistics.median(statistics.fmean(turn.pace) for turn in cell.turns) if cell.turns else None,
        utilisation=tuple(statistics.median(shares) for shares in zip(*cell.busy, strict=True)),
        processor_s=tuple(statistics.median(shares) for shares in zip(*cell.used, strict=True)),
        predicted_processor_s=foretold.processor_s if foretold else (),
        peak_bytes=peaks,
        final_loss=statistics.mean(seen[-_KEPT_LOSSES:]) if session.rank == 0 else None,
        spread=half_interquartile_range(cell.seconds) / middle,
    )
