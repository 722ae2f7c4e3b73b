"""Spilled training of one pipeline: from a cap on the device's memory to shards, slots and a tier."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from pipefit.errors import PlanError
from pipefit.ir.program import Header, Program
from pipefit.ir.spill import Spill
from pipefit.models import ModelBundle, build
from pipefit.planner.spilling import NOT_FROM_DISK, STEP_ON
from pipefit.profiling import measure_tier
from pipefit.runtime.session import Session, current
from pipefit.runtime.spilling import Spilling, SpillPlace
from pipefit.runtime.worker import Tie, Training, Worker
from pipefit.schedules.shape import Shape
from pipefit.spec import Partition, Plan
from pipefit.spec.topology import Tier
from pipefit.stage.materialise import can_be_drawn, initialise, is_meta, materialise
from pipefit.stage.split import NamedLayer, named_layers
from pipefit.train.config import RunConfig
from pipefit.train.resumed import agree_on_step, check_same, committed_step, facts_of, identity, recorded_plan
from pipefit.units import parse_quantity

__all__ = [
    "Spilled",
    "bundle_of",
    "in_bytes",
    "let_go",
    "rates_of",
    "same_plan",
    "spilled_shape",
    "spillings",
    "tiers_of",
    "told_apart",
]


KEEP = ("auto", "all", "none")
"""Which stages may be told to keep their activations."""


@dataclass(frozen=True)
class Spilled:
    """How a pipeline spills: `Pipeline(…, spill=Spilled("1.5 GiB", disk="/scratch"))`.

    Attributes:
        device_memory: most that training may take on the device, bytes or text like "1.5 GiB"; None: the stages are
            cut as the pipeline's other arguments say, all of them spilled.
        host_memory: most that the host tiers of a machine's ranks may take; None: no limit.
        disk: folder of the disk tier, for what `host_memory` leaves, or all; None: stages live in the host's memory.
        slots: stages whose weights and gradients are on the device at once: one computes, the others load.
        optim_slots: the same for the optimizer's states; 0: these stay on the device.
        step_on: where stages step: "device" (the optimizer's states come to it, or stay there), "host" (in the memory
            of the host tier, where the states stay), the stages that step on the host, or "auto": what is faster by
            the plan for the cap; without one, the device.
        keep: stages that keep on the device what a forward saved for its backward, while their weights are away,
            instead of replaying it: "all", "none", these, or "auto": as many as the plan for the cap has room for;
            without one, none. What a layer computes from its weights it must save through autograd, as torch's do.
        activations: whether what enters a stage waits on the tier too, from its forward to its replay: room for more
            micro-batches, and more to move. Under a cap this is also done where nothing fits without.
        prefetch: stages ahead that the next is loaded; None: as soon as a slot is free; 0: when it is needed.
        resume: go on from the last step that a run which was cut off has committed in `disk`, instead of beginning
            anew. Model, plan and training must be the same; weights, optimizers, schedules and random numbers stand
            where they stood, and `Pipeline.num_updates` says where that is. A number: from that step or one before.
        commit_every: steps from one commit on `disk` to the next, which is where a run that is cut off goes on from;
            None: 1 where all records lie there, else 10; 0: nothing is committed.
        about: JSON data on what else must be the same to go on from there, each by the name that a message calls it.
        place: in place of `disk` and `host_memory`, for runs that share slots and lanes.
    """

    device_memory: float | str | None = None
    host_memory: float | str | None = None
    disk: str | Path | None = None
    slots: int = 2
    optim_slots: int = 1
    step_on: str | Sequence[int] = "auto"
    keep: str | Sequence[int] = "auto"
    activations: bool = False
    prefetch: int | None = None
    resume: bool | int = False
    commit_every: int | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    place: SpillPlace | None = None

    @property
    def cap_bytes(self) -> float | None:
        """The cap on the device's memory."""
        return in_bytes(self.device_memory, "device_memory")

    @property
    def where(self) -> SpillPlace:
        """The tier's place."""
        if self.place is not None:
            return self.place
        host = in_bytes(self.host_memory, "host_memory")
        folder = None if self.disk is None else Path(self.disk)
        if self.commit_every is not None and self.commit_every < 0:
            raise PlanError(f"commit_every: expected steps, 1 or more, or 0 for no commits, got {self.commit_every}")
        return SpillPlace(
            folder,
            None if host is None else int(host),
            about=self.about,
            resume=self.resume,
            commits=self.commit_every != 0,
        )

    @property
    def committed(self) -> int | None:
        """The step that `resume` would go on from, of this process's rank; None: there is none."""
        folder = self.where.folder
        return None if folder is None else committed_step(folder, current().rank)

    def measured(self, device: torch.device) -> Tier:
        """The tier with its rates, measured now."""
        folder, host = self.where.folder, in_bytes(self.host_memory, "host_memory")
        return measure_tier(folder, device, capacity_bytes=host if folder is None else None)

    def of(self, num_stages: int, ties: Sequence[Sequence[int]] = ()) -> Spill:
        """As the programs know it.

        Args:
            num_stages: of the model.
            ties: groups of stages that share a weight, which stays on the device: so they step there.

        Raises:
            PlanError: a step on the host, and the stages are on disk.
        """
        on_disk = self.disk is not None or (self.place is not None and self.place.folder is not None)
        tied = {stage for tie in ties for stage in tie}
        free = [stage for stage in range(num_stages) if stage not in tied]
        if isinstance(self.step_on, str):
            stepped = tuple(free) if self.step_on == "host" else ()
            is_known = self.step_on in STEP_ON
        else:
            stepped = tuple(sorted(set(self.step_on)))
            is_known = set(stepped) <= set(free)
        if not is_known:
            raise PlanError(
                f"step_on: expected one of {', '.join(STEP_ON)}, or stages from 0 to {num_stages - 1} that share no "
                f"weight with another, got {self.step_on!r}"
            )
        if stepped and on_disk:
            raise PlanError(NOT_FROM_DISK)
        optim_slots = self.optim_slots if len(stepped) < num_stages else 0
        spill = Spill.of(num_stages, self.slots, optim_slots, "disk" if on_disk else "host")
        if isinstance(self.keep, str):
            keeps = tuple(range(num_stages)) if self.keep == "all" else ()
            is_known = self.keep in KEEP
        else:
            keeps = tuple(sorted(set(self.keep)))
            is_known = set(keeps) <= set(range(num_stages))
        if not is_known:
            raise PlanError(
                f"keep: expected one of {', '.join(KEEP)}, or stages from 0 to {num_stages - 1}, got {self.keep!r}"
            )
        return msgspec.structs.replace(spill, on_host=stepped, keeps=keeps, activations=self.activations)


