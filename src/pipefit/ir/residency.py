"""Waits of spilled stages: a fetch waits for the write-back of its value and for its slot. Part of the graph.

A rank issues its list in order and its compute lane makes it wait. So the instructions that read a slot are done when
the `drop` or `evict` that frees it is issued. Two kinds of waits remain: between copies, which run asynchronously, and
of a backward for gradients that were summed earlier.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipefit.ir.instruction import Indices, ValueKey
from pipefit.ir.op import WEIGHT_GRADIENT_OPS, Op
from pipefit.ir.program import Program
from pipefit.ir.values import WEIGHTS, WGRAD


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
    fetched: dict[ValueKey, int] = field(default_factory=dict)
    written: dict[ValueKey, int] = field(default_factory=dict)

    def leave(self, kind: str, stage: int, index: int) -> None:
        slot = self.home.pop((kind, stage), -1)
        if slot >= 0:
            self.freed[kind, slot] = index

    def begin_again(self, size: int) -> None:
        """Ends a pass of `size` instructions: its indices become negative, and its last versions the first ones."""
        self.freed = {space: index - size for space, index in self.freed.items()}
        before = sorted(self.written.items())
        self.written = {(kind, stage, 0): index - size for (kind, stage, _), index in before}
        self.fetched = {}


def copy_waits(program: Program, rank: int, later: bool = False) -> dict[int, Indices]:
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


def _walk(program: Program, rank: int, later: bool) -> tuple[dict[int, Indices], list[int]]:
    waits: dict[int, Indices] = {}
    kept: list[int] = []
    copies = _Copies()
    if program.header.spill is None:
        return waits, kept
    for _ in range(1 + later):
        waits, kept = _pass(program, rank, copies)
        copies.begin_again(len(program.ranks[rank]))
    return waits, kept


def _pass(program: Program, rank: int, copies: _Copies) -> tuple[dict[int, Indices], list[int]]:
    home = copies.home
    freed = copies.freed
    fetched = copies.fetched
    written = copies.written
    waits = {}
    kept = []
    for index, i in enumerate(program.ranks[rank]):
        op = i.op
        kind = i.kind
        stage = i.stage
        found = []
        value = (kind, stage, i.version)
        weights = (WEIGHTS, stage, i.version)
        gradients = (WGRAD, stage, i.version)
        if op is Op.FETCH:
            writer = written.get(value)
            leaver = freed.get((kind, i.slot))
            found = [writer, leaver]
            if kind == WEIGHTS:
                if writer is not None and writer == leaver:
                    kept.append(index)
                found.append(freed.get((WGRAD, i.slot)))
            elif kind == WGRAD:
                found.append(fetched.get(weights))
            home[kind, stage] = i.slot
            fetched[value] = index
        elif op is Op.EVICT:
            written[value] = index
            copies.leave(kind, stage, index)
        elif op is Op.DROP:
            copies.leave(WEIGHTS, stage, index)
        elif op is Op.STEP:
            copies.leave(WGRAD, stage, index)
        elif op is Op.HOST_STEP:
            found = [written.get(weights), written.get(gradients), fetched.get(weights)]
            written[WEIGHTS, stage, i.version + 1] = index
        elif op in WEIGHT_GRADIENT_OPS and (WEIGHTS, stage) in home:
            home[WGRAD, stage] = home[WEIGHTS, stage]
            update = program.header.update_of(stage, i.mb)
            found = [fetched.get((WGRAD, stage, update))]
        known = {n for n in found if n is not None}
        if known:
            waits[index] = tuple(sorted(known))
    return waits, kept
