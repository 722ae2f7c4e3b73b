"""Rule `residency`: spilled values are on their tier or in one slot of the device, and never lost.

The rule walks each rank's list and tracks the contents of the device's slots and of the tier. For each stage a tier
holds one version of the weights and of the optimizer's states: the one written last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pipefit.ir.instruction import Instruction, StageAt, ValueKey
from pipefit.ir.op import Op
from pipefit.ir.program import Header
from pipefit.ir.spill import SLOTTED
from pipefit.ir.values import OPTIM, WEIGHTS, WGRAD
from pipefit.verify.subject import Finding, Findings, Subject

_NOUN = {WEIGHTS: "weights", WGRAD: "gradients", OPTIM: "optimizer states"}


_Held = tuple[str, int]
"""Values that a slot or the tier holds: their kind and stage."""


@dataclass
class _Rank:
    """The content of one rank's device and tier at an instruction.

    Attributes:
        header: the program's header.
        recomputed: the (stage, micro-batch) whose forward is replayed.
        here: (kind, stage) → its slot, and the version or update in it.
        tier: (kind, stage) → the version or update written there.
        parked: the activations there, (kind, stage, micro-batch).
        saved: the micro-batches whose activations autograd keeps for each stage, with views of the slot.
    """

    header: Header
    recomputed: frozenset[StageAt]
    here: dict[_Held, tuple[int, int]] = field(default_factory=dict)
    tier: dict[_Held, int] = field(default_factory=dict)
    parked: set[ValueKey] = field(default_factory=set)
    saved: dict[int, set[int]] = field(default_factory=dict)

    def slot(self, kind: str, stage: int) -> int | None:
        """The slot of a stage's values of a kind."""
        slot, _ = self.here.get((kind, stage), (None, 0))
        return slot


def residency(s: Subject) -> Findings:
    """Fetches read existing values into free slots; no change is lost; everything is on its tier at the end."""
    spill = s.header.spill
    if spill is None:
        return
    for rank, instructions in enumerate(s.program.ranks):
        state = _Rank(s.header, s.program.recomputed)
        for stage in s.header.stages_of(rank):
            if s.header.is_spilled(stage):
                state.tier[WEIGHTS, stage] = 0
                if s.header.is_optim_spilled(stage):
                    state.tier[OPTIM, stage] = 0
        for number, i in enumerate(instructions, s.graph.starts[rank]):
            rule = _RULES.get(i.op)
            if rule:
                for message in rule(state, i):
                    yield s.at("residency", number, message)
        yield from _at_home(state, rank)


def _fetch(state: _Rank, i: Instruction) -> Iterator[str]:
    if i.kind not in SLOTTED:
        if (i.kind, i.stage, i.version) not in state.parked:
            yield f"the {i.tier} does not hold the {i.kind} of stage {i.stage}, micro-batch {i.version}"
        return
    noun = f"the {_NOUN[i.kind]} of stage {i.stage}"
    held = state.tier.get((i.kind, i.stage))
    if held != i.version:
        there = "none"
        if held is not None:
            there = _name(i.kind, held)
        wanted = _name(i.kind, i.version)
        yield f"fetches {wanted}, but the {i.tier} holds {there} of {noun}"
    here = state.slot(i.kind, i.stage)
    if here is not None:
        yield f"{noun} are already on the device, in slot @{here}"
    yield from _not_free(state, i)
    weights = state.slot(WEIGHTS, i.stage)
    if i.kind == WGRAD:
        if weights != i.slot:
            place = "nowhere"
            if weights is not None:
                place = f"in slot @{weights}"
            yield f"gradients need the second slot of their weights, but the weights of stage {i.stage} are {place}"
        # The sum continues here: the tier's copy is no longer the newest.
        state.tier.pop((i.kind, i.stage), None)
    state.here[i.kind, i.stage] = i.slot, i.version


def _not_free(state: _Rank, i: Instruction) -> Iterator[str]:
    """The values that the slot of a fetch still holds; weights come with room for their gradients."""
    kinds = [i.kind]
    if i.kind == WEIGHTS:
        kinds.append(WGRAD)
    for kind in kinds:
        for (what, stage), (slot, _) in state.here.items():
            if what == kind and slot == i.slot:
                yield f"slot @{i.slot} still holds the {_NOUN[kind]} of stage {stage}: evict or drop them first"


def _evict(state: _Rank, i: Instruction) -> Iterator[str]:
    if i.kind not in SLOTTED:
        state.parked.add((i.kind, i.stage, i.version))
        return
    if i.kind == WEIGHTS:
        yield from _left_behind(state, i)
    # The rules of values check that it is here in that version.
    state.here.pop((i.kind, i.stage), None)
    state.tier[i.kind, i.stage] = i.version


