"""Live values of each rank, counted from the liveness of the real program and never from a formula.

A schedule holds values (activations, saved tensors, weight versions, gradients); their sizes depend on the cut of the
model, their number only on the schedule. So the number is counted once for (schedule, depth, micro-batches, chunks,
recompute) and multiplied by the sizes of every cut that is tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.cost import CostModel
from pipefit.errors import ScheduleError
from pipefit.ir.graph import FEW_SENDS
from pipefit.ir.instruction import Groups, Indices
from pipefit.ir.liveness import Lifetime, lifetimes, peak_inflight, working_lifetimes
from pipefit.ir.op import Op, Reduction
from pipefit.ir.program import Program
from pipefit.ir.values import ACT, SAVED, WEIGHTS, Value
from pipefit.partition.balance import Array
from pipefit.planner.space import Config
from pipefit.schedules import Schedule, Shape, find
from pipefit.spec.plan import SHARD_SLOTS, Figures, Shard

# Forwards of a program that is counted whole.
_SMALL = 600
# Micro-batches of a program on four ranks that shows how many are in flight.
_SHOWN = 12
# Micro-batches after which a rank that holds all of them holds as much more with each, however many ranks there are.
_GROWING = 4


class Small(NamedTuple):
    """A program of one pipeline with so few micro-batches that it is soon made and counted.

    `recompute` None: all stages replay; `works`: the work of instructions is counted too, `summed`: with
    gradients that copies of the pipeline sum. With a `shard` of gradients or weights there are two copies.
    """

    schedule: Schedule
    depth: int
    microbatches: int
    chunks: int = 1
    recompute: Indices | None = ()
    replicas: Indices = ()
    frozen: int = 0
    works: bool = False
    summed: bool = False
    shard: Shard = "none"


class Holding(NamedTuple):
    """Live values of one rank.

    Attributes:
        keys: (kind, stage) of each column.
        rows: array [moment, key] of counts, only moments that no other exceeds in every count. Micro-batches beyond
            those counted are added to every moment, each kind at its own maximum, so the sum is an upper bound.
            (A line through two counts would be too low: with more micro-batches another moment becomes the highest.)
    """

    keys: tuple[tuple[str, int], ...]
    rows: Array


def holdings_of(
    config: Config, recomputed: Collection[int], frozen: int = 0, works: bool = False
) -> tuple[Holding, ...]:
    """Live values of each rank when some of them recompute; without frozen stages, at least as many as with some.

    Args:
        config: the candidate.
        recomputed: its stages that replay.
        frozen: stages at the beginning that do not train.
        works: whether the work of instructions counts: the profile knows its bytes.

    Raises:
        ScheduleError: the schedule has no such program.
    """
    plain = _held_in(config, config.recompute == "stage", frozen, works)
    if config.recompute != "some" or not recomputed:
        return plain
    found = list(plain)
    for rank, replaying in enumerate(_held_in(config, True, frozen, works)):
        if rank in recomputed:
            found[rank] = replaying
    return tuple(found)


def _held_in(config: Config, recompute: bool, frozen: int, works: bool) -> tuple[Holding, ...]:
    """Live values of each rank of a pipeline.

    A small program is counted whole. With many micro-batches only as many are counted as fill the pipeline, and one
    more where all of them are held.
    """
    small = _counted(config)._replace(frozen=frozen, works=works, summed=works and config.data > 1)
    if works:
        # So many further messages are held after they were sent.
        enough = min(small.microbatches + FEW_SENDS, max(config.per_pipeline, small.microbatches))
        small = small._replace(microbatches=enough)
    if recompute:
        small = small._replace(recompute=None)
    found = _held(small)
    more = config.per_pipeline - small.microbatches
    if not more or config.replicas or not holds_all(config):
        return found
    growth = _growth(small)
    grown = []
    for (keys, rows), grows in zip(found, growth, strict=True):
        grown.append(Holding(keys, rows + more * grows))
    return tuple(grown)


def replayed(config: Config) -> Figures:
    """Of each stage the share of its forwards that are replayed, if all stages keep only their input.

    Forwards whose backward follows at once are not replayed.
    """
    if config.replicas:
        return (1.0,) * len(config.replicas)
    small = _counted(replace(config, shard="none"))
    # A rank that holds all of them runs only those at the end once: as many, whatever the number of micro-batches.
    of = small.microbatches
    if holds_all(config):
        of = config.per_pipeline
    run_once = _run_once(small._replace(recompute=None))
    return tuple(1 - once / of for once in run_once)


def collectives_of(config: Config) -> list[tuple[float, float]]:
    """Of each stage of shared gradients or weights how often per update these are gathered, and summed.

    Those of a large program follow from as many micro-batches as fill it. Where all stages of a rank have room, each is
    gathered and summed once.
    """
    small = _counted(config)
    program = small_program(small)
    share = 1.0
    if config.chunks > SHARD_SLOTS and not holds_all(config):
        share = config.per_pipeline / small.microbatches
    found = []
    for stage, ranks in enumerate(program.header.placement):
        own = [i for i in program.ranks[ranks[0]] if i.stage == stage]
        gathers = sum(i.op is Op.UNSHARD for i in own)
        joins = sum(i.kind == Reduction.SHARDS for i in own)
        sums = sum(i.kind == Reduction.SCATTER for i in own)
        found.append((gathers * share + joins, sums * share))
    return found


def least_replayed(config: Config, is_frozen: bool = False) -> Figures:
    """Of each stage at least so large a share of its forwards is replayed, if all keep only their input.

    No program is needed where the schedule knows its forwards before the first backward: where there is only one, each
    backward follows its forward; of all of them at most the last one is followed by its backward. Otherwise other work
    of the rank comes between the two, which may all be that of a stage that is frozen, where it has several.
    """
    m = config.per_pipeline
    none = (0.0,) * config.num_stages
    if m == 1 or config.num_stages == 1:
        return none
    known = ahead_of(config)
    follows = is_frozen and config.chunks > 1
    if not known:
        if follows:
            return none
        try:
            return replayed(config)
        except ScheduleError:
            return none
    # Ranks hold stages p apart.
    counts = [count for each in zip(*known, strict=True) for count in each]
    shares = {1: 0.0, m: 1 - 1 / m}
    return tuple(shares.get(count, float(not follows)) for count in counts)


def ahead_of(config: Config) -> Groups:
    """Of each rank the forwards of its stages before its first backward; (): only the program shows them."""
    if config.replicas:
        return ()
    return _ahead(find(config.schedule), config.depth, config.per_pipeline, config.chunks)


@lru_cache(maxsize=4096)
def _ahead(schedule: Schedule, depth: int, count: int, chunks: int) -> Groups:
    formula = schedule.ahead
    if formula is None:
        return ()
    return tuple(formula(depth, count, chunks, rank) for rank in range(depth))


def least_in_flight(config: Config) -> list[int]:
    """Micro-batches of which each rank holds the values of all of its stages at once, at least."""
    known = ahead_of(config)
    if not known:
        return [1] * config.depth
    return list(map(min, known))


def first_holdings(config: Config) -> tuple[Holding, ...]:
    """Values that each rank holds at its first backward, of a schedule that knows its forwards before it.

    Where stages are replayed, the input of the newest micro-batch may be gone.
    """
    found = []
    replays = config.recompute == "stage"
    for rank, counts in enumerate(ahead_of(config)):
        held = {}
        for chunk, count in enumerate(counts):
            stage = rank + chunk * config.depth
            # Of shared weights, those of the stage that begins are whole.
            if chunk == config.chunks - 1 or not config.shares_weights:
                held[WEIGHTS, stage] = 1
            if not replays:
                held[SAVED, stage] = count
            elif stage:
                held[ACT, stage - 1] = count - 1
        found.append(Holding(tuple(held), np.array([list(held.values())])))
    return tuple(found)


@lru_cache(maxsize=8)
def small_program(small: Small) -> Program:
    """One pipeline: a few updates of an asynchronous schedule, one of a synchronous one."""
    schedule, depth, count, chunks, recompute, replicas, frozen, *_ = small
    if small.shard != "none":
        replicas = (2,)
        count *= 2
        if schedule.layout == "replicas":
            depth = 2
    # Two weight versions only meet where one update follows another.
    if schedule.is_synchronous:
        steps = 1
    elif replicas:
        steps = 4 * sum(replicas)
    elif count > 1:
        steps = 3
    else:
        steps = 3 * depth + 2
    shape = Shape(depth, count, chunks, steps, replicas, recompute=recompute, frozen=frozen, shard=small.shard)
    return schedule(shape)


@lru_cache(maxsize=64)
def _shown(schedule: Schedule, chunks: int) -> tuple[float, bool]:
    """The micro-batches that the first of four ranks holds at once, and whether backwards are whole.

    0 and False where the schedule has no such program.
    """
    try:
        program = small_program(Small(schedule, 4, _SHOWN, chunks))
    except ScheduleError:
        return 0, False
    return peak_inflight(program, 0), all(i.op is not Op.BWD_INPUT for _, _, i in program)


def holds_all(config: Config) -> bool:
    """Returns whether a rank holds every micro-batch of an update at once, as GPipe does."""
    in_flight, _ = _shown(find(config.schedule), min(config.chunks, 2))
    return in_flight == _SHOWN


def fills(config: Config) -> bool:
    """Returns whether a rank waits at each update for its first micro-batch, and for the ranks before it at the end.

    The last work of a rank is then a whole backward, whose gradient the ranks before it need.
    """
    schedule = find(config.schedule)
    _, has_whole_backwards = _shown(schedule, min(config.chunks, 2))
    return schedule.is_synchronous and schedule.flushes and has_whole_backwards


def filling(config: Config) -> int:
    """Micro-batches that fill a pipeline: p, or 2p with chunks and where more are in flight than there are ranks."""
    if config.chunks > 1:
        return 2 * config.depth
    in_flight, _ = _shown(find(config.schedule), 1)
    if 4 < in_flight < _SHOWN:
        return 2 * config.depth
    return config.depth


def _counted(config: Config) -> Small:
    """The program that is counted: nothing is replayed in it."""
    count = config.per_pipeline
    if config.replicas:
        count = min(count, 4 * sum(config.replicas))
    elif config.num_stages * count > _SMALL:
        enough = filling(config)
        if config.chunks == 1:
            enough += 2
            if holds_all(config):
                enough = _GROWING
        count = min(count, enough)
    small = Small(find(config.schedule), config.depth, count, config.chunks, replicas=config.replicas)
    if config.shares_gradients:
        small = small._replace(shard=config.shard)
    return small


@lru_cache(maxsize=512)
def _run_once(small: Small) -> Figures:
    """Of each stage the forwards per update that are not replayed, if all stages keep only their input."""
    program = small_program(small)
    header = program.header
    count = Counter(stage for stage, _ in program.recomputed)
    found = []
    for stage in range(header.num_stages):
        once = header.total_microbatches - count[stage]
        found.append(once / header.num_steps)
    return tuple(found)


@lru_cache(maxsize=512)
def _held(small: Small) -> tuple[Holding, ...]:
    """Live values of the first rank of each position."""
    program = small_program(small._replace(works=False, summed=False))
    lives_of: Callable[[Program, int], list[Lifetime]] = lifetimes
    if small.works:
        lives_of = partial(working_lifetimes, summed=small.summed)
    ranks = [ranks[0] for ranks in program.header.placement[: small.depth]]
    return tuple(_rows(lives_of(program, rank)) for rank in ranks)


@lru_cache(maxsize=512)
def _growth(small: Small) -> tuple[Array, ...]:
    """For each rank, the additional values of each key with one micro-batch more than are counted."""
    few = _held(small)
    many = _held(small._replace(microbatches=small.microbatches + 1))
    growth = []
    for before, after in zip(few, many, strict=True):
        growth.append(after.rows.max(axis=0) - before.rows.max(axis=0))
    return tuple(growth)


def most_bytes(holding: Holding, size_of: Callable[[str, int], float | Array]) -> Array:
    """Peak bytes of a rank's live values: the moment at which the sum of counts times sizes is highest.

    Args:
        holding: the counts.
        size_of: bytes of a value by its kind and stage: of a cut, or, in arrays, of all stages that could be cut.
    """
    sizes = np.array([size_of(kind, stage) for kind, stage in holding.keys])
    found: Array = np.tensordot(holding.rows, sizes, axes=1).max(axis=0)
    return found


def peaks(holdings: tuple[Holding, ...], cost: CostModel, stages_of: list[Indices]) -> Figures:
    """Peak bytes of each rank, optimizer state included; every stage stays on its device."""

    def size_of(kind: str, stage: int) -> float:
        return cost.held_bytes(Value(kind, stage, 0))

    result = []
    for holding, stages in zip(holdings, stages_of, strict=True):
        live = float(most_bytes(holding, size_of))
        frozen = sum(map(cost.frozen_bytes, stages))
        result.append(live + cost.resident_bytes(stages) + cost.room_bytes(stages) + frozen)
    return tuple(result)


def _rows(lives: list[Lifetime]) -> Holding:
    """Counts at the first end of a value after each birth of one, without those that another moment covers."""
    born = [life.born for life in lives]
    dies = [life.dies for life in lives]
    kinds = [(life.value.kind, life.value.stage) for life in lives]
    keys = sorted(set(kinds))
    column = {key: index for index, key in enumerate(keys)}
    which = np.array([column[kind] for kind in kinds])
    after = np.maximum(born, dies) + 2
    changes = np.zeros((max(after) + 1, len(keys)), np.int32)
    np.add.at(changes, (np.array(born) + 1, which), 1)
    np.add.at(changes, (after, which), -1)
    before_an_end = np.flatnonzero((changes < 0).any(axis=1)) - 1
    births = np.cumsum((changes > 0).any(axis=1))[before_an_end]
    moments = before_an_end[np.diff(births, prepend=-1) > 0]
    counts: NDArray[Any] = np.cumsum(changes, axis=0, dtype=changes.dtype)
    return Holding(tuple(keys), _highest(counts[moments]))


def _highest(rows: Array) -> Array:
    """The rows that no other row covers in every count."""
    by_sum = np.argsort(-rows.sum(axis=1), kind="stable")
    columns = np.ascontiguousarray(rows[by_sum].T)
    highest = []
    uncovered = np.ones(len(rows), bool)
    while uncovered.any():
        # A row that covers this one has a larger sum, and has been found.
        highest.append(columns[:, uncovered.argmax()])
        uncovered &= (columns > highest[-1][:, None]).any(axis=0)
    return np.array(highest)
