"""`pipefit verify`: proves a program, or lists all its violations."""

from __future__ import annotations

from pathlib import Path

from pipefit.cli.answer import FINDING, FINE, Answer
from pipefit.cli.options import Count, Counts, Json, Size, UnitCosts
from pipefit.cli.programs import read_source
from pipefit.errors import PipefitError


def command(
    path: Path,
    /,
    *,
    capacity: Size | None = None,
    tier_capacity: Size | None = None,
    profile: str | None = None,
    layers: Counts = (),
    topology: str | None = None,
    max_versions: Count | None = None,
    steps: Count = 1,
    json: Json = False,
) -> Answer:
    """Prove a program right, or list all violations in it.

    Example: pipefit verify program.pipe

    Checks that every micro-batch is complete, that dependencies, messages and weight versions are right, that nothing
    hangs even when sends block, and with --capacity that it fits. Exit code 1: there are violations.

    Args:
        path: A program (.pipe) or a plan (.json).
        capacity: Memory of each rank, like 8GiB; needs --profile.
        tier_capacity: Capacity of the tier of spilled stages, for all ranks; needs --profile.
        profile: Profile of the model, for the bytes of its values.
        layers: Layers of each stage, like 3,3, which a .pipe file does not contain.
        topology: Topology whose device memory is the capacity.
        max_versions: Versions of one stage's weights that may be alive at once.
        steps: Weight updates of a plan's program.
    """
    from pipefit.verify import verify

    source = read_source(path, steps, profile, topology, layers)
    for option, given in (("--capacity", capacity), ("--tier-capacity", tier_capacity), ("--topology", topology)):
        if given is not None and source.profile is None:
            raise PipefitError(f"a program does not contain the bytes of its values: {option} needs --profile")
    limits: float | list[float] | None = capacity
    if capacity is None and source.topology:
        limits = [source.topology.device_of(rank).memory_bytes for rank in range(source.program.header.num_ranks)]
    report = verify(
        source.program,
        capacity_bytes=limits,
        size=source.cost(UnitCosts()).size_bytes if source.profile else None,
        tier_bytes=tier_capacity,
        max_versions=max_versions,
    )
    data = {
        "ok": report.ok,
        "schedule": report.schedule,
        "num_ranks": source.program.header.num_ranks,
        "num_instructions": report.num_instructions,
        "violations": report.violations,
    }
    return Answer(data, str(report), FINE if report.ok else FINDING)
