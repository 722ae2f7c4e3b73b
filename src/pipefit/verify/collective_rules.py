"""Rule `collectives`: required reductions, their members, their place and their order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from pipefit.ir.graph import collective_members
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import WEIGHT_GRADIENT_OPS, Op, Reduction
from pipefit.ir.program import Header
from pipefit.ir.values import reduced_stages, tied_stages
from pipefit.verify.subject import Finding, Subject

Key = tuple[str, int, int]
_MOST_NAMED = 16
_AFTER = (Reduction.NORM.value, Reduction.SHARDS.value)
Positions = dict[tuple[int, Key], int]


def collectives(s: Subject) -> Iterator[Finding]:
    """Each due reduction once on each member, between the gradients it sums and the steps that use them."""
    header = s.header
    due = _due(header)
    found: dict[tuple[int, Key], list[int]] = defaultdict(list)
    for _, _, number in s.each(Op.REDUCE):
        i = s.graph.instructions[number]
        found[s.graph.ranks[number], (i.kind, i.stage, i.version)].append(number)
    for (rank, key), numbers in found.items():
        is_due = rank in due.get(key, ())
        problem = f"is already reduced: {s.where(numbers[0])}" if is_due else "nothing to reduce"
        for number in numbers[is_due:]:
            yield s.at("collectives", number, problem)
    for key, members in due.items():
        for rank in members:
            if (rank, key) not in found:
                reduce = Instruction(Op.REDUCE, key[1], version=key[2], kind=key[0])
                more = f" and {len(members) - _MOST_NAMED} more" if len(members) > _MOST_NAMED else ""
                names = ", ".join(map(str, members[:_MOST_NAMED])) + more
                message = f"{reduce} is missing: ranks {names} take part in it together"
                yield Finding("collectives", rank, -1, message)
    yield from _misplaced(s, {place: numbers[0] for place, numbers in found.items()})
    yield from _barriers(s)
    yield from _out_of_order(s)


def _due(header: Header) -> dict[Key, tuple[int, ...]]:
    """The reductions that the header requires, and their members."""
    due: dict[Key, tuple[int, ...]] = {}
    groups = []
    for stage in range(header.num_stages):
        sharded = header.is_sharded(stage)
        groups.append((Reduction.SCATTER.value if sharded else Reduction.REPLICAS.value, stage))
        groups += [(Reduction.SHARDS.value, stage)] * sharded
    groups += [(Reduction.TIED.value, tie[0]) for tie in header.ties if len(tie) > 1]
    for kind, stage in groups:
        members = collective_members(header, Instruction(Op.REDUCE, stage, version=0, kind=kind))
        # Stages of one rank that share a weight are summed too, though nothing is sent.
        is_local = len(members) == 1 and len(tied_stages(header, stage, members[0])) < 2
        if (kind == Reduction.REPLICAS and len(members) == 1) or is_local:
            continue
        due.update({(kind, stage, update): members for update in range(header.num_updates(stage))})
    if header.clip:
        everyone = tuple(range(header.num_ranks))
        updates = max(header.num_updates(stage) for stage in range(header.num_stages))
        due.update({(Reduction.NORM.value, -1, update): everyone for update in range(updates)})
        for stage in filter(header.is_spilled, range(header.num_stages)):
            parts = [(Reduction.NORM.value, stage, update) for update in range(header.num_updates(stage))]
            due.update(dict.fromkeys(parts, tuple(sorted(header.placement[stage]))))
    return due


def _misplaced(s: Subject, positions: Positions) -> Iterator[Finding]:
    """Reductions before gradients they must contain, before other reductions they must contain, or after a step."""
    header, ranks = s.header, s.graph.ranks
    last_gradient: dict[tuple[int, int, int], int] = {}
    for stage, mb, number in s.each(*WEIGHT_GRADIENT_OPS):
        key = ranks[number], stage, header.update_of(stage, mb)
        last_gradient[key] = max(last_gradient.get(key, -1), number)
    steps = {
        (ranks[number], stage, update): number
        for (stage, update), numbers in s.places[Op.STEP].items()
        for number in reversed(numbers)
    }
    others: dict[tuple[int, int], list[tuple[Key, int]]] = defaultdict(list)
    for (rank, reduction), number in positions.items():
        others[rank, reduction[2]].append((reduction, number))
    for (rank, (kind, stage, update)), number in positions.items():
        stages = reduced_stages(header, kind, stage, rank)
        # A gather of new weights follows its step; the rules of values check that it has their shards.
        for member in stages if kind != Reduction.SHARDS else ():
            gradient = last_gradient.get((rank, member, update), -1)
            if gradient > number:
                yield s.at("collectives", number, f"comes before a gradient that it must hold: {s.where(gradient)}")
            step = steps.get((rank, member, update), number)
            if step < number:
                yield s.at("collectives", number, f"comes after the step that uses it: {s.where(step)}")
        if kind == Reduction.NORM:
            for other, earlier in others[rank, update]:
                if (
                    other[0] not in _AFTER
                    and earlier > number
                    and {*stages} & {*reduced_stages(header, *other[:2], rank)}
                ):
                    yield s.at(
                        "collectives", number, f"the norm is of reduced gradients: {s.where(earlier)} comes later"
                    )


def _barriers(s: Subject) -> Iterator[Finding]:
    counts = [sum(i.op is Op.BARRIER for i in instructions) for instructions in s.program.ranks]
    for rank, count in enumerate(counts):
        if count < max(counts):
            yield Finding("collectives", rank, -1, f"has {count} barriers, other ranks have {max(counts)}")


def _out_of_order(s: Subject) -> Iterator[Finding]:
    """Any two ranks issue the collectives they share in the same order.

    Ranks can differ only where two sets of members overlap, so one sequence for each pair of sets is compared.
    """
    graph = s.graph
    expected: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, list[int]]] = {}
    members = [tuple(sorted(graph.ranks[number] for number in group)) for group in graph.collectives]
    for rank in range(s.header.num_ranks):
        by_set: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number in range(graph.starts[rank], graph.starts[rank + 1]):
            if number in graph.collective_of:
                by_set[members[graph.collective_of[number]]].append(number)
        sets = sorted(by_set)
        for position, one in enumerate(sets):
            for other in sets[position:]:
                numbers = sorted({*by_set[one], *by_set[other]})
                order = [graph.collective_of[number] for number in numbers]
                first, reference = expected.setdefault((one, other), (rank, order))
                for number, mine, theirs in zip(numbers, order, reference, strict=True):
                    if mine != theirs:
                        there = next(n for n in graph.collectives[theirs] if graph.ranks[n] == first)
                        yield s.at("collectives", number, f"out of order: here rank {first} has {s.where(there)}")
                        break
