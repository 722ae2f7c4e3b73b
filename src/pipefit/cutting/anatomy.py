"""The parts of a model that was not written for a pipeline: its repeated blocks, and the code between them.

One run of the model with an example shows the modules that are called, how often and in which order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from pipefit.cutting.channels import Channels, Owners
from pipefit.cutting.own import Given, Leaves, Paths
from pipefit.cutting.states import seed_torch
from pipefit.errors import ModelError
from pipefit.stage.compiler import Forward
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
        made: the places of the leaves of each block's arguments that depend on weights or on other blocks.
        exits: leaves of each block's output.
        owners: the layers during which each unit was called.
        direct: blocks and units of whose weights other code makes use, besides their own forward.
        alike: for each block and unit, for each leaf of its output the place of a tensor among its arguments with the
            same shape and type, -1 for a leaf that is not a tensor, None where there is none.
        examples: an output of each block and unit.
        output: the model's output.
    """

    entries: list[list[Any]]
    made: list[set[int]]
    exits: list[list[Any]]
    owners: Owners
    direct: set[str]
    alike: dict[str, list[int | None]]
    examples: dict[str, Any]
    output: Any

    def leaves_at(self, border: int) -> list[Any]:
        """The leaves before a layer: the arguments of its block, or after the blocks the output of the last one."""
        if border <= len(self.entries):
            return self.entries[border - 1]
        return self.exits[-1]


def num_weights(module: nn.Module) -> int:
    """The number of a module's weights."""
    return sum(parameter.numel() for parameter in module.parameters())


def calls_of(model: nn.Module, given: Given, channels: Channels | None = None) -> list[str]:
    """The modules that a model calls in one run, by their paths, in order.

    Args:
        model: any module.
        given: its arguments.
        channels: follow the run; None: nothing does.
    """
    channels = channels or Channels(model)
    args, kwargs = given
    paths = {module: path for path, module in model.named_modules()}
    found: list[str] = []

    def note(module: nn.Module, given: Any) -> None:
        if module in paths:
            found.append(paths[module])

    with channels.following(given), register_module_forward_pre_hook(note):
        model(*args, **kwargs)
    return found


_BLOCK = "GradientCheckpointingLayer"
"""The parent of the classes of blocks in transformers."""

_FEW = 3
"""Children of a model that are too few to be its blocks when there are lists."""


