"""Any `nn.Module` as a sequence of layers: found by one run of an example, and proved by it before training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.cutting.anatomy import Anatomy, Seen, anatomies, called_again, calls_of, num_weights, observe
from pipefit.cutting.cut_model import Cut
from pipefit.cutting.differences import same_leaf
from pipefit.cutting.exported import copied
from pipefit.cutting.lasting import places_of, refuse_replaced, second_batch
from pipefit.cutting.notice import noticed, traces
from pipefit.cutting.own import (
    Arguments,
    Call,
    Given,
    Paths,
    Result,
    Routers,
    is_transformers,
    loss_of,
    random_batch,
    result,
)
from pipefit.cutting.proof import (
    Difference,
    borders,
    branches,
    crossed,
    entries,
    prove,
    reference,
    refuse_channels,
    run_layer,
)
from pipefit.cutting.proof_of_trace import prove_trace
from pipefit.cutting.shell import CutLayer, Payload, Shell, node_at, share_tensors
from pipefit.cutting.states import States, fill_zeros, kept_outside
from pipefit.cutting.stubs import Stub
from pipefit.cutting.traced import Traced
from pipefit.cutting.tracking import Foreign, described
from pipefit.errors import ModelError
from pipefit.parallel.loss import Loss
from pipefit.runtime.microbatches import Weigh
from pipefit.spec.arguments import checked
from pipefit.stage.materialise import is_meta, lent_weights
from pipefit.stage.split import NamedLayer, is_sequence, named_layers

_Batches = tuple[Any, Any]


class _Ways(NamedTuple):
    """The ways into a model and out of it; see `Shell`.

    Attributes:
        carries: whether a module is one whose outputs are carried; None: there is none.
    """

    arguments: Arguments
    result: Result
    carries: Callable[[nn.Module], bool] | None


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
    modules = dict(model.named_modules())
    for path in cuts or ():
        if path not in modules:
            raise ModelError(f"cuts: the model has no module {path!r}")
    if example is None:
        example = random_batch(model, 3)
    if is_known:
        ways = _Ways(Call.of(model), result, Routers.of(model))
        loss, weigh = loss_of(model)
    else:
        ways = _Ways(plain_arguments, _as_it_is, None)
        loss = weigh = None
    found = _found(model, example, cuts, ways)
    # With the model's own weights again, not the weights of the proof.
    if isinstance(found.shell, Traced):
        own = found.shell.hold(model)
    else:
        own = _layers(model, found.shell)
    return replace(found, layers=own, loss=loss, weigh=weigh)


class Layers(NamedTuple):
    """A model as layers, with its own loss if it has one, and its `Cut`. An example may have proved them."""

    layers: Sequence[NamedLayer]
    loss: Loss | None = None
    weigh: Weigh | None = None
    is_proved: bool = True
    whole: Cut | None = None


def as_layers(model: Any, example: tuple[Any, Any] | None = None) -> Layers:
    """The layers of any model: its own, if it is a sequence of layers or was cut; else the layers of a new cut.

    Args:
        model: an `nn.Sequential`, a list of modules, a `Cut`, or any module.
        example: (input, target) of one batch.

    Raises:
        ModelError: it cannot be cut; or, with an example, its layers pass values aside.
    """
    if isinstance(model, Cut):
        return Layers(model.layers, model.loss, model.weigh, whole=model)
    if not isinstance(model, nn.Module) or is_sequence(model):
        layers = named_layers(model)
        for layer in layers:
            _refuse_sparse(layer.module, layer.dotted)
            _refuse_lazy(f"layer {layer.name}", layer.module)
        with noticed(model):
            is_proved = example is not None and not is_meta(layers) and refuse_channels(layers, example[0])
        return Layers(layers, is_proved=is_proved)
    return as_layers(cut(model, None if example is None else example[0]))


def _as_it_is(output: Any) -> Any:
    return output


def _found(model: nn.Module, example: Any, cuts: Paths | None, ways: _Ways) -> Cut:
    """The cut, found and proved with states of its own; nothing of them remains."""
    kind = type(model).__name__
    _refuse_lazy(kind, model)
    if any(_is_sparse(leaf) for leaf in pytree.tree_leaves(example)):
        raise _refusal(model, "its input has a sparse tensor, which has no micro-batches: make it dense")
    _refuse_sparse(model)
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise _refusal(
                model,
                f"{path} is TorchScript, whose forward cannot be followed; give it as Python code, or write the model "
                "as a list of layers",
            )
    states = States(model)
    try:
        with noticed(model), kept_outside(model), states.apart(), lent_weights(model):
            fill_zeros(model)
            return _cut(model, example, cuts, ways)
    except ModelError:
        raise
    except (Exception, Foreign) as problem:
        raise _refusal(model, f"{described(problem, model)}. {_ADVICE}") from problem


_ADVICE = "Give cuts=['path.to.module', …], modules to cut before, or write the model as a list of layers"


def _refusal(model: nn.Module, why: object) -> ModelError:
    return ModelError(f"{type(model).__name__} cannot be cut: {why}")


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is not torch.strided


def _refuse_lazy(name: str, model: nn.Module) -> None:
    if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        raise ModelError(f"{name} has weights without a shape yet: call it once on a batch before it is cut")


def _refuse_sparse(model: nn.Module, prefix: str = "") -> None:
    """Refuses weights and saved buffers that are sparse: they cannot be sent, and checkpoints cannot hold them."""
    for name, tensor in model.state_dict(prefix=prefix, keep_vars=True).items():
        if _is_sparse(tensor):
            raise ModelError(
                f"{name} is a sparse tensor, which checkpoints cannot hold: make it dense, or, if it is a buffer that "
                "stays as it is, leave it out of the state: register_buffer(…, persistent=False)"
            )


def _cut(model: nn.Module, example: Any, cuts: Paths | None, ways: _Ways) -> Cut:
    problems = []
    calls = []
    found = None
    states = States(model)
    places = places_of(model)
    try:
        with states.apart():
            calls = calls_of(model, ways.arguments(example))
    except Foreign as problem:
        problems.append(str(problem))
    except Exception as problem:
        kind = type(model).__name__
        raise ModelError(f"{kind} raised {type(problem).__name__} on its example: {problem}") from problem
    try:
        refuse_replaced(model, places)
        batches = example, second_batch(model, example, ways.arguments)
    except (ModelError, Foreign) as problem:
        raise _refusal(model, problem) from None
    if not problems:
        possible = anatomies(model, calls, cuts)
        found = _around_blocks(model, possible, batches, ways, problems)
    if found is not None and (is_transformers(model) or _is_good(found, cuts)):
        return found
    try:
        traced = _traced(model, batches, cuts, ways)
        if found is None or cuts is not None or _largest(traced) < _largest(found):
            return traced
    except ModelError as problem:
        problems.append(f"as a graph: {problem}")
    except Exception as problem:
        problems.append(f"as a graph: {type(problem).__name__}: {problem}")
    if found is not None:
        return found
    again = called_again(model, calls)
    if again and cuts is None:
        problems.insert(0, f"{again[0]} is called {again[1]} times in one forward, so it would be in several layers")
    causes = problems[0]
    if problems[-1] != causes:
        causes += f"; {problems[-1]}"
    raise _refusal(model, f"{causes}. {_ADVICE}")


def _is_good(found: Cut, cuts: Paths | None) -> bool:
    """Returns whether all borders were possible and, unless given by hand, no layer has most of the weights."""
    if found.merged:
        return False
    return cuts is not None or 2 * _largest(found) <= num_weights(found.shell.model)


def _largest(found: Cut) -> int:
    """The most weights of a layer."""
    return max(num_weights(layer.module) for layer in found.layers)


def _traced(model: nn.Module, batches: _Batches, cuts: Paths | None, ways: _Ways) -> Cut:
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
        problems.append(described(problem, model))
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
            layers = _layers(model, shell)
            return Cut(layers, shell, model, _crossing(shell, seen), tuple(merged.items()))
        gone = {}
        for block, why in found:
            if block is None:
                problems.append(why)
                return None
            gone[parts.blocks[block]] = why
        merged |= gone
        left = tuple(path for path in parts.blocks if path not in gone)
        parts = parts._replace(blocks=left, units=(*parts.units, *gone))
    for path, why in list(merged.items())[:3]:
        problems.append(f"{path}: {why}")
    return None


def _attempt(model: nn.Module, parts: Anatomy, batches: _Batches, ways: _Ways) -> tuple[Shell, Seen, list[Difference]]:
    """The shell with borders before some blocks, and the borders at which it differs from the whole model."""
    states = States(model)
    example = batches[0]
    with states.apart(), torch.no_grad():
        seen = observe(model, parts, ways.arguments(example))
        seen = seen._replace(output=ways.result(seen.output))
    shell = _shell(model, parts, seen, ways)
    with states.apart(), torch.no_grad():
        shell.crossing, found = _crossings(shell, seen, example)
    if found:
        return shell, seen, found
    found = borders(shell, seen, example)
    if found:
        shell.writes = True
        fewer = borders(shell, seen, example)
        shell.writes = len(fewer) < len(found)
        found = borders(shell, seen, example)
    if found:
        return shell, seen, found
    whole = reference(model, parts, batches, shell)
    last = len(parts.blocks) - 1
    for channel in whole.channels:
        for border in range(channel.writer, channel.reader):
            found.append(Difference(min(border, last), channel.why))
    found = found or prove(shell, whole) or branches(parts, example, shell, whole)
    return shell, seen, found


def _shell(model: nn.Module, parts: Anatomy, seen: Seen, ways: _Ways) -> Shell:
    """The shell of a model, without the values that cross its borders."""
    called = len(seen.entries)
    expected = len(parts.blocks)
    if called != expected:
        raise ModelError(
            f"{called} of {expected} blocks were called in a second forward: which layers run must not depend on "
            "chance or on the data (set layerdrop to 0)"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks = [modules[path] for path in parts.blocks]
    spine = [modules[path] for path in parts.spine]
    owners = {path: frozenset(seen.owners[path] or {0}) for path in parts.units}
    units = [(modules[path], own) for path, own in owners.items()]
    owners |= {path: frozenset({number}) for number, path in enumerate(parts.blocks, 1)}
    labels = {modules[path]: path for path in owners}
    bare = [(module, frozenset({0})) for module in spine]
    for path in sorted(seen.direct):
        for inner in modules[path].modules():
            if inner._parameters:
                bare.append((inner, owners[path]))
    named = labels.keys() | spine
    shared = [child for module in spine for child in module.children() if child not in named]
    stubs = {}
    for path, output in seen.examples.items():
        stubs[modules[path]] = Stub(modules[path], seen.alike[path], output)
    carried = []
    if ways.carries is not None:
        carried = [list(filter(ways.carries, block.modules())) for block in blocks]
    return Shell(model, blocks, units, spine, bare, shared, labels, ways.arguments, ways.result, stubs, carried)


def _crossings(shell: Shell, seen: Seen, example: Any) -> tuple[dict[int, list[int]], list[Difference]]:
    """For each border, the leaves that cross it: they are computed from weights or from stand-ins.

    Also the borders that are impossible, since earlier code cannot run without the values themselves.
    """
    crossing: dict[int, list[int]] = {}
    entered, why = entries(shell, example)
    for block, whole in enumerate(seen.entries):
        if block >= len(entered):
            unreached = range(block, len(shell.blocks))
            return crossing, [Difference(k, why) for k in unreached]
        leaves, foreign = entered[block]
        if len(leaves) != len(whole):
            return crossing, [Difference(block, "its arguments have another structure after stand-ins")]
        differing = {place for place in range(len(whole)) if not same_leaf(leaves[place], whole[place])}
        crossing[block + 1] = sorted(foreign | seen.made[block] | differing)
        for place in crossing[block + 1]:
            if not isinstance(whole[place], Tensor):
                kind = type(whole[place]).__name__
                why = f"it is given a {kind} that depends on earlier layers; only tensors can be sent"
                return crossing, [Difference(block, why)]
    crossing[len(shell.blocks) + 1] = _needed_at_the_end(shell, seen, example)
    return crossing, []


def _needed_at_the_end(shell: Shell, seen: Seen, example: Any) -> list[int]:
    """The output leaves of the last block that the model's output depends on."""
    leaves = seen.exits[-1]
    number = len(shell.blocks) + 1
    every = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(every) == 1 or shell.carried:
        return every
    needed = every
    for place in every:
        fewer = [one for one in needed if one != place]
        shell.crossing = {number: fewer}
        payload = Payload(example, [leaves[one] for one in fewer], [])
        _, why = run_layer(shell, number, payload._asdict(), seen)
        if why is None:
            needed = fewer
    return needed


