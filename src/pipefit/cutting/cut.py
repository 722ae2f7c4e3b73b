"""Any `nn.Module` as a sequence of layers: found by one run of an example, and proved by it before training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.cutting.anatomy import Anatomy, Seen, anatomies, called_again, calls_of, observe
from pipefit.cutting.differences import same_leaf
from pipefit.cutting.exported import copied
from pipefit.cutting.lasting import places_of, refuse_replaced, second_batch
from pipefit.cutting.notice import noticed, traces
from pipefit.cutting.own import Arguments, Call, Given, Routers, is_transformers, loss_of, random_batch, result
from pipefit.cutting.proof import (
    Difference,
    borders,
    branches,
    entries,
    prove,
    reference,
    refuse_channels,
    run_layer,
)
from pipefit.cutting.proof_of_trace import prove_trace
from pipefit.cutting.shell import CutLayer, Payload, Shell, node_at
from pipefit.cutting.states import States, fill_zeros, kept_outside, seed_torch
from pipefit.cutting.stubs import Stub
from pipefit.cutting.traced import Traced
from pipefit.cutting.tracking import Foreign, place_of
from pipefit.errors import ModelError
from pipefit.spec.arguments import checked
from pipefit.stage.materialise import InitialiseLayer, is_meta, lent_weights
from pipefit.stage.split import NamedLayer, is_sequence, named_layers
from pipefit.units import columns, counted, format_bytes, format_count

_Batches = tuple[Any, Any]


class _Ways(NamedTuple):
    """The ways into a model and out of it; see `Shell`.

    Attributes:
        carries: whether a module is one whose outputs are carried; None: there is none.
    """

    arguments: Arguments
    result: Callable[[Any], Any]
    carries: Callable[[nn.Module], bool] | None


@dataclass(frozen=True)
class Cut:
    """A model as layers.

    Attributes:
        layers: in order; their parameters have the model's own names.
        shell: the model's forward, which the layers share, around its blocks or traced.
        model: the whole one, as its author wrote it; the layers have its weights.
        crossing: (bytes, number of tensors) that cross the border before each layer but the first, for the example.
        merged: blocks before which it cannot be cut, with the reason.
        loss: the model's own, (output, batch) -> mean; None: it has none.
        weigh: the weight of a batch in that mean; None: its number of samples.
        initialise_layer: sets the weights of layers of the meta device; None: they have weights.
    """

    layers: tuple[NamedLayer, ...]
    shell: Shell | Traced
    model: nn.Module
    crossing: tuple[tuple[float, int], ...]
    merged: tuple[tuple[str, str], ...] = ()
    loss: Callable[[Any, Any], Tensor] | None = None
    weigh: Callable[[Any], float] | None = None
    initialise_layer: InitialiseLayer | None = None

    @property
    def way(self) -> str:
        """The place of the borders, for people."""
        if isinstance(self.shell, Traced):
            return "of its traced graph"
        return "around its blocks"

    def __len__(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def __str__(self) -> str:
        """A table of the layers, with the bytes that enter each of them for the example."""
        entering = [("the batch", ""), *((format_bytes(size), counted(n, "tensor")) for size, n in self.crossing)]
        rows = [(*row, *enters) for row, enters in zip(_rows(self.layers), entering, strict=True)]
        head = f"{len(self)} layers {self.way}, proved equal to the whole model"
        lines = [head, *columns([("layer", "parameters", "enters", ""), *rows])]
        lines += [f"{name} is in several layers: {', '.join(of)}" for name, of in shared_weights(self.layers)]
        return "\n".join([*lines, *(f"no cut before {path}: {why}" for path, why in self.merged)])


def shared_weights(layers: Sequence[NamedLayer]) -> list[tuple[str, list[str]]]:
    """Weights that several layers hold, by their first names, with the names of these layers; they stay tied."""
    found: dict[int, tuple[str, list[str]]] = {}
    for layer in layers:
        for name, parameter in layer.module.named_parameters(layer.prefix):
            found.setdefault(id(parameter), (name, []))[1].append(layer.name)
    return [(name, of) for name, of in found.values() if len(of) > 1]


def table(model: Any) -> str:
    """A table of the layers of a model that is a sequence of them, or was cut."""
    if isinstance(model, Cut):
        return str(model)
    layers = named_layers(model)
    return "\n".join([f"{len(layers)} layers", *columns([("layer", "parameters"), *_rows(layers)])])


def _rows(layers: Sequence[NamedLayer]) -> list[tuple[str, str]]:
    return [(layer.name, format_count(sum(p.numel() for p in layer.module.parameters()))) for layer in layers]


def plain_arguments(batch: Any) -> Given:
    """The arguments of a batch: keyword arguments of a dict, positional ones of a tuple, else a single argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple):
        return (tuple(batch), {})
    return ((batch,), {})


