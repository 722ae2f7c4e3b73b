"""Models built on the meta device, whose layers get their weights one by one when there is memory for them.

    with torch.device("meta"):
        model = gpt(layers=48, hidden=2048, heads=16)

The weights of a layer depend only on the seed and its place in the model, so they are the same for every split of the
model and on every tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipefit.errors import ModelError
from pipefit.stage.split import NamedLayer, joined, own_tensors
from pipefit.stage.stage import layer_seed

InitialiseLayer = Callable[[str, nn.Module], None]
"""A model's own function to initialise a layer's weights, its attribute `initialise_layer`: from the prefix of the
layer's names and its module. With an attribute `is_complete` it sets every weight; else modules draw theirs first."""

Made = dict[Tensor, nn.Parameter]
"""The replacement of each parameter."""

_INITIALISATION = -1


def is_meta(layers: Sequence[NamedLayer]) -> bool:
    """Returns whether some weight or buffer of the layers has no memory yet."""
    whole = joined(layers)
    return any(tensor.is_meta for tensor in (*whole.parameters(), *whole.buffers()))


def can_be_drawn(layers: Sequence[NamedLayer], own: InitialiseLayer | None = None) -> bool:
    """Returns whether each layer can initialise its own weights.

    Either no two layers share one and every module with weights can reset them, or the model's own function sets all.
    """
    if getattr(own, "is_complete", False):
        return True
    users: Counter[int] = Counter()
    for layer in layers:
        users.update(map(id, layer.module.parameters()))
    if max(users.values(), default=1) > 1:
        return False
    return all(_reset_of(module) is not None for module in joined(layers).modules() if own_tensors(module))


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def stand_in(
    layers: Sequence[NamedLayer],
    make: Callable[[Tensor], Tensor],
    of: Callable[[Tensor], bool] = lambda t: t.is_meta,
    made: Made | None = None,
) -> None:
    """Replaces some parameters and buffers by the results of `make`; shared ones stay shared.

    Args:
        layers: of the model.
        make: from a parameter or buffer to its replacement.
        of: selects those that are replaced; usually those of the meta device.
        made: the replacement of each parameter so far, to which these are added; None: none before.
    """
    if made is None:
        made = {}
    for layer in layers:
        for module in layer.module.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and of(parameter):
                    if parameter not in made:
                        made[parameter] = _like(parameter, make(parameter))
                    setattr(module, name, made[parameter])
            for name, buffer in module.named_buffers(recurse=False):
                if of(buffer):
                    module._buffers[name] = make(buffer)


