"""Spilling of a model: the plan under a cap on the device's memory, or the shape of a program by the user's options.

Under a cap, devices, tiers and layers are measured on all ranks at the same time, and the first rank plans for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import torch
from torch import nn

from pipefit.errors import PlanError
from pipefit.ir.instruction import Indices
from pipefit.ir.spill import Spill
from pipefit.pipeline.layer_sizes import sizes_of, state_per_weight
from pipefit.planner import NOT_FROM_DISK, Cap, plan
from pipefit.profiling import measure_device, measure_tier
from pipefit.profiling.agreed import agreed
from pipefit.profiling.clock import Clock
from pipefit.profiling.kinds import profile_kinds
from pipefit.profiling.links import links_of
from pipefit.profiling.optimizer import step_seconds
from pipefit.profiling.workload import Workload
from pipefit.runtime.collectives import exchange, from_first, meet
from pipefit.runtime.microbatches import largest_part
from pipefit.runtime.session import Session
from pipefit.schedules.shape import Shape
from pipefit.spec import Plan, Profile, Topology
from pipefit.spec.options import AUTO, KEEP, STEP_ON, Request, Spilled
from pipefit.spec.topology import Device, Tier
from pipefit.stage.accelerator import workspace_bytes
from pipefit.stage.ties import tied_layers

_NUM_STEPPED = 1 << 20
"""Elements of a weight for measuring the step on the host."""


def plan_under_cap(request: Request, work: Workload, session: Session) -> tuple[Plan, Profile, Topology]:
    """The plan for a cap on the device's memory: stages, slots, and prediction; see `planner.plan`.

    Layers may be on the meta device: one of each kind is run, on all ranks at the same time, as devices and tiers are
    measured too. The first rank plans for all.

    Raises:
        PlanError: there is no example, from which the sizes of activations follow, or the request splits the model.
        InfeasibleError: the cap is too small; the message names the smallest that works.
    """
    spill = request.spill
    assert spill is not None and spill.cap_bytes is not None
    example = work.batch("a cap on the device's memory")
    copies = _equal_copies(request)
    if session.is_distributed:
        num_ranks = session.num_ranks
    else:
        num_ranks = request.parallelism.ranks or copies
    taken = workspace_bytes(work.device)
    left = max(spill.cap_bytes - taken, 1.0)
    links = links_of(session, num_ranks, work.device)
    meet(session)
    dtype = work.half or torch.float32
    device = _slowest(session, measure_device(work.device, threads=None, repeats=3, dtype=dtype))
    tier = machine_tier(spill, work, session, links.tier_shares(num_ranks))
    topology = msgspec.structs.replace(links, tiers=(tier,), device=device, devices=())
    state = state_per_weight(work.layers, work.optimizer)
    size = largest_part(example[0], request.num_microbatches)
    profile = agreed(session, lambda: profile_kinds(work, size, device, state, left))
    host_bytes = None
    if tier.name == "host":
        host_bytes = spill.host_bytes
    num_chunks = 0
    if request.parallelism.chunks > 1:
        num_chunks = request.parallelism.chunks
    schedules = None
    if request.schedule not in (None, AUTO):
        schedules = [request.schedule]
    cap = Cap(
        left,
        tier=tier.name,
        host_bytes=host_bytes,
        step_on=_step_on(spill, tier),
        keep=_may_keep(spill),
        activations=spill.activations or None,
        num_ranks=num_ranks,
        copies=copies,
        num_chunks=num_chunks,
        clip=work.clips,
        ties=tuple(map(tuple, tied_layers(work.layers))),
        sizes=sizes_of(work.layers, work.optimizer, copies),
        taken_bytes=taken,
    )
    search = partial(
        plan,
        profile,
        topology,
        num_microbatches=request.num_microbatches,
        schedules=schedules,
        state_per_weight=state,
        cap=cap,
    )
    found = msgspec.convert(from_first(session, lambda: msgspec.to_builtins(search())), Plan)
    return found, profile, topology


def _equal_copies(request: Request) -> int:
    """The number of copies of each stage, which must be the same for all under a cap.

    Raises:
        PlanError: they differ, or the request splits the model.
    """
    usual = Request()
    spread = request.parallelism
    given = [name for name in ("stages", "plan") if getattr(request, name) != getattr(usual, name)]
    for name in ("recompute", "tensor", "sequence_parallel", "shard", "shares"):
        if getattr(spread, name) != getattr(usual.parallelism, name):
            given.append(name)
    if given:
        raise PlanError(
            f"a cap on the device's memory makes its own plan: leave out {' and '.join(given)}, or device_memory; "
            "without it, disk and host_memory spill the stages of any pipeline"
        )
    if len(set(spread.copies)) > 1:
        raise PlanError(
            "a cap on the device's memory splits the model itself: give one number of replicas, got "
            f"{list(spread.copies)}"
        )
    if spread.copies:
        return spread.copies[0]
    return 1


def machine_tier(spill: Spilled, work: Workload, session: Session, num_sharing: int) -> Tier:
    """The tier of a machine, with rates from the measurements of all ranks that share it, made at the same time.

    Commits are counted only where every step is committed.
    """
    if spill.folder is None:
        tier = measure_tier(None, work.device, capacity_bytes=spill.host_bytes)
    else:
        tier = measure_tier(spill.folder, work.device)
    each_step = spill.commit_every == 1
    if spill.commit_every is None:
        each_step = spill.host_bytes is None
    if not each_step:
        tier = msgspec.structs.replace(tier, commit_s=0.0)
    if tier.name == "host":
        weight = nn.Parameter(torch.ones(_NUM_STEPPED))
        step_s = step_seconds([weight], work.optimizer, Clock(torch.device("cpu")), repeats=3)
        tier = msgspec.structs.replace(tier, step_bytes_per_s=weight.nbytes / step_s)
    return _shared(session, tier, num_sharing)


def _slowest(session: Session, mine: Device) -> Device:
    """The slowest device of all ranks, the same everywhere, for one pipeline."""
    devices = exchange(session, msgspec.to_builtins(mine))
    return min(msgspec.convert(devices, list[Device]), key=lambda device: device.flops)


def _shared(session: Session, mine: Tier, num_sharing: int) -> Tier:
    """The tier of a machine, from the simultaneous measurements of the ranks that share it."""
    found = msgspec.convert(exchange(session, msgspec.to_builtins(mine)), list[Tier])
    return msgspec.structs.replace(
        mine,
        capacity_bytes=min(tier.capacity_bytes for tier in found),
        check_bytes_per_s=min(tier.check_bytes_per_s for tier in found),
        read_bytes_per_s=num_sharing * min(tier.read_bytes_per_s for tier in found),
        write_bytes_per_s=num_sharing * min(tier.write_bytes_per_s for tier in found),
        step_bytes_per_s=num_sharing * min(tier.step_bytes_per_s for tier in found),
        one_channel=any(tier.one_channel for tier in found),
        commit_s=max(tier.commit_s for tier in found),
    )


def _step_on(spill: Spilled, tier: Tier) -> str:
    if not isinstance(spill.step_on, str):
        raise PlanError("step_on: stages are known once the model is split; under a cap give device, host or auto")
    if spill.step_on == "host" and tier.name != "host":
        raise PlanError(NOT_FROM_DISK)
    return spill.step_on


def _may_keep(spill: Spilled) -> bool:
    if spill.keep not in ("auto", "none"):
        raise PlanError(
            f"keep: under a cap as many stages keep their activations as fit; expected auto or none, got {spill.keep!r}"
        )
    return spill.keep == "auto"


def spilled_shape(shape: Shape, spill: Spilled | None) -> Shape:
    """The shape of a spilled program, from that of the same one without spilling; a plan's own spilling wins."""
    if spill is None or shape.spill is not None or spill.cap_bytes is not None:
        return shape
    num_stages = shape.depth * shape.num_chunks
    return msgspec.structs.replace(shape, spill=spill_of(spill, num_stages, shape.ties), prefetch=spill.prefetch)


