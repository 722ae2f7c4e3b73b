"""Spilling on one rank: its tier, its slots, the stores of its spilled stages, and the steps that are committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.errors import InfeasibleError, ModelError, PlanError, TierError
from pipefit.ir.op import Kind, Op
from pipefit.ir.program import Header, Program
from pipefit.ir.spill import SLOTTED
from pipefit.ir.values import OPTIM
from pipefit.parallel.buckets import record_layout
from pipefit.spec.sealed import FileEntry
from pipefit.spill.arena import Arena
from pipefit.spill.disk import DiskTier
from pipefit.spill.host import HostTier
from pipefit.spill.lanes import Copy, Lanes
from pipefit.spill.parked import ParkedTensors
from pipefit.spill.split_tier import SplitTier
from pipefit.spill.stage_store import SpilledStore
from pipefit.spill.states import is_zero_at_first, numbers_beside, probe_states
from pipefit.spill.tier_file import Commit
from pipefit.spill.tiers import Key, TierStore
from pipefit.stage.materialise import InitialiseLayer, initialise, is_meta, stand_in
from pipefit.stage.record_layout import Layout
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import Training

__all__ = ["SpillPlace", "Spilling", "tier_name"]


def tier_name(rank: int) -> str:
    """What the files of a rank's disk tier are called."""
    return f"rank-{rank}"


@dataclass(frozen=True)
class SpillPlace:
    """Where spilled stages live; not part of a plan, for it differs from machine to machine.

    Attributes:
        folder: of the disk tier; None: the host's memory.
        host_bytes: most that the host tier may take; with a folder, the rest lies there. None: no limit, or no host.
        direct: whether the disk is read and written past the page cache.
        about: JSON data that is kept beside the records: what they are of.
        resume: from the records in the folder; a number: from that step or one before.
        commits: whether steps will be committed to the folder.
    """

    folder: Path | None = None
    host_bytes: int | None = None
    direct: bool = True
    about: Mapping[str, Any] = field(default_factory=dict)
    resume: bool | int = False
    commits: bool = True

    @property
    def latest(self) -> int | None:
        """The last step to resume from; None: whichever it is."""
        return None if isinstance(self.resume, bool) else self.resume

    def tier(self, rank: int, kind: str, lanes: Lanes, device: torch.device) -> TierStore:
        """Opens the tier of a rank.

        Raises:
            PlanError: the plan spills to disk, and no folder is given.
            TierError: the folder cannot be used.
        """
        if kind == "host":
            return HostTier(self.host_bytes, lanes, device)
        if self.folder is None:
            raise PlanError("the plan spills to disk: say where, by --disk FOLDER or spill=Spilled(disk=FOLDER)")
        disk = DiskTier(self.folder, tier_name(rank), lanes, self.direct, device)
        disk.about = dict(self.about)
        if self.host_bytes is None:
            return disk
        return SplitTier(HostTier(None, lanes, device), disk, self.host_bytes, self.commits)


