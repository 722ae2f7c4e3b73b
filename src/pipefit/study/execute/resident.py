"""The part of a trial's state that no record of its spilled shards holds: small, and on the device while a shard works.

That is buffers, sums of batch norms, weights that several shards use (with gradients and optimizer states), and the
numbers of optimizers and learning-rate schedules. Of each shard it is one safetensors file in memory, which waits on
the tier between turns like any other tensor. A weight or buffer of several shards belongs to the first of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from pipefit.checkpoint.manifest import Optimization
from pipefit.checkpoint.optim import OPTIM, by_parameter, optimization_of, optimizer_tensors, restore_optimizer
from pipefit.runtime.worker import Worker
from pipefit.stage.split import NamedLayer

_NUMBERS, _SUMS, _OWN, _GRADIENT = "numbers", "sums/", "own/", "gradient/"


class _Numbers(msgspec.Struct, frozen=True):
    """The part of a shard's state that is no tensor.

    Attributes:
        optimization: of its optimizer and learning-rate schedule; empty where nothing trains.
        known: states that its optimizer has made.
    """

    optimization: list[Optimization]
    known: list[int] = []


def shared_parameters(layers: Mapping[int, Sequence[NamedLayer]]) -> set[int]:
    """Ids of the parameters that layers of several shards use."""
    users = Counter(key for own in layers.values() for key in {id(p) for x in own for p in x.module.parameters()})
    return {key for key, count in users.items() if count > 1}


class ResidentState:
    """Packs the resident state of shards, and restores it.

    Args:
        worker: that has all shards of the trial as its stages.
        shared: ids of the parameters that several shards use.

    Attributes:
        homes: of each shard, those whose resident state it needs: itself, and the owners of what it shares.
        is_shared: whether there are weights that several shards use.
    """

    def __init__(self, worker: Worker, shared: set[int]) -> None:
        assert worker.spilling is not None
        self._worker, self._stores = worker, worker.spilling.stores
        self.is_shared = bool(shared)
        self.homes = {stage: {stage} for stage in worker.stages}
        self._own: dict[int, dict[str, tuple[nn.Module, str]]] = {stage: {} for stage in worker.stages}
        first: dict[object, int] = {}
        for stage in worker.stages:
            for module, key, name, tensor in _tensors(worker.stages[stage].layers):
                if isinstance(tensor, nn.Parameter) and id(tensor) not in shared:
                    continue
                what: object = id(tensor) if isinstance(tensor, nn.Parameter) else (id(module), key)
                self.homes[stage].add(first.get(what, stage))
                if what not in first:
                    first[what] = stage
                    self._own[stage][name] = module, key

    def pack(self, stage: int) -> bytes:
        """The resident state of a shard whose records are all on the tier."""
        worker, store = self._worker, self._stores[stage]
        tensors: dict[str, Tensor | None] = {}
        for name, (module, key) in self._own[stage].items():
            tensor = getattr(module, key)
            tensors |= {_OWN + name: tensor.detach(), _GRADIENT + name: tensor.grad}
        for place, norm in enumerate(worker.stages[stage].batchnorms):
            tensors[f"{_SUMS}{place}"] = norm.gathered(0)
        states = optimizer_tensors(worker, stage, all_ties=True)
        tensors |= {name: value for name, value in states if value.data_ptr() not in store.stand_ins}
        numbers = _Numbers(optimization_of(worker, [stage]), sorted(store.states.known) if store.states else [])
        tensors[_NUMBERS] = torch.frombuffer(bytearray(msgspec.json.encode(numbers)), dtype=torch.uint8)
        # Contiguous: one that is laid out otherwise comes back in the layout that stands there.
        return save({name: t.to("cpu").contiguous() for name, t in tensors.items() if t is not None})

    @torch.no_grad()
    def unpack(self, stage: int, data: bytes) -> None:
        """Restores a shard from the result of `pack`, in this process or another."""
        worker, store = self._worker, self._stores[stage]
        tensors = load(data)
        numbers = msgspec.json.decode(tensors[_NUMBERS].numpy().tobytes(), type=_Numbers)
        for name, (module, key) in self._own[stage].items():
            tensor, gradient = getattr(module, key), tensors.get(_GRADIENT + name)
            if isinstance(tensor, nn.Parameter):
                self._place(stage, tensor, tensors[_OWN + name].to(worker.device))
                tensor.grad = None if gradient is None else gradient.to(worker.device)
            else:
                tensor.copy_(tensors[_OWN + name])
        for place, norm in enumerate(worker.stages[stage].batchnorms):
            sums = tensors.get(f"{_SUMS}{place}")
            norm._seen, norm._gathered = {}, {} if sums is None else {0: sums.to(worker.device)}
        if store.states is not None:
            store.states.known = set(numbers.known)
        if stage in worker.optimizers:
            states = by_parameter({name: t.clone for name, t in tensors.items() if name.startswith(OPTIM)})
            restore_optimizer(worker, stage, numbers.optimization, states)()

    def _place(self, stage: int, parameter: nn.Parameter, data: Tensor) -> None:
        """Makes a tensor the data of a shared weight, and of the optimizer's copy of it."""
        parameter.data = data
        for owned, master in zip(self._worker.owned[stage], self._worker.stores[stage].masters, strict=True):
            if owned.parameter is parameter:
                master.data = data

    def release(self) -> None:
        """Releases the memory of shared weights, their gradients and states, until they are unpacked again."""
        for stage, own in self._own.items():
            tensors = [getattr(module, key) for module, key in own.values()]
            shared = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
            for parameter in shared:
                self._place(stage, parameter, torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))
                parameter.grad = None
            if shared and stage in self._worker.optimizers:
                self._worker.optimizers[stage].state.clear()


def _tensors(layers: Sequence[NamedLayer]) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """(module, its key, name in the model, tensor) of all parameters and buffers of some layers."""
    for layer in layers:
        for prefix, module in layer.module.named_modules(prefix=layer.prefix):
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    yield module, key, f"{prefix}.{key}", tensor