@checked()
def cut(model: nn.Module, example: Any = None, *, cuts: Sequence[str] | None = None) -> Cut:
    """Cuts a model into layers, and proves the cut on an example.

    Args:
        model: stays as it is; its forward runs a few times in its current mode. Weights of the meta device are lent
            memory meanwhile.
        example: one batch: a tensor, a tuple of positional or a dict of keyword arguments; None: a random one, which
            models of transformers have.
        cuts: paths of modules before which the model is cut; None: the blocks of its repeated list, or, where that
            leaves most of the weights in one layer, wherever little crosses in the graph of `torch.export`.

    Returns:
        The layers; the first is the code before the first cut, the last the code after the last one.

    Raises:
        ModelError: no cut gives the results of the model; the message names the place and the reason.
    """
    is_known = is_transformers(model)
    if example is None and not is_known:
        raise ModelError(
            f"{type(model).__name__} is not a sequence of layers: a cut is found with an example of its "
            "input; give example=…, one batch"
        )
    unknown = set(cuts or ()) - dict(model.named_modules()).keys()
    if unknown:
        raise ModelError(f"cuts: the model has no module {min(unknown)!r}")
    if example is None:
        example = random_batch(model, 3)
    if is_known:
        ways = _Ways(Call.of(model), result, Routers.of(model))
    else:
        ways = _Ways(plain_arguments, _as_it_is, None)
    found = _found(model, example, cuts, ways)
    # With the model's own weights again, not those of the proof.
    if isinstance(found.shell, Traced):
        own = found.shell.hold(model)
    else:
        own = _layers(model, found.shell)
    if is_known:
        loss, weigh = loss_of(model)
    else:
        loss, weigh = None, None
    return replace(found, layers=own, loss=loss, weigh=weigh)


class Layers(NamedTuple):
    """A model as layers, with its own loss if it has one; see `Cut`. An example may have proved them."""

    layers: Sequence[NamedLayer]
    loss: Callable[[Any, Any], Tensor] | None = None
    weigh: Callable[[Any], float] | None = None
    is_proved: bool = True


def as_layers(model: Any, example: tuple[Any, Any] | None = None) -> Layers:
    """The layers of any model: its own, if it is a sequence of layers or was cut; else those of a new cut.

    Args:
        model: an `nn.Sequential`, a list of modules, a `Cut`, or any module.
        example: (input, target) of one batch.

    Raises:
        ModelError: it cannot be cut; or, with an example, its layers pass values aside.
    """
    if isinstance(model, Cut):
        return Layers(model.layers, model.loss, model.weigh)
    if not isinstance(model, nn.Module) or is_sequence(model):
        layers = named_layers(model)
        for layer in layers:
            _refuse_sparse(layer.module, layer.dotted)
        with noticed(model):
            is_proved = example is not None and not is_meta(layers) and refuse_channels(layers, example[0])
        return Layers(layers, is_proved=is_proved)
    return as_layers(cut(model, None if example is None else example[0]))


def _as_it_is(output: Any) -> Any:
    return output


