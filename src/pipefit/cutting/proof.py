"""The proof of a cut: two batches through its layers, with all values and gradients compared with the whole model.

Each layer has a state of its own, as in different processes, and the batches alternate:

    whole model, one state       A, B, A again        after B, A's results must not change
    whole model, another one     B                    B's results must not depend on A
    layer 0, layer 1, …          A0 B0, A1 B1, …      every layer has its own state

What is computed from a stand-in must not be used, whatever its value is: origins are followed, see `tracking.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.cutting.anatomy import Anatomy, Seen, calls_of, observe
from pipefit.cutting.channels import Channel, Channels
from pipefit.cutting.differences import compared_sums, sums_of_gradients, worst_difference
from pipefit.cutting.lasting import States, changed, facts, kept_buffers, lasting
from pipefit.cutting.shell import Payload, Shell
from pipefit.cutting.tracking import Foreign, Origin, Tracker, place_in_code, place_of, storages_of
from pipefit.errors import ModelError
from pipefit.stage.payload import leaves_of


class Difference(NamedTuple):
    """A place at which a cut gives other results than the model.

    Attributes:
        block: number of the first block (from 0) before which it cannot be cut; None: no single one.
        why: for people.
    """

    block: int | None
    why: str


class Reference(NamedTuple):
    """What the whole model gives for two batches, one after the other.

    Attributes:
        batches: the example, and a batch of other data.
        runs: of each batch.
        sums: of each batch, weighted sums of the gradients; see `sums_of_gradients`.
        buffers: after both, by name.
        channels: between the model's layers.
        reads: places of its code between the layers that read data into Python.
    """

    batches: Sequence[Any]
    runs: Sequence[Seen]
    sums: Sequence[dict[str, Tensor] | None]
    buffers: Mapping[str, Tensor]
    channels: Sequence[Channel]
    reads: Mapping[tuple[str, str], Any]


def other_batches(example: Any) -> Iterator[Any]:
    """Batches of an example's kind with other data, the most different one first."""
    generator = torch.Generator().manual_seed(0)

    def made(leaf: Any, scale: float, permutes: bool) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        turned = leaf.detach().flip(0)
        if leaf.is_floating_point() or leaf.is_complex():
            turned = turned * scale
        elif permutes:
            order = torch.randperm(leaf.numel(), generator=generator).to(leaf.device)
            turned = turned.flatten()[order].view(leaf.shape)
        return turned.requires_grad_(leaf.requires_grad)

    for scale, permutes in ((20.0, True), (20.0, False), (1.0, False)):
        yield pytree.tree_map(functools.partial(made, scale=scale, permutes=permutes), example)
    yield example


class _Whole:
    """Runs of the whole model that follow its tensors."""

    def __init__(self, model: nn.Module, parts: Anatomy, shell: Shell) -> None:
        self.model, self.parts, self.shell = model, parts, shell
        self.states = States(model)
        self.channels = Channels(model, [module for modules in shell.carried for module in modules])
        self.everywhere = [*shell.spine, *(inner for module in shell.shared for inner in module.modules())]

    def run(self, batch: Any) -> Seen:
        """The record of one forward, with the input of the loss as its output."""
        args, kwargs = self.shell.arguments(batch)
        seen = observe(self.model, self.parts, args, kwargs, torch.manual_seed, self.channels)
        if self.channels.lasting is not None:
            raise ModelError(f"{self.channels.lasting}: a forward must not depend on the one before")
        return seen._replace(output=self.shell.result(seen.output))

    def other_run(self, example: Any, first: Seen, buffers: Mapping[Any, Tensor]) -> tuple[Any, Seen]:
        """Another batch on which the model runs, as if it were the first one that it sees."""
        for batch in other_batches(example):
            with self.states.used(self.states.fresh()), contextlib.suppress(Exception):
                put_buffers(buffers)
                seen = self.run(batch)
                if _is_finite(seen) or not _is_finite(first):
                    return batch, seen
        if self.channels.lasting is not None:
            raise ModelError(f"{self.channels.lasting}: a forward must not depend on the one before")
        raise ModelError("its forward fails when it runs on its example again")

    def facts(self) -> dict[str, Any]:
        """What its attributes hold now."""
        return facts(self.model, self.everywhere)


