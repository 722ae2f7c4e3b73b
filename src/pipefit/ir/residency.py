"""Waits of spilled stages: a fetch waits for the write-back of its value and for its slot. Part of the graph.

A rank issues its list in order and its compute lane makes it wait. So the instructions that read a slot are done when
the `drop` or `evict` that frees it is issued. Two kinds of waits remain: between copies, which run asynchronously, and
of a backward for gradients that were summed earlier.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipefit.ir.op import WEIGHT_GRADIENT_OPS, Kind, Op
from pipefit.ir.program import Program

_WEIGHTS = Kind.WEIGHTS.value
_WGRAD = Kind.WGRAD.value
_Value = tuple[str, int, int]


@dataclass
class _Copies:
    """Copies of a rank so far, by the index of the instruction that last moved each.

    Attributes:
        home: the slot of each (kind, stage).
        freed: the instruction that freed each (kind, slot).
        fetched: the instruction that read each (kind, stage, version).
        written: the instruction that wrote each (kind, stage, version) to the tier.
    """

    home: dict[tuple[str, int], int] = field(default_factory=dict)
    freed: dict[tuple[str, int], int] = field(default_factory=dict)
    fetched: dict[_Value, int] = field(default_factory=dict)
    written: dict[_Value, int] = field(default_factory=dict)

    def leave(self, kind: str, stage: int, index: int) -> None:
        slot = self.home.pop((kind, stage), -1)
        if slot >= 0:
            self.freed[kind, slot] = index

    def begin_again(self, size: int) -> None:
        """Ends a pass of `size` instructions: its indices become negative, and its last versions the first ones."""
        self.freed = {space: index - size for space, index in self.freed.items()}
        self.written = {(kind, stage, 0): index - size for (kind, stage, _), index in sorted(self.written.items())}
        self.fetched = {}


def copy_waits(program: Program, rank: int, later: bool = False) -> dict[int, tuple[int, ...]]:
    """For each instruction of a rank, the earlier ones it must wait for in addition to the makers of its values.

    fetch: the evict that wrote the value it reads; the drop or evict that frees its slot (a step frees gradients); for
    gradients also the fetch of their weights, which clears the slot.
    bwd: the fetch of the gradients it adds to.
    host_step: the evict of its gradients, the instruction that wrote its weights, and the fetches that read these.

    Args:
        program: that may spill.
        rank: whose list.
        later: whether this is not the first pass; instructions of the pass before have negative indices, −1 the last.
    """
    return _walk(program, rank, later)[0]


def kept_fetches(program: Program, rank: int, later: bool = False) -> frozenset[int]:
    """The fetches of a rank, by their index, that move nothing: the slot still holds the weights that left it last.

    This holds only for weights that were written back: dropped ones may differ from those on the tier.

    Args:
        program: that may spill.
        rank: whose list.
        later: whether this is not the first pass; it then begins with the last weights of the pass before.
    """
    return frozenset(_walk(program, rank, later)[1])


def _walk(program: Program, rank: int, later: bool) -> tuple[dict[int, tuple[int, ...]], list[int]]:
    waits: dict[int, tuple[int, ...]] = {}
    kept: list[int] = []
    copies = _Copies()
    for _ in range(1 + later if program.header.spill else 0):
        waits, kept = _pass(program, rank, copies)
        copies.begin_again(len(program.ranks[rank]))
    return waits, kept


def _pass(program: Program, rank: int, copies: _Copies) -> tuple[dict[int, tuple[int, ...]], list[int]]:
    home = copies.home
    freed = copies.freed
    fetched = copies.fetched
    written = copies.written
    waits: dict[int, tuple[int, ...]] = {}
    kept: list[int] = []
    for index, i in enumerate(program.ranks[rank]):
        found: tuple[int | None, ...] = ()
        value = (i.kind, i.stage, i.version)
        weights = (_WEIGHTS, i.stage, i.version)
        if i.op is Op.FETCH:
            found = written.get(value), freed.get((i.kind, i.slot))
            if i.kind == _WEIGHTS:
                kept += [index] * (found[0] is not None and found[0] == found[1])
                found += (freed.get((_WGRAD, i.slot)),)
            elif i.kind == _WGRAD:
                found += (fetched.get(weights),)
            home[i.kind, i.stage] = i.slot
            fetched[value] = index
        elif i.op is Op.EVICT:
            written[value] = index
            copies.leave(i.kind, i.stage, index)
        elif i.op is Op.DROP:
            copies.leave(_WEIGHTS, i.stage, index)
        elif i.op is Op.STEP:
            copies.leave(_WGRAD, i.stage, index)
        elif i.op is Op.HOST_STEP:
            found = written.get(weights), written.get((_WGRAD, i.stage, i.version)), fetched.get(weights)
            written[_WEIGHTS, i.stage, i.version + 1] = index
        elif i.op in WEIGHT_GRADIENT_OPS and (_WEIGHTS, i.stage) in home:
            home[_WGRAD, i.stage] = home[_WEIGHTS, i.stage]
            found = (fetched.get((_WGRAD, i.stage, program.header.update_of(i.stage, i.mb))),)
        if known := {n for n in found if n is not None}:
            waits[index] = tuple(sorted(known))
    return waits, kept
