"""Programs that differ from a given one in one place."""

from collections.abc import Iterator

from msgspec.structs import replace

from pipefit.ir import OP_SPEC, Instruction, Op, Program

KINDS = (
    "act",
    "act-piece",
    "grad",
    "grad-piece",
    "shards",
    "replicas",
    "scatter",
    "tied",
    "norm",
    "weights",
    "saved",
    "wgrad",
    "optim",
    "",
)


def with_rank(program: Program, rank: int, instructions) -> Program:
    """The program with another list on one rank."""
    ranks = [list(own) for own in program.ranks]
    ranks[rank] = list(instructions)
    return program.with_ranks(ranks)


def relabelled(program: Program, rank: int, index: int) -> Iterator[tuple[str, object]]:
    """The instruction with one operand, or its operation, changed."""
    i = program.ranks[rank][index]
    for name in OP_SPEC[i.op].fields:
        if name == "kind":
            yield from ((f"{name}: {kind}", replace(i, kind=kind)) for kind in KINDS if kind != i.kind)
        elif name == "tier":
            yield f"{name}: other", replace(i, tier="disk" if i.tier == "host" else "host")
        elif name in ("stage", "mb", "version", "peer", "slot"):
            value = getattr(i, name)
            others = {value - 1, value + 1, value + 2, -1, 999} - {value}
            yield from ((f"{name}: {other}", replace(i, **{name: other})) for other in sorted(others))
    same_operands = [op for op in Op if op is not i.op and OP_SPEC[op].fields == OP_SPEC[i.op].fields]
    yield from ((f"op: {op}", replace(i, op=op)) for op in same_operands)
    spill = program.header.spill
    if i.op is Op.EVICT:
        yield "op: drop", Instruction(Op.DROP, i.stage, version=i.version)
        yield "op: fetch", replace(i, op=Op.FETCH, slot=0)
    elif i.op is Op.FETCH:
        yield "op: evict", replace(i, op=Op.EVICT, slot=-1)
    elif i.op is Op.DROP and spill:
        yield "op: evict", Instruction(Op.EVICT, i.stage, kind="weights", version=i.version, tier=spill.tier)


def mutants(program: Program) -> Iterator[tuple[str, Program]]:
    """Every deletion, duplication (there and at the end), move (swaps of neighbours among them) and relabelling."""
    for rank, own in enumerate(program.ranks):
        for index, i in enumerate(own):
            name = f"rank {rank}[{index}] {i}"
            rest = own[:index] + own[index + 1 :]
            yield f"delete: {name}", with_rank(program, rank, rest)
            yield f"double: {name}", with_rank(program, rank, (*own[:index], i, *own[index:]))
            yield f"again at the end: {name}", with_rank(program, rank, (*own, i))
            for to in {index + 1, index + 2, index - 3, index + 5, 0, len(rest)}:
                if 0 <= to <= len(rest) and to != index:
                    yield f"move: {name} to {to}", with_rank(program, rank, (*rest[:to], i, *rest[to:]))
            for what, other in relabelled(program, rank, index):
                yield f"relabel: {name} {what}", with_rank(program, rank, (*own[:index], other, *own[index + 1 :]))
