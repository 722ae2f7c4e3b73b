"""A model whose shards come and go: structure without memory, and the tensors of one shard bound into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from pipefit.checkpoint.manifest import Optimization
from pipefit.checkpoint.optim import OPTIM, optimization_of, optimizer_tensors, restore_optimizer
from pipefit.errors import ModelError
from pipefit.runtime.worker import Worker
from pipefit.spec import Partition
from pipefit.stage.split import NamedLayer
from pipefit.stage.stage import Stage
from pipefit.stage.ties import tied_groups
from pipefit.stage.training import Owned, Training
from pipefit.stage.weights import WeightStore
from pipefit.study.execute.records import Record

__all__ = ["BUFFER", "Shard", "Structure"]

BUFFER = "buffer/"


class _Place(NamedTuple):
    """Where a tensor hangs in a module; `name` is its first name in the whole model."""

    module: nn.Module
    key: str
    name: str
    trains: bool


class Structure:
    """The layers of a model cut into shards.

    A weight that several shards use lives with the first of them, which trains it; the others borrow it, and leave
    their part of its gradient to the first.

    Attributes:
        layers: of each shard.
        num_shards: how many there are.
        aliases: further names of weights, with the name they live under.
        shares_modules: whether two shards have a module in common: then only one of them can be on a device.
    """

    def __init__(self, layers: Sequence[NamedLayer], partition: Partition) -> None:
        tied_groups(layers, partition)  # refuses shards that share a batch norm
        self.layers = [[layers[index] for index in stage.layers] for stage in partition.stages]
        self.num_shards = len(self.layers)
        self.aliases: dict[str, str] = {}
        self._home: dict[str, int] = {}
        self._parameters: list[list[_Place]] = []
        self._buffers: list[list[_Place]] = []
        first: dict[int, str] = {}
        for shard, own in enumerate(self.layers):
            self._parameters.append([])
            self._buffers.append([])
            for layer in own:
                self._look(shard, layer, first)
        modules = [{id(m) for layer in own for m in layer.module.modules()} for own in self.layers]
        self.shares_modules = len(set().union(*modules)) < sum(map(len, modules))

    def _look(self, shard: int, layer: NamedLayer, first: dict[int, str]) -> None:
        for prefix, module in layer.module.named_modules(prefix=layer.prefix):
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                full = f"{prefix}.{key}"
                name = first.setdefault(id(parameter), full)
                if name != full:
                    self.aliases[full] = name
                self._home.setdefault(name, shard)
                self._parameters[shard].append(_Place(module, key, name, parameter.requires_grad))
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    self._buffers[shard].append(_Place(module, key, f"{prefix}.{key}", False))

    def own(self, shard: int) -> list[str]:
        """The names of the parameters that live with a shard."""
        return list(dict.fromkeys(p.name for p in self._parameters[shard] if self._home[p.name] == shard))

    def borrowed(self, shard: int) -> dict[str, int]:
        """The names of those it borrows, with the shard they live with."""
        homes = {place.name: self._home[place.name] for place in self._parameters[shard]}
        return {name: home for name, home in homes.items() if home != shard}

    def next_above(self, shard: int) -> dict[str, int]:
        """For each weight of a shard that shards above use too, the nearest of these: whose gradients come before."""
        users: dict[str, list[int]] = {}
        for other, places in enumerate(self._parameters):
            for place in places:
                users.setdefault(place.name, []).append(other)
        mine = {place.name for place in self._parameters[shard] if place.trains}
        above = {name: [other for other in users[name] if other > shard] for name in mine}
        return {name: min(others) for name, others in above.items() if others}

    def tensors(self, shard: int) -> dict[str, Tensor]:
        """Weights and buffers that live with a shard, as they are bound now."""
        places = {p.name: p for p in self._parameters[shard] if self._home[p.name] == shard}
        found: dict[str, Tensor] = {name: p.module._parameters[p.key] for name, p in places.items()}
        return {name: value.detach() for name, value in found.items()} | self.buffers(shard)

    def buffers(self, shard: int) -> dict[str, Tensor]:
        """The buffers of a shard, under names that no parameter has."""
        return {BUFFER + p.name: p.module._buffers[p.key] for p in self._buffers[shard]}

    def bind(self, shard: int, tensors: Mapping[str, Tensor]) -> None:
        """Makes tensors the weights and buffers of a shard; nothing is copied.

        Raises:
            ModelError: one is missing: the model is not built alike each time.
        """
        made: dict[str, nn.Parameter] = {}
        try:
            for place in self._parameters[shard]:
                if place.name not in made:
                    made[place.name] = nn.Parameter(tensors[place.name], requires_grad=place.trains)
                setattr(place.module, place.key, made[place.name])
            for place in self._buffers[shard]:
                place.module._buffers[place.key] = tensors[BUFFER + place.name]
        except KeyError as problem:
            missing = f"{problem} is not in the trial's state"
            raise ModelError(f"{missing}: the factory must build the same model each time") from None

    def release(self, shard: int) -> None:
        """Lets go of the memory of a shard."""
        self.bind(shard, {p.name: _nothing(p.module._parameters[p.key]) for p in self._parameters[shard]}
                  | {BUFFER + p.name: _nothing(p.module._buffers[p.key]) for p in self._buffers[shard]})  # fmt: skip

    def state(self, shard: int) -> dict[str, Tensor]:
        """What a shard's own `state_dict` holds as it is bound now, under the user's names."""
        return {
            name: value
            for layer in self.layers[shard]
            for name, value in layer.module.state_dict(prefix=f"{layer.prefix}.").items()
        }

    def state_names(self, shard: int) -> Iterator[tuple[str, str]]:
        """(the user's name, where it lies) of what a shard's own `state_dict` holds."""
        for name in self.state(shard):
            yield name, self.aliases.get(name, name)

    @property
    def num_parameters(self) -> int:
        """Each counted once."""
        sizes = {p.name: p.module._parameters[p.key].numel() for own in self._parameters for p in own}
        return sum(sizes.values())


def _nothing(tensor: Any) -> Tensor:
    return torch.empty_like(tensor, device="meta")


class Shard:
    """One shard on the device: what the executor calls a rank that has just this stage.

    Attributes:
        worker: with the stage, its weights' store and its optimizer.
        borrowed: weights that live with another shard, by the name they have there.
        num_bytes: of weights, gradients and states.
    """

    def __init__(
        self,
        structure: Structure,
        index: int,
        training: Training,
        device: torch.device,
        record: Record,
        borrowed: Mapping[str, Tensor],
    ) -> None:
        self.structure, self.index = structure, index
        named = {n: t.to(device) for n, t in (record.tensors | dict(borrowed)).items() if not n.startswith(OPTIM)}
        structure.bind(index, named)
        stage = Stage(index, structure.layers[index], device, training.seed)
        self.worker = Worker(0, training, device, {index: stage}, {})
        trained = [(name, p) for name, p in stage.named_parameters() if p.requires_grad]
        foreign = structure.borrowed(index)
        self.borrowed = {self.home_name(n): p for n, p in trained if self.home_name(n) in foreign}
        mine = [(name, p) for name, p in trained if self.home_name(name) not in foreign]
        self.worker.owned[index] = [Owned(name, parameter, None) for name, parameter in mine]
        self.worker.stores[index] = store = WeightStore([parameter for _, parameter in mine])
        if mine:
            self.worker.optimizers[index] = optimizer = training.optimizer(store.masters)
            if training.scheduler:
                self.worker.schedulers[index] = training.scheduler(optimizer)
            self._restore(record)
        self.num_bytes = sum(4 * t.nbytes for t in named.values())
        self._marks = self._buffer_marks()

    def home_name(self, name: str) -> str:
        """The name under which a parameter lives."""
        return self.structure.aliases.get(name, name)

    def _restore(self, record: Record) -> None:
        saved = record.extra.get("optimization")
        if not saved:
            return
        states: dict[str, dict[str, Any]] = {}
        for name, tensor in record.tensors.items():
            if name.startswith(OPTIM):
                parameter, _, key = name.removeprefix(OPTIM).rpartition("/")
                states.setdefault(parameter, {})[key] = lambda tensor=tensor: tensor
        records = [msgspec.convert(item, Optimization) for item in saved]
        restore_optimizer(self.worker, self.index, records, states)()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What its record holds: weights, buffers, optimizer; read before the next turn changes them."""
        store = self.worker.stores[self.index]
        store.rebase()
        tensors = self.structure.tensors(self.index) | dict(optimizer_tensors(self.worker, self.index))
        return tensors, {"optimization": msgspec.to_builtins(optimization_of(self.worker, [self.index]))}

    def buffers_changed(self) -> bool:
        """Whether a forward has changed a buffer since this was last asked."""
        before, self._marks = self._marks, self._buffer_marks()
        return before != self._marks

    def _buffer_marks(self) -> list[tuple[int, int]]:
        return [(id(t), t._version) for t in self.structure.buffers(self.index).values()]

    def forget(self) -> None:
        """Lets go of the memory."""
        self.structure.release(self.index)