@dataclass
class Spilling:
    """What a rank keeps for spilling, between programs and over all of them.

    Attributes:
        stores: of its spilled stages.
        arena: the slots.
        tier: where the stages live.
        lanes: that copy.
        parked: activations that wait on the tier.
        resumed: what an earlier run committed, from which this one resumes.
        committed: the last commit that was asked for.
        committed_step: its step, or that of `resumed`.
        commit_every: steps from one commit to the next; 0: none.
        parts: norms of the gradients of stages that have left the device, by update and stage.
        steps: on the host, that this pass has begun.
    """

    stores: dict[int, SpilledStore]
    arena: Arena
    tier: TierStore
    lanes: Lanes
    parked: ParkedTensors
    resumed: Commit | None = None
    committed: Copy | None = None
    committed_step: int = 0
    commit_every: int = 1
    writes: list[Copy] = field(default_factory=list)
    parts: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    steps: list[Copy] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        rank: int,
        program: Program,
        training: Training,
        layers: dict[int, list[NamedLayer]],
        shared: set[int],
        device: torch.device,
        place: SpillPlace,
        own: InitialiseLayer | None = None,
    ) -> Spilling:
        """Moves the spilled stages of a rank to their tier, one after the other.

        Layers of the meta device get their weights in a slot, so that there is never more than that of them in memory.

        Args:
            rank: whose.
            program: one of those that will run.
            training: its optimizer.
            layers: of the rank's stages.
            shared: ids of the parameters that several stages use; they stay on the device.
            device: where the rank computes.
            place: where the tier is.
            own: the model's way to draw weights.

        Raises:
            PipefitError: the tier has not enough room, or the optimizer cannot be spilled.
        """
        spill = program.header.spill
        assert spill is not None
        mine = [stage for stage in spill.stages if stage in layers]
        for stage in mine:
            _stand_ins(layers[stage], shared, device)
        zero = spill.optim and is_zero_at_first(training.optimizer)
        beside = numbers_beside(training.optimizer, device) if spill.optim else {}
        stores = {s: _store(s, layers[s], shared, training, program.header, zero, device, beside) for s in mine}
        sizes = {key: size for store in stores.values() for key, size in store.sizes().items()}
        slotted = {key: size for key, size in sizes.items() if key.kind != OPTIM or not stores[key.stage].on_host}
        arena = _arena(slotted, {kind: spill.slots(kind) for kind in SLOTTED}, device)
        lanes = Lanes(device)
        tier = place.tier(rank, spill.tier, lanes, device)
        moving = {i.stage for i in program.ranks[rank] if i.op is Op.EVICT and i.kind == Kind.WGRAD}
        kept = {key: size for key, size in sizes.items() if key.kind != Kind.WGRAD or key.stage in moving}
        scratch = [key for key in kept if key.kind == Kind.WGRAD]
        try:
            resumed = _recovered(tier, kept, scratch, place) if place.resume is not False else None
            if resumed is None:
                tier.reserve(kept, scratch)
        except TierError:
            lanes.close()
            tier.close()
            raise
        for number, (stage, store) in enumerate(stores.items()):
            store.attach(arena, tier, lanes)
            fill = _filling(layers[stage], training.seed, own) if is_new(layers[stage]) else None
            store.store_first(number % spill.weights_slots, fill, resumed.version(stage) if resumed else None)
        return cls(stores, arena, tier, lanes, ParkedTensors(tier, device), resumed)

    def resume_from(self, step: int) -> None:
        """Before the first program: takes the records of a step that is not after the one that was found.

        Raises:
            TierError: they are not whole.
        """
        assert isinstance(self.tier, DiskTier | SplitTier) and self.resumed is not None
        if step < self.resumed.step:
            self.resumed = self.tier.recover(step)
        self.tier.resume_from(self.resumed)
        self.committed_step = self.resumed.step
        for stage, store in self.stores.items():
            store.hold(self.resumed.version(stage))

    def end_pass(self) -> None:
        """A program has ended.

        Raises:
            TierError: the commit of the program before has failed.
        """
        self.parts.clear()
        steps, self.steps = self.steps, []
        for step in steps:
            # What the optimizers have now may be read between two passes.
            step.wait()
        self.settle()

    @property
    def is_durable(self) -> bool:
        """Whether commits outlive the process."""
        return isinstance(self.tier, DiskTier | SplitTier)

    def is_commit_due(self, step: int) -> bool:
        """Whether a step is to be committed."""
        return 0 < self.commit_every <= step - self.committed_step

    def check_writes(self) -> None:
        """Looks at the writes that have ended, where a step is not committed.

        Raises:
            TierError: one of them has failed.
        """
        under_way = [copy for copy in self.writes if not copy.ended()]
        for copy in self.writes:
            if copy not in under_way:
                copy.wait()
        self.writes = under_way

    def commit(self, step: int, state: Mapping[str, Any], tensors: FileEntry | bytes | None = None) -> None:
        """Starts to commit a step with all that was written.

        Args:
            step: weight updates done.
            state: JSON data: what else is needed to resume from there.
            tensors: a safetensors file with more of that, or the bytes of one.
        """
        self.committed = self.tier.commit(step, state, self.writes, tensors)
        self.committed_step = step
        self.writes = []

    def settle(self) -> None:
        """Waits until the last step that was asked to is committed.

        Raises:
            TierError: the tier has failed.
        """
        if self.committed is not None:
            committed, self.committed = self.committed, None
            committed.wait()

    def close(self, discard: bool = False) -> None:
        """Ends the copies under way and lets go of the tier.

        Args:
            discard: the records are not needed any more; else a disk keeps its file.
        """
        self.lanes.close()
        if discard and isinstance(self.tier, DiskTier | SplitTier):
            self.tier.discard()
        else:
            self.tier.close()