def _drop(state: _Rank, i: Instruction) -> Iterator[str]:
    if not state.header.is_spilled(i.stage):
        return
    yield from _left_behind(state, i)
    held = state.tier.get((WEIGHTS, i.stage))
    was_here = state.here.pop((WEIGHTS, i.stage), None)
    if was_here and held != i.version:
        yield f"w{i.version} would be lost: stage {i.stage} has stepped since the tier's w{held}; evict it"


def _left_behind(state: _Rank, i: Instruction) -> Iterator[str]:
    """Gradients are in the second slot of their weights, and leave before them or with a step."""
    if (WGRAD, i.stage) in state.here:
        yield f"the gradients of stage {i.stage} are still in the second slot of these weights: evict them first"
    yield from _kept_views(state, i)


def _kept_views(state: _Rank, i: Instruction) -> Iterator[str]:
    """Tensors saved by autograd are in the slot, except for stages that keep them: their backward reads any slot.

    The rules of values check that the slot then holds the same version.
    """
    assert state.header.spill is not None
    kept = state.saved.get(i.stage)
    if kept and i.stage not in state.header.spill.keeps:
        mbs = ", ".join(f"m{mb}" for mb in sorted(kept))
        yield f"tensors saved by autograd for {mbs} leave with this slot: replay stage {i.stage} before its backward"


def _forward(state: _Rank, i: Instruction) -> Iterator[str]:
    saves = i.stage >= state.header.frozen
    if i.op is Op.FWD and (i.stage, i.mb) in state.recomputed:
        saves = False
    if saves and state.header.is_spilled(i.stage):
        state.saved.setdefault(i.stage, set()).add(i.mb)
    return iter(())


def _backward(state: _Rank, i: Instruction) -> Iterator[str]:
    if not state.header.is_spilled(i.stage):
        return
    state.saved.get(i.stage, set()).discard(i.mb)
    update = state.header.update_of(i.stage, i.mb)
    evicted = state.tier.get((WGRAD, i.stage))
    if evicted is not None:
        yield f"half of the sum is on the tier: fetch the gradients of stage {i.stage}, update {evicted}, first"
    slot = state.slot(WEIGHTS, i.stage)
    if slot is not None:
        state.here[WGRAD, i.stage] = slot, update


def _step(state: _Rank, i: Instruction) -> Iterator[str]:
    if not state.header.is_spilled(i.stage):
        return
    state.here.pop((WGRAD, i.stage), None)
    yield from _kept_views(state, i)
    for kind in (WEIGHTS, OPTIM):
        slot = state.slot(kind, i.stage)
        if slot is not None:
            state.here[kind, i.stage] = slot, i.version + 1


def _host_step(state: _Rank, i: Instruction) -> Iterator[str]:
    held = state.tier.get((WEIGHTS, i.stage))
    summed = state.tier.get((WGRAD, i.stage))
    if held != i.version:
        yield f"steps from w{i.version} on the host, which holds w{held} of stage {i.stage}"
    if summed != i.version:
        there = "none"
        if summed is not None:
            there = f"the gradients of update {summed}"
        yield f"needs the gradients of update {i.version} on the host, which holds {there}: evict them first"
    if (WEIGHTS, i.stage) in state.here:
        yield f"w{i.version} of stage {i.stage} is still on the device, and stale after this: drop it first"
    state.tier[WEIGHTS, i.stage] = i.version + 1
    state.tier.pop((WGRAD, i.stage), None)


def _at_home(state: _Rank, rank: int) -> Findings:
    for (kind, stage), (_, at) in sorted(state.here.items()):
        what = _name(kind, at)
        held = f"the {_NOUN[kind]} of stage {stage} ({what}) are still on the device at the end"
        yield Finding("residency", rank, -1, f"{held}: evict them, or drop them if they are unchanged")
    for (kind, stage), at in sorted(state.tier.items()):
        last = state.header.num_updates(stage)
        if kind == WGRAD or at == last or (kind, stage) in state.here:
            continue
        message = f"the {_NOUN[kind]} of stage {stage} end as w{at} on the tier, expected w{last}"
        yield Finding("residency", rank, -1, message)


def _name(kind: str, at: int) -> str:
    if kind == WGRAD:
        return f"update {at}"
    return f"w{at}"


_Rule = Callable[[_Rank, Instruction], Iterator[str]]

_RULES: dict[Op, _Rule] = {
    Op.FETCH: _fetch,
    Op.EVICT: _evict,
    Op.DROP: _drop,
    Op.FWD: _forward,
    Op.RECOMPUTE: _forward,
    Op.BWD: _backward,
    Op.BWD_WEIGHT: _backward,
    Op.STEP: _step,
    Op.HOST_STEP: _host_step,
}
