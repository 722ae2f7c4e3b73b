"""Must wait, for what is spilled: a fetch for the write-back of its value and for its slot. Part of the graph.

A rank issues its list in order and its compute lane makes it wait, so what read a slot is done when the `drop` or
`evict` that frees it is issued. What is left are the waits between copies, which run asynchronously, and those of a
backward for gradients that were summed earlier.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipefit.ir.op import WEIGHT_GRADIENT_OPS, Kind, Op
from pipefit.ir.program import Program
from pipefit.ir.spill import SLOTTED

_WEIGHTS, _WGRAD = Kind.WEIGHTS.value, Kind.WGRAD.value


@dataclass
class _Slots:
    """Which slot each (kind, stage) sits in, and what freed each (kind, slot) last."""

    home: dict[tuple[str, int], int] = field(default_factory=dict)
    freed: dict[tuple[str, int], int] = field(default_factory=dict)

    def leave(self, kind: str, stage: int, index: int) -> None:
        slot = self.home.pop((kind, stage), -1)
        if slot >= 0:
            self.freed[kind, slot] = index

    def enter(self, kind: str, stage: int, slot: int) -> tuple[int, ...]:
        """Takes a slot, and says what must be over first: for weights also the gradients of who was there."""
        self.home[kind, stage] = slot
        spaces = (_WEIGHTS, _WGRAD) if kind == _WEIGHTS else (kind,)
        return tuple(self.freed[space, slot] for space in spaces if (space, slot) in self.freed)


def copy_waits(program: Program, rank: int) -> dict[int, tuple[int, ...]]:
    """For the index of an instruction of a rank: the earlier ones it must wait for besides the makers of its values.

    fetch: the evict that wrote what it reads; the drop or evict that frees its slot (a step frees gradients); of
    gradients also the fetch of their weights, which clears the slot.
    bwd: the fetch of the gradients it adds to.
    host_step: the evict of its gradients, what wrote the weights it starts from, and the fetches that read these.
    """
    waits: dict[int, tuple[int, ...]] = {}
    if program.header.spill is None:
        return waits
    slots = _Slots()
    written: dict[tuple[str, int, int, str], int] = {}
    gradients: dict[tuple[int, int], int] = {}
    filled: dict[int, int] = {}
    read: dict[int, int] = {}
    for index, i in enumerate(program.ranks[rank]):
        if i.op is Op.FETCH:
            before = written.get((i.kind, i.stage, i.version, i.tier))
            free = slots.enter(i.kind, i.stage, i.slot) if i.kind in SLOTTED and i.slot >= 0 else ()
            waits[index] = tuple(sorted({*free, *(() if before is None else (before,))}))
            if i.kind == _WGRAD:
                gradients[i.stage, i.version] = index
                if i.slot in filled and filled[i.slot] not in waits[index]:
                    waits[index] += (filled[i.slot],)
            elif i.kind == _WEIGHTS:
                filled[i.slot] = index
                read[i.stage] = index
        elif i.op is Op.EVICT:
            written[i.kind, i.stage, i.version, i.tier] = index
            slots.leave(i.kind, i.stage, index)
        elif i.op is Op.DROP:
            slots.leave(_WEIGHTS, i.stage, index)
        elif i.op is Op.STEP:
            slots.leave(_WGRAD, i.stage, index)
        elif i.op is Op.HOST_STEP:
            tier = program.header.spill.tier
            found = [written.get((kind, i.stage, i.version, tier)) for kind in (_WEIGHTS, _WGRAD)]
            waits[index] = tuple(sorted({n for n in (*found, read.get(i.stage)) if n is not None}))
            written[_WEIGHTS, i.stage, i.version + 1, tier] = index
        elif i.op in WEIGHT_GRADIENT_OPS and (_WEIGHTS, i.stage) in slots.home:
            slots.home[_WGRAD, i.stage] = slots.home[_WEIGHTS, i.stage]
            fetched = gradients.get((i.stage, program.header.update_of(i.stage, i.mb)))
            if fetched is not None:
                waits[index] = (fetched,)
    return waits


def kept_fetches(program: Program, rank: int, later: bool = False) -> frozenset[int]:
    """The fetches of a rank, by their index, that move nothing: the weights that left a slot last still lie there.

    Only weights that were written back are theirs: what was dropped is not known to be the tier's.

    Args:
        program: that spills.
        rank: whose list.
        later: whether a pass over the program has gone before, whose last weights are those that this one begins with.
    """
    if program.header.spill is None:
        return frozenset()
    lying: dict[int, tuple[int, int]] = {}
    found = _found_lying(program, rank, lying)
    if later:
        last = {stage: max(v for s, v in lying.values() if s == stage) for stage, _ in lying.values()}
        # They are counted from 0 again.
        lying = {slot: (stage, 0) for slot, (stage, version) in lying.items() if version == last[stage]}
        found = _found_lying(program, rank, lying)
    return frozenset(found)


def _found_lying(program: Program, rank: int, lying: dict[int, tuple[int, int]]) -> list[int]:
    """Goes through a pass with the (stage, version) that lies in each slot, which it brings up to date."""
    found: list[int] = []
    home: dict[int, int] = {}
    for index, i in enumerate(program.ranks[rank]):
        if i.kind != _WEIGHTS or i.op not in (Op.FETCH, Op.EVICT):
            continue
        if i.op is Op.EVICT:
            lying[home[i.stage]] = i.stage, i.version
            continue
        home[i.stage] = i.slot
        if lying.pop(i.slot, None) == (i.stage, i.version):
            found.append(index)
    return found
