"""Live values of each rank, counted from the liveness of the real program and never from a formula.

A schedule holds values (activations, saved tensors, weight versions, gradients); their sizes depend on where the model
is cut, their number only on the schedule. So the number is counted once for (schedule, depth, micro-batches, chunks,
recompute) and multiplied with the sizes of every cut that is tried.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipefit.cost import CostModel
from pipefit.ir.liveness import Lifetime, lifetimes, peak_inflight
from pipefit.ir.program import Program
from pipefit.ir.values import Value
from pipefit.partition.balance import Array
from pipefit.planner.space import Config
from pipefit.schedules import Shape, find, generate
from pipefit.simulate.simulate import collector_paused

Key = tuple[str, int]

# Forwards of a program that is counted whole.
_SMALL = 600


@dataclass(frozen=True)
class Holding:
    """Live values of one rank.

    Attributes:
        keys: (kind, stage) of each column.
        rows: array [moment, key] of counts, only moments that no other exceeds in every count.
        growth: for each key, more of it per further micro-batch of the pipeline, beyond what was counted; each at its
            own highest moment, so all together are an upper bound.
    """

    keys: tuple[Key, ...]
    rows: Array
    growth: Array

    def peak_bytes(self, size: dict[Key, float], further: int = 0) -> float:
        """The most bytes at once.

        Args:
            size: of a value of each key.
            further: micro-batches beyond those counted.
        """
        if not self.keys:
            return 0.0
        sizes = np.array([size.get(key, 0.0) for key in self.keys])
        # A line through two counts would fall short: with more micro-batches another moment becomes the highest.
        return float(((self.rows + further * self.growth) @ sizes).max())


Both = tuple[tuple[Holding, ...], tuple[Holding, ...]]
"""Live values of each rank without and with recompute."""


def holdings_of(config: Config) -> tuple[Both, int]:
    """Live values of the ranks without and with recompute, and the micro-batches beyond those counted."""
    if config.replicas:
        found, more = _held_by_replicas(
            config.schedule, config.replicas, config.num_microbatches, config.recompute == "all"
        )
        return (found, found), more
    name, count = config.schedule, config.per_pipeline
    plain, counted = _held_by_all(name, config.depth, count, config.chunks, config.recompute == "all")
    replayed = _held_by_all(name, config.depth, count, config.chunks, True)[0] if config.recompute == "some" else plain
    return (plain, replayed), count - counted


def replayed(config: Config) -> tuple[float, ...]:
    """Of each stage the share of its forwards that are replayed: none where the backward follows at once."""
    if config.replicas:
        return (1.0,) * len(config.replicas)
    return _replays(config.schedule, config.depth, config.per_pipeline, config.chunks)


def mixed(both: Both, recomputed: set[int]) -> tuple[Holding, ...]:
    """Live values of each rank when some of them recompute."""
    return tuple(
        replayed if rank in recomputed else plain for rank, (plain, replayed) in enumerate(zip(*both, strict=True))
    )


@lru_cache(maxsize=8)
def small_program(
    schedule: str, depth: int, num_microbatches: int, chunks: int, recompute: bool | tuple[int, ...]
) -> Program:
    """One pipeline without copies: a few updates of an asynchronous schedule, one of a synchronous one."""
    # Two weight versions only meet where one update follows another.
    steps = 1 if find(schedule).is_synchronous else 3 if num_microbatches > 1 else 3 * depth + 2
    with collector_paused():
        replayed = recompute if isinstance(recompute, tuple) else None if recompute else ()
        shape = Shape(depth, num_microbatches, chunks, steps, recompute=replayed)
        return generate(schedule, shape)


def _held_by_all(
    schedule: str, depth: int, num_microbatches: int, chunks: int, recompute: bool
) -> tuple[tuple[Holding, ...], int]:
    """Live values of each rank of a pipeline, and the micro-batches that were really counted.

    A small program is counted whole. With many micro-batches only so many are counted as fill the pipeline. Whether
    what is held still grows with them is seen on a pipeline of at most four ranks.
    """
    counted = _counted(schedule, depth, num_microbatches, chunks)
    return _held(schedule, depth, counted, chunks, recompute, counted < num_microbatches), counted


def filling(schedule: str, depth: int, chunks: int) -> int:
    """Micro-batches that fill a pipeline: p, or 2p with chunks, and where more are in flight than there are ranks."""
    return (2 if chunks > 1 or _runs_ahead(schedule) else 1) * depth


@lru_cache(maxsize=64)
def _runs_ahead(schedule: str) -> bool:
    """Whether more micro-batches than ranks are in flight, but not all of them, as four ranks show."""
    return 4 < peak_inflight(small_program(schedule, 4, 12, 1, False), 0) < 12


def _counted(schedule: str, depth: int, num_microbatches: int, chunks: int) -> int:
    enough = filling(schedule, depth, chunks) + (2 if chunks == 1 else 0)
    small = depth * chunks * num_microbatches <= _SMALL
    return num_microbatches if small else min(num_microbatches, enough)


@lru_cache(maxsize=512)
def _replays(schedule: str, depth: int, num_microbatches: int, chunks: int) -> tuple[float, ...]:
    """Of each stage the share of its forwards that a program replays, if all stages keep only their input."""
    program = small_program(schedule, depth, _counted(schedule, depth, num_microbatches, chunks), chunks, True)
    count = Counter(stage for stage, _ in program.recomputed)
    return tuple(count[stage] / program.header.total_microbatches for stage in range(depth * chunks))


@lru_cache(maxsize=512)
def _held(schedule: str, depth: int, counted: int, chunks: int, recompute: bool, grows: bool) -> tuple[Holding, ...]:
    program = small_program(schedule, depth, counted, chunks, recompute)
    with collector_paused():
        counts = [_rows(lifetimes(program, rank)) for rank in range(len(program.ranks))]
    growth = _growth(schedule, min(depth, 4), chunks, recompute) if grows else {}
    return tuple(
        Holding(keys, rows, np.array([[growth.get(_role(program, rank, key), 0.0) for key in keys]]))
        for rank, (keys, rows) in enumerate(counts)
    )


Role = tuple[str, str, str, int]


def _role(program: Program, rank: int, key: Key) -> Role:
    """The role of a value on its rank at any depth: its kind, the rank's place, whose it is, on which chunk."""
    place = "first" if rank == 0 else "last" if rank == len(program.ranks) - 1 else "middle"
    stages = program.header.stages_of(rank)
    for whose, stage in (("own", key[1]), ("entering", key[1] + 1)):
        if stage in stages:
            return key[0], place, whose, stages.index(stage)
    return key[0], place, "other", 0