def _like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter with other data, and with the attributes and the hooks that the user has given to this one."""
    made = nn.Parameter(data, parameter.requires_grad)
    before = parameter
    made.__dict__.update(before.__dict__)
    made._backward_hooks = before._backward_hooks
    made._post_accumulate_grad_hooks = before._post_accumulate_grad_hooks
    return made


@contextmanager
def lent_weights(root: nn.Module) -> Iterator[None]:
    """Lends memory to the weights of the meta device for a while, so that the modules can run.

    All of them are views of the same random numbers, each at another offset, so the memory lent is hardly more than the
    largest weight. Nothing may change them meanwhile.
    """
    found = [
        (module._parameters, name, parameter)
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    generator = torch.Generator("cpu").manual_seed(0)

    def numbers(dims: range) -> Tensor:
        sizes = [parameter.numel() for _, _, parameter in found if parameter.dim() in dims]
        size = max(sizes, default=0)
        if size:
            size += len(found)
        return torch.randn(size, generator=generator, device="cpu")

    # Vectors are mostly scales of norms, which are about 1.
    vectors = numbers(range(2)).mul_(0.1).add_(1)
    matrices = numbers(range(2, 99)).mul_(0.02)
    lent = {}
    for start, (_, _, parameter) in enumerate(found):
        memory = matrices
        if parameter.dim() < 2:
            memory = vectors
        part = memory[start : start + parameter.numel()].view(parameter.shape)
        # `data` is not a view: autograd counts the changes of each on its own.
        data = part.data.to(parameter.dtype)
        lent[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
    try:
        for owner, name, parameter in found:
            owner[name] = lent[id(parameter)]
        yield
    finally:
        for owner, name, parameter in found:
            owner[name] = parameter


def forget_others(layers: Sequence[NamedLayer], held: set[int]) -> None:
    """Frees the weights of layers that no stage of this process holds; names and shapes stay, on the meta device.

    Buffers that no state holds, such as masks, stay: `give_back` could not restore them. So do those of the code
    between the layers of a model that was cut: every process runs it.
    """
    kept = set(map(id, joined(layer for layer in layers if layer.index in held).parameters()))
    for module in joined(layers).modules():
        kept |= {id(module._buffers[name]) for name in module._non_persistent_buffers_set}
    for layer in layers:
        everywhere = getattr(layer.module, "everywhere", None)
        if everywhere is not None:
            kept |= {id(buffer) for buffer in everywhere()}

    def is_freed(tensor: Tensor) -> bool:
        return not tensor.is_meta and id(tensor) not in kept

    others = [layer for layer in layers if layer.index not in held]
    stand_in(others, lambda tensor: tensor.to("meta"), is_freed)


def give_back(layers: Sequence[NamedLayer], state: Mapping[str, Tensor]) -> None:
    """Restores what `forget_others` has freed, from the state of the whole model."""
    names: dict[int, str] = {}
    for layer in layers:
        own = layer.module.state_dict(prefix=layer.dotted, keep_vars=True)
        names.update((id(tensor), name) for name, tensor in own.items())
    stand_in(layers, lambda tensor: state[names[id(tensor)]], lambda tensor: tensor.is_meta and id(tensor) in names)


def initialise(layers: Sequence[NamedLayer], seed: int, own: InitialiseLayer | None = None) -> None:
    """Draws the weights of layers in place: by `reset_parameters` of their modules, then by the model's own function.

    Raises:
        ModelError: a module has weights but no `reset_parameters`.
    """
    with torch.random.fork_rng(devices=[]):
        for layer in layers:
            torch.manual_seed(layer_seed(seed, _INITIALISATION, layer.index))
            for name, module in layer.module.named_modules(prefix=layer.prefix):
                if not own_tensors(module) or getattr(own, "is_complete", False):
                    continue
                reset = _reset_of(module)
                if reset is None:
                    raise ModelError(
                        f"{name} ({type(module).__name__}) was built on the meta device and has no reset_parameters() "
                        "to draw its weights; give it one, or build the model in memory"
                    )
                reset()
            if own is not None:
                own(layer.prefix, layer.module)


def materialise(
    layers: Sequence[NamedLayer],
    seed: int,
    device: torch.device,
    own: InitialiseLayer | None = None,
    whole: Sequence[NamedLayer] = (),
    made: Made | None = None,
) -> None:
    """Gives layers of the meta device memory and weights.

    Args:
        layers: of the meta device, or not.
        seed: of the weights that modules draw.
        device: of the memory.
        own: the model's own function to initialise a layer; None: it has none.
        whole: see `give_memory`.
        made: see `stand_in`.

    Raises:
        ModelError: see `initialise`.
    """
    drawn = [layer for layer in layers if is_meta([layer])]
    give_memory(layers, device, whole, made)
    initialise(drawn, seed, own)


def give_memory(
    layers: Sequence[NamedLayer],
    device: torch.device,
    whole: Sequence[NamedLayer] = (),
    made: Made | None = None,
) -> None:
    """Gives memory to the weights and buffers of layers that are on the meta device.

    Args:
        layers: of the meta device, or not.
        device: of the memory.
        whole: all layers of the model; those that share a weight with these still share it afterwards.
        made: see `stand_in`.
    """
    part = joined(layers)
    wanted = set(map(id, (*part.parameters(), *part.buffers())))

    def waits(tensor: Tensor) -> bool:
        return tensor.is_meta and id(tensor) in wanted

    stand_in([*layers, *whole], lambda tensor: torch.empty_like(tensor, device=device), waits, made)
