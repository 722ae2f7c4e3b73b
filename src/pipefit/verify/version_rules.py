"""Rule `versions`: the versions of weights that are used, the number kept, and their drops."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from pipefit.ir.liveness import is_in_place
from pipefit.ir.op import COMPUTE_OPS, Op
from pipefit.ir.program import WeightRule
from pipefit.ir.versions import required_versions
from pipefit.verify.subject import Finding, Findings, Subject

_WAITED_FOR = COMPUTE_OPS | {Op.STEP}
_MAKE_OR_DROP = {Op.STEP, Op.DROP}
_MOST = {WeightRule.FLUSH: 1, WeightRule.DOUBLE: 2}
_ASKS = {
    WeightRule.FLUSH: "a flush asks for the version its update starts from",
    WeightRule.STASH: "stashing asks for the newest when the forward starts",
    WeightRule.VERTICAL: "vertical sync asks for the version of the first trained stage's forward",
    WeightRule.DOUBLE: "double buffering asks for the version before the update",
}


def versions(s: Subject, max_versions: int | None = None) -> Findings:
    """The header's weight rule; at most k versions of a stage alive; each dropped right after its last use."""
    yield from _used(s)
    if max_versions is None:
        most = _MOST.get(s.header.weights)
    else:
        most = max_versions
    for rank in range(s.header.num_ranks):
        yield from _dropped(s, rank)
        yield from _alive(s, rank, most)


def _used(s: Subject) -> Findings:
    required = required_versions(s.header, s.program.ranks)
    why = _ASKS[s.header.weights]
    for stage, mb, number in s.each(*COMPUTE_OPS):
        version = s.graph.instructions[number].version
        expected = required.get((stage, mb))
        if expected is not None and version != expected:
            yield s.at("versions", number, f"uses w{version}, expected w{expected}: {why}")


def _dropped(s: Subject, rank: int) -> Findings:
    """Checks that each version is dropped after its last use and before the next computation."""
    last_use = {}
    gone = {}
    newest: dict[int, int] = defaultdict(int)
    busy = []
    for number, i in enumerate(s.program.ranks[rank], s.graph.starts[rank]):
        is_use = i.op in _WAITED_FOR
        if is_use:
            busy.append(number)
        if not s.header.is_resident(i.stage):
            continue
        if is_use:
            last_use[i.stage, i.version] = number
            if i.op is Op.STEP:
                newest[i.stage] = max(newest[i.stage], i.version + 1)
        elif i.op is Op.DROP:
            gone[i.stage, i.version] = number
    next_busy = dict(pairwise(busy))
    for (stage, version), number in gone.items():
        used = last_use.get((stage, version), -1)
        if version >= newest[stage]:
            yield s.at("versions", number, f"w{version} is the newest of stage {stage} and must stay")
        elif number < used:
            yield s.at("versions", number, f"drops a version that is used later: {s.where(used)}")
        elif next_busy.get(used, number) < number:
            yield s.at("versions", number, f"drops too late: last used at {s.where(used)}")
    for stage, last in newest.items():
        for version in range(last):
            if (stage, version) not in gone:
                message = f"drop s{stage} w{version} is missing: it is dead after w{version + 1}"
                yield Finding("versions", rank, -1, message)


def _alive(s: Subject, rank: int, most: int | None) -> Findings:
    """Checks the number of versions alive after each step; a step in place overwrites its weights and adds none."""
    if most is None:
        return
    instructions = s.program.ranks[rank]
    alive: dict[int, int] = dict.fromkeys(s.header.stages_of(rank), 1)
    for index, i in enumerate(instructions):
        if i.op not in _MAKE_OR_DROP or not s.header.is_resident(i.stage):
            continue
        alive.setdefault(i.stage, 0)
        if i.op is Op.DROP:
            alive[i.stage] -= 1
            continue
        alive[i.stage] += 1
        if alive[i.stage] > most + is_in_place(instructions, index):
            count = alive[i.stage]
            held = f"{count} versions of stage {i.stage} alive, at most {most} allowed"
            number = s.graph.starts[rank] + index
            yield s.at("versions", number, held)