@lru_cache(maxsize=512)
def _growth(schedule: str, depth: int, chunks: int, recompute: bool) -> dict[Role, float]:
    """How many more values of each role a rank holds per further micro-batch, once the pipeline is full."""
    few, many = 3 * depth, 4 * depth
    before: dict[tuple[int, Key], float] = {}
    growth: dict[Role, float] = {}
    for count in (few, many):
        program = small_program(schedule, depth, count, chunks, recompute)
        for rank in range(len(program.ranks)):
            keys, rows = _rows(lifetimes(program, rank))
            for key, high in zip(keys, rows.max(axis=0), strict=True):
                if count == few:
                    before[rank, key] = high
                else:
                    role = _role(program, rank, key)
                    more = (high - before.get((rank, key), 0.0)) / (many - few)
                    growth[role] = max(growth.get(role, 0.0), more)
    return growth


def holds_all(schedule: str, chunks: int) -> bool:
    """Whether a rank holds every micro-batch of an update at once, as GPipe does: two ranks are enough to see it."""
    return _growth(schedule, 2, min(chunks, 2), False).get(("saved", "first", "own", 0), 0.0) >= 1


@lru_cache(maxsize=64)
def _held_by_replicas(
    schedule: str, replicas: tuple[int, ...], num_microbatches: int, recompute: bool
) -> tuple[tuple[Holding, ...], int]:
    """Live values of one rank of each stage where their numbers of replicas differ; nothing is extrapolated."""
    counted = min(num_microbatches, 4 * sum(replicas))
    steps = 1 if find(schedule).is_synchronous else 4 * sum(replicas)
    shape = Shape(len(replicas), counted, 1, steps, replicas, recompute=None if recompute else ())
    with collector_paused():
        program = generate(schedule, shape)
        counts = [_rows(lifetimes(program, ranks[0])) for ranks in program.header.placement]
    return tuple(Holding(keys, rows, 0 * rows[:1]) for keys, rows in counts), 0


def peaks(
    holdings: tuple[Holding, ...], cost: CostModel, stages_of: list[tuple[int, ...]], further: int
) -> list[float]:
    """The most bytes of each rank, optimizer state included."""
    result = []
    for holding, stages in zip(holdings, stages_of, strict=True):
        size = {(kind, stage): cost.size_bytes(Value(kind, stage, 0)) for kind, stage in holding.keys}
        result.append(holding.peak_bytes(size, further) + cost.resident_bytes(stages))
    return result


def _rows(lives: list[Lifetime]) -> tuple[tuple[Key, ...], Array]:
    """Counts at every moment at which something ends, without those that another covers."""
    keys = sorted({(life.value.kind, life.value.stage) for life in lives})
    column = {key: index for index, key in enumerate(keys)}
    if not lives:
        return (), np.zeros((1, 0))
    length = max(life.dies for life in lives) + 3
    changes = np.zeros((length, len(keys)))
    born = np.array([life.born + 1 for life in lives])
    after = np.array([max(life.dies, life.born) + 2 for life in lives])
    which = np.array([column[life.value.kind, life.value.stage] for life in lives])
    np.add.at(changes, (born, which), 1.0)
    np.add.at(changes, (after, which), -1.0)
    return tuple(keys), _highest(np.unique(np.cumsum(changes, axis=0), axis=0))


def _highest(rows: Array) -> Array:
    """The rows that no other row covers in every count; of very many, the highest count of each in one row."""
    if len(rows) > 400:
        return np.asarray(rows.max(axis=0)[None, :])
    covers = (rows[:, None, :] >= rows[None, :, :]).all(axis=2)
    # Rows are distinct, so each one covers itself and no two cover each other.
    return np.asarray(rows[covers.sum(axis=0) == 1])
