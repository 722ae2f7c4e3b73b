"""The parts of a model that was not written for a pipeline: its repeated blocks, and the code between them.

One run of the model with an example shows the modules that are called, how often and in which order.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.cutting.channels import Channels
from pipefit.cutting.shell import Enter
from pipefit.errors import ModelError
from pipefit.stage.stage import replaced_forwards


class Anatomy(NamedTuple):
    """Modules of a model by their paths.

    Attributes:
        blocks: called once, in this order, none inside another.
        spine: modules that hold blocks, the model first, and those that are never called but hold modules that are.
        units: other children of the spine that have weights or buffers to be saved.
    """

    blocks: tuple[str, ...]
    spine: tuple[str, ...]
    units: tuple[str, ...]


class Seen(NamedTuple):
    """Record of one run of the whole model.

    Attributes:
        entries: leaves of each block's arguments.
        made: of each block, the places of the leaves that depend on weights or on other blocks.
        exits: leaves of each block's output.
        owners: of each unit, the layers during which it was called.
        direct: blocks and units of whose weights other code makes use, besides their own forward.
        alike: for each block and unit, for each leaf of its output the place of a tensor among its arguments with the
            same shape and type, -1 for a leaf that is not a tensor, None where there is none.
        examples: an output of each block and unit.
        output: of the model.
    """

    entries: list[list[Any]]
    made: list[set[int]]
    exits: list[list[Any]]
    owners: dict[str, set[int]]
    direct: set[str]
    alike: dict[str, list[int | None]]
    examples: dict[str, Any]
    output: Any


def calls_of(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], channels: Channels | None = None
) -> list[str]:
    """The modules that a model calls in one run, by their paths, in order.

    Args:
        model: of any kind.
        args: positional arguments.
        kwargs: keyword arguments.
        channels: follow the run; None: nothing does.
    """
    channels = channels or Channels(model)
    found: list[str] = []
    with contextlib.ExitStack() as hooks:
        hooks.enter_context(channels.following((args, kwargs)))
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(lambda *_, path=path: found.append(path)))
        model(*args, **kwargs)
    return found


_FEW = 3
"""Children of a model that are too few to be its blocks when there are lists."""


def anatomies(model: nn.Module, calls: Sequence[str], cuts: Sequence[str] | None = None) -> Iterator[Anatomy]:
    """The possible choices of blocks in a model, the most promising first.

    Args:
        model: of any kind.
        calls: of one run, by paths.
        cuts: paths of modules before which it may be cut; None: found here.

    Raises:
        ModelError: a path of `cuts` names a module that is not called once.
    """
    times = Counter(calls)
    order = [path for path in calls if times[path] == 1]
    modules = dict(model.named_modules())
    if cuts is not None:
        for path in cuts:
            if times[path] != 1:
                raise ModelError(f"cuts: {path} is called {times[path]} times in one forward; a cut needs exactly one")
        yield _anatomy(model, [path for path in order if path in cuts], calls)
        return
    kinds = [path for path in order if type(modules[path]).__mro__[1].__name__ == "GradientCheckpointingLayer"]
    listed = [path for path in order if _is_listed(modules, path)]
    children = [path for path, module in model.named_children() if path in order]
    last = children[-1:]
    known: set[tuple[str, ...]] = set()
    choices = [_outermost(kinds), _outermost(listed), _finest(listed)]
    lists = {path.rpartition(".")[0] for path in choices[1]}
    # More lists than children: the lists are branches inside of the children.
    choices.insert(1 if len(lists) > len(children) > _FEW else len(choices), children)
    for found in choices:
        # The code after the last block may need more than its output, as in x + block(x): then the last child ends it.
        follows = found and last and order.index(last[0]) > order.index(found[-1])
        for blocks in (found, found + last) if follows else (found,):
            if len(blocks) > 1 and tuple(blocks) not in known:
                known.add(tuple(blocks))
                yield _anatomy(model, blocks, calls)


def called_again(model: nn.Module, calls: Sequence[str]) -> tuple[str, int] | None:
    """The largest module with weights that one forward calls several times, with the number; None: there is none."""
    times = Counter(calls)
    sizes = {path: sum(p.numel() for p in module.parameters()) for path, module in model.named_modules()}
    largest = max(
        (path for path in times if times[path] > 1 and sizes[path]), key=lambda path: sizes[path], default=None
    )
    if largest is None:
        return None
    return (largest, times[largest])


def _is_listed(modules: Mapping[str, nn.Module], path: str) -> bool:
    """Returns whether a module is one of several children of a list that are all called once."""
    parent = modules.get(path.rpartition(".")[0])
    if not isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict) or not path:
        return False
    return len(parent) > 1 and sum(1 for child in parent.children() if any(True for _ in child.parameters())) > 1


def _outermost(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


def _finest(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]


def _anatomy(model: nn.Module, blocks: Sequence[str], calls: Sequence[str]) -> Anatomy:
    held = _holders(blocks)
    bare = _holders(calls).difference(calls)
    for path, _ in model.named_modules():
        if path in bare and path.rpartition(".")[0] in held:
            held.add(path)
    spine = [path for path, _ in model.named_modules() if path in held]
    units = []
    seen: set[int] = set()
    for parent in spine:
        for name, child in model.get_submodule(parent).named_children():
            if parent:
                path = f"{parent}.{name}"
            else:
                path = name
            if path not in held and path not in blocks and id(child) not in seen and child.state_dict():
                seen.add(id(child))
                units.append(path)
    return Anatomy(tuple(blocks), tuple(spine), tuple(units))


def _holders(paths: Iterable[str]) -> set[str]:
    """The modules inside of which some modules are."""
    found = {""}
    for path in paths:
        while path := path.rpartition(".")[0]:
            found.add(path)
    return found


def observe(
    model: nn.Module,
    parts: Anatomy,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    enter: Enter,
    channels: Channels | None = None,
) -> Seen:
    """Runs the whole model and records its blocks and units.

    Args:
        model: in the mode of the run.
        parts: of the model.
        args: positional arguments.
        kwargs: keyword arguments.
        enter: called as each layer begins.
        channels: follow the run; None: nothing does.
    """
    channels = channels or Channels(model)
    seen = Seen([], [], [], {path: set() for path in parts.units}, set(), {}, {}, None)
    numbers = {path: number for number, path in enumerate(parts.blocks, 1)}
    now = 0

    def watched(path: str, module: nn.Module) -> Any:
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            given = pytree.tree_leaves((args, kwargs))
            if path in numbers:
                now = numbers[path]
                seen.entries.append([_copy(leaf) for leaf in given])
                seen.made.append({place for place, leaf in enumerate(given) if channels.is_made(leaf)})
                enter(now)
            else:
                seen.owners[path].add(now)
            with channels.inside(path, now, given):
                output = forward(*args, **kwargs)
                channels.hand(output)
            leaves = pytree.tree_leaves(output)
            seen.examples[path] = output
            seen.alike[path] = _alike([leaf for leaf in given if isinstance(leaf, Tensor)], leaves)
            if path in numbers:
                seen.exits.append([_copy(leaf) for leaf in leaves])
                if now == len(numbers):
                    now += 1
                    channels.end_blocks(now)
                    enter(now)
            return output

        return run

    modules = {path: model.get_submodule(path) for path in (*parts.blocks, *parts.units)}
    watches = {module: watched(path, module) for path, module in modules.items()}
    weights = {path: {id(p) for p in module.parameters()} for path, module in modules.items()}
    channels.homes = {key: path for path, own in weights.items() for key in own}
    enter(0)
    with channels.following((args, kwargs)), replaced_forwards(watches):
        output = model(*args, **kwargs)
    for path in parts.units:
        seen.owners[path].update(channels.users.get(path, ()))
    for path, user in channels.direct:
        # A weight that both have is the user's own.
        if weights[path].isdisjoint(weights.get(user, ())):
            seen.direct.add(path)
    return seen._replace(output=output)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf


def _alike(given: Sequence[Tensor], leaves: Sequence[Any]) -> list[int | None]:
    found: list[int | None] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            found.append(-1)
            continue
        places = [place for place, one in enumerate(given) if (one.shape, one.dtype) == (leaf.shape, leaf.dtype)]
        found.append(places[0] if places else None)
    return found
