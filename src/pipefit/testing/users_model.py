"""The user's model in one process: its own modules and its own forward, in plain torch.

A layer draws its random numbers from a seed of its own for each micro-batch, which is part of their definition: the
masks of dropout depend on neither ranks, stages nor schedule. Hooks and modes of torch set that seed:

    a sequence             before each layer is called
    blocks of a model      before each block is called, and after the last one returns
    lines in its graph     before each operation that draws, by the layer that the operation is in
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.cutting import Cut
from pipefit.cutting.traced import Traced
from pipefit.errors import ModelError
from pipefit.stage.accelerator import generator_of
from pipefit.stage.split import NamedLayer
from pipefit.testing.case import Case, Tensors

Begin = Callable[[int], None]
"""Called with the number of a layer before the layer computes."""


def _nothing(layer: int) -> None:
    pass


@dataclass(frozen=True)
class Whole:
    """A copy of the user's model, on the device of a case.

    Attributes:
        root: has all weights and buffers under the user's names.
        held: the names of each layer's weights and buffers.
        forward: computes the input of the loss from a batch; calls `Begin` before each layer.
        begins_layers: whether it calls `Begin` for every layer, not only for the first and for layers that draw random
            numbers.
        case: the training.
        others: buffers that no layer holds, as they were at first.
    """

    root: nn.Module
    held: Sequence[frozenset[str]]
    forward: Callable[[Any, Begin], Any]
    begins_layers: bool
    case: Case
    others: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        case: Case,
        root: nn.Module,
        held: Sequence[frozenset[str]],
        forward: Callable[[Any, Begin], Any],
        begins_layers: bool = True,
    ) -> Whole:
        """A model before its training."""
        every = frozenset[str]().union(*held)
        others = {name: value.clone() for name, value in root.state_dict().items() if name not in every}
        return cls(root, held, forward, begins_layers, case, others)

    def loss(self, number: int, x: Any, y: Any, share: float, begin: Begin = _nothing) -> Tensor:
        """The loss of a micro-batch times its share.

        Args:
            number: the micro-batch's number, counted over all batches.
            x: input.
            y: target.
            share: the micro-batch's share in the mean loss of the batch.
            begin: called before each layer.
        """
        case = self.case
        # A first layer may change its input in place.
        given = pytree.tree_map(lambda leaf: leaf.clone().to(case.device), x)
        target = pytree.tree_map(lambda leaf: leaf.to(case.device), y)
        generator = generator_of(torch.device(case.device))

        def seeded(layer: int) -> None:
            generator.manual_seed(layer_seed(case.updates.seed, number, layer))
            begin(layer)

        before = generator.get_state()
        with contextlib.nullcontext() if case.half is None else torch.autocast(case.device, case.half):
            output = self.forward(given, seeded)
        generator.set_state(before)
        if case.half is not None:
            output = pytree.tree_map(lambda leaf: leaf.float() if leaf.dtype == case.half else leaf, output)
        loss: Any = case.loss(output, target)  # the user's function
        if isinstance(loss, tuple):
            loss, _ = loss  # metrics
        weighted: Tensor = loss * share
        return weighted

    def state(self) -> Tensors:
        """A copy of weights and buffers, without the buffers that no layer holds and nothing has changed."""
        state = self.root.state_dict()
        unchanged = [name for name, value in self.others.items() if torch.equal(state[name], value)]
        return {name: value.detach().clone() for name, value in state.items() if name not in unchanged}

    def aliases(self) -> dict[str, list[str]]:
        """The names of each parameter, by the first of them."""
        found: dict[int, list[str]] = {}
        for name, parameter in self.root.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), []).append(name)
        return {names[0]: names for names in found.values()}


def layer_seed(seed: int, micro_batch: int, layer: int) -> int:
    """The seed of a layer's random numbers, stated once more: nothing that a check compares comes from what it checks.

    Args:
        seed: the training's seed.
        micro_batch: counted over all batches.
        layer: number of the layer.

    Source: the finalizer of SplitMix64 (Steele et al., OOPSLA 2014), over a sum of odd multiples.
    """
    last_64_bits = 2**64 - 1
    mixed = seed * 0x9E3779B97F4A7C15 + micro_batch * 0xBF58476D1CE4E5B9 + layer * 0x94D049BB133111EB
    mixed &= last_64_bits
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & last_64_bits
    return (mixed ^ (mixed >> 31)) % 2**63


def whole(case: Case) -> Whole:
    """A copy of a case's model."""
    if isinstance(case.model, Cut):
        return _of_cut(case, case.model)
    return _of_sequence(case)


def first_layers(case: Case) -> list[int]:
    """The number of each stage's first layer."""
    return [0, *itertools.accumulate(case.counts[:-1])]