def in_bytes(value: float | str | None, name: str) -> float | None:
    """Bytes of a number, or of text like "1.5 GiB"; None stays None."""
    return None if value is None else parse_quantity(value, "bytes", name)


def spilled_shape(shape: Shape, spill: Spilled | None) -> Shape:
    """The shape of a spilled program, from that of the same one without spilling; a plan's own wins."""
    if spill is None or shape.spill is not None or spill.cap_bytes is not None:
        return shape
    num_stages = shape.depth * shape.num_chunks
    return msgspec.structs.replace(shape, spill=spill.of(num_stages, shape.ties), prefetch=spill.prefetch)


def bundle_of(model: str, options: dict[str, Any], seed: int, capped: bool) -> ModelBundle:
    """A model for a run, whose weights are the same with and without a cap.

    One that says how a layer draws its weights draws them so, layer by layer; under a cap it comes without weights, for
    a layer draws them once it has a slot. Any other is built in memory, for only its factory knows how.
    """
    if capped:
        with torch.device("meta"):
            bundle = build(model, **options)
        if _draws(bundle):
            return bundle
    bundle = build(model, **options)
    if _draws(bundle):
        for layer in named_layers(bundle.layers):
            initialise(layer, seed, bundle.layers.initialise_layer)
    return bundle


def _draws(bundle: ModelBundle) -> bool:
    return hasattr(bundle.layers, "initialise_layer") and can_be_drawn(named_layers(bundle.layers))


def tiers_of(config: RunConfig, resume: bool = False) -> Spilled | None:
    """Where the stages of a run live, if it asks for a tier.

    Args:
        config: of the run.
        resume: it goes on from the records there. It must still have a step to do, so that it can be measured: a run
            that was cut off after its last one does that again.
    """
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


