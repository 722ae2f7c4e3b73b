"""verify: checks one program by every rule."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.errors import PipefitError
from pipefit.ir.collector import collector_paused
from pipefit.ir.liveness import Size
from pipefit.ir.program import Program
from pipefit.verify.collective_rules import collectives
from pipefit.verify.complete import complete, ownership
from pipefit.verify.excerpt import excerpt
from pipefit.verify.memory_rules import for_each_rank, memory, tiers
from pipefit.verify.messages import fifo, messages
from pipefit.verify.order import deadlock, dependencies, use_after_free
from pipefit.verify.report import RULES, Report, Violation
from pipefit.verify.sense import set_aside
from pipefit.verify.sharing_rules import sharing
from pipefit.verify.spill_rules import residency
from pipefit.verify.subject import Finding, Rule, Subject
from pipefit.verify.version_rules import versions

_PLAIN: tuple[Rule, ...] = (
    complete,
    ownership,
    dependencies,
    use_after_free,
    messages,
    fifo,
    deadlock,
    collectives,
    residency,
    sharing,
)


_MOST_GRIDS = 1000
"""Violations that are shown in the grid; more have their place and message only."""


@collector_paused()
def verify(
    program: Program,
    *,
    capacity_bytes: float | Sequence[float] | None = None,
    size: Size | None = None,
    tier_bytes: float | None = None,
    max_versions: int | None = None,
) -> Report:
    """Checks a program against every rule; violations are listed, never raised.

    Args:
        program: valid or not.
        capacity_bytes: memory of each rank, or one number for all; None: the rule `memory` is not checked.
        size: bytes of a value; needed with `capacity_bytes` and `tier_bytes`.
        tier_bytes: capacity of the tier that stages are spilled to, for all ranks together (None: no limit).
        max_versions: the most versions of a stage's weights alive at once (None: one with a flush, two with double
            buffering, else as many as the order needs).

    >>> from pipefit.schedules import Shape, generate
    >>> print(verify(generate("1f1b", Shape(depth=2, num_microbatches=4))))
    1f1b: 48 instructions, no violations

    Raises:
        PipefitError: a capacity without `size`, or a wrong number of capacities.
    """
    clean, kept, findings = set_aside(program)
    subject = Subject.of(clean, kept)
    for rule in _PLAIN:
        findings += rule(subject)
    findings += versions(subject, max_versions)
    for limit, name in ((capacity_bytes, "capacity_bytes"), (tier_bytes, "tier_bytes")):
        if limit is not None and size is None:
            raise PipefitError(f"{name} needs size: a function from a value to its bytes")
    if size is not None and capacity_bytes is not None:
        capacities = for_each_rank("capacity_bytes", capacity_bytes, program.header.num_ranks, 0)
        findings += memory(subject, capacities, size)
    if size is not None and tier_bytes is not None:
        findings += tiers(subject, tier_bytes, size)
    return Report(program.header.schedule, len(program), _violations(program, findings))


def _violations(program: Program, findings: list[Finding]) -> tuple[Violation, ...]:
    rules = list(RULES)

    def order(finding: Finding) -> tuple[int, int, int]:
        return rules.index(finding.rule), finding.rank, finding.position

    result = []
    ordered = sorted(findings, key=order)
    for number, (rule, rank, index, message) in enumerate(ordered):
        text = ""
        grid = ""
        if 0 <= rank < len(program.ranks) and index >= 0:
            text = str(program.ranks[rank][index])
            if number < _MOST_GRIDS:
                grid = excerpt(program.ranks, rank, index)
        result.append(Violation(rule, rank, index, text, message, grid))
    return tuple(result)