def spill_of(spill: Spilled, num_stages: int, ties: Sequence[Sequence[int]] = ()) -> Spill:
    """The spilling of a program.

    Args:
        spill: the user's options.
        num_stages: of the model.
        ties: groups of stages that share a weight, which stays on the device: so they step there.

    Raises:
        PlanError: a step on the host with stages on disk.
    """
    tied = {stage for tie in ties for stage in tie}
    free = [stage for stage in range(num_stages) if stage not in tied]
    on_host = _chosen("step_on", spill.step_on, STEP_ON, "host", free)
    kept = _chosen("keep", spill.keep, KEEP, "all", range(num_stages))
    on_disk = spill.folder is not None
    if on_host and on_disk:
        raise PlanError(NOT_FROM_DISK)
    if len(on_host) < num_stages:
        optim_slots = spill.optim_slots
    else:
        optim_slots = 0
    made = Spill.of(num_stages, spill.slots, optim_slots, "disk" if on_disk else "host", spill.activations)
    return msgspec.structs.replace(made, on_host=on_host, keeps=kept)


def _chosen(name: str, choice: object, words: Sequence[str], every: str, stages: Sequence[int]) -> Indices:
    """The stages of a choice: a word, of which `every` means all of them, or their numbers."""
    if isinstance(choice, str) and choice in words:
        if choice == every:
            return tuple(stages)
        return ()
    if isinstance(choice, Sequence) and not isinstance(choice, str) and set(choice) <= set(stages):
        return tuple(sorted(set(choice)))
    if name == "step_on":
        shared = " (those that share no weight with another)"
    else:
        shared = ""
    numbers = ", ".join(map(str, stages)) or "none"
    raise PlanError(f"{name}: expected {', '.join(words)}, or some of the stages {numbers}{shared}, got {choice!r}")
