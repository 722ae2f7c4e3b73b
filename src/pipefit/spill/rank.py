"""Spilling on one rank: its tier, its slots, the stores of its spilled stages, and the steps that are committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.errors import InfeasibleError, ModelError, PipefitError, PlanError, TierError
from pipefit.ir.op import Kind, Op
from pipefit.ir.program import Program
from pipefit.ir.spill import SLOTTED, Spill
from pipefit.spec.options import Spilled
from pipefit.spill.arena import Arena
from pipefit.spill.lanes import Copy
from pipefit.spill.optimizer_states import StateRules, is_zero_at_first, numbers_outside
from pipefit.spill.parked import ParkedTensors
from pipefit.spill.stage_store import SpilledStore
from pipefit.spill.tier_file import Commit
from pipefit.spill.tier_store import TierStore
from pipefit.spill.tiers import OPTIM, WEIGHTS, WGRAD, Key
from pipefit.stage.accelerator import CPU
from pipefit.stage.materialise import InitialiseLayer, initialise, is_meta, stand_in
from pipefit.stage.split import NamedLayer, joined
from pipefit.stage.ties import shared_parameters
from pipefit.stage.training import Tie, Training


def tier_name(rank: int) -> str:
    """The name of the files of a rank's disk tier, without suffix."""
    return f"rank-{rank}"


def open_tier(rank: int, spill: Spill, where: Spilled, device: torch.device, run: str) -> TierStore:
    """The tier of a rank.

    Args:
        rank: its number.
        spill: names the tier.
        where: its folder and its memory.
        device: of the rank.
        run: name of the run where it is new.

    Raises:
        PipefitError: there is no folder, or it cannot be used.
    """
    folder = None
    if spill.tier == "disk":
        folder = where.folder
        if folder is None:
            raise PlanError("the plan spills to disk: name a folder by --disk FOLDER or spill=Spilled(disk=FOLDER)")
    return TierStore(folder, tier_name(rank), device=device, host_bytes=where.host_bytes, run=run)


@dataclass(frozen=True)
class RankStages:
    """The stages of one rank, spilled or not.

    Attributes:
        rank: its number.
        layers: of each stage.
        ties: all tied parameters of the model.
        initialise: the model's own function to draw a layer's weights.
    """

    rank: int
    layers: Mapping[int, list[NamedLayer]]
    ties: Mapping[str, Tie]
    initialise: InitialiseLayer | None = None


