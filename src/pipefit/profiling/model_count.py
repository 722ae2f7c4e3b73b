"""Counts of whole models of transformers, without weights and memory: the blocks in isolation, and the code between.

One forward on fake tensors. At each block the code before it ends, and its backward is counted. A block of a kind and
with inputs that are known is not run again; new tensors in the form of its output go on:

    code ── block 0 ── block 1 ── … ── code
     "before" │          └ known: not run   └ "after", with the model's own loss
              └ counted
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.func import functional_call

from pipefit.cutting.anatomy import blocks_of
from pipefit.cutting.own import Call, random_batch, result
from pipefit.cutting.tensor_plan import tensor_rules
from pipefit.errors import ModelError, ProfileError
from pipefit.parallel import Mesh, Ruled, shard_layers, widths_of
from pipefit.parallel.region import Exchange, IsolatedRegion
from pipefit.profiling.analytic import (
    configuration_of,
    count_layer,
    figures_of,
    forms_of,
    gradients_of,
    like,
    pretended_state,
)
from pipefit.profiling.counting import KernelCount, pretended
from pipefit.profiling.loops import CountedBlock, LongLoopError, extrapolated
from pipefit.profiling.survey import Storages, begun_by, saved_storages, shared_weights, storage_key, weighed
from pipefit.profiling.tensors import Run, num_bytes, tensors_of
from pipefit.spec.counted import Counted, Kernels, LayerCount
from pipefit.stage.compiler import Forward, Forwards
from pipefit.stage.split import NamedLayer
from pipefit.stage.stage import in_mode, replaced_forwards

Named = list[tuple[str, LayerCount]]
"""The layers of a model with their counts."""


Follow = Callable[[str, Kernels], CountedBlock]
"""Gives the count of a block by its path and the kernels with which its forward begins."""

_MOST = 500
"""Kernels in the forward of a block that is run, at most, unless it has no loop over tokens."""

_SIZES = (37, 53)
"""Micro-batch sizes at which layers are counted: sizes of models are seldom multiples of these, or of one more."""


def count_model(
    make: Callable[[], nn.Module], tokens: int = 0, widths: Iterable[int] = (1,), fp8: bool = False
) -> Counted:
    """Counts what the layers of a model of transformers do; layers that are alike once.

    Args:
        make: the model, best on the meta device, always a new one.
        tokens: of a sample; 0: its samples are no texts.
        widths: tensor widths to count in addition to 1, those that the model's plan and sizes allow.
        fp8: linear layers of blocks take numbers of 8 bits; embedding and head do not (torchtitan's docs/float8.md).

    Raises:
        ModelError: it cannot be counted.
    """
    whole = make()
    allowed = widths_of([_Whole(whole)], max(widths))
    chosen = sorted({1, *widths}.intersection(allowed))
    columns: list[Named] = []
    shared = []
    for width in chosen:
        for size in _SIZES:
            found = count_whole(make, width, size, fp8, tokens)
            columns.append(found.layers)
        shared.append(shared_weights(found.weights))
    kinds: list[tuple[LayerCount, ...]] = []
    places = []
    for each in zip(*columns, strict=True):
        counts = tuple(count for _, count in each)
        if counts not in kinds:
            kinds.append(counts)
        places.append(kinds.index(counts))
    parameters = list(whole.parameters())
    return Counted(
        names=tuple(name for name, _ in columns[0]),
        kinds=tuple(places),
        microbatch_sizes=_SIZES,
        widths=tuple(chosen),
        counts=tuple(kinds),
        sequence=tokens,
        element_bytes=max(parameters, key=Tensor.numel).element_size(),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        shared=tuple(shared),
    )


class _Whole(nn.Module):
    """A model as one layer, with its rules for tensor parallelism."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def tensor_rules(self, known: Any) -> dict[str, Ruled]:
        """Its modules that have a rule, by their paths."""
        rules = tensor_rules(self.model)
        return {path: Ruled(module, rules[module]) for path, module in self.named_modules() if module in rules}


def _share(model: nn.Module, width: int) -> list[Exchange]:
    """Turns a model into one of so many processes that share it, in isolation; returns where it notes exchanges."""
    nobody: Any = None
    region = IsolatedRegion(nobody, width, 0)
    if width > 1:
        shard_layers([NamedLayer(0, "", _Whole(model), "model")], Mesh(width, 0, region))
    return region.exchanges


def count_whole(make: Callable[[], nn.Module], width: int, size: int, fp8: bool, tokens: int) -> Walk:
    """The layers of a model: the code before its blocks, each block, the code after them with the loss.

    Weights that the forward does not need, such as those of pictures, are in the first layer, and do not train.

    Args:
        make: as of `count_model`.
        width: devices that share each layer.
        size: of a micro-batch.
        fp8: as of `count_model`.
        tokens: as of `count_model`.

    Raises:
        ModelError: it has no blocks, or its forward cannot be run without numbers.
    """
    model = make()
    counter = KernelCount(_share(model, width))
    batch = random_batch(model, size, tokens=tokens)
    short = cache(partial(count_whole, make, width, size, fp8))

    def follow(path: str, begun: Kernels) -> CountedBlock:
        return extrapolated(lambda length: short(length).blocks[path], tokens, begun)

    blocks = blocks_of(model)
    kind = type(model).__name__
    if not blocks:
        raise ModelError(f"{kind} has no list of blocks, so its layers are not known; measure it (`pipefit profile`)")
    args, kwargs = Call.of(model)(batch)
    with in_mode(True, model), pretended(), torch.enable_grad():
        found = Walk(model, blocks, counter, fp8, follow)
        try:
            with replaced_forwards(found.forwards), _one_sequence_each():
                found.begin([])
                output = functional_call(model, found.state, args, like(kwargs))
            found.end(tensors_of(result(output)), "after")
        except Exception as problem:
            found.pause()
            raise ModelError(f"{kind} cannot be counted: {type(problem).__name__}: {problem}") from problem
        found.keep_unused()
    return found


@contextlib.contextmanager
def _one_sequence_each() -> Iterator[None]:
    """The context in which samples are one sequence each, as transformers would read from the numbers of positions."""
    from transformers import masking_utils

    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = found


class Walk:
    """One forward through a model.

    Args:
        model: whose weights are replaced by `state`.
        blocks: by path.
        counter: of kernels.
        fp8: as of `count_model`.
        follow: gives the count of a block by its path and the kernels with which its forward begins, or raises.

    Attributes:
        state: fake tensors by name.
        forwards: of the blocks, and of other modules with weights of their own.
        layers: counted so far.
        blocks: by path, without the code after them.
        weights: of each layer.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        counter: KernelCount,
        fp8: bool,
        follow: Follow,
    ) -> None:
        self.layers: Named = []
        self.blocks: dict[str, CountedBlock] = {}
        self.weights: list[list[Tensor]] = []
        self.state = pretended_state(model, None)
        self.forwards: Forwards = {}
        self._counter = counter
        self._fp8 = fp8
        self._follow = follow
        self._persistent = {storage_key(tensor) for tensor in self.state.values()}
        self._known: dict[Any, CountedBlock] = {}
        self._context = contextlib.ExitStack()
        inside = {part for block in blocks.values() for part in block.modules()}
        for path, block in blocks.items():
            own = self._weights_of(path, block)
            self.forwards[block] = partial(self._block, path, configuration_of(block), own, block.forward)
        for path, module in model.named_modules():
            own = self._weights_of(path, module, recurse=False)
            if own and module not in inside:
                self.forwards[module] = partial(self._outside, own, module.forward)

    def _weights_of(self, path: str, module: nn.Module, recurse: bool = True) -> list[Tensor]:
        named = module.named_parameters(path, recurse=recurse)
        return [self.state[name] for name, _ in named]

    def begin(self, leaves: list[Tensor]) -> None:
        """Begins to note the code after a block, which gave these leaves of the graph."""
        self._leaves = leaves
        self._used: dict[Tensor, None] = {}
        self._seen: Storages = {}
        self._counter.take()
        self._context = contextlib.ExitStack()
        self._context.enter_context(saved_storages(self._seen, self._persistent))
        self._context.enter_context(self._counter)

    def pause(self) -> None:
        """Notes nothing until the next `begin`."""
        self._context.close()

    def end(self, ends: list[Tensor], name: str = "") -> None:
        """Counts the code since the last block; without a name it belongs to the layer before, if there is one.

        Args:
            ends: what the next block gets from it, or all that the model gives.
            name: of the layer.
        """
        self.pause()
        forward = self._counter.take()
        # The backward begins at the loss, where the model has one.
        roots = [leaf for leaf in ends if leaf.requires_grad and not leaf.is_leaf]
        scalars = [leaf for leaf in roots if not leaf.dim()]
        seed_bytes = num_bytes(scalars) if scalars else None
        weights = list(self._used | _trained_in(roots))
        ways = gradients_of(self._counter, scalars or roots, self._leaves, weights)
        figures = figures_of(begun_by(weighed("", self._leaves, ends, self._seen.values(), weights), seed_bytes))
        self._counter.take()
        count = LayerCount(figures, forward, *ways)
        if name or not self.layers:
            self.layers.append((name or "before", count))
            self.weights.append(weights)
            return
        last, before = self.layers[-1]
        self.layers[-1] = last, before.joined(count)
        self.weights[-1] = self.weights[-1] + weights

    def keep_unused(self) -> None:
        """Adds the weights that no layer used to the memory of the first one."""
        every = {leaf for leaf in self.state.values() if isinstance(leaf, nn.Parameter)}
        _, first = self.layers[0]
        first.figures["weight_bytes"] += num_bytes(every.difference(*self.weights))

    def _outside(self, own: list[Tensor], forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Runs a module between blocks, whose weights are those of the present code."""
        self._used |= dict.fromkeys(own)
        return forward(*args, **kwargs)

    def _block(self, path: str, kind: Any, weights: list[Tensor], forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Runs a block, or gives new tensors in place of its output where one of its kind has run."""
        given = (args, kwargs)
        entering = _crossing(given)
        self.end(entering)
        if path in self.blocks:
            raise ModelError(f"{path} is called twice in a forward, so it would be in two layers")
        form = forms_of(given)
        key = kind, repr(form)
        if key not in self._known:

            def run(given: Any) -> Any:
                args, kwargs = given
                return forward(*args, **kwargs)

            count, output = self._counted(path, run, form, weights)
            figures = {**count.figures, "input_bytes": num_bytes(entering)}
            self._known[key] = replace(count, figures=figures), output
        self.blocks[path] = self._known[key]
        count, output = self._known[key]
        self.layers.append((path, count))
        self.weights.append(weights)
        made = like(output)
        self.begin([leaf for leaf in tensors_of(made) if leaf.requires_grad])
        return made

    def _counted(self, path: str, run: Run, form: Any, weights: list[Tensor]) -> CountedBlock:
        """The count of a block; one with many kernels follows from short sequences, or is run whole."""
        if self._fp8:
            self._counter.in_8_bits = set(map(storage_key, weights))
        self._counter.most = _MOST
        try:
            count, output = count_layer(self._counter, run, form, weights, self._persistent)
        except LongLoopError as loop:
            self._counter.most = math.inf
            with contextlib.suppress(ModelError, ProfileError):
                return self._follow(path, *loop.args)
            count, output = count_layer(self._counter, run, form, weights, self._persistent)
        finally:
            self._counter.most = math.inf
            self._counter.in_8_bits = set()
        return count, forms_of(output)


def _trained_in(roots: list[Tensor]) -> dict[Tensor, None]:
    """The parameters in the graph that ends in these, also those that another module than their own uses."""
    found: dict[Tensor, None] = {}
    nodes: list[Any] = [root.grad_fn for root in roots]
    seen = {None, *nodes}
    for node in nodes:
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            found[variable] = None
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def _crossing(given: Any) -> list[Tensor]:
    """The tensors that a block gets from layers before it: those with a gradient; without any, the first with numbers.

    Masks and rotary tables are made again on every stage.
    """
    floating = dict.fromkeys(leaf for leaf in tensors_of(given) if leaf.is_floating_point())
    graded = [leaf for leaf in floating if leaf.requires_grad]
    return graded or list(floating)[:1]
