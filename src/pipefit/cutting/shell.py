"""A model's own forward as a shell: some of its modules compute, the others only return tensors of their shapes.

A cut model is a sequence of layers: 0, the code before the first block; 1 to n, the blocks; n + 1, the code after them.
A stage runs the model's own forward from its start, so that masks, positions and rotary tables are recomputed from the
small inputs that every stage has:

    module of a layer before the stage    a stub: returns NaN of the right shapes
    first block of the stage              entered with the values that crossed the border
    modules of the stage                  compute
    first block after the stage           reached: its arguments are the values that cross the next border

The arguments of a block that cross its border are not guessed: they are those that the stubs cannot reproduce.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.cutting.own import Arguments, Result
from pipefit.cutting.stubs import nan_like
from pipefit.cutting.tensor_plan import Rules, tensor_rules
from pipefit.cutting.tracking import arrived, stood_in
from pipefit.errors import ModelError
from pipefit.parallel import Ruled
from pipefit.stage.compiler import Forward, Forwards
from pipefit.stage.stage import replaced_forwards

Owned = tuple[nn.Module, frozenset[int]]
"""A module, and the numbers of the layers that have its weights."""

Enter = Callable[[int], None]
"""Called when the forward reaches a layer that computes, with the layer's number."""


class _Reached(BaseException):
    """The forward reached the end of the stage; not an `Exception`, so that no handler of the model catches it."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values


class Payload(NamedTuple):
    """Input of a layer of a cut model, sent as a dict: the batch, the values that cross the border, carried outputs.

    `carried` has the outputs of each block that came before.
    """

    batch: Any
    values: list[Any]
    carried: list[list[Any]]


def entering(first: int, payload: Any) -> Payload:
    """The payload of a layer, of which layer 0 gets the batch alone."""
    if first == 0:
        return Payload(payload, [], [])
    return Payload(**payload)


@dataclass
class Shell:
    """A model with the places where it can be cut.

    Attributes:
        model: the module that its author wrote.
        blocks: modules that are called once and in this order; block i is layer i + 1.
        units: other modules with weights, and the layers that call them.
        spine: modules that hold blocks; their forwards are the code between the layers.
        bare: modules with weights that code besides their forward uses, the spine among them, and the layers that have
            these weights; the others get stand-ins of them.
        shared: modules without weights that this code calls, such as rotary tables; every stage has them.
        labels: the paths of blocks and units.
        arguments: makes the positional and keyword arguments of the model from a batch.
        result: makes the input of the loss from the output of the model.
        carried: the modules in each block whose outputs the model gathers from hooks for its end, such as the
            routers of a mixture of experts; they are sent with the values that cross the borders.
        crossing: the positions of the leaves that cross each border k (0: none) among the arguments of block k,
            and for the last among the outputs of the last block.
        copies: blocks that write into what they are given, by number: as the first of a stage they get a copy.
        writes: values that crossed a border are also written into the tensors that they replace, for models whose own
            code uses these again, as in x + block(x); otherwise they only replace arguments of blocks.
    """

    model: nn.Module
    blocks: Sequence[nn.Module]
    units: Sequence[Owned]
    spine: Sequence[nn.Module]
    bare: Sequence[Owned]
    shared: Sequence[nn.Module]
    labels: Mapping[nn.Module, str]
    arguments: Arguments
    result: Result
    stubs: Mapping[nn.Module, Forward]
    carried: Sequence[Sequence[nn.Module]] = ()
    crossing: Mapping[int, Sequence[int]] = field(default_factory=dict)
    copies: set[int] = field(default_factory=set)
    writes: bool = False

    @property
    def num_layers(self) -> int:
        """Number of layers: the blocks, and the code before and after them."""
        return len(self.blocks) + 2

    def run(self, first: int, last: int, payload: Any, enter: Enter = lambda layer: None) -> Any:
        """Runs some consecutive layers.

        Args:
            first: number of the first layer.
            last: number of the last layer.
            payload: a batch for layer 0; for others the output of the layer before: the batch and the crossing values.
            enter: called as a layer begins.

        Returns:
            The payload of the next layer; after the last layer the model's result.
        """
        begin = entering(first, payload)
        args, kwargs = self.arguments(begin.batch)
        passage = _Passage(self, first, last, begin, enter)
        with passage.replaced():
            if first == 0:
                enter(0)
            try:
                output = self.model(*args, **kwargs)
            except _Reached as reached:
                return Payload(begin.batch, reached.values, passage.carried)._asdict()
        passage.check(None)
        return self.result(output)

    def pass_by(self, batch: Any, note: Callable[[list[Any]], None]) -> None:
        """Runs the code before the last block, with stand-ins for all modules with weights.

        Args:
            batch: one batch of the model's kind.
            note: called with the leaves of each block's arguments.
        """
        num_blocks = len(self.blocks)

        def noted(number: int, stub: Forward) -> Forward:
            def run(*args: Any, **kwargs: Any) -> Any:
                note(pytree.tree_leaves((args, kwargs)))
                if number == num_blocks:
                    raise _Reached([])
                return stub(*args, **kwargs)

            return run

        stubs = dict(self.stubs)
        for number, block in enumerate(self.blocks, 1):
            stubs[block] = noted(number, stubs[block])
        begin = Payload(batch, [], [])._asdict()
        passed = replace(self, stubs=stubs, carried=())
        passed.run(num_blocks + 1, num_blocks, begin)

    def train(self, mode: bool) -> None:
        """Training or evaluation mode of all that runs between the layers."""
        self.model.train(mode)

    def with_modes(self) -> list[nn.Module]:
        """Everything that has a mode of its own."""
        return list(self.model.modules())

    def block(self, number: int) -> nn.Module | None:
        """The block that is a layer; None: what runs before or after the blocks."""
        if 0 < number <= len(self.blocks):
            return self.blocks[number - 1]
        return None


class _Passage:
    """One run of some layers."""

    def __init__(self, shell: Shell, first: int, last: int, begin: Payload, enter: Enter) -> None:
        self.shell = shell
        self.first = first
        self.last = last
        self.values = begin.values
        self.enter = enter
        self.carried = list(begin.carried)
        self.next = 1
        # Values that crossed the border, by the stub's tensor that they replace wherever the forward uses it again.
        self.arrived: dict[int, tuple[Any, Any]] = {}

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """The context of a run, in which the forwards of modules are replaced."""
        shell = self.shell
        inside = range(self.first, self.last + 1)
        forwards: Forwards = {}
        for unit, owners in shell.units:
            if unit not in shell.stubs:
                forwards[unit] = partial(self._uncalled, shell.labels[unit])
            elif owners.isdisjoint(inside):
                forwards[unit] = shell.stubs[unit]
        for number, block in enumerate(shell.blocks, 1):
            forward = self._forward_of(number, block)
            forwards[block] = partial(self._in_order, number, forward)
        hidden = []
        for module, owners in shell.bare:
            if owners.isdisjoint(inside):
                hidden.append((module, dict(module._parameters)))
        try:
            for module, parameters in hidden:
                stand_ins = {name: nan_like(p) for name, p in parameters.items() if p is not None}
                module._parameters.update(stood_in(stand_ins))
            with replaced_forwards(forwards):
                yield
        finally:
            for module, parameters in hidden:
                module._parameters.update(parameters)

    def check(self, block: int | None) -> None:
        """Checks that a block is the next one.

        Args:
            block: its number; None: the forward ends.

        Raises:
            ModelError: another block would be.
        """
        wanted = None
        if self.next <= len(self.shell.blocks):
            wanted = self.next
        if block != wanted:
            raise ModelError(
                f"{self._event(block)} where in the example {self._event(wanted)}: which blocks run must not depend on "
                "the data; put the branch into the forward of the block, or give cuts=[…] elsewhere"
            )

    def _event(self, block: int | None) -> str:
        if block is None:
            return "the forward ended"
        return f"{self._label(block)} was called"

    def _in_order(self, number: int, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        self.check(number)
        self.next += 1
        return forward(*args, **kwargs)

    def _uncalled(self, label: str, *args: Any, **kwargs: Any) -> None:
        raise ModelError(
            f"{label} was not called in the example, so no stage has its weights: which modules run must not depend on "
            "the data; put the branch into the forward of the module, or give an example that calls it"
        )

    def _forward_of(self, number: int, block: nn.Module) -> Forward:
        stub = self.shell.stubs[block]
        num_blocks = len(self.shell.blocks)
        if number > self.last:
            return partial(self._reached, number)
        if number >= self.first:
            return partial(self._computes, number, block.forward)
        if self.last > num_blocks and (number == num_blocks or self.shell.carried):
            return partial(self._skipped, number, stub)
        return stub

    def _reached(self, number: int, *args: Any, **kwargs: Any) -> None:
        given = self._with_arrived((args, kwargs))
        raise _Reached(self._crossing(number, given))

    def _computes(self, number: int, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if number == self.first:
            args, kwargs = self._entered(number, (args, kwargs))
        elif len(self.arrived) > 1:
            args, kwargs = self._with_arrived((args, kwargs))
        self.enter(number)
        if self.shell.carried:
            output = self._carrying(number, forward, args, kwargs)
        else:
            output = forward(*args, **kwargs)
        if number == len(self.shell.blocks):
            if self.last == number:
                raise _Reached(self._crossing(number + 1, output))
            self.enter(number + 1)
        return output

    def _entered(self, number: int, tree: Any) -> Any:
        """The arguments of the first block of a stage, with the values that crossed the border."""
        leaves, structure = pytree.tree_flatten(tree)
        for place, value in zip(self.shell.crossing[number], self.values, strict=True):
            if place >= len(leaves) or getattr(leaves[place], "shape", None) != value.shape:
                raise ModelError(
                    f"a value that enters {self._label(number)} has another shape than its stand-in; no cut there"
                )
            stand_in = leaves[place]
            _, known = self.arrived.setdefault(id(stand_in), (stand_in, value))
            if known is not value:
                raise ModelError(f"two values that enter {self._label(number)} cannot be distinguished; no cut there")
            if self.shell.writes and not stand_in.requires_grad:
                stand_in.copy_(value)
                arrived(stand_in)
            leaves[place] = value
            if number in self.shell.copies:
                leaves[place] = value.clone()
        return pytree.tree_unflatten(leaves, structure)

    def _carrying(self, number: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Runs a block and keeps the outputs of the modules in it that are carried."""
        kept: list[Any] = []
        self.carried.append(kept)

        def keep(module: nn.Module, given: Any, output: Any) -> None:
            kept.append(output)

        with contextlib.ExitStack() as hooks:
            for module in self.shell.carried[number - 1]:
                hooks.enter_context(module.register_forward_hook(keep))
            return forward(*args, **kwargs)

    def _skipped(self, number: int, stub: Forward, *args: Any, **kwargs: Any) -> Any:
        """The output of an earlier block, where the model's end runs: the model's own hooks get the carried outputs."""
        if self.shell.carried:
            modules = self.shell.carried[number - 1]
            for module, output in zip(modules, self.carried[number - 1], strict=True):
                with replaced_forwards({module: partial(_given, output)}):
                    module()
        output = stub(*args, **kwargs)
        num_blocks = len(self.shell.blocks)
        if number < num_blocks or self.first <= num_blocks:
            return output
        leaves, structure = pytree.tree_flatten(output)
        for place, value in zip(self.shell.crossing[self.first], self.values, strict=True):
            leaves[place] = value
        self.enter(self.first)
        return pytree.tree_unflatten(leaves, structure)

    def _with_arrived(self, tree: Any) -> Any:
        if not self.arrived:
            return tree

        def current(leaf: Any) -> Any:
            _, value = self.arrived.get(id(leaf), (leaf, leaf))
            return value

        return pytree.tree_map(current, tree)

    def _crossing(self, border: int, tree: Any) -> list[Any]:
        leaves = pytree.tree_leaves(tree)
        places = self.shell.crossing[border]
        if any(place >= len(leaves) for place in places):
            raise ModelError(f"what enters {self._label(border)} has another structure than in the example")
        return [leaves[place] for place in places]

    def _label(self, number: int) -> str:
        """The path of a block; after the last one, the name of the code that follows."""
        block = self.shell.block(number)
        if block is None:
            return "the code after the blocks"
        return self.shell.labels[block]