def rates_of(config: RunConfig, device: torch.device) -> Tier:
    """The tier of a run with its rates, measured now."""
    return (tiers_of(config) or Spilled()).measured(device)


def let_go(workers: Sequence[Worker], finished: bool) -> None:
    """A run has ended and saved what it wanted: its records go, if it was not stopped before its last step."""
    for worker in workers:
        if worker.spilling is not None:
            worker.spilling.settle()
            worker.spilling.close(discard=finished)


def same_plan(spill: Spilled | None, is_balanced: bool, session: Session) -> Plan | None:
    """The plan of the run that another goes on from, where it followed from measurements; None: it is told, or new.

    Args:
        spill: what is asked for.
        is_balanced: whether the stages were to be balanced by a profile.
        session: the ranks.
    """
    if spill is None or spill.resume is False or not (is_balanced or spill.cap_bytes is not None):
        return None
    return recorded_plan(_resumable(spill), session.rank)


def told_apart(
    spill: Spilled | None, layers: Sequence[NamedLayer], plan: Plan, training: Training, session: Session
) -> Spilled | None:
    """The same, with what tells the run apart; what it goes on from, if it does, must be the same run.

    Raises:
        TierError: it is another.
    """
    if spill is None:
        return None
    about = identity(layers, plan, training, spill.about)
    if spill.resume is not False:
        folder = _resumable(spill)
        recorded_plan(folder, session.rank)
        check_same(folder, session.rank, about)
    return replace(spill, place=replace(spill.where, about=about, resume=spill.resume))


def _resumable(spill: Spilled) -> Path:
    folder = spill.where.folder
    if folder is None:
        raise PlanError("spill=Spilled(resume=True) needs the disk= that the records are on")
    return folder


def spillings(
    ranks: Sequence[int],
    parts: Sequence[dict[int, list[NamedLayer]]],
    program: Program,
    training: Training,
    ties: dict[str, Tie],
    device: torch.device,
    spill: Spilled | None,
    model: object,
    session: Session,
    partition: Partition,
    whole: Sequence[NamedLayer],
) -> list[Spilling | None]:
    """The tiers of the ranks of this process; layers of the meta device get their weights, wherever they will lie."""
    own = getattr(model, "initialise_layer", None)
    result: list[Spilling | None] = []
    where = (spill or Spilled()).where
    for rank, part in zip(ranks, parts, strict=True):
        made = None
        if any(program.header.is_spilled(stage) for stage in part):
            shared = _shared(part, ties)
            place = where
            if where.host_bytes is not None and program.header.num_ranks > 1:
                share = _host_share(rank, program.header, partition, whole, session)
                place = replace(where, host_bytes=int(where.host_bytes * share))
            made = Spilling.create(rank, program, training, part, shared, device, place, own)
        for stage, layers in part.items():
            if not program.header.is_spilled(stage) and is_meta(layers):
                materialise(layers, training.seed, device, own)
        result.append(made)
    if spill is not None and spill.resume is not False:
        agree_on_step(session, result)
    return result


def _host_share(
    rank: int, header: Header, partition: Partition, whole: Sequence[NamedLayer], session: Session
) -> float:
    """A rank's share of the host's memory: as of the weights that the ranks of its machine spill."""

    def spilled_bytes(of: int) -> int:
        stages = [stage for stage in header.stages_of(of) if header.is_spilled(stage)]
        layers = [whole[layer].module for stage in stages for layer in partition.stages[stage].layers]
        return sum(p.nbytes for p in {id(p): p for layer in layers for p in layer.parameters()}.values())

    first, count = 0, header.num_ranks
    if session.is_distributed:
        first = rank - int(os.environ.get("LOCAL_RANK", rank))
        count = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    total = sum(spilled_bytes(of) for of in range(first, first + count))
    return spilled_bytes(rank) / total if total else 1.0


def _shared(part: dict[int, list[NamedLayer]], ties: dict[str, Tie]) -> set[int]:
    """Parameters that stay on the device because several stages use them."""
    users: Counter[int] = Counter()
    tied: set[int] = set()
    for layers in part.values():
        users.update({id(p) for layer in layers for p in layer.module.parameters()})
        for layer in layers:
            tied.update(id(p) for name, p in layer.module.named_parameters(prefix=layer.prefix) if name in ties)
    return tied | {parameter for parameter, count in users.items() if count > 1}
