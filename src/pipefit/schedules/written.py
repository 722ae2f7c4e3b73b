"""Schedules with a given order, from a `.pipe` file or a search, for one shape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from msgspec.structs import replace

from pipefit.errors import ScheduleError
from pipefit.ir import text
from pipefit.ir.instruction import Instructions
from pipefit.ir.op import Op
from pipefit.ir.program import Header, WeightRule
from pipefit.schedules.registry import Orders, Schedule, Task
from pipefit.schedules.shape import Shape, placement_of

SUFFIX = ".pipe"

_ORDERED = frozenset({Op.FWD, Op.BWD, Op.BWD_INPUT, Op.BWD_WEIGHT})


def from_file(path: str) -> Schedule:
    """The schedule of a `.pipe` file: its forwards and backwards in their order; the passes add all else again.

    Its name is the path as given, so that a plan with this name finds the file again.

    Raises:
        ProgramError: the file is not a program.
        ScheduleError: its order is not one update of a synchronous pipeline.
    """
    try:
        state = Path(path).stat()
    except OSError as problem:
        raise ScheduleError(f"{path}: {problem.strerror}; expected the name of a schedule or a .pipe file") from None
    return _read(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)
def _read(path: str, changed_ns: int, size_bytes: int) -> Schedule:
    program = text.load(path)
    header = program.header
    if header.weights is not WeightRule.FLUSH or header.num_steps != 1:
        raise ScheduleError(
            f"{path}: expected one update of a schedule with a flush, got {header.num_steps} with the rule "
            f"{header.weights.value!r}"
        )
    if header.frozen:
        raise ScheduleError(
            f"{path}: expected the backwards of all stages, got {header.frozen} frozen stages; a run itself leaves out "
            "what its model does not need"
        )
    orders = [[i for i in instructions if i.op in _ORDERED] for instructions in program.ranks]
    return written(path, header, orders)


def layout_of(placement: Sequence[Sequence[int]]) -> tuple[int, int, str] | None:
    """Ranks, chunks and layout of a placement; None: neither a loop nor a wave of single ranks."""
    num_ranks = 1 + max(rank for ranks in placement for rank in ranks)
    num_chunks = max(len(placement) // num_ranks, 1)
    for layout in ("loop", "wave"):
        if placement_of(num_ranks, num_chunks, layout) == tuple(map(tuple, placement)):
            return num_ranks, num_chunks, layout
    return None


def written(name: str, header: Header, orders: Sequence[Instructions]) -> Schedule:
    """A schedule from each rank's forwards and backwards, for one update.

    Copies of the whole pipeline follow the same order with their own micro-batches; updates follow each other.

    Args:
        name: the schedule's name.
        header: placement and micro-batches of the order.
        orders: one for each rank.

    Raises:
        ScheduleError: the placement is neither a loop nor a wave, with one rank for each stage.
    """
    found = layout_of(header.placement)
    if found is None:
        got = " ".join("+".join(map(str, ranks)) for ranks in header.placement)
        raise ScheduleError(f"{name}: placement: expected one rank per stage, in a loop or a wave, got {got}")
    num_ranks, num_chunks, layout = found
    if len(orders) < num_ranks:
        raise ScheduleError(f"{name}: expected the orders of {num_ranks} ranks, got {len(orders)}")
    by_stages = {}
    for rank in range(num_ranks):
        _refuse_foreign(name, header, rank, orders[rank])
        by_stages[header.stages_of(rank)] = tuple(orders[rank])

    def order(task: Task) -> Orders:
        for rank in range(task.num_ranks):
            stages = task.stages_of(rank)
            if stages not in by_stages:
                raise ScheduleError(f"{name}: placement: no rank of the order has the stages {list(stages)}")
            mbs = {stage: task.microbatches_of(stage, rank) for stage in stages}
            yield [replace(i, mb=mbs[i.stage][i.mb], version=-1) for i in by_stages[stages]]

    def check(shape: Shape) -> None:
        copies = 1
        if shape.replicas:
            copies = shape.replicas[0]
        if shape.placement:
            copies = len(shape.placement[0])
        wanted = num_ranks, header.num_microbatches * copies, num_chunks
        given = shape.depth, shape.num_microbatches, shape.num_chunks
        if given != wanted or len(set(shape.replicas)) > 1:
            expected = _sizes(*wanted)
            if copies > 1:
                expected += f" for {copies} copies of the pipeline"
            raise ScheduleError(
                f"{name} is for {expected}, got {_sizes(*given)}; find one for these with `pipefit synthesize`"
            )

    order.__doc__ = f"The order of {name}, for {_sizes(num_ranks, header.num_microbatches, num_chunks)}."
    return Schedule(name, order, WeightRule.FLUSH, layout, num_chunks > 1, check=check)


def _refuse_foreign(name: str, header: Header, rank: int, order: Instructions) -> None:
    """Refuses instructions of other stages or micro-batches than a rank has, and backwards without a forward."""
    forwards = {(i.stage, i.mb) for i in order if i.op is Op.FWD}
    stages = header.stages_of(rank)
    for i in order:
        if i.stage not in stages or not 0 <= i.mb < header.num_microbatches:
            raise ScheduleError(f"{name}: rank {rank}: '{i}': it has no such stage, or there is no such micro-batch")
        if (i.stage, i.mb) not in forwards:
            raise ScheduleError(f"{name}: rank {rank}: '{i}': its forward is missing")


def _sizes(num_ranks: int, num_microbatches: int, num_chunks: int) -> str:
    text = f"{num_ranks} ranks, {num_microbatches} micro-batches"
    if num_chunks > 1:
        text += f", {num_chunks} chunks"
    return text