class CutLayer(nn.Module):
    """A layer of a cut model: the weights of some of its modules, under their own names, and its part of the forward.

    Args:
        shell: the whole model, the same for all its layers: a `Shell`, or what takes its place.
        number: the layer's number.
        holder: a module whose parameters, buffers and children are the layer's; they stay shared with it.
    """

    holder: nn.Module

    def __init__(self, shell: Any, number: int, holder: nn.Module) -> None:
        super().__init__()
        share_tensors(self, holder)
        self.__dict__["_modules"] = holder._modules
        self.__dict__["holder"] = holder
        self.shell = shell
        self.number = number

    def train(self, mode: bool = True) -> CutLayer:
        """Training or evaluation mode of the layer, and of all modules between the layers."""
        super().train(mode)
        self.shell.train(mode)
        return self

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> CutLayer:
        """Moves or converts the layer, and the modules that every stage has."""
        super()._apply(fn, recurse)
        for module in self.shell.shared:
            module._apply(fn)
        for module in self.shell.spine:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return self

    def everywhere(self) -> list[Tensor]:
        """The buffers of the code between the layers, which every stage runs."""
        return [buffer for module in self.shell.spine for buffer in module.buffers(recurse=False)]

    @property
    def block(self) -> nn.Module | None:
        """The module that `torch.compile` and replays take for this layer; see `Shell.block`."""
        return self.shell.block(self.number)

    def tensor_rules(self, known: dict[nn.Module, Rules]) -> dict[str, Ruled]:
        """Its modules that have a rule for tensor parallelism, by their paths.

        Args:
            known: the rules of whole models; the rules of this layer's model are added.

        Raises:
            ModelError: the model has no plan for it, or one that cannot be followed.
        """
        model = self.shell.model
        if not isinstance(self.shell, Shell):
            raise ModelError(f"{type(model).__name__} is cut in its graph, which cannot be sharded; use tensor=1")
        if model not in known:
            known[model] = tensor_rules(model)
        rules = known[model]
        modules = {**dict(self.named_modules()), "": self.holder}
        return {path: Ruled(module, rules[module]) for path, module in modules.items() if module in rules}

    def forward(self, payload: Any) -> Any:
        """The payload of the next layer."""
        return self.shell.run(self.number, self.number, payload)

    def through(self, last: CutLayer, payload: Any, enter: Enter) -> Any:
        """The payload after this layer and those that follow up to `last`; see `Shell.run`."""
        return self.shell.run(self.number, last.number, payload, enter)


def share_tensors(module: nn.Module, holder: nn.Module) -> None:
    """Gives a module the parameters and buffers of another one, which stay shared."""
    for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        module.__dict__[name] = holder.__dict__[name]


def _given(output: Any) -> Any:
    return output


def node_at(root: nn.Module, path: str) -> nn.Module:
    """The module at a path below another one; a bare one is made where there is none."""
    for name in path.split(".") if path else ():
        if name not in root._modules:
            root._modules[name] = nn.Module()
        child = root._modules[name]
        assert child is not None
        root = child
    return root
