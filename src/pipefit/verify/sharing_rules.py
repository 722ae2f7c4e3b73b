"""Rule `sharing`: weights that the copies of a stage share are whole when they are used, and no gradient is lost.

The rule walks each rank's list and tracks which stages are whole there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pipefit.ir.graph import collective_members
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import WEIGHT_GRADIENT_OPS, Op, Reduction
from pipefit.ir.program import Header
from pipefit.verify.subject import Finding, Findings, Subject

_RULE = "sharing"


@dataclass
class _Rank:
    """What is whole on one rank at an instruction.

    Attributes:
        header: the program's header.
        steps: the number of updates that each stage has made.
        weights: the version of each stage whose weights are whole.
        gradients: the stages whose gradients are whole, and whether some of them are not in a sum yet.
    """

    header: Header
    steps: dict[int, int] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, bool] = field(default_factory=dict)


def sharing(s: Subject) -> Findings:
    """Whole weights are the newest version; gradients are summed before they are freed; at the end nothing is whole."""
    header = s.header
    if not any(map(header.shares_gradients, range(header.num_stages))):
        return
    for rank, instructions in enumerate(s.program.ranks):
        state = _Rank(header)
        for number, i in enumerate(instructions, s.graph.starts[rank]):
            rule = _RULES.get(i.op)
            if rule and header.shares_gradients(i.stage):
                for message in rule(state, i):
                    yield s.at(_RULE, number, message)
        yield from _left(rank, "weights", state.weights)
        yield from _left(rank, "gradients", state.gradients)
    yield from _unmatched(s)


def _left(rank: int, what: str, stages: Iterable[int]) -> Findings:
    """Stages of which something is whole at the end."""
    for stage in sorted(stages):
        message = f"the {what} of stage {stage} are still whole at the end"
        yield Finding(_RULE, rank, -1, message)


def _unmatched(s: Subject) -> Findings:
    """Gathers and sums in which a copy does not take part, because it has fewer of them."""
    for numbers in s.graph.collectives:
        first = s.graph.instructions[numbers[0]]
        is_gather = first.op is Op.UNSHARD
        is_sum = first.kind == Reduction.SCATTER
        if not (is_gather or is_sum):
            continue
        present = {s.graph.ranks[number] for number in numbers}
        absent = [rank for rank in collective_members(s.header, first) if rank not in present]
        if absent:
            yield s.at(_RULE, numbers[0], f"rank {absent[0]} takes part in fewer: all copies must gather equally often")


def _unshard(state: _Rank, i: Instruction) -> Iterator[str]:
    newest = state.steps.get(i.stage, 0)
    is_shared = state.header.shares_weights(i.stage)
    if not is_shared:
        yield f"the header does not share the weights of stage {i.stage}"
    if i.version != newest:
        yield f"gathers w{i.version}, but the shards of stage {i.stage} are of w{newest}"
    if i.stage in state.weights:
        yield f"the weights of stage {i.stage} are whole already"
    state.weights[i.stage] = i.version
    yield from _too_many(state, "weights", len(state.weights))


def _too_many(state: _Rank, what: str, count: int) -> Iterator[str]:
    most = state.header.shard_slots
    if count > most:
        yield f"the {what} of {count} stages are whole at once, the header allows {most}"


def _drop(state: _Rank, i: Instruction) -> Iterator[str]:
    # The rules of values check that they were whole.
    state.weights.pop(i.stage, None)
    return iter(())


def _backward(state: _Rank, i: Instruction) -> Iterator[str]:
    is_summed = state.gradients.get(i.stage) is False
    if is_summed:
        yield f"adds to gradients of stage {i.stage} of which a sum is made: free them first"
    state.gradients[i.stage] = True
    yield from _too_many(state, "gradients", len(state.gradients))


def _reduce(state: _Rank, i: Instruction) -> Iterator[str]:
    if i.kind == Reduction.SCATTER and i.stage in state.gradients:
        state.gradients[i.stage] = False
    return iter(())


def _free(state: _Rank, i: Instruction) -> Iterator[str]:
    if state.gradients.pop(i.stage, False):
        yield f"frees gradients of stage {i.stage} that no sum has: scatter them first"


def _step(state: _Rank, i: Instruction) -> Iterator[str]:
    if i.stage in state.weights:
        yield f"the whole weights of stage {i.stage} would be stale after this: drop them first"
    if i.stage in state.gradients:
        yield f"the gradients of stage {i.stage} are still whole: free them first"
    state.steps[i.stage] = i.version + 1


_Rule = Callable[[_Rank, Instruction], Iterator[str]]

_RULES: dict[Op, _Rule] = {
    **dict.fromkeys(WEIGHT_GRADIENT_OPS, _backward),
    Op.UNSHARD: _unshard,
    Op.DROP: _drop,
    Op.REDUCE: _reduce,
    Op.FREE: _free,
    Op.STEP: _step,
}