def _recovered(tier: TierStore, kept: Mapping[Key, int], scratch: Sequence[Key], place: SpillPlace) -> Commit:
    """Goes back to what an earlier run committed; its records must be those of this one."""
    if not isinstance(tier, DiskTier | SplitTier):
        raise TierError("a run resumes only from records on a disk; resume from a checkpoint")
    found = tier.recover(place.latest)
    lasting = {key: size for key, size in kept.items() if key not in scratch}
    if tier.sizes != lasting:
        key = next(key for key in {**tier.sizes, **lasting} if tier.sizes.get(key) != lasting.get(key))
        was, wanted = (f"{sizes[key]} bytes" if key in sizes else "none" for sizes in (tier.sizes, lasting))
        raise TierError(f"{place.folder}: {key}: its record has {was}, this run's {wanted}; it is of another run")
    tier.reserve_scratch({key: kept[key] for key in scratch})
    return found


def is_new(layers: Iterable[NamedLayer]) -> bool:
    """Whether layers that were built on the meta device still wait for their weights."""
    return any(getattr(layer.module, "_pipefit_new", False) for layer in layers)


def _stand_ins(layers: list[NamedLayer], shared: set[int], device: torch.device) -> None:
    if not is_meta(layers):
        return
    if any(id(p) in shared for layer in layers for p in layer.module.parameters()):
        raise ModelError(
            "a model built on the meta device cannot be spilled with weights that several stages share: untie them "
            "(for gpt: tied=False), or build it in memory"
        )

    def make(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    stand_in(layers, make)
    for layer in layers:
        layer.module._pipefit_new = True


def _filling(layers: list[NamedLayer], seed: int, own: InitialiseLayer | None) -> Callable[[], None]:
    def fill() -> None:
        for layer in layers:
            initialise(layer, seed, own)
            del layer.module._pipefit_new

    return fill


def _store(
    stage: int,
    layers: list[NamedLayer],
    shared: set[int],
    training: Training,
    header: Header,
    zero: bool,
    device: torch.device,
    beside: Mapping[str, Tensor],
) -> SpilledStore:
    found = {id(p): p for layer in layers for p in layer.module.parameters()}
    trained = [p for p in found.values() if p.requires_grad]
    frozen = [p for p in found.values() if not p.requires_grad]
    sharing = [p for p in trained if id(p) in shared]
    on_host = header.steps_on_host(stage)
    if on_host and sharing:
        raise ModelError(
            f"stage {stage} shares a weight with another, which stays on the device: it cannot step on the host"
        )
    place = torch.device("cpu") if on_host else device
    states = None if header.keeps_states(stage) else probe_states(training.optimizer, trained, place)
    numbers = {} if on_host else beside
    # Replicas sum them bucket by bucket, where they lie.
    gradients = _bucketed if len(header.placement[stage]) > 1 else Layout
    return SpilledStore(stage, trained, sharing, frozen, states, zero, device, on_host, numbers, gradients)


def _bucketed(parameters: Sequence[Tensor]) -> Layout:
    """The layout of gradients that replicas sum."""
    return record_layout(parameters)[1]


def _arena(sizes: dict[Key, int], counts: dict[str, int], device: torch.device) -> Arena:
    largest = {kind: max((size for key, size in sizes.items() if key.kind == kind), default=0) for kind in counts}
    try:
        return Arena(largest, counts, device)
    except (RuntimeError, MemoryError) as problem:
        raise InfeasibleError(f"{device} has no room for the slots of the largest stage: {problem}") from None
