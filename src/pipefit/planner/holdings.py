"""Live values of each rank, counted from the liveness of the real program and never from a formula.

A schedule holds values (activations, saved tensors, weight versions, gradients); their sizes depend on the cut of the
model, their number only on the schedule. So the number is counted once for (schedule, depth, micro-batches, chunks,
recompute) and multiplied by the sizes of every cut that is tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.cost import CostModel
from pipefit.ir.collector import collector_paused
from pipefit.ir.liveness import Lifetime, lifetimes, peak_inflight
from pipefit.ir.program import Program
from pipefit.ir.values import ACT, SAVED, WEIGHTS, Value
from pipefit.partition.balance import Array
from pipefit.planner.space import Config
from pipefit.schedules import Shape, find, generate

# Forwards of a program that is counted whole.
_SMALL = 600
# Micro-batches of a program on four ranks that shows how many are in flight.
_SHOWN = 12
# Micro-batches after which a rank that holds all of them holds as much more with each, however many ranks there are.
_GROWING = 4


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


def holdings_of(config: Config, recomputed: Collection[int], frozen: int = 0) -> tuple[Holding, ...]:
    """Live values of each rank when some of them recompute; without frozen stages, at least as many as with some.

    Raises:
        ScheduleError: the schedule has no such program.
    """
    plain = _held_in(config, config.recompute == "stage", frozen)
    if config.recompute != "some" or not recomputed:
        return plain
    found = list(plain)
    for rank, replaying in enumerate(_held_in(config, True, frozen)):
        if rank in recomputed:
            found[rank] = replaying
    return tuple(found)


def _held_in(config: Config, recompute: bool, frozen: int) -> tuple[Holding, ...]:
    """Live values of each rank of a pipeline.

    A small program is counted whole. With many micro-batches only as many are counted as fill the pipeline, and one
    more where all of them are held.
    """
    name = config.schedule
    depth = config.depth
    chunks = config.chunks
    replicas = config.replicas
    if replicas:
        counted = min(config.num_microbatches, 4 * sum(replicas))
        return _held(name, depth, counted, 1, recompute, replicas, frozen)
    counted = _counted(config)
    found = _held(name, depth, counted, chunks, recompute, frozen=frozen)
    more = config.per_pipeline - counted
    if not more or not holds_all(name, chunks):
        return found
    growth = _growth(name, depth, counted, chunks, recompute, frozen)
    return tuple(Holding(keys, rows + more * grows) for (keys, rows), grows in zip(found, growth, strict=True))


def replayed(config: Config) -> tuple[float, ...]:
    """Of each stage the share of its forwards that are replayed, if all stages keep only their input.

    Forwards whose backward follows at once are not replayed.
    """
    if config.replicas:
        return (1.0,) * len(config.replicas)
    counted = _counted(config)
    # A rank that holds all of them runs only those at the end once: as many, whatever the number of micro-batches.
    of = counted
    if holds_all(config.schedule, config.chunks):
        of = config.per_pipeline
    run_once = _run_once(config.schedule, config.depth, counted, config.chunks)
    return tuple(1 - once / of for once in run_once)


def least_replayed(config: Config) -> tuple[float, ...]:
    """Of each stage at least so large a share of its forwards is replayed, if all keep only their input: no program.

    One micro-batch is not replayed by every rank. Else the last stage replays none, unless all forwards come first;
    GPipe's ranks run the last forward and its backward at once.
    """
    stages = config.num_stages
    m = config.per_pipeline
    if m == 1 or config.depth == 1 or config.schedule == "naive":
        return (0.0,) * stages
    if config.schedule == "gpipe":
        return (1 - 1 / m,) * stages
    last = 0.0
    if config.schedule == "breadth-first" and config.chunks > 1:
        last = 1.0
    return (*[1.0] * (stages - 1), last)


@lru_cache(maxsize=8)
def small_program(
    schedule: str,
    depth: int,
    count: int,
    chunks: int,
    recompute: tuple[int, ...] | None,
    replicas: tuple[int, ...] = (),
    frozen: int = 0,
) -> Program:
    """One pipeline: a few updates of an asynchronous schedule, one of a synchronous one; `recompute` None: all."""
    # Two weight versions only meet where one update follows another.
    if find(schedule).is_synchronous:
        steps = 1
    elif replicas:
        steps = 4 * sum(replicas)
    elif count > 1:
        steps = 3
    else:
        steps = 3 * depth + 2
    with collector_paused():
        return generate(schedule, Shape(depth, count, chunks, steps, replicas, recompute=recompute, frozen=frozen))


def filling(schedule: str, depth: int, chunks: int) -> int:
    """Micro-batches that fill a pipeline: p, or 2p with chunks and where more are in flight than there are ranks."""
    if chunks > 1 or 4 < _in_flight(schedule, 1) < _SHOWN:
        return 2 * depth
    return depth


def least_in_flight(config: Config) -> list[int]:
    """Micro-batches of which each rank holds the values of each of its stages at once, under 1F1B and looped schedules.

    Of each chunk of an interleaved rank at least p, or of the last one those that are in flight below it.
    """
    p = config.depth
    m = config.per_pipeline
    if holds_all(config.schedule, config.chunks):
        return [m] * p
    if config.chunks == 1:
        return [min(p - rank, m) for rank in range(p)]
    return [min(p, 2 * (p - rank) - 1, m) for rank in range(p)]


def least_holdings(config: Config) -> tuple[Holding, ...]:
    """Values that each rank of a looped schedule holds at once, if not more.

    Where stages are replayed, the input of the newest micro-batch may be gone.
    """
    found = []
    replays = config.recompute == "stage"
    for rank, count in enumerate(least_in_flight(config)):
        stages = range(rank, config.num_stages, config.depth)
        if replays:
            kept = [(ACT, stage - 1) for stage in stages if stage]
        else:
            kept = [(SAVED, stage) for stage in stages]
        weights = [(WEIGHTS, stage) for stage in stages]
        counts = [count - replays] * len(kept) + [1] * len(weights)
        found.append(Holding((*kept, *weights), np.array([counts])))
    return tuple(found)


@lru_cache(maxsize=64)
def _in_flight(schedule: str, chunks: int) -> float:
    """Maximum number of micro-batches that the first of four ranks holds at once."""
    return peak_inflight(small_program(schedule, 4, _SHOWN, chunks, ()), 0)


def _counted(config: Config) -> int:
    """Micro-batches of the program that is counted."""
    if config.num_stages * config.per_pipeline <= _SMALL:
        return config.per_pipeline
    if config.chunks == 1 and holds_all(config.schedule, 1):
        return min(config.per_pipeline, _GROWING)
    enough = filling(config.schedule, config.depth, config.chunks)
    if config.chunks == 1:
        enough += 2
    return min(config.per_pipeline, enough)


@lru_cache(maxsize=512)
def _run_once(schedule: str, depth: int, counted: int, chunks: int) -> tuple[float, ...]:
    """Of each stage the forwards per update that are not replayed, if all stages keep only their input."""
    program = small_program(schedule, depth, counted, chunks, None, (), 0)
    header = program.header
    count = Counter(stage for stage, _ in program.recomputed)
    return tuple((header.total_microbatches - count[stage]) / header.num_steps for stage in range(depth * chunks))


@lru_cache(maxsize=512)
def _held(
    schedule: str,
    depth: int,
    counted: int,
    chunks: int,
    recompute: bool,
    replicas: tuple[int, ...] = (),
    frozen: int = 0,
) -> tuple[Holding, ...]:
    """Live values of the first rank of each position."""
    program = small_program(schedule, depth, counted, chunks, None if recompute else (), replicas, frozen)
    with collector_paused():
        ranks = [ranks[0] for ranks in program.header.placement[:depth]]
        return tuple(_rows(lifetimes(program, rank)) for rank in ranks)


@lru_cache(maxsize=512)
def _growth(schedule: str, depth: int, counted: int, chunks: int, recompute: bool, frozen: int) -> tuple[Array, ...]:
    """For each rank, the additional values of each key with one micro-batch more than are counted."""
    few = _held(schedule, depth, counted, chunks, recompute, frozen=frozen)
    many = _held(schedule, depth, counted + 1, chunks, recompute, frozen=frozen)
    return tuple(after.rows.max(axis=0) - before.rows.max(axis=0) for before, after in zip(few, many, strict=True))


def holds_all(schedule: str, chunks: int) -> bool:
    """Returns whether a rank holds every micro-batch of an update at once, as GPipe does."""
    return _in_flight(schedule, min(chunks, 2)) == _SHOWN


def peaks(holdings: tuple[Holding, ...], cost: CostModel, stages_of: list[tuple[int, ...]]) -> tuple[float, ...]:
    """Peak bytes of each rank, optimizer state included; every stage stays on its device."""
    result = []
    for (keys, rows), stages in zip(holdings, stages_of, strict=True):
        sizes = np.array([cost.held_bytes(Value(kind, stage, 0)) for kind, stage in keys])
        live = float((rows @ sizes).max())
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
