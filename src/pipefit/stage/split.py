"""A model as a list of layers, and its layers assigned to stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipefit.errors import ModelError
from pipefit.spec.plan import Partition
from pipefit.stage.instead import Instead


@dataclass(frozen=True)
class NamedLayer:
    """A layer with the prefix of its parameters in the user's own names, and its place in the model.

    Attributes:
        index: from 0.
        prefix: of the names of its parameters; "" where they have no common one.
        module: from one payload to the next.
        label: its name where the prefix is not enough.
    """

    index: int
    prefix: str
    module: nn.Module
    label: str = ""

    @property
    def name(self) -> str:
        """Its name for people and profiles, unique in its model."""
        return self.label or self.prefix

    @property
    def dotted(self) -> str:
        """The prefix as `state_dict` takes it."""
        if self.prefix:
            return f"{self.prefix}."
        return ""


def called_module(layer: NamedLayer) -> nn.Module | None:
    """The module that `torch.compile` and replays take for a layer: of a model that was cut a block, or None."""
    module: Any = layer.module  # a layer of a model that was cut has more than every module
    if hasattr(module, "through"):
        return module.block
    return layer.module


def joined(layers: Iterable[NamedLayer]) -> nn.ModuleList:
    """Some layers as one module: it has each of their modules, parameters and buffers once."""
    return nn.ModuleList(layer.module for layer in layers)


def own_tensors(module: nn.Module) -> list[Tensor]:
    """A module's own parameters and buffers, without those of its children."""
    every = [*module._parameters.values(), *module._buffers.values()]
    return [tensor for tensor in every if tensor is not None]


def is_sequence(module: nn.Module) -> bool:
    """Returns whether a module holds layers that are called one after another, and its forward does nothing else."""
    if not isinstance(module, nn.Sequential):
        return isinstance(module, nn.ModuleList)
    if type(module).forward is not nn.Sequential.forward or "forward" in module.__dict__:
        return False
    return not module._forward_hooks and not module._forward_pre_hooks


def named_layers(model: Any) -> list[NamedLayer]:
    """The layers of a model that is a sequence of them, in order.

    Args:
        model: an `nn.Sequential` (its children), a list of modules (named "0", "1", …) or of (name, module), or a model
            that was cut (its own layers); layers that have names already stay as they are.

    Raises:
        ModelError: the model is none of these, or has no layers; an item is not a module; two layers have one name.
    """
    found = getattr(model, "layers", model)
    if isinstance(found, list | tuple) and found and all(isinstance(layer, NamedLayer) for layer in found):
        return list(found)
    named: list[Any]
    if isinstance(model, nn.Module) and is_sequence(model):
        named = list(model._modules.items())  # named_children() would leave out the second use of one module
    elif isinstance(model, list | tuple):
        named = list(model)
        for index, item in enumerate(model):
            if not isinstance(item, tuple):
                named[index] = (str(index), item)
    elif isinstance(model, nn.Sequential):
        raise ModelError(
            f"{type(model).__name__} is an nn.Sequential with a forward or hooks of its own, which its layers in a row "
            "would leave out: cut it with pipefit.cut(model, example), or move them into a layer"
        )
    else:
        raise ModelError(
            f"expected an nn.Sequential or a list of modules, got {type(model).__name__}; "
            "write the model as a sequence of layers, each taking the output of the one before"
        )
    if not named:
        raise ModelError("the model has no layers: expected at least one")
    places: dict[str, int] = {}
    for index, item in enumerate(named):
        has_name = len(item) == 2 and isinstance(item[0], str)
        if not has_name or not isinstance(item[1], nn.Module):
            raise ModelError(f"layer {index}: expected an nn.Module or (name, nn.Module), got {item!r}")
        name = item[0]
        before = places.setdefault(name, index)
        if before != index:
            raise ModelError(f"layers {before} and {index} are both named {name!r}: give each its own name")
    return [NamedLayer(index, prefix, module) for index, (prefix, module) in enumerate(named)]


def modules_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The user's modules in a layer, by their paths: a part of a model that was cut holds one of them, or some."""
    yield from getattr(module, "holder", module).named_modules(prefix=prefix)


def num_frozen(layers: Sequence[NamedLayer], partition: Partition) -> int:
    """How many stages at the beginning have nothing that steps change: parameters that train, averages of batch norms.

    Raises:
        ModelError: the partition is for another number of layers, or layers to be copied cannot be.
    """
    _check(layers, partition)

    def trains(index: int) -> bool:
        module = layers[index].module
        for _, inner in modules_of(module):
            if isinstance(inner, _BatchNorm) and inner.track_running_stats:
                return True
        return any(parameter.requires_grad for parameter in module.parameters())

    return partition.num_frozen(trains)


def split(
    layers: Sequence[NamedLayer], partition: Partition, held: Sequence[Sequence[int]]
) -> list[dict[int, list[NamedLayer]]]:
    """The layers of each rank by stage, with nothing shared between ranks of one process.

    Args:
        layers: of the whole model.
        partition: layers of each stage.
        held: stages that each rank holds; only these are kept.

    Returns:
        For each rank, its stages' layers. The first rank to hold a stage gets the user's own modules, others copies;
        a rank that shares weights with another gets copies of its modules, with copies of these weights only. Weights
        tied inside one rank stay one parameter.

    Raises:
        ModelError: the partition is for another number of layers.
    """
    _check(layers, partition)
    given: set[int] = set()
    owned: set[int] = set()
    result = []
    for stages in held:
        mine = {stage: [layers[index] for index in partition.stages[stage].layers] for stage in stages}
        every = [layer for own in mine.values() for layer in own]
        module = joined(every)
        tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        if given & set(stages) or owned & tensors.keys():
            # One copy for all stages of the rank, so that ties within the rank survive.
            kept = {key: tensor for key, tensor in tensors.items() if key not in owned}
            mine = _copied(mine, module, kept)
        given |= set(stages)
        owned |= tensors.keys()
        result.append(mine)
    return result


def copying() -> Instead:
    """The context in which copies of computed tensors are detached; torch itself would refuse to copy them."""
    return Instead({Tensor.__deepcopy__}, _copied_tensor)


def _copied_tensor(func: Callable[..., Tensor], tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if tensor.is_leaf:
        return func(tensor, memo)
    return memo.setdefault(id(tensor), tensor.detach().clone())


def _copied(mine: dict[int, list[NamedLayer]], module: nn.Module, kept: dict[int, Any]) -> dict[int, list[NamedLayer]]:
    """Copies of a rank's layers, whose weights keep their hooks.

    Args:
        mine: the layers by stage.
        module: all of them as one.
        kept: tensors by their ids that are not copied; it then has the copies of the others, too.

    Raises:
        ModelError: something in them cannot be copied.
    """
    try:
        if any(isinstance(one, torch.jit.ScriptModule) for one in module.modules()):
            raise TypeError("TorchScript")
        with copying():
            made = copy.deepcopy(mine, kept)
    except Exception as problem:
        raise ModelError(
            "in one process, copies of a stage and stages that share weights each get a copy of their layers, but "
            f"something in these cannot be copied: {type(problem).__name__}: {problem}; give each rank its own process "
            "(pipefit run), or the object's class a method __deepcopy__"
        ) from problem
    for parameter in module.parameters():
        copied = kept[id(parameter)]
        if copied is not parameter and parameter.requires_grad:
            copied._backward_hooks = parameter._backward_hooks
            copied._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    return made


def _check(layers: Sequence[NamedLayer], partition: Partition) -> None:
    if partition.num_layers != len(layers):
        raise ModelError(f"the partition has {partition.num_layers} layers, the model has {len(layers)}")