def _found(model: nn.Module, example: Any, cuts: Sequence[str] | None, ways: _Ways) -> Cut:
    """The cut, found and proved with states of its own; nothing of them remains."""
    kind = type(model).__name__
    if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        raise ModelError(f"{kind} has weights without a shape yet: call it once on a batch before it is cut")
    if any(isinstance(leaf, Tensor) and leaf.layout is not torch.strided for leaf in pytree.tree_leaves(example)):
        raise ModelError(
            f"{kind} cannot be cut: its input has a sparse tensor, which has no micro-batches: make it dense"
        )
    _refuse_sparse(model)
    scripts = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripts:
        raise ModelError(
            f"{kind} cannot be cut: {scripts[0]} is TorchScript, whose forward cannot be followed; give it as Python "
            "code, or write the model as a list of layers"
        )
    states = States(model)
    try:
        with noticed(model), kept_outside(model), states.used(states.fresh()), lent_weights(model):
            fill_zeros(model)
            return _cut(model, example, cuts, ways)
    except ModelError:
        raise
    except (Exception, Foreign) as problem:
        path, line = place_of(problem, model)
        raise ModelError(
            f"{kind} cannot be cut: {type(problem).__name__} in {path} ({line}): {problem}. Give "
            "cuts=['path.to.module', …], modules to cut before, or write the model as a list of layers"
        ) from problem