def _of_sequence(case: Case) -> Whole:
    """Layers that are called one after another."""
    named = _named(copy.deepcopy(case.model))
    root = nn.Module()
    root._modules.update(named)
    root.to(case.device)
    borders = first_layers(case)[1:]

    def forward(batch: Any, begin: Begin) -> Any:
        for number, (_, layer) in enumerate(named):
            if case.half is not None and number in borders:
                batch = _sent(batch, case.half)
            begin(number)
            batch = layer(batch)
        return batch

    held = [frozenset(layer.state_dict(prefix=f"{name}.")) for name, layer in named]
    return Whole.of(case, root, held, forward)


def _named(model: Any) -> list[tuple[str, nn.Module]]:
    """The layers of a sequence under the names of their weights."""
    if isinstance(model, nn.Module):
        return [(name, module) for name, module in model._modules.items() if module is not None]
    named = []
    for index, item in enumerate(model):
        if isinstance(item, NamedLayer):
            named.append((item.prefix, item.module))
        elif isinstance(item, tuple):
            named.append(item)
        else:
            named.append((str(index), item))
    return named


def _sent(payload: Any, half: torch.dtype) -> Any:
    """A payload that crosses a border of stages under autocast: rounded to the half type, as its gradient is.

    Each stage casts weights to the half type for itself, so a tied weight adds up its gradients in float32.
    """
    torch.clear_autocast_cache()

    def rounded(leaf: Tensor) -> Tensor:
        is_floating = leaf.dtype in (torch.float32, half)
        carries = leaf.requires_grad and is_floating
        if carries:
            return leaf.to(half).float()
        return leaf

    return pytree.tree_map(rounded, payload)


def _of_cut(case: Case, cut: Cut) -> Whole:
    """A model with its own forward."""
    if isinstance(cut.shell, Traced):
        model = copy.deepcopy(cut.model)
        beginning: _Blocks | _Draws = _Draws(cut)
    else:
        model, blocks = copy.deepcopy((cut.model, list(cut.shell.blocks)))
        beginning = _Blocks(blocks)
    model.to(case.device)

    def forward(batch: Any, begin: Begin) -> Any:
        args, kwargs = cut.shell.arguments(batch)
        with beginning.calling(begin, batch):
            return cut.shell.result(model(*args, **kwargs))

    held = [frozenset(layer.module.state_dict(prefix=layer.dotted)) for layer in cut.layers]
    return Whole.of(case, model, held, forward, begins_layers=not isinstance(cut.shell, Traced))


class _Blocks:
    """The layers of a model that is cut around its blocks: each block is one, the code before and after are two more.

    The hooks stay: blocks that the user's own checkpoints replay draw their numbers again.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._begin: Begin = _nothing
        for number, block in enumerate(blocks, 1):
            block.register_forward_pre_hook(functools.partial(self._called, number))
        blocks[-1].register_forward_hook(functools.partial(self._called, len(blocks) + 1), prepend=True)

    def _called(self, number: int, *_: Any) -> None:
        self._begin(number)

    @contextlib.contextmanager
    def calling(self, begin: Begin, batch: Any) -> Iterator[None]:
        """The context of a forward, which calls `begin`."""
        self._begin = begin
        begin(0)
        yield


class _Draws:
    """The layers of a model that is cut at lines of its graph.

    The model's own forward does not know the lines. They are found by its draws of random numbers, which are as many
    and in the same order as in the graph. A model that draws none never runs the graph.
    """

    def __init__(self, cut: Cut) -> None:
        self._cut = copy.deepcopy(cut)

    @contextlib.contextmanager
    def calling(self, begin: Begin, batch: Any) -> Iterator[None]:
        """The context of a forward, which calls `begin` before the first draw of each layer."""
        layers = None
        now = 0

        def draws() -> None:
            nonlocal layers, now
            if layers is None:
                layers = iter(self._layers(batch))
            layer = next(layers, None)
            if layer is None:
                raise ModelError("the model draws random numbers more often than its graph: a check cannot match them")
            if layer != now:
                now = layer
                begin(layer)

        begin(0)
        with _BeforeDraws(draws):
            yield

    def _layers(self, batch: Any) -> list[int]:
        """For each draw of a forward its layer in the graph."""
        found = []
        now = 0

        def enter(layer: int) -> None:
            nonlocal now
            now = layer

        def draws() -> None:
            found.append(now)

        shell = self._cut.shell
        with torch.random.fork_rng(), _BeforeDraws(draws):
            shell.run(0, shell.num_layers - 1, batch, enter)
        return found


class _BeforeDraws(TorchDispatchMode):
    """Calls a function before each operation that draws random numbers."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self._before = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._before()
        return func(*args, **kwargs or {})
