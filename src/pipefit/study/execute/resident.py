"""The part of a trial's state that no record of its spilled shards holds: small, and on the device while a shard works.

That is buffers, sums of batch norms, weights that several shards use (with gradients and optimizer states), and the
numbers of optimizers and learning-rate schedules. Of each shard it is one safetensors file in memory, which waits on
the tier between turns like any other tensor. A weight or buffer of several shards belongs to the first of them.
"""

from __future__ import annotations

import json
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

_HEAD = "pipefit"
_BUFFER, _SUMS, _WEIGHT, _GRADIENT = "buffer/", "sums/", "weight/", "gradient/"


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
    """

    def __init__(self, worker: Worker, shared: set[int]) -> None:
        self._worker = worker
        self._buffers: dict[int, dict[str, tuple[nn.Module, str]]] = {stage: {} for stage in worker.stages}
        self._shared: dict[int, dict[str, nn.Parameter]] = {stage: {} for stage in worker.stages}
        self._homes = {stage: {stage} for stage in worker.stages}
        first: dict[object, int] = {}
        for stage in worker.stages:
            for module, key, name, tensor in _tensors(worker.stages[stage].layers):
                is_shared = isinstance(tensor, nn.Parameter) and id(tensor) in shared
                if isinstance(tensor, nn.Parameter) and not is_shared:
                    continue
                home = first.setdefault(id(tensor) if is_shared else (id(module), key), stage)
                self._homes[stage].add(home)
                if home != stage:
                    continue
                if not isinstance(tensor, nn.Parameter):
                    self._buffers[stage][name] = module, key
                elif all(tensor is not known for known in self._shared[stage].values()):
                    self._shared[stage][name] = tensor

    def homes(self, stage: int) -> set[int]:
        """The shards whose resident state a shard needs: itself, and the owners of what it shares."""
        return self._homes[stage]

    def has_tensors(self, stage: int) -> bool:
        """Whether a forward or backward may change the state of a shard, in addition to its step."""
        return bool(self._buffers[stage] or self._shared[stage])

    def pack(self, stage: int) -> bytes:
        """The resident state of a shard whose records are all on the tier."""
        worker = self._worker
        tensors = {_BUFFER + name: module._buffers[key] for name, (module, key) in self._buffers[stage].items()}
        for place, norm in enumerate(worker.stages[stage].batchnorms):
            tensors[f"{_SUMS}{place}"] = norm.gathered(0)
        for name, parameter in self._shared[stage].items():
            tensors |= {_WEIGHT + name: parameter.detach(), _GRADIENT + name: parameter.grad}
        store = worker.spilling.stores[stage] if worker.spilling else None
        assert store is not None
        states = optimizer_tensors(worker, stage, all_ties=True)
        tensors |= {name: value for name, value in states if value.data_ptr() not in store.stand_ins}
        known = sorted(store.states.known) if store.states is not None else []
        numbers = _Numbers(optimization_of(worker, [stage]), known)
        # Contiguous: one that is laid out otherwise comes back in the layout that stands there.
        kept = {name: t.to("cpu").contiguous() for name, t in tensors.items() if t is not None}
        return save(kept, {_HEAD: msgspec.json.encode(numbers).decode()})

    @torch.no_grad()
    def unpack(self, stage: int, data: bytes) -> None:
        """Restores a shard from the result of `pack`, in this process or another."""
        worker = self._worker
        numbers = msgspec.json.decode(_metadata(data)[_HEAD], type=_Numbers)
        tensors = load(data)
        for name, (module, key) in self._buffers[stage].items():
            buffer = module._buffers[key]
            assert buffer is not None
            buffer.copy_(tensors[_BUFFER + name])
        for place, norm in enumerate(worker.stages[stage].batchnorms):
            sums = tensors.get(f"{_SUMS}{place}")
            norm._seen, norm._gathered = {}, {} if sums is None else {0: sums.to(worker.device)}
        for name, parameter in self._shared[stage].items():
            self._place(stage, parameter, tensors[_WEIGHT + name].to(worker.device))
            gradient = tensors.get(_GRADIENT + name)
            parameter.grad = None if gradient is None else gradient.to(worker.device)
        store = worker.spilling.stores[stage] if worker.spilling else None
        if store is not None and store.states is not None:
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
        for stage, shared in self._shared.items():
            for parameter in shared.values():
                self._place(stage, parameter, torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))
                parameter.grad = None
            if shared and stage in self._worker.optimizers:
                self._worker.optimizers[stage].state.clear()

    @property
    def is_shared(self) -> bool:
        """Whether there are weights that several shards use."""
        return any(self._shared.values())


def _tensors(layers: Sequence[NamedLayer]) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """(module, its key, name in the model, tensor) of all parameters and buffers of some layers."""
    for layer in layers:
        for prefix, module in layer.module.named_modules(prefix=layer.prefix):
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    yield module, key, f"{prefix}.{key}", tensor


def _metadata(data: bytes) -> dict[str, str]:
    """The metadata in the head of a safetensors file."""
    found: dict[str, str] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    return found
