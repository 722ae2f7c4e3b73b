"""Rule `collectives`: required reductions, their members, their place and their order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations_with_replacement

from pipefit.ir.graph import collective_members
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import WEIGHT_GRADIENT_OPS, Op, Reduction
from pipefit.ir.program import Header
from pipefit.ir.values import reduced_stages, tied_stages
from pipefit.verify.subject import Finding, Findings, Subject

_RULE = "collectives"
_MOST_NAMED = 16

Key = tuple[str, int, int]
"""A reduction: its kind, its stage and its update."""

Ranks = tuple[int, ...]
Due = dict[Key, Ranks]
"""The members of each reduction that must be there."""
Positions = dict[tuple[int, Key], int]
"""Number of the instruction by rank and reduction."""


def collectives(s: Subject) -> Findings:
    """Each due reduction once on each member, between the gradients it sums and the steps that use them."""
    due = _due(s.header)
    found = _found(s)
    for (rank, key), numbers in found.items():
        if rank in due.get(key, ()):
            kind, stage, _ = key
            if kind == Reduction.SCATTER and s.header.shares_gradients(stage):
                continue
            first = s.where(numbers[0])
            for number in numbers[1:]:
                yield s.at(_RULE, number, f"is already reduced: {first}")
        else:
            for number in numbers:
                yield s.at(_RULE, number, "nothing to reduce")
    for key, members in due.items():
        for rank in members:
            if (rank, key) not in found:
                yield _missing(rank, key, members)
    # Shared gradients are summed in parts: the last sum must come after all of them.
    lasts = {place: numbers[-1] for place, numbers in found.items()}
    yield from _misplaced(s, lasts)
    yield from _barriers(s)
    yield from _out_of_order(s)


def _found(s: Subject) -> dict[tuple[int, Key], list[int]]:
    """The numbers of all reductions, by rank and reduction."""
    found = defaultdict(list)
    for stage, update, number in s.each(Op.REDUCE):
        kind = s.graph.instructions[number].kind
        rank = s.graph.ranks[number]
        found[rank, (kind, stage, update)].append(number)
    return found


def _missing(rank: int, key: Key, members: Ranks) -> Finding:
    kind, stage, update = key
    reduce = Instruction(Op.REDUCE, stage, version=update, kind=kind)
    names = ", ".join(map(str, members[:_MOST_NAMED]))
    if len(members) > _MOST_NAMED:
        names += f" and {len(members) - _MOST_NAMED} more"
    message = f"{reduce} is missing: ranks {names} take part in it together"
    return Finding(_RULE, rank, -1, message)


def _due(header: Header) -> Due:
    """The reductions that the header requires, and their members."""
    due = {}
    for kind, stage in _groups(header):
        members = collective_members(header, Instruction(Op.REDUCE, stage, version=0, kind=kind))
        if len(members) == 1:
            if kind == Reduction.REPLICAS:
                continue
            # Stages of one rank that share a weight are summed too, though nothing is sent.
            if len(tied_stages(header, stage, members[0])) < 2:
                continue
        for update in range(header.num_updates(stage)):
            due[kind, stage, update] = members
    if header.clip:
        due |= _norms(header)
    return due


def _groups(header: Header) -> Iterator[tuple[str, int]]:
    """The sums over replicas and over tied stages: kind and stage."""
    for stage in range(header.num_stages):
        if header.is_sharded(stage):
            yield Reduction.SCATTER.value, stage
            if header.is_resident(stage):
                yield Reduction.SHARDS.value, stage
        else:
            yield Reduction.REPLICAS.value, stage
    for tie in header.ties:
        if len(tie) > 1:
            yield Reduction.TIED.value, tie[0]


def _norms(header: Header) -> Due:
    """The norms of all gradients, and the parts that spilled stages give to them."""
    norm = Reduction.NORM.value
    everyone = tuple(range(header.num_ranks))
    due = {}
    for stage in range(header.num_stages):
        for update in range(header.num_updates(stage)):
            due[norm, -1, update] = everyone
            if header.is_spilled(stage):
                due[norm, stage, update] = tuple(sorted(header.placement[stage]))
    return due


def _misplaced(s: Subject, positions: Positions) -> Findings:
    """Reductions before gradients they must contain, before other reductions they must contain, or after a step."""
    last_gradient = _last_gradients(s)
    steps = _first_steps(s)
    for (rank, key), number in positions.items():
        kind, stage, update = key
        # A gather of new weights follows its step; the rules of values check that it has their shards.
        if kind == Reduction.SHARDS:
            continue
        members = reduced_stages(s.header, kind, stage, rank)
        for member in members:
            gradient = last_gradient.get((rank, member, update), -1)
            if gradient > number:
                yield s.at(_RULE, number, f"comes before a gradient that it must hold: {s.where(gradient)}")
            step = steps.get((rank, member, update), number)
            if step < number:
                yield s.at(_RULE, number, f"comes after the step that uses it: {s.where(step)}")
    yield from _norms_too_early(s, positions)


Places = dict[tuple[int, int, int], int]
"""Number of an instruction by rank, stage and update."""


def _last_gradients(s: Subject) -> Places:
    """The last instruction that adds to a gradient, by rank, stage and update."""
    found: Places = defaultdict(int)
    for stage, mb, number in s.each(*WEIGHT_GRADIENT_OPS):
        update = s.header.update_of(stage, mb)
        key = s.graph.ranks[number], stage, update
        found[key] = max(found[key], number)
    return found


def _first_steps(s: Subject) -> Places:
    """The first step by rank, stage and update."""
    found: Places = {}
    for stage, update, number in s.each(Op.STEP):
        rank = s.graph.ranks[number]
        found.setdefault((rank, stage, update), number)
    return found


def _norms_too_early(s: Subject, positions: Positions) -> Findings:
    """Norms that come before a reduction of the same gradients."""
    reduced = defaultdict(list)
    norms = []
    for (rank, (kind, stage, update)), number in positions.items():
        stages = set(reduced_stages(s.header, kind, stage, rank))
        if kind == Reduction.NORM:
            norms.append((rank, update, number, stages))
        elif kind != Reduction.SHARDS:
            reduced[rank, update].append((number, stages))
    for rank, update, number, stages in norms:
        for other, theirs in reduced[rank, update]:
            if other > number and stages & theirs:
                yield s.at(_RULE, number, f"the norm is of reduced gradients: {s.where(other)} comes later")


def _barriers(s: Subject) -> Findings:
    """As many barriers on every rank; where steps are committed, one, between all gradients and the first step."""
    counts = [0] * s.header.num_ranks
    for _, _, number in s.each(Op.BARRIER):
        counts[s.graph.ranks[number]] += 1
    most = max(counts)
    for rank, count in enumerate(counts):
        if count < most:
            yield Finding(_RULE, rank, -1, f"has {count} barriers, other ranks have {most}")
    if s.header.commit:
        yield from _commits(s)


def _commits(s: Subject) -> Findings:
    """Instructions on the wrong side of the barrier that commits a step, and a second barrier."""
    ranks = s.graph.ranks
    commits: dict[int, int] = {}
    for _, _, number in s.each(Op.BARRIER):
        rank = ranks[number]
        if rank in commits:
            first = s.where(commits[rank])
            message = f"the step is already committed: {first}"
            yield s.at(_RULE, number, message)
        else:
            commits[rank] = number
    for _, _, number in s.each(*WEIGHT_GRADIENT_OPS, Op.REDUCE):
        rank = ranks[number]
        if commits.get(rank, number) < number:
            commit = s.where(commits[rank])
            message = f"comes after the barrier that commits the step: {commit}"
            yield s.at(_RULE, number, message)
    for _, _, number in s.each(Op.STEP):
        rank = ranks[number]
        if commits.get(rank, number) >= number:
            yield s.at(_RULE, number, "may run before the barrier that commits the step")


def _out_of_order(s: Subject) -> Findings:
    """Any two ranks issue the collectives they share in the same order.

    Ranks can differ only where two sets of members overlap, so one sequence for each pair of sets is compared.
    """
    graph = s.graph
    expected: dict[tuple[Ranks, Ranks], tuple[int, list[int]]] = {}
    for rank in range(s.header.num_ranks):
        by_set = _by_members(s, rank)
        for pair in combinations_with_replacement(sorted(by_set), 2):
            numbers = sorted(set().union(*(by_set[members] for members in pair)))
            order = [graph.collective_of[number] for number in numbers]
            first, reference = expected.setdefault(pair, (rank, order))
            for number, mine, theirs in zip(numbers, order, reference, strict=True):
                if mine != theirs:
                    sides = graph.collectives[theirs]
                    there = [s.where(side) for side in sides if graph.ranks[side] == first]
                    yield s.at(_RULE, number, f"out of order: here rank {first} has {there[0]}")
                    break


def _by_members(s: Subject, rank: int) -> dict[Ranks, list[int]]:
    """The numbers of a rank's collectives, by the ranks that take part."""
    graph = s.graph
    found = defaultdict(list)
    for number in range(graph.starts[rank], graph.starts[rank + 1]):
        collective = graph.collective_of.get(number)
        if collective is not None:
            sides = graph.collectives[collective]
            members = sorted(graph.ranks[side] for side in sides)
            found[tuple(members)].append(number)
    return found
