"""The records of an earlier run on a disk tier: a resumed run reads them, a new run does not overwrite them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipefit.errors import PlanError, TierError
from pipefit.pipeline.resume import check_same, committed_step
from pipefit.planner import NOT_FROM_DISK
from pipefit.run.config import RunConfig, facts_of
from pipefit.runtime.session import current
from pipefit.spec.options import Spilled
from pipefit.spill.rank import tier_name
from pipefit.spill.tier_file import check_unused

_OF_SPILLED = ("commit_every", "activations", "step_on", "keep")
"""Options that have no effect where no stage is spilled."""


def with_tier(config: RunConfig, rank: int) -> RunConfig:
    """The configuration with the disk and the step from which it resumes, if it does.

    A new run does not overwrite the records of an earlier one.

    Raises:
        PlanError: an option of spilled stages has no effect here.
        TierError: the records are of another run or in another place, or would be lost.
    """
    disk = config.spill.disk
    if disk or config.resume:
        check_unused(Path(config.resume or str(disk)), tier_name(rank))
    # A start after a fault that resumes from nothing: some rank has committed no step yet.
    again = current().start.restart > 0
    resumes = bool(config.resume) and (Path(config.resume) / f"{tier_name(rank)}.json").exists()
    if resumes:
        folder = Path(config.resume)
        if disk and Path(disk).resolve() != folder.resolve():
            raise TierError(f"{folder}: a run resumes from the records there in place: give --disk {folder} too")
        check_same(folder, rank, {"run": facts_of(config)})
        config = _with_spill(config, replace(config.spill, disk=config.resume))
    elif disk and not config.resume and not again and (step := committed_step(disk, rank)) is not None:
        raise TierError(
            f"{disk} holds step {step} of an interrupted run: resume with --resume {disk}, or remove the folder to "
            "start a new run"
        )
    spill = _checked(config)
    if spill is not None:
        latest: int | bool = False
        if resumes:
            # It must still have a step to do, so that it can be measured: one interrupted after its last repeats that.
            latest = config.num_steps - 1
        spill = replace(spill, resume=latest, about=facts_of(config))
    return _with_spill(config, spill)


def _with_spill(config: RunConfig, spill: Spilled | None) -> RunConfig:
    return replace(config, request=replace(config.request, spill=spill))


def _checked(config: RunConfig) -> Spilled | None:
    """The options of spilling; None: no stage spills.

    Raises:
        PlanError: an option of spilled stages has no effect here.
    """
    spill = config.spill
    usual = Spilled()
    given = [f"--{n.replace('_', '-')}" for n in _OF_SPILLED if getattr(spill, n) != getattr(usual, n)]
    is_spilled = bool(spill.device_memory or spill.host_memory or spill.disk)
    if given and not is_spilled and not config.request.plan:
        raise PlanError(
            f"{' and '.join(given)}: nothing is spilled; give --device-memory, --disk or --host-memory as well"
        )
    if spill.commit_every is not None and not spill.disk:
        raise PlanError("--commit-every: only records on a disk outlast the run; give --disk as well")
    if spill.step_on == "host" and spill.disk:
        raise PlanError(NOT_FROM_DISK)
    return spill if is_spilled else None