def reference(model: nn.Module, parts: Anatomy, example: Any, shell: Shell) -> Reference:
    """Runs the whole model on two batches.

    Args:
        model: stays as it is.
        parts: of the model.
        example: a batch.
        shell: of the model.

    Raises:
        ModelError: a forward depends on earlier ones in other ways than by buffers of blocks.
    """
    whole = _Whole(model, parts, shell)
    with whole.states.used(whole.states.fresh()), kept_buffers(model, but=whole.everywhere) as restore:
        with torch.no_grad():
            first = whole.run(example)
            left, between = whole.facts(), buffers_of(model)
            batch, alone = whole.other_run(example, first, between)
        with whole.channels.spying():
            second = whole.run(batch)
        sums = [sums_of_gradients(model, second.output)]
        after, left_by_second = buffers_of(model), whole.facts()
        if worst_difference(_tensors(alone), _tensors(second)) is not None:
            found = changed(left, left_by_second) or "something that a forward leaves"
            raise ModelError(f"its output depends on the batches before: {lasting(found)}")
        restore()
        again = whole.run(example)
        found = changed(left, whole.facts())
        if found is not None:
            raise ModelError(lasting(found))
        if worst_difference(_tensors(first), _tensors(again)) is not None:
            raise ModelError("its output differs when it gets the same batch again")
        sums.insert(0, sums_of_gradients(model, again.output))
    runs = [seen._replace(output=pytree.tree_map_only(Tensor, Tensor.detach, seen.output)) for seen in (again, second)]
    channels = list(whole.channels.found.values())
    return Reference((example, batch), runs, sums, after, channels, whole.channels.reads)


def _tensors(seen: Seen) -> list[Any]:
    return _leaves(seen.output)


def _leaves(output: Any) -> list[Any]:
    return leaves_of(output, "the output of the model")


def _is_finite(seen: Seen) -> bool:
    floating = [one for one in _tensors(seen) if isinstance(one, Tensor) and one.is_floating_point()]
    return all(bool(one.isfinite().all()) for one in floating)


def entries(shell: Shell, example: Any) -> tuple[list[tuple[list[Any], set[int]]], str]:
    """Runs the code between the blocks with stand-ins only.

    Args:
        shell: of the cut.
        example: a batch.

    Returns:
        Of each block that is reached, the leaves of its arguments, and the places of those that are computed from
        stand-ins or weights; and why the others are not reached.
    """
    found: list[tuple[list[Any], set[int]]] = []
    tracker = _tracker_of(shell, -1, {"values": []})

    def note(leaves: list[Any]) -> None:
        found.append((leaves, {place for place, leaf in enumerate(leaves) if tracker.is_foreign(leaf)}))

    try:
        with tracker.following():
            shell.pass_by(example, note)
    except (Exception, Foreign) as problem:
        return found, _why(problem, shell.model)
    return found, ""


def _why(problem: BaseException, model: nn.Module) -> str:
    if isinstance(problem, ModelError | Foreign):
        return str(problem)
    path, line = place_of(problem, model)
    return f"its forward fails there: {type(problem).__name__} in {path} ({line}): {problem}"