def _refuse_sparse(model: nn.Module, prefix: str = "") -> None:
    """Refuses weights and saved buffers that are sparse: they cannot be sent, and checkpoints cannot hold them."""
    for name, tensor in model.state_dict(prefix=prefix, keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
            raise ModelError(
                f"{name} is a sparse tensor, which checkpoints cannot hold: make it dense, or, if it is a buffer that "
                "stays as it is, leave it out of the state: register_buffer(…, persistent=False)"
            )


def _cut(model: nn.Module, example: Any, cuts: Sequence[str] | None, ways: _Ways) -> Cut:
    kind, problems = type(model).__name__, list[str]()
    calls: list[str] = []
    found = None
    states, places = States(model), places_of(model)
    try:
        with states.used(states.fresh()):
            calls = calls_of(model, *ways.arguments(example))
    except Foreign as problem:
        problems.append(str(problem))
    except Exception as problem:
        raise ModelError(f"{kind} raised {type(problem).__name__} on its example: {problem}") from problem
    try:
        refuse_replaced(model, places)
        batches = example, second_batch(model, example, ways.arguments)
    except (ModelError, Foreign) as problem:
        raise ModelError(f"{kind} cannot be cut: {problem}") from None
    if not problems:
        found = _around_blocks(model, anatomies(model, calls, cuts), batches, ways, problems)
    if found is not None and (is_transformers(model) or _is_good(found, cuts)):
        return found
    try:
        traced = _traced(model, batches, cuts, ways)
        if found is None or cuts is not None or _largest(traced) < _largest(found):
            return traced
    except Exception as problem:
        if isinstance(problem, ModelError):
            kind_of = ""
        else:
            kind_of = f"{type(problem).__name__}: "
        problems.append(f"as a graph: {kind_of}{problem}")
    if found is not None:
        return found
    again = called_again(model, calls)
    if again and cuts is None:
        problems.insert(0, f"{again[0]} is called {again[1]} times in one forward, so it would be in several layers")
    causes = "; ".join(dict.fromkeys([problems[0], problems[-1]]))
    raise ModelError(
        f"{kind} cannot be cut: {causes}. Give cuts=['path.to.module', …], modules to cut before, or write the model "
        "as a list of layers"
    )


def _is_good(found: Cut, cuts: Sequence[str] | None) -> bool:
    """Returns whether all borders were possible and, unless given by hand, no layer has most of the weights."""
    total = sum(p.numel() for p in found.shell.model.parameters())
    return not found.merged and (cuts is not None or 2 * _largest(found) <= total)


def _largest(found: Cut) -> int:
    """The most weights of a layer."""
    return max(sum(p.numel() for p in layer.module.parameters()) for layer in found.layers)


def _traced(model: nn.Module, batches: _Batches, cuts: Sequence[str] | None, ways: _Ways) -> Cut:
    """The cut of a model's traced graph."""
    traces()
    hollow = copied(model, lambda tensor: tensor.to("meta"))
    shell = Traced(hollow, ways.arguments, ways.result, model.training)
    crossing = shell.choose(batches[0], cuts)
    layers = shell.hold(model)
    why = prove_trace(shell, model, batches)
    if why is not None:
        raise ModelError(why)
    return Cut(layers, shell, model, crossing)


def _around_blocks(
    model: nn.Module, possible: Iterator[Anatomy], batches: _Batches, ways: _Ways, problems: list[str]
) -> Cut | None:
    """The cut before blocks that are modules, the most promising that can be proved."""
    try:
        for parts in possible:
            found = _best(model, parts, batches, ways, problems)
            if found is not None:
                return found
    except ModelError as problem:
        problems.append(str(problem))
    except Exception as problem:
        problems.append(f"{type(problem).__name__} in {' ('.join(place_of(problem, model))}): {problem}")
    return None


def _best(model: nn.Module, parts: Anatomy, batches: _Batches, ways: _Ways, problems: list[str]) -> Cut | None:
    """The cut with borders before as many of these blocks as can be proved."""
    merged: dict[str, str] = {}
    while len(parts.blocks) > 1:
        try:
            shell, seen, found = _attempt(model, parts, batches, ways)
        except Foreign as problem:
            raise ModelError(str(problem)) from None
        except ModelError as problem:
            problems.append(str(problem))
            return None
        if not found:
            return Cut(_layers(model, shell), shell, model, _crossing(shell, seen), tuple(merged.items()))
        whole = [difference.why for difference in found if difference.block is None]
        if whole:
            problems.append(whole[0])
            return None
        gone = {parts.blocks[difference.block]: difference.why for difference in found if difference.block is not None}
        merged |= gone
        left = tuple(path for path in parts.blocks if path not in gone)
        parts = parts._replace(blocks=left, units=(*parts.units, *gone))
    problems += [f"{path}: {why}" for path, why in list(merged.items())[:3]]
    return None


def _attempt(model: nn.Module, parts: Anatomy, batches: _Batches, ways: _Ways) -> tuple[Shell, Seen, list[Difference]]:
    """The shell with borders before some blocks, and the borders at which it differs from the whole model."""
    states, example = States(model), batches[0]
    with states.used(states.fresh()), torch.no_grad():
        seen = observe(model, parts, *ways.arguments(example), seed_torch)
        seen = seen._replace(output=ways.result(seen.output))
    shell = _shell(model, parts, seen, ways)
    with states.used(states.fresh()), torch.no_grad():
        shell.crossing, found = _crossings(shell, seen, example)
    if found:
        return shell, seen, found
    found = borders(shell, seen, example)
    if found:
        shell.writes = True
        shell.writes = len(borders(shell, seen, example)) < len(found)
        found = borders(shell, seen, example)
    if found:
        return shell, seen, found
    whole = reference(model, parts, batches, shell)
    num_blocks = len(parts.blocks)
    found = [Difference(min(border, num_blocks - 1), channel.why) for channel in whole.channels
             for border in range(channel.writer, channel.reader)]  # fmt: skip
    found = found or [difference for difference in [prove(shell, whole)] if difference is not None]
    return shell, seen, found or branches(model, parts, example, shell, whole)


def _shell(model: nn.Module, parts: Anatomy, seen: Seen, ways: _Ways) -> Shell:
    """The shell of a model, without the values that cross its borders."""
    if len(seen.entries) != len(parts.blocks):
        raise ModelError(
            f"{len(seen.entries)} of {len(parts.blocks)} blocks were called in a second forward: which layers run must "
            "not depend on chance or on the data (set layerdrop to 0)"
        )
    modules = {path: model.get_submodule(path) for path in (*parts.blocks, *parts.units, *parts.spine)}
    named = set(modules.values())
    units = {path: frozenset(seen.owners[path] or {0}) for path in parts.units}
    owners = units | {path: frozenset({number}) for number, path in enumerate(parts.blocks, 1)}
    bare = [(modules[path], frozenset({0})) for path in parts.spine]
    for path in sorted(seen.direct):
        bare += [(inner, owners[path]) for inner in modules[path].modules() if inner._parameters]
    carried = []
    if ways.carries is not None:
        carried = [list(filter(ways.carries, modules[path].modules())) for path in parts.blocks]
    return Shell(
        model,
        [modules[path] for path in parts.blocks],
        [(modules[path], own) for path, own in units.items()],
        [modules[path] for path in parts.spine],
        bare,
        [child for path in parts.spine for child in modules[path].children() if child not in named],
        {modules[path]: path for path in (*parts.blocks, *parts.units)},
        ways.arguments,
        ways.result,
        {modules[path]: Stub(modules[path], seen.alike[path], output) for path, output in seen.examples.items()},
        carried,
    )


def _crossings(shell: Shell, seen: Seen, example: Any) -> tuple[dict[int, list[int]], list[Difference]]:
    """For each border, the leaves that cross it: they are computed from weights or from stand-ins.

    Also the borders that are impossible, since earlier code cannot run without the values themselves.
    """
    crossing: dict[int, list[int]] = {}
    entered, why = entries(shell, example)
    for number, whole in enumerate(seen.entries, 1):
        if number > len(entered):
            return crossing, [Difference(k, why) for k in range(len(entered), len(shell.blocks))]
        leaves, foreign = entered[number - 1]
        if len(leaves) != len(whole):
            return crossing, [Difference(number - 1, "its arguments have another structure after stand-ins")]
        differing = (k for k, pair in enumerate(zip(leaves, whole, strict=True)) if not same_leaf(*pair))
        crossing[number] = sorted(foreign.union(seen.made[number - 1], differing))
        for place in crossing[number]:
            if not isinstance(whole[place], Tensor):
                what = f"is given a {type(whole[place]).__name__} that depends on earlier layers"
                return crossing, [Difference(number - 1, f"it {what}; only tensors can be sent")]
    crossing[len(shell.blocks) + 1] = _needed_at_the_end(shell, seen, example)
    return crossing, []


def _needed_at_the_end(shell: Shell, seen: Seen, example: Any) -> list[int]:
    """The output leaves of the last block that the model's output depends on."""
    leaves, number = seen.exits[-1], len(shell.blocks) + 1
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for place in places if len(places) > 1 and not shell.carried else ():
        fewer = [one for one in places if one != place]
        shell.crossing = {number: fewer}
        payload = Payload(example, [leaves[one] for one in fewer], [])
        if run_layer(shell, number, payload._asdict(), seen)[1] is None:
            places = fewer
    return places


def _crossing(shell: Shell, seen: Seen) -> tuple[tuple[int, int], ...]:
    found = []
    for number in range(1, shell.num_layers):
        if number <= len(shell.blocks):
            leaves = seen.entries[number - 1]
        else:
            leaves = seen.exits[-1]
        tensors = [leaves[place] for place in shell.crossing[number] if isinstance(leaves[place], Tensor)]
        found.append((sum(tensor.nbytes for tensor in tensors), len(tensors)))
    return tuple(found)


def _layers(model: nn.Module, shell: Shell) -> tuple[NamedLayer, ...]:
    """The layers with the modules that each one owns."""
    paths = [shell.labels[block] for block in shell.blocks]
    spine = [path for path, module in model.named_modules() if module in shell.spine]
    members: list[list[str]] = [[], *([path] for path in paths), []]
    for unit, owners in shell.units:
        for owner in sorted(owners):
            members[owner].append(shell.labels[unit])
    layers = []
    for number, (label, own) in enumerate(zip(["before", *paths, "after"], members, strict=True)):
        prefix, holder = _holder(model, own, spine if number == 0 else ())
        layers.append(NamedLayer(number, prefix, CutLayer(shell, number, holder), label))
    return tuple(layers)


def _holder(model: nn.Module, paths: Sequence[str], spine: Sequence[str]) -> tuple[str, nn.Module]:
    """A module with some modules of the model under their own names below a common prefix."""
    own = {path: model.get_submodule(path) for path in spine}
    direct = {path: module for path, module in own.items() if module._parameters or module._buffers}
    if len(paths) == 1 and not direct:
        return paths[0], model.get_submodule(paths[0])
    root = nn.Module()
    for path, module in direct.items():
        node = node_at(root, path)
        for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            node.__dict__[name] = module.__dict__[name]
    for path in paths:
        parent, _, name = path.rpartition(".")
        node_at(root, parent)._modules[name] = model.get_submodule(path)
    return "", root