def anatomies(model: nn.Module, calls: Paths, cuts: Paths | None = None) -> Iterator[Anatomy]:
    """The possible choices of blocks in a model, the most promising first.

    Args:
        model: any module.
        calls: the modules that one run calls, by their paths.
        cuts: paths of modules before which it may be cut; None: found here.

    Raises:
        ModelError: a path of `cuts` names a module that is not called once.
    """
    times = Counter(calls)
    order = [path for path in calls if times[path] == 1]
    if cuts is not None:
        for path in cuts:
            if times[path] != 1:
                raise ModelError(f"cuts: {path} is called {times[path]} times in one forward; a cut needs exactly one")
        chosen = [path for path in order if path in cuts]
        yield _anatomy(model, chosen, calls)
        return
    known = set()
    for found in _choices(model, order):
        if len(found) > 1 and tuple(found) not in known:
            known.add(tuple(found))
            yield _anatomy(model, found, calls)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model by their paths, without a run; none where it has no list of them."""
    modules = dict(model.named_modules())
    kinds = [path for path in modules if _parent_class(modules[path]) == _BLOCK]
    listed = [path for path in modules if _is_listed(modules, path)]
    return {path: modules[path] for path in _outermost(kinds) or _outermost(listed)}


def _choices(model: nn.Module, order: Paths) -> Iterator[list[str]]:
    """Paths that may be the blocks of a model, among those that are called once."""
    modules = dict(model.named_modules())
    kinds = [path for path in order if _parent_class(modules[path]) == _BLOCK]
    listed = [path for path in order if _is_listed(modules, path)]
    children = [path for path, _ in model.named_children() if path in order]
    choices = [_outermost(kinds), _outermost(listed), _finest(listed)]
    lists = {path.rpartition(".")[0] for path in choices[1]}
    if len(lists) > len(children) > _FEW:
        # The lists are branches inside of the children.
        choices.insert(1, children)
    else:
        choices.append(children)
    for found in choices:
        yield found
        # The code after the last block may need more than its output, as in x + block(x): then the last child ends it.
        if found and children and order.index(children[-1]) > order.index(found[-1]):
            yield [*found, children[-1]]


def _parent_class(module: nn.Module) -> str:
    return type(module).__mro__[1].__name__


def called_again(model: nn.Module, calls: Paths) -> tuple[str, int] | None:
    """The largest module with weights that one forward calls several times, with the number; None: there is none."""
    times = Counter(calls)
    sizes = {path: num_weights(model.get_submodule(path)) for path in times if times[path] > 1}
    largest = max(sizes, key=sizes.__getitem__, default=None)
    if largest is None or not sizes[largest]:
        return None
    return largest, times[largest]


def _is_listed(modules: Mapping[str, nn.Module], path: str) -> bool:
    """Returns whether a module is one of several children of a list that are all called once."""
    if not path or isinstance(modules[path], nn.ModuleList):
        return False
    parent = modules.get(path.rpartition(".")[0])
    if not isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return False
    with_weights = [child for child in parent.children() if list(child.parameters())]
    return len(with_weights) > 1


def _outermost(paths: Paths) -> list[str]:
    return [path for path in paths if not any(_is_inside(path, other) for other in paths)]


def _finest(paths: Paths) -> list[str]:
    return [path for path in paths if not any(_is_inside(other, path) for other in paths)]


def _is_inside(path: str, other: str) -> bool:
    return path.startswith(f"{other}.")


def _anatomy(model: nn.Module, blocks: Paths, calls: Paths) -> Anatomy:
    held = _holders(blocks)
    bare = _holders(calls).difference(calls)
    spine = []
    for path, _ in model.named_modules():
        if path in bare and path.rpartition(".")[0] in held:
            held.add(path)
        if path in held:
            spine.append(path)
    units = []
    seen = set()
    for parent in spine:
        for name, child in model.get_submodule(parent).named_children():
            path = f"{parent}.{name}".removeprefix(".")
            is_known = path in held or path in blocks or child in seen
            if not is_known and child.state_dict():
                seen.add(child)
                units.append(path)
    return Anatomy(tuple(blocks), tuple(spine), tuple(units))


def _holders(paths: Iterable[str]) -> set[str]:
    """The modules inside of which some modules are."""
    found = {""}
    for path in paths:
        while path := path.rpartition(".")[0]:
            found.add(path)
    return found


def observe(model: nn.Module, parts: Anatomy, given: Given, channels: Channels | None = None) -> Seen:
    """Runs the whole model and records its blocks and units; each layer begins with its number as the seed.

    Args:
        model: a model in the mode of the run.
        parts: its blocks and units.
        given: its arguments.
        channels: follow the run; None: nothing does.
    """
    channels = channels or Channels(model)
    owners: Owners = {path: set() for path in parts.units}
    seen = Seen([], [], [], owners, set(), {}, {}, None)
    numbers = {path: number for number, path in enumerate(parts.blocks, 1)}
    now = 0

    def watched(path: str, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            given = pytree.tree_leaves((args, kwargs))
            if path in numbers:
                now = numbers[path]
                seen.entries.append(list(map(_copy, given)))
                # After the copies, which make a tensor that code between the blocks only passes on one of this code.
                made = {place for place, leaf in enumerate(given) if channels.is_made(leaf)}
                seen.made.append(made)
                seed_torch(now)
            else:
                owners[path].add(now)
            with channels.inside(path, now, given):
                output = forward(*args, **kwargs)
                channels.hand(output)
            leaves = pytree.tree_leaves(output)
            seen.examples[path] = output
            seen.alike[path] = _alike(given, leaves)
            if path in numbers:
                seen.exits.append(list(map(_copy, leaves)))
                if now == len(numbers):
                    now += 1
                    channels.end_blocks(now)
                    seed_torch(now)
            return output

        return run

    watches = {}
    weights = {}
    for path in (*parts.blocks, *parts.units):
        module = model.get_submodule(path)
        watches[module] = watched(path, module.forward)
        weights[path] = set(map(id, module.parameters()))
        channels.homes |= dict.fromkeys(weights[path], path)
    args, kwargs = given
    seed_torch(0)
    with channels.following(given), replaced_forwards(watches):
        output = model(*args, **kwargs)
    for path, layers in owners.items():
        layers.update(channels.users.get(path, ()))
    for path, user in channels.direct:
        # A weight that both have is the user's own.
        if weights[path].isdisjoint(weights.get(user, ())):
            seen.direct.add(path)
    return seen._replace(output=output)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf


def _alike(given: Leaves, leaves: Leaves) -> list[int | None]:
    # The places count every argument: one that is None here may be a tensor there, and the reverse.
    forms = [isinstance(one, Tensor) and (one.shape, one.dtype) for one in given]
    found: list[int | None] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            found.append(-1)
        elif (leaf.shape, leaf.dtype) in forms:
            found.append(forms.index((leaf.shape, leaf.dtype)))
        else:
            found.append(None)
    return found
