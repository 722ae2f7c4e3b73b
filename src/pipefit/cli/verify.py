"""`pipefit verify`: proves a program, or lists all its violations."""

from __future__ import annotations

from pathlib import Path

from pipefit.cli.answer import Answer, code_of, picked
from pipefit.cli.options import Count, Json, Size, verb
from pipefit.cli.programs import SourceOptions, read_source
from pipefit.cost.unit_costs import UnitCosts
from pipefit.errors import PipefitError


@verb(
    profile="Profile of the model, for the bytes of its values.",
    topology="Topology whose device memory is the capacity.",
)
def command(
    path: Path,
    /,
    *,
    capacity: Size | None = None,
    tier_capacity: Size | None = None,
    given: SourceOptions,
    max_versions: Count | None = None,
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
        max_versions: Versions of one stage's weights that may be alive at once.
    """
    from pipefit.verify import verify

    source = read_source(path, given)
    program = source.program
    size = None
    if source.profile is not None:
        size = source.cost(UnitCosts()).size_bytes
    for name, value in (("capacity", capacity), ("tier-capacity", tier_capacity), ("topology", given.topology)):
        if value is not None and size is None:
            raise PipefitError(f"a program does not contain the bytes of its values: --{name} needs --profile")
    limits: float | list[float] | None = capacity
    if capacity is None and source.topology is not None:
        devices = map(source.topology.device_of, range(program.header.num_ranks))
        limits = [device.memory_bytes for device in devices]
    report = verify(program, capacity_bytes=limits, size=size, tier_bytes=tier_capacity, max_versions=max_versions)
    data = picked(report, "ok", "schedule", "num_instructions", "violations")
    data["num_ranks"] = program.header.num_ranks
    return Answer(data, str(report), code_of(report.ok))