def _crossing(shell: Shell, seen: Seen) -> tuple[tuple[int, int], ...]:
    found = []
    for number in range(1, shell.num_layers):
        tensors = crossed(shell, seen, number)
        size = sum(tensor.nbytes for tensor in tensors)
        found.append((size, len(tensors)))
    return tuple(found)


def _layers(model: nn.Module, shell: Shell) -> tuple[NamedLayer, ...]:
    """The layers with the modules that each one owns."""
    paths = [shell.labels[block] for block in shell.blocks]
    members = [[], *([path] for path in paths), []]
    for unit, owners in shell.units:
        for owner in owners:
            members[owner].append(shell.labels[unit])
    spine = [path for path, module in model.named_modules() if module in shell.spine]
    layers = []
    for number, label in enumerate(["before", *paths, "after"]):
        prefix, holder = _holder(model, members[number], spine)
        layer = CutLayer(shell, number, holder)
        layers.append(NamedLayer(number, prefix, layer, label))
        spine = []  # The first layer has it.
    return tuple(layers)


def _holder(model: nn.Module, paths: Paths, spine: Paths) -> tuple[str, nn.Module]:
    """A module with some modules of the model under their own names below a common prefix."""
    root = nn.Module()
    is_bare = True
    for path in spine:
        module = model.get_submodule(path)
        if module._parameters or module._buffers:
            share_tensors(node_at(root, path), module)
            is_bare = False
    if len(paths) == 1 and is_bare:
        return paths[0], model.get_submodule(paths[0])
    for path in paths:
        parent, _, name = path.rpartition(".")
        node_at(root, parent)._modules[name] = model.get_submodule(path)
    return "", root
