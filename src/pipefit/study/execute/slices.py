"""A turn as a list of its own, which the executor runs like a whole program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pipefit.ir.op import Op
from pipefit.runtime.compiled import CompiledRank
from pipefit.study.turns import Turn, replays

__all__ = ["Slice", "slice_of"]


@dataclass
class Slice:
    """A turn, compiled: a part of the program's list."""

    compiled: CompiledRank
    turn: Turn

    @cached_property
    def ops(self) -> frozenset[Op]:
        """What it does."""
        return frozenset(i.op for i in self.compiled.instructions)


def slice_of(whole: CompiledRank, turn: Turn) -> Slice:
    """A turn of a compiled program: its loads again, then its part of the list."""
    loads = tuple(replays(whole.program, turn))
    first, end, more = turn.first, turn.end, len(loads)
    awaits = tuple(tuple(index - first + more for index in found) for found in whole.awaits[first:end])
    compiled = CompiledRank(
        whole.program,
        0,
        loads + whole.instructions[first:end],
        ((),) * more + awaits,
        ((),) * more + whole.frees[first:end],
        frozenset(index - first + more for index in whole.in_place if first <= index < end),
    )
    return Slice(compiled, turn)
