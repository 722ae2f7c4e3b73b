"""The plan for a cap on the device's memory: what is measured for it, and how ranks agree on it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipefit.errors import PlanError
from pipefit.pipeline.layer_sizes import sizes_of, state_per_weight
from pipefit.pipeline.spill_options import Spilled, in_bytes
from pipefit.planner.spilling import NOT_FROM_DISK, plan_spilling
from pipefit.profiling import analytic_profile, measure_device, with_measured_kinds
from pipefit.profiling.agreed import merged
from pipefit.profiling.links import links_of
from pipefit.runtime.collectives import agree, attempt, exchange, from_first
from pipefit.runtime.microbatches import largest_part
from pipefit.runtime.session import Session, current
from pipefit.spec import Plan, Profile, Topology
from pipefit.spec.topology import Device, Tier
from pipefit.stage.split import NamedLayer
from pipefit.stage.ties import tied_layers
from pipefit.stage.training import MakeOptimizer

__all__ = ["AUTO", "measure_host_step", "one_number", "plan_of"]

AUTO = "auto"
"""The schedule of whoever leaves it to the plan."""


def plan_of(
    layers: Sequence[NamedLayer],
    spill: Spilled,
    optimizer: MakeOptimizer,
    example: tuple[Any, Any] | None,
    num_microbatches: int,
    loss: Callable[[Any, Any], Tensor] | None = None,
    clip: bool = False,
    device: torch.device | None = None,
    *,
    num_ranks: int = 1,
    copies: int = 1,
    schedule: str | None = None,
    num_chunks: int = 0,
    half: torch.dtype | None = None,
) -> tuple[Plan, Profile, Topology]:
    """The plan for a cap on the device's memory: cuts, slots, and what it should cost; see `planner.plan_spilling`.

    Layers may be on the meta device: one of each kind is run, on all ranks at the same time, as devices and tiers are
    measured too. The first rank plans for all.

    Args:
        layers: of the whole model.
        spill: the cap, and where stages live.
        optimizer: of a stage.
        example: (input, target) of one batch.
        num_microbatches: per weight update.
        loss: of the model's output.
        clip: gradients are clipped by their global norm.
        device: where a rank computes.
        num_ranks: of all pipelines where all ranks run in this process; else as many as processes.
        copies: of the pipeline.
        schedule: by which they take turns; None: as the planner does.
        num_chunks: stages on each rank; 0: as many as are best.
        half: the type that autocast computes in; None: no autocast.

    Raises:
        PlanError: there is no example, from which the sizes of activations follow.
        InfeasibleError: the cap is too small; the message says the smallest that works.
    """
    if example is None or spill.cap_bytes is None:
        raise PlanError("a cap on the device's memory needs example=(input, target), one batch of data")
    keep = _may_keep(spill)
    session = current()
    num_ranks = session.num_ranks if session.is_distributed else num_ranks
    place = device or torch.device("cpu")
    links = links_of(session, num_ranks)
    if session.is_distributed:
        dist.barrier()
    own = _slowest(session, measure_device(place, threads=None, repeats=3, dtype=half or torch.float32))
    tier = _shared(session, _measured(spill, place, optimizer), links.tier_shares(num_ranks))
    topology = msgspec.structs.replace(links, tiers=(tier,), device=own)
    chain = nn.Sequential(OrderedDict((layer.prefix, layer.module) for layer in layers))
    size, state = largest_part(example[0], num_microbatches), state_per_weight(layers, optimizer)

    def profiled() -> Any:
        # Pretended tensors are the CPU's: under autocast it counts what is kept in half, and weights that are cast.
        with torch.autocast("cpu", half, enabled=half is not None):
            computed = analytic_profile(
                chain, example[0], own, loss, example[1], microbatch_size=size, model="the model"
            )
        found = with_measured_kinds(
            computed,
            chain,
            example[0],
            place,
            loss=loss,
            target=example[1],
            optimizer=optimizer,
            state_per_weight=state,
            room_bytes=spill.cap_bytes or 0.0,
            half=half,
        )
        return msgspec.to_builtins(found)

    if session.is_distributed:
        dist.barrier()
    # All at the same time, so that they slow each other down as they will in the run.
    found = agree(session, attempt(profiled)) if session.is_distributed else [profiled()]
    profile = merged([msgspec.convert(data, Profile) for data in found])

    def planned() -> Any:
        found = plan_spilling(
            profile,
            topology,
            device_bytes=spill.cap_bytes or 0.0,
            num_microbatches=num_microbatches,
            tier=tier.name,
            host_bytes=in_bytes(spill.host_memory, "host_memory") if tier.name == "host" else None,
            state_per_weight=state,
            clip=clip,
            ties=tied_layers(layers),
            step_on=_told_place(spill, tier),
            activations=spill.activations or None,
            num_ranks=num_ranks,
            copies=copies,
            schedule=schedule,
            num_chunks=num_chunks,
            keep=keep,
            sizes=sizes_of(layers, optimizer, copies),
        )
        return msgspec.to_builtins(found)

    plan = msgspec.convert(from_first(session, planned), Plan)
    return plan, profile, topology


def one_number(replicas: Sequence[int]) -> int:
    """The copies of each stage, which under a cap are as many of all.

    Raises:
        PlanError: they differ.
    """
    if len(set(replicas)) > 1:
        raise PlanError(
            f"a cap on the device's memory cuts the model itself: give one number of replicas, got {list(replicas)}"
        )
    return replicas[0] if replicas else 1


def _measured(spill: Spilled, place: torch.device, optimizer: MakeOptimizer) -> Tier:
    tier = spill.measured(place)
    if tier.name != "host":
        return tier
    return msgspec.structs.replace(tier, step_bytes_per_s=measure_host_step(optimizer))


def _slowest(session: Session, own: Device) -> Device:
    """The device of all ranks, as slow as the slowest: the same everywhere, for one pipeline."""
    found = [msgspec.convert(data, Device) for data in exchange(session, msgspec.to_builtins(own))]
    return min(found, key=lambda device: device.flops)


def _shared(session: Session, own: Tier, num_sharing: int) -> Tier:
    """The tier of a machine, from what each of the ranks that share it got when all of them measured."""
    if not session.is_distributed:
        return own
    figures = "capacity_bytes", "read_bytes_per_s", "write_bytes_per_s", "step_bytes_per_s", "check_bytes_per_s"
    found = exchange(session, [getattr(own, name) for name in figures])
    capacity, read, write, step, check = (min(column) for column in zip(*found, strict=True))
    return Tier(
        own.name,
        capacity,
        read * num_sharing,
        write * num_sharing,
        step_bytes_per_s=step * num_sharing,
        one_channel=any(exchange(session, own.one_channel)),
        check_bytes_per_s=check,
        commit_s=max(exchange(session, own.commit_s)),
    )


def _told_place(spill: Spilled, tier: Tier) -> str:
    if not isinstance(spill.step_on, str):
        raise PlanError("step_on: stages are known once the model is cut; under a cap say 'device', 'host' or 'auto'")
    if spill.step_on == "host" and tier.name != "host":
        raise PlanError(NOT_FROM_DISK)
    return spill.step_on


def _may_keep(spill: Spilled) -> bool:
    if spill.keep not in ("auto", "none"):
        raise PlanError(
            f"keep: under a cap as many stages keep their activations as there is room for; expected auto or none, got "
            f"{spill.keep!r}"
        )
    return spill.keep == "auto"


def measure_host_step(optimizer: MakeOptimizer, num_elements: int = 1 << 20) -> float:
    """Bytes of weights per second that an optimizer steps in the host's memory: the best of a few steps."""
    parameter = nn.Parameter(torch.ones(num_elements))
    made = optimizer([parameter])
    seconds = []
    for _ in range(4):
        parameter.grad = torch.ones_like(parameter)
        started = time.perf_counter()
        made.step()
        seconds.append(time.perf_counter() - started)
    return parameter.nbytes / min(seconds[1:])