def borders(shell: Shell, seen: Seen, example: Any) -> list[Difference]:
    """Runs each layer on what enters it in the whole model, without gradients.

    Args:
        shell: of the cut.
        seen: a run of the whole model.
        example: its batch.

    Returns:
        The borders before which it cannot be cut.
    """
    found: list[Difference] = []
    payload: Any = example
    states = States(shell.model)
    with states.used(states.fresh()), torch.no_grad():
        for number in range(shell.num_layers):
            if number > 0:
                leaves = seen.entries[number - 1] if number <= len(shell.blocks) else seen.exits[-1]
                values = [leaves[place].clone() for place in shell.crossing[number]]
                payload = Payload(example, values, payload["carried"])._asdict()
            payload, why = run_layer(shell, number, payload, seen)
            if why is not None:
                found.append(Difference(_before(shell, number), why))
                if payload is None:
                    payload = {"carried": []}
                    if shell.carried:
                        break
    return found


def _before(shell: Shell, number: int) -> int:
    """The block (from 0) with which a layer begins; of the first layer, and the last, the nearest one."""
    return min(max(number - 1, 0), len(shell.blocks) - 1)


def run_layer(shell: Shell, number: int, payload: Any, seen: Seen) -> tuple[Any, str | None]:
    """Runs one layer and compares what leaves it with the whole model.

    Returns:
        The payload of the next layer, None if there is none; and what differs, None if nothing does.
    """
    tracker = _tracker_of(shell, number, payload)
    last = shell.num_layers - 1
    try:
        with tracker.following():
            output = shell.run(number, number, payload, torch.manual_seed)
    except (Exception, Foreign) as problem:
        return None, _why(problem, shell.model)
    if number == last:
        got, wanted, name = _leaves(output), _tensors(seen), "the output"
    else:
        leaves = seen.entries[number] if number < last - 1 else seen.exits[-1]
        got, wanted = output["values"], [leaves[place] for place in shell.crossing[number + 1]]
        name = "what leaves it"
    if tracker.is_foreign(got):
        return output, "its code also uses values of earlier layers that are not arguments of its blocks"
    worst = worst_difference(got, wanted)
    return output, None if worst is None else f"{name} differs from the whole model's by {worst}"


def _tracker_of(shell: Shell, number: int, payload: Any) -> Tracker:
    """Follows the tensors of a layer that are not there on its stage: stand-ins, and weights of other layers."""
    tracker = Tracker()
    own = {id(parameter) for module in own_modules(shell, number) for parameter in module._parameters.values()}
    others = [parameter for parameter in shell.model.parameters() if id(parameter) not in own]
    tracker.mark(others, Origin(0, -1, "", True))
    tracker.forget([parameter for parameter in shell.model.parameters() if id(parameter) in own])
    entered = {key for key, _ in storages_of(payload["values"])} if number else set()

    def read(origins: list[Origin], value: Any) -> Any:
        if any(origin.foreign for origin in origins):
            path, line = place_in_code(shell.model)
            raise Foreign(
                f"{path} reads a value of earlier layers into Python ({line}), so that a branch, a size or an argument "
                "depends on it, which another stage could not know"
            )
        return value

    def write(key: int) -> None:
        if key in entered and shell.block(number) is not None:
            shell.copies.add(number)

    tracker.on_read, tracker.on_write = read, write
    return tracker


def own_modules(shell: Shell, number: int) -> list[nn.Module]:
    """The modules that a layer has with all their tensors: its block and units, and what is between all layers."""
    block = shell.block(number)
    roots = [unit for unit, owners in shell.units if number in owners] + ([] if block is None else [block])
    inside = [inner for root in (*roots, *shell.shared) for inner in root.modules()]
    return [*inside, *(shell.spine if number == 0 else ())]


