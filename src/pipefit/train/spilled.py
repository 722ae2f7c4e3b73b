"""Spilled training of one pipeline: from a cap on the device's memory to shards, slots and a tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from pipefit.errors import PlanError
from pipefit.ir.program import Program
from pipefit.ir.spill import Spill
from pipefit.memory.states import probe_states
from pipefit.profiling.analytic import analytic_profile
from pipefit.runtime.spilling import Spilling, SpillPlace
from pipefit.runtime.worker import MakeOptimizer, Tie, Training
from pipefit.schedules.shape import Shape
from pipefit.spec import Profile
from pipefit.spec.topology import Device
from pipefit.stage.materialise import is_meta, materialise
from pipefit.stage.split import NamedLayer
from pipefit.train.shards import ShardSizes, cut_into_shards
from pipefit.units import parse_quantity

__all__ = ["Spilled", "profile_of", "shard_counts", "sizes_of", "spilled_shape", "spillings"]


@dataclass(frozen=True)
class Spilled:
    """How a pipeline spills: `Pipeline(…, spill=Spilled("1.5 GiB", disk="/scratch"))`.

    Attributes:
        device_memory: most that training may take on the device, bytes or text like "1.5 GiB"; None: the stages are
            cut as the pipeline's other arguments say, all of them spilled.
        host_memory: most that the host tier may take; None: no limit.
        disk: folder of the disk tier; None: stages live in the host's memory.
        slots: stages whose weights and gradients are on the device at once: one computes, the others load.
        optim_slots: the same for the optimizer's states; 0: these stay on the device.
        prefetch: stages ahead that the next is loaded; None: as soon as a slot is free; 0: when it is needed.
        place: in place of `disk` and `host_memory`, for runs that share slots and lanes.
    """

    device_memory: float | str | None = None
    host_memory: float | str | None = None
    disk: str | Path | None = None
    slots: int = 2
    optim_slots: int = 1
    prefetch: int | None = None
    place: SpillPlace | None = None

    @property
    def cap_bytes(self) -> float | None:
        """The cap on the device's memory."""
        return _bytes(self.device_memory, "device_memory")

    @property
    def where(self) -> SpillPlace:
        """The tier's place."""
        if self.place is not None:
            return self.place
        host = _bytes(self.host_memory, "host_memory")
        return SpillPlace(None if self.disk is None else Path(self.disk), None if host is None else int(host))

    def of(self, num_stages: int) -> Spill:
        """As the programs know it."""
        on_host = self.disk is None and (self.place is None or self.place.folder is None)
        return Spill.of(num_stages, self.slots, self.optim_slots, "host" if on_host else "disk")


def _bytes(value: float | str | None, name: str) -> float | None:
    return None if value is None else parse_quantity(value, "bytes", name)


def spilled_shape(shape: Shape, spill: Spilled | None) -> Shape:
    """The shape of a spilled program, from that of the same one without spilling."""
    if spill is None:
        return shape
    num_stages = shape.depth * shape.num_chunks
    return msgspec.structs.replace(shape, spill=spill.of(num_stages), prefetch=spill.prefetch)


def shard_counts(
    layers: Sequence[NamedLayer],
    spill: Spilled,
    optimizer: MakeOptimizer,
    example: tuple[Any, Any] | None,
    num_microbatches: int,
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> list[int]:
    """Layers of each shard under the cap.

    Raises:
        PlanError: there is no example, from which the sizes of activations follow.
        InfeasibleError: the cap is too small; the message says the smallest that works.
    """
    assert spill.cap_bytes is not None
    if example is None:
        raise PlanError("a cap on the device's memory needs example=(input, target), one batch of data")
    profile = profile_of(layers, example, num_microbatches)
    sizes = sizes_of(layers, optimizer, bool(spill.optim_slots))
    found = cut_into_shards(profile, sizes, spill.cap_bytes, num_microbatches, spill.slots, spill.optim_slots)
    return [len(stage.layers) for stage in found.stages]


def profile_of(layers: Sequence[NamedLayer], example: tuple[Any, Any], num_microbatches: int) -> Profile:
    """Bytes of activations, worked out without running anything; its times count FLOP of a device of 1 TFLOP/s."""
    named = [(layer.prefix, layer.module) for layer in layers]
    size = -(-len(torch.utils._pytree.tree_leaves(example[0])[0]) // num_microbatches)
    device = Device(flops=1e12, efficiency=1.0)
    return analytic_profile(nn.Sequential(*(m for _, m in named)), example[0], device, microbatch_size=size)


def sizes_of(layers: Sequence[NamedLayer], optimizer: MakeOptimizer, optim: bool) -> list[ShardSizes]:
    """What each layer and its optimizer states weigh; of layers built alike one is looked at."""
    known: dict[tuple[Any, ...], ShardSizes] = {}
    found = []
    for layer in layers:
        parameters = list(layer.module.parameters())
        key = tuple((p.shape, p.dtype, p.requires_grad) for p in parameters)
        if key not in known:
            states = probe_states(optimizer, [p for p in parameters if p.requires_grad], torch.device("cpu"))
            known[key] = ShardSizes(
                sum(p.nbytes for p in parameters),
                sum(spec.like.nbytes for spec in states) if optim else 0.0,
                max((p.nbytes for p in parameters), default=0),
            )
        found.append(known[key])
    return found


def spillings(
    ranks: Sequence[int],
    parts: Sequence[dict[int, list[NamedLayer]]],
    program: Program,
    training: Training,
    ties: dict[str, Tie],
    device: torch.device,
    spill: Spilled | None,
    model: object,
) -> list[Spilling | None]:
    """The tiers of the ranks of this process; layers of the meta device get their weights, wherever they will lie."""
    own = getattr(model, "initialise_layer", None)
    result: list[Spilling | None] = []
    for rank, part in zip(ranks, parts, strict=True):
        made = None
        if spill is not None and any(program.header.is_spilled(stage) for stage in part):
            shared = _shared(part, ties)
            made = Spilling.create(rank, program, training, part, shared, device, spill.where, own)
        for stage, layers in part.items():
            if not program.header.is_spilled(stage) and is_meta(layers):
                materialise(layers, training.seed, device, own)
        result.append(made)
    return result


def _shared(part: dict[int, list[NamedLayer]], ties: dict[str, Tie]) -> set[int]:
    """Parameters that stay on the device because several stages use them."""
    users: Counter[int] = Counter()
    tied: set[int] = set()
    for layers in part.values():
        users.update({id(p) for layer in layers for p in layer.module.parameters()})
        for layer in layers:
            tied.update(id(p) for name, p in layer.module.named_parameters(prefix=layer.prefix) if name in ties)
    return tied | {parameter for parameter, count in users.items() if count > 1}