@dataclass
class Spilling:
    """All objects of a rank for spilling, over all its programs.

    Attributes:
        spill: the shape of its programs.
        stores: of its spilled stages.
        tier: of the spilled stages.
        device: of the slots.
        arena: the slots; without memory until `take_slots`.
        has_slots: whether they have memory.
        resumed: the commit of an earlier run from which this one resumes.
        committed: the last commit that was started.
        committed_step: its step, or that of `resumed`.
        commit_every: steps from one commit to the next; 0: none.
        writes: started since the last commit.
        parts: tensors of norms of the gradients of stages that have left the device, by update and stage.
        steps: host steps that this program has started.
        parked: activations that wait on the tier.
        resident: records of the tensors that stay on the device, as the last commit names them.
    """

    spill: Spill
    stores: dict[int, SpilledStore]
    tier: TierStore
    device: torch.device
    arena: Arena = field(init=False)
    has_slots: bool = field(default=False, init=False)
    resumed: Commit | None = None
    committed: Copy | None = None
    committed_step: int = 0
    commit_every: int = 1
    writes: list[Copy] = field(default_factory=list)
    parts: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    steps: list[Copy] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parked = ParkedTensors(self.tier, self.device)
        self.resident = ParkedTensors(self.tier, CPU, is_scratch=False)
        self.free_slots()

    @classmethod
    def create(
        cls,
        stages: RankStages,
        program: Program,
        training: Training,
        device: torch.device,
        open_tier: Callable[[], TierStore],
        where: Spilled | None,
    ) -> Spilling:
        """Moves the spilled stages of a rank to their tier, one after the other.

        Layers of the meta device get their weights in a slot, so that never more than a slot of them is in memory.

        Args:
            stages: of the rank.
            program: one of those that will run; its header names the spilled stages.
            training: its optimizer and seed.
            device: of the rank.
            open_tier: opens the tier, when it is known that the stages can be spilled.
            where: the options of spilling; None: the tier holds the weights of a commit, and nothing is moved.

        Raises:
            PipefitError: the tier has not enough room, or the optimizer cannot be spilled.
        """
        header, spill = program.header, program.header.spill
        assert spill is not None
        layers = {stage: stages.layers[stage] for stage in spill.stages if stage in stages.layers}
        drawn = {stage for stage, own in layers.items() if is_meta(own)}
        if where is not None:
            _check_drawn([layers[stage] for stage in drawn], shared_parameters(stages.layers, stages.ties))
        every = [layer for own in layers.values() for layer in own]
        stand_in(every, partial(make_stand_in, device=device))
        shared = shared_parameters(stages.layers, stages.ties)
        rules = StateRules()
        if spill.optim_slots:
            rules = StateRules(is_zero_at_first(training.optimizer), numbers_outside(training.optimizer, device))
        stores = {
            stage: SpilledStore(stage, own, shared, training, header, rules, device) for stage, own in layers.items()
        }
        spilling = cls(spill, stores, open_tier(), device)
        if where is None:
            for store in stores.values():
                store.hold(0)
            return spilling
        try:
            spilling.make_room(program, stages.rank, where)
            spilling.take_slots()
        except PipefitError:
            spilling.close()
            raise
        for number, (stage, store) in enumerate(stores.items()):
            fill = held = None
            if stage in drawn:
                fill = partial(initialise, layers[stage], training.seed, stages.initialise)
            if spilling.resumed is not None:
                held = spilling.resumed.version(stage)
            store.store_first(number % spill.weights_slots, fill, held)
        return spilling

    def take_slots(self) -> None:
        """Allocates the slots on the device, each as large as the largest record of its kind, if there are none.

        Raises:
            InfeasibleError: they do not fit on the device.
        """
        if self.has_slots:
            return
        largest = dict.fromkeys(SLOTTED, 0)
        for store in self.stores.values():
            for kind, size in store.sizes.items():
                if kind != OPTIM or not store.on_host:
                    largest[kind] = max(largest[kind], size)
        counts = {kind: self.spill.slots(kind) for kind in SLOTTED}
        try:
            self._attach(Arena(largest, counts, self.device))
        except (RuntimeError, MemoryError) as problem:
            raise InfeasibleError(f"{self.device} has no room for the slots of the largest stage: {problem}") from None
        self.has_slots = True

    def free_slots(self) -> None:
        """Releases the memory of the slots; the tier holds what was in them."""
        self._attach(Arena({}, {}, self.device))
        self.has_slots = False

    def close(self) -> None:
        """Ends all copies; the slots are freed when nobody has them any more."""
        self.tier.close()
        for store in self.stores.values():
            store.let_go()

    def _attach(self, arena: Arena) -> None:
        self.arena = arena
        for store in self.stores.values():
            store.attach(arena, self.tier)

    def make_room(self, program: Program, rank: int, where: Spilled) -> None:
        """Reserves room for the records of a rank, or restores the commit of an earlier run.

        Args:
            program: determines the stages whose gradients are written to the tier.
            rank: of the stages.
            where: determines whether the run resumes, and commits.

        Raises:
            TierError: there is not enough room, or nothing to resume from.
        """
        written = {i.stage for i in program.ranks[rank] if i.op is Op.EVICT and i.kind == Kind.WGRAD}
        scratch = {}
        kept = {}
        for stage, store in self.stores.items():
            for kind, size in store.sizes.items():
                if kind != WGRAD:
                    kept[Key(stage, kind)] = size
                elif stage in written:
                    scratch[Key(stage, kind)] = size
        if where.resume is False:
            every = kept | scratch
            self.tier.reserve(every, every if where.commit_every == 0 else scratch, where.about or None)
            return
        if self.tier.files is None:
            raise TierError("a run resumes only from records on a disk; resume from a checkpoint")
        self.resumed = self.tier.recover(None if where.resume is True else where.resume)
        found = {key: size for key, size in self.tier.sizes.items() if key.kind in (WEIGHTS, OPTIM)}
        if found != kept:
            key = next(key for key in found | kept if found.get(key) != kept.get(key))
            sizes_differ = f"its record has {found.get(key, 0)} bytes, this run's {kept.get(key, 0)}"
            raise TierError(f"{where.folder}: {key}: {sizes_differ}: it is of another run")
        self.tier.reserve_more(scratch)

    def resume_from(self, step: int) -> None:
        """Before the first program: restores the records of a step that is not after the one that was found.

        Raises:
            TierError: they are damaged.
        """
        assert self.resumed is not None
        if step < self.resumed.step:
            self.resumed = self.tier.recover(step)
        self.tier.resume_from(self.resumed)
        self.committed_step = self.resumed.step
        for stage, store in self.stores.items():
            store.hold(self.resumed.version(stage))

    def end_pass(self) -> None:
        """Ends a program.

        Raises:
            TierError: the commit of the program before has failed.
        """
        self.parts.clear()
        self.parked.end_pass()
        steps, self.steps = self.steps, []
        for step in steps:
            # The optimizers' states may be read between two programs.
            step.wait()
        self.settle()

    def is_commit_due(self, step: int) -> bool:
        """Returns whether a step is to be committed."""
        return 0 < self.commit_every <= step - self.committed_step

    def check_writes(self) -> None:
        """Checks the writes that were launched, where a step is not committed.

        Raises:
            TierError: one of them has failed.
        """
        started, self.writes = self.writes, []
        for copy in started:
            if copy.is_launched():
                copy.launched()
            else:
                self.writes.append(copy)

    def commit(self, step: int, state: Mapping[str, Any]) -> None:
        """Starts to commit a step with all its written records.

        Args:
            step: weight updates done.
            state: JSON data: the other state that is needed to resume.
        """
        self.committed = self.tier.commit(step, state, self.writes)
        self.committed_step = step
        self.writes = []

    def settle(self) -> None:
        """Waits until the last commit that was started has ended.

        Raises:
            TierError: the tier has failed.
        """
        if self.committed is not None:
            committed, self.committed = self.committed, None
            committed.wait()


def _check_drawn(drawn: Iterable[Sequence[NamedLayer]], shared: set[int]) -> None:
    """Refuses weights that are drawn in a slot, and would have to stay on the device.

    Raises:
        ModelError: several stages share one of them.
    """
    weights = joined(layer for layers in drawn for layer in layers).parameters()
    if any(weight.is_meta and id(weight) in shared for weight in weights):
        raise ModelError(
            "a model built on the meta device cannot be spilled with weights that several stages share: untie "
            "them (for gpt: tied=False), or build it in memory"
        )


def make_stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """The stand-in for a tensor of the meta device: no memory for a weight; memory without values for a buffer."""
    if isinstance(tensor, nn.Parameter):
        return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