def prove(shell: Shell, whole: Reference) -> Difference | None:
    """Compares the layers, one by one, with the whole model: outputs, buffers, and gradients of every weight.

    Args:
        shell: of the cut.
        whole: runs of the model, each layer with its number as the seed.
    """
    states = States(shell.model)
    payloads: list[Any] = list(whole.batches)
    for number in range(shell.num_layers):
        own = [*own_modules(shell, number), *shell.spine]
        with states.used(states.fresh(own)):
            for index, seen in enumerate(whole.runs):
                payloads[index], why = run_layer(shell, number, payloads[index], seen)
                if why is not None:
                    return Difference(_before(shell, number), why)
            mine = {key: value for key, value in buffers_of(shell.model).items() if key[0] in own}
        worst = worst_difference(list(mine.values()), [whole.buffers[key] for key in mine])
        if worst is not None:
            return Difference(None, f"a buffer that its own code writes differs from the whole model's by {worst}")
    with states.used(states.fresh()):
        worst = _difference_of_gradients(shell.model, payloads, whole.sums)
    return _together(shell, states, whole) if worst is None else Difference(None, worst)


def _difference_of_gradients(
    model: nn.Module, payloads: Sequence[Any], wanted: Sequence[dict[str, Tensor] | None]
) -> str | None:
    for payload, sums in zip(payloads, wanted, strict=True):
        try:
            got = sums_of_gradients(model, payload)
        except RuntimeError as problem:
            return f"its backward fails: {problem}"
        worst = compared_sums(got, sums)
        if worst is not None:
            return worst
    return None


def _together(shell: Shell, states: States, whole: Reference) -> Difference | None:
    """Compares two halves, each of several layers that run together, with the whole model."""
    half, last = shell.num_layers // 2, shell.num_layers - 1
    with torch.no_grad():
        with states.used(states.fresh()):
            first = shell.run(0, half - 1, whole.batches[0], torch.manual_seed)
        with states.used(states.fresh()):
            joined = shell.run(half, last, first, torch.manual_seed)
    worst = worst_difference(_leaves(joined), _tensors(whole.runs[0]))
    if worst is None:
        return None
    return Difference(None, f"several layers together differ from the same ones one by one by {worst}")


def buffers_of(model: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """Copies of a model's buffers."""
    every = ((module, name, one) for module in model.modules() for name, one in module._buffers.items())
    return {(module, name): one.detach().clone() for module, name, one in every if one is not None}


def put_buffers(buffers: Mapping[tuple[nn.Module, str], Tensor]) -> None:
    """Gives modules copies of buffers."""
    for (module, name), value in buffers.items():
        module._buffers[name] = value.clone()


def branches(model: nn.Module, parts: Anatomy, example: Any, shell: Shell, whole: Reference) -> list[Difference]:
    """Finds places where data decides which blocks run, by reading something else there.

    Args:
        model: the whole one.
        parts: of the model.
        example: a batch.
        shell: of the model.
        whole: runs of the model.
    """
    states = States(model)
    for place, value in whole.reads.items():
        for other in _other_values(value):
            channels = Channels(model)
            channels.varied = place, other
            args, kwargs = shell.arguments(example)
            with contextlib.suppress(Exception, Foreign), states.used(states.fresh()), torch.no_grad():
                path = _first_elsewhere(shell, parts, calls_of(model, args, kwargs, channels))
                if path is not None:
                    why = f"{place[0]} decides by the data whether {path} runs ({place[1]})"
                    return [Difference(None, f"{why}; put the branch into the forward of {path}")]
    return []


def _first_elsewhere(shell: Shell, parts: Anatomy, calls: Sequence[str]) -> str | None:
    """The first block that is not in its place among some calls, or the first unit in a layer without its weights."""
    owners = {shell.labels[unit]: own for unit, own in shell.units if unit in shell.stubs}
    layer = 0
    for path in calls:
        if path in parts.blocks:
            layer += 1
            if parts.blocks.index(path) != layer - 1:
                return path
        elif path in parts.units:
            after_last = layer == len(parts.blocks) and layer + 1 in owners.get(path, ())
            if layer not in owners.get(path, ()) and not after_last:
                return path
    return None


def _other_values(value: Any) -> list[Any]:
    """Values that would take other branches."""
    if isinstance(value, bool):
        return [not value]
    return [0, value + 1000] if isinstance(value, int) else [-1e9, 1e9]
