"""What a run's options say of spilled stages: the plan for a cap, the tiers, and what it resumes from."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from pipefit.errors import PlanError, TierError
from pipefit.pipeline.capped import AUTO, plan_of
from pipefit.pipeline.resumed import check_same, committed_step, recorded_plan
from pipefit.pipeline.spill_options import Spilled
from pipefit.planner.spilling import NOT_FROM_DISK
from pipefit.run.config import RunConfig
from pipefit.spec import Plan, Profile, Topology
from pipefit.spec.topology import Tier
from pipefit.spill.rank import tier_name
from pipefit.spill.tier_file import check_unused
from pipefit.stage.precision import half_of
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import MakeOptimizer

__all__ = ["capped", "facts_of", "going_on", "rates_of", "tiers_of"]

_FREE = ("output", "resume", "checkpoint_every", "sample", "disk", "host_memory", "commit_every", "plan")
_OPTIONS = {"options": "option"}

_DIVIDES = (
    *("plan", "replicas", "stages", "recompute"),
    *("tensor", "sequence_parallel", "shard_optimizer"),
)


def capped(
    config: RunConfig,
    layers: Sequence[NamedLayer],
    optimizer: MakeOptimizer,
    example: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor],
) -> tuple[Plan, Profile, Topology]:
    """The plan of a run under a cap, with the profile and the topology it was made from.

    Raises:
        PlanError: the run is also told how to be divided.
    """
    usual = RunConfig()
    told = [f"--{name.replace('_', '-')}" for name in _DIVIDES if getattr(config, name) != getattr(usual, name)]
    if told:
        raise PlanError(
            f"a cap on the device's memory makes its own plan: leave out {' and '.join(told)}, or --device-memory; "
            "without it, --disk and --host-memory spill the stages of any pipeline; under a cap, equal copies are "
            "--data-parallel"
        )
    where = config.host_memory or None, config.disk or None
    spill = Spilled(
        config.device_memory,
        *where,
        step_on=config.step_on,
        keep=config.keep,
        activations=config.activations,
        commit_every=config.commit_every,
    )
    device = torch.device(config.device) if config.device else None
    return plan_of(
        layers,
        spill,
        optimizer,
        example,
        config.microbatches,
        loss,
        bool(config.clip),
        device,
        num_ranks=config.ranks,
        copies=config.data_parallel,
        schedule=None if config.schedule == AUTO else config.schedule,
        num_chunks=config.chunks if config.chunks > 1 else 0,
        half=half_of(config.precision),
    )


def going_on(config: RunConfig, rank: int) -> tuple[RunConfig, Plan | None]:
    """Whether a run goes on from a tier's records; then where they lie, and the plan that they were written by.

    Records that a run has left are not overwritten by one that begins anew.

    Raises:
        TierError: the records are of another run, cannot be gone on from where they are, or would be lost.
    """
    if config.disk or config.resume:
        check_unused(Path(config.resume or config.disk), tier_name(rank))
    if config.resume and (Path(config.resume) / f"{tier_name(rank)}.json").exists():
        folder = Path(config.resume)
        if config.disk and Path(config.disk).resolve() != folder.resolve():
            raise TierError(f"{folder}: what lies there is gone on from in its place: give --disk {folder} too")
        plan = recorded_plan(folder, rank)
        check_same(folder, rank, {"run": facts_of(config)})
        return replace(config, disk=config.resume), Plan.load(config.plan) if config.plan else plan
    left = committed_step(config.disk, rank) if config.disk and not config.resume else None
    if left is not None:
        raise TierError(
            f"{config.disk} holds step {left} of a run that was cut off: go on with --resume {config.disk}, or remove "
            "the folder to begin anew"
        )
    return config, None


def facts_of(config: RunConfig) -> dict[str, Any]:
    """What a run's options say that decides its numbers, by the options' names."""
    facts = {key: value for key, value in asdict(config).items() if key not in _FREE}
    named = {"--" + _OPTIONS.get(key, key).replace("_", "-"): value for key, value in facts.items()}
    return dict(json.loads(json.dumps(named)))


_OF_SPILLED = ("commit_every", "activations", "step_on", "keep")
"""What a run says of stages that are spilled."""


def tiers_of(config: RunConfig, resume: bool = False) -> Spilled | None:
    """Where the stages of a run live, if it asks for a tier.

    Args:
        config: of the run.
        resume: it goes on from the records there. It must still have a step to do, so that it can be measured: a run
            that was cut off after its last one does that again.

    Raises:
        PlanError: it says something of spilled stages that means nothing here.
    """
    usual = RunConfig()
    told = [f"--{name.replace('_', '-')}" for name in _OF_SPILLED if getattr(config, name) != getattr(usual, name)]
    if told and not config.spills and not config.plan:
        raise PlanError(
            f"{' and '.join(told)}: nothing is spilled; give --device-memory, --disk or --host-memory as well"
        )
    if config.commit_every is not None and not config.disk:
        raise PlanError("--commit-every: only what lies on a disk outlasts the run; give --disk as well")
    if config.step_on == "host" and config.disk:
        raise PlanError(NOT_FROM_DISK)
    if not config.spills:
        return None
    latest = config.steps - 1 if resume else False
    about = facts_of(config)
    where = config.host_memory or None, config.disk or None
    return Spilled(
        None,
        *where,
        step_on=config.step_on,
        keep=config.keep,
        activations=config.activations,
        resume=latest,
        commit_every=config.commit_every,
        about=about,
    )


def rates_of(config: RunConfig, device: torch.device, num_sharing: int) -> Tier:
    """The tier of a machine with its rates, measured now by all of the ranks that share it."""
    own = (tiers_of(config) or Spilled()).measured(device)
    return msgspec.structs.replace(
        own,
        read_bytes_per_s=own.read_bytes_per_s * num_sharing,
        write_bytes_per_s=own.write_bytes_per_s * num_sharing,
        step_bytes_per_s=own.step_bytes_per_s * num_sharing,
    )
