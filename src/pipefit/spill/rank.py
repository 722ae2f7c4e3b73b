"""Spilling on one rank: its tier, its slots, the stores of its spilled stages, and the steps that are committed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.errors import InfeasibleError, ModelError, PlanError, TierError
from pipefit.ir.op import Kind, Op
from pipefit.ir.program import Program
from pipefit.ir.spill import SLOTTED, Spill
from pipefit.spec.options import Spilled
from pipefit.spill.arena import Arena
from pipefit.spill.lanes import Copy
from pipefit.spill.optimizer_states import StateRules, state_rules
from pipefit.spill.parked import ParkedTensors
from pipefit.spill.stage_store import SpilledStore
from pipefit.spill.tier_file import Commit
from pipefit.spill.tier_store import TierStore
from pipefit.spill.tiers import OPTIM, WEIGHTS, WGRAD
from pipefit.stage.materialise import InitialiseLayer, initialise, is_meta, stand_in
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import Training


def tier_name(rank: int) -> str:
    """The name of the files of a rank's disk tier, without suffix."""
    return f"rank-{rank}"


@dataclass(frozen=True)
class RankStages:
    """The stages of one rank, spilled or not.

    Attributes:
        rank: its number.
        layers: of each stage.
        shared: ids of the parameters that several stages use; they stay on the device.
        initialise: the model's own function to draw a layer's weights.
        run: name of the run where it is new.
    """

    rank: int
    layers: Mapping[int, list[NamedLayer]]
    shared: set[int]
    initialise: InitialiseLayer | None = None
    run: str = ""


@dataclass
class Spilling:
    """All objects of a rank for spilling, over all its programs.

    Attributes:
        stores: of its spilled stages.
        arena: the slots.
        tier: of the spilled stages.
        resumed: the commit of an earlier run from which this one resumes.
        committed: the last commit that was started.
        committed_step: its step, or that of `resumed`.
        commit_every: steps from one commit to the next; 0: none.
        writes: started since the last commit.
        parts: norms of the gradients of stages that have left the device, by update and stage.
        steps: host steps that this program has started.
        parked: activations that wait on the tier.
        resident: records of the tensors that stay on the device, as the last commit names them.
    """

    stores: dict[int, SpilledStore]
    arena: Arena
    tier: TierStore
    resumed: Commit | None = None
    committed: Copy | None = None
    committed_step: int = 0
    commit_every: int = 1
    writes: list[Copy] = field(default_factory=list)
    parts: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    steps: list[Copy] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parked = ParkedTensors(self.tier, self.arena.device)
        self.resident = ParkedTensors(self.tier, torch.device("cpu"), is_scratch=False)

    @classmethod
    def create(
        cls, stages: RankStages, program: Program, training: Training, device: torch.device, where: Spilled
    ) -> Spilling:
        """Moves the spilled stages of a rank to their tier, one after the other.

        Layers of the meta device get their weights in a slot, so that never more than a slot of them is in memory.

        Args:
            stages: of the rank.
            program: one of those that will run; its header names the spilled stages.
            training: its optimizer and seed.
            device: of the rank.
            where: the options of spilling.

        Raises:
            PipefitError: the tier has not enough room, or the optimizer cannot be spilled.
        """
        header, spill = program.header, program.header.spill
        assert spill is not None
        layers = {stage: stages.layers[stage] for stage in spill.stages if stage in stages.layers}
        drawn = {stage for stage, own in layers.items() if is_meta(own)}
        for stage in drawn:
            weights = [p for layer in layers[stage] for p in layer.module.parameters()]
            if any(p.is_meta and id(p) in stages.shared for p in weights):
                raise ModelError(
                    "a model built on the meta device cannot be spilled with weights that several stages share: untie "
                    "them (for gpt: tied=False), or build it in memory"
                )
            stand_in(layers[stage], partial(make_stand_in, device=device))
        if spill.optim_slots:
            rules = state_rules(training.optimizer, device)
        else:
            rules = StateRules()
        stores = {s: SpilledStore(s, own, stages.shared, training, header, rules, device) for s, own in layers.items()}
        arena = make_arena(stores.values(), spill, device)
        if spill.tier == "disk":
            folder = where.folder
        else:
            folder = None
        if folder is None and spill.tier == "disk":
            raise PlanError("the plan spills to disk: name a folder by --disk FOLDER or spill=Spilled(disk=FOLDER)")
        tier = TierStore(folder, tier_name(stages.rank), device=device, host_bytes=where.host_bytes, run=stages.run)
        spilling = cls(stores, arena, tier)
        try:
            spilling.make_room(program, stages.rank, where)
        except TierError:
            tier.close()
            raise
        resumed = spilling.resumed
        for number, (stage, store) in enumerate(stores.items()):
            store.attach(arena, tier)
            if stage in drawn:
                fill = partial(initialise, layers[stage], training.seed, stages.initialise)
            else:
                fill = None
            store.store_first(number % spill.weights_slots, fill, resumed.version(stage) if resumed else None)
        return spilling

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
        sizes = {key: size for store in self.stores.values() for key, size in store.sizes().items()}
        scratch = {key: size for key, size in sizes.items() if key.kind == WGRAD and key.stage in written}
        kept = {key: size for key, size in sizes.items() if key.kind != WGRAD}
        if where.resume is False:
            self.tier.reserve({**kept, **scratch}, sizes if where.commit_every == 0 else scratch, where.about or None)
            return
        if self.tier.files is None:
            raise TierError("a run resumes only from records on a disk; resume from a checkpoint")
        self.resumed = self.tier.recover(None if where.resume is True else where.resume)
        found = {key: size for key, size in self.tier.sizes.items() if key.kind in (WEIGHTS, OPTIM)}
        if found != kept:
            key = next(key for key in {**found, **kept} if found.get(key) != kept.get(key))
            was, needed = (f"{sizes[key]} bytes" if key in sizes else "none" for sizes in (found, kept))
            raise TierError(f"{where.folder}: {key}: its record has {was}, this run's {needed}: it is of another run")
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
        steps, self.steps = self.steps, []
        for step in steps:
            # The optimizers' states may be read between two programs.
            step.wait()
        self.settle()

    def is_commit_due(self, step: int) -> bool:
        """Returns whether a step is to be committed."""
        return 0 < self.commit_every <= step - self.committed_step

    def check_writes(self) -> None:
        """Checks the writes that have ended, where a step is not committed.

        Raises:
            TierError: one of them has failed.
        """
        ended = [copy for copy in self.writes if copy.ended()]
        self.writes = [copy for copy in self.writes if copy not in ended]
        for copy in ended:
            copy.wait()

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


def make_arena(stores: Iterable[SpilledStore], spill: Spill, device: torch.device) -> Arena:
    """The slots of a rank, each as large as the largest record of its kind.

    Raises:
        InfeasibleError: they do not fit on the device.
    """
    largest = dict.fromkeys(SLOTTED, 0)
    for store in stores:
        for key, size in store.sizes().items():
            if key.kind != OPTIM or not store.on_host:
                largest[key.kind] = max(largest[key.kind], size)
    try:
        return Arena(largest, {kind: spill.slots(kind) for kind in SLOTTED}, device)
    except (RuntimeError, MemoryError) as problem:
        raise InfeasibleError(f"{device} has no room for the slots of the largest stage: {problem}") from None


def make_stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """The stand-in for a tensor of the meta device: no memory for a weight; memory without values for a buffer."""
    if isinstance(tensor, nn.Parameter):
        return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
