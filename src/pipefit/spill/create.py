"""Moving the spilled stages of a rank to their tier before the first program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pipefit.errors import InfeasibleError, ModelError, TierError
from pipefit.ir.op import Kind, Op
from pipefit.ir.program import Header, Program
from pipefit.ir.spill import SLOTTED, Spill
from pipefit.spill.arena import Arena
from pipefit.spill.disk import DiskTier
from pipefit.spill.lanes import Lanes
from pipefit.spill.optimizer_states import StateRules, probe_states, state_rules
from pipefit.spill.parked import ParkedTensors
from pipefit.spill.rank import Spilling, SpillPlace
from pipefit.spill.split_tier import SplitTier
from pipefit.spill.stage_store import SpilledStore
from pipefit.spill.tier_file import Commit
from pipefit.spill.tiers import OPTIM, WGRAD, TierStore
from pipefit.stage.materialise import InitialiseLayer, initialise, is_meta, stand_in
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import Training


@dataclass(frozen=True)
class RankStages:
    """The stages of one rank, spilled or not.

    Attributes:
        rank: its number.
        layers: of each stage.
        shared: ids of the parameters that several stages use; they stay on the device.
        initialise: the model's own way to draw a layer's weights.
    """

    rank: int
    layers: Mapping[int, list[NamedLayer]]
    shared: set[int]
    initialise: InitialiseLayer | None = None


def create_spilling(
    stages: RankStages, program: Program, training: Training, device: torch.device, place: SpillPlace
) -> Spilling:
    """Moves the spilled stages of a rank to their tier, one after the other.

    Layers of the meta device get their weights in a slot, so that there is never more than that of them in memory.

    Args:
        stages: of the rank.
        program: one of those that will run; it says which stages are spilled.
        training: its optimizer and seed.
        device: where the rank computes.
        place: where the tier is.

    Raises:
        PipefitError: the tier has not enough room, or the optimizer cannot be spilled.
    """
    header, spill = program.header, program.header.spill
    assert spill is not None
    layers = {stage: stages.layers[stage] for stage in spill.stages if stage in stages.layers}
    drawn = {stage for stage, own in layers.items() if is_meta(own)}
    for stage in drawn:
        if any(id(p) in stages.shared for layer in layers[stage] for p in layer.module.parameters()):
            raise ModelError(
                "a model built on the meta device cannot be spilled with weights that several stages share: untie them "
                "(for gpt: tied=False), or build it in memory"
            )
        stand_in(layers[stage], partial(make_stand_in, device=device))
    rules = state_rules(training.optimizer, device) if spill.optim else StateRules()
    stores = {s: make_store(s, own, stages.shared, training, header, rules, device) for s, own in layers.items()}
    arena = make_arena(stores.values(), spill, device)
    written = {i.stage for i in program.ranks[stages.rank] if i.op is Op.EVICT and i.kind == Kind.WGRAD}
    lanes = Lanes(device)
    tier = place.open(stages.rank, spill.tier, lanes, device)
    try:
        resumed = _make_room(tier, stores.values(), written, place)
    except TierError:
        lanes.close()
        tier.close()
        raise
    for number, (stage, store) in enumerate(stores.items()):
        store.attach(arena, tier, lanes)
        fill = partial(draw, layers[stage], training.seed, stages.initialise) if stage in drawn else None
        store.store_first(number % spill.weights_slots, fill, resumed.version(stage) if resumed else None)
    return Spilling(stores, arena, tier, lanes, ParkedTensors(tier, device), resumed)


def make_store(
    stage: int,
    layers: Sequence[NamedLayer],
    shared: set[int],
    training: Training,
    header: Header,
    rules: StateRules,
    device: torch.device,
) -> SpilledStore:
    """The store of one spilled stage.

    Args:
        stage: its number.
        layers: of the stage.
        shared: ids of the parameters that several stages use.
        training: its optimizer.
        header: of the program; it says where the stage steps, and whether its optimizer's states move.
        rules: of the optimizer.
        device: where the rank computes.

    Raises:
        ModelError: it cannot step on the host, or its optimizer cannot be spilled.
    """
    parameters = list({id(p): p for layer in layers for p in layer.module.parameters()}.values())
    on_host = header.steps_on_host(stage)
    if on_host and any(id(p) in shared and p.requires_grad for p in parameters):
        raise ModelError(
            f"stage {stage} shares a weight with another, which stays on the device: it cannot step on the host"
        )
    states = None
    if not header.keeps_states(stage):
        trained = [p for p in parameters if p.requires_grad]
        states = probe_states(training.optimizer, trained, torch.device("cpu") if on_host else device)
    if on_host:
        rules = rules._replace(numbers={})
    is_replicated = len(header.placement[stage]) > 1
    return SpilledStore(stage, parameters, shared, states, rules, device, on_host, is_replicated)


def make_arena(stores: Iterable[SpilledStore], spill: Spill, device: torch.device) -> Arena:
    """The slots of a rank, each as large as the largest record of its kind.

    Raises:
        InfeasibleError: the device has no room for them.
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


def _make_room(tier: TierStore, stores: Iterable[SpilledStore], written: set[int], place: SpillPlace) -> Commit | None:
    """Takes room for the records of a rank, or takes up what an earlier run committed, which is returned.

    Args:
        tier: of the rank.
        stores: of its stages.
        written: stages whose gradients go to the tier.
        place: says whether the run resumes.
    """
    sizes = {key: size for store in stores for key, size in store.sizes().items()}
    scratch = [key for key in sizes if key.kind == WGRAD and key.stage in written]
    committed = {key: size for key, size in sizes.items() if key.kind != WGRAD}
    if place.resume is False:
        tier.reserve({key: size for key, size in sizes.items() if key in committed or key in scratch}, scratch)
        return None
    if not isinstance(tier, DiskTier | SplitTier):
        raise TierError("a run resumes only from records on a disk; resume from a checkpoint")
    found = tier.recover(None if place.resume is True else place.resume)
    if tier.sizes != committed:
        key = next(key for key in {**tier.sizes, **committed} if tier.sizes.get(key) != committed.get(key))
        was, needed = (f"{sizes[key]} bytes" if key in sizes else "none" for sizes in (tier.sizes, committed))
        raise TierError(f"{place.folder}: {key}: its record has {was}, this run's {needed}; it is of another run")
    tier.reserve_scratch({key: sizes[key] for key in scratch})
    return found


def make_stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """In place of a tensor of the meta device: a weight's has no memory; a buffer's has, with no values yet."""
    if isinstance(tensor, nn.Parameter):
        return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def draw(layers: Sequence[NamedLayer], seed: int, own: InitialiseLayer | None) -> None:
    """Draws the first weights of a stage where they are now; see `initialise`."""
    for layer in layers:
        initialise(layer, seed, own)
