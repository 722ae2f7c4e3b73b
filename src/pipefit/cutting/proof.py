"""The proof of a cut: two batches through its layers, with all values and gradients compared with the whole model.

Each layer has a state of its own and no weights of other layers, as in different processes, and the batches alternate:

    whole model, one state       A, B, A again        after B, A's results must not change
    whole model, another one     B                    B's results must not depend on A
    layer 0, layer 1, …          A0 B0, A1 B1, …      every layer has its own state

What is computed from a stand-in must not be used, whatever its value is: origins are followed, see `tracking.py`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.cutting.absent import Absent, own_modules
from pipefit.cutting.anatomy import Anatomy, Seen, calls_of, observe
from pipefit.cutting.channels import Channel, Channels
from pipefit.cutting.differences import Sums, compared_sums, sums_of_gradients, worst_difference
from pipefit.cutting.notice import proves
from pipefit.cutting.own import Paths
from pipefit.cutting.shell import Payload, Shell
from pipefit.cutting.states import Buffers, States, buffers_of, kept_outside, own_copy, seed_torch
from pipefit.cutting.tracking import Foreign, InCode, Origin, Tracker, described, place_in_code, place_of, storages_of
from pipefit.errors import ModelError
from pipefit.stage.payload import leaves_of
from pipefit.stage.split import NamedLayer, joined


class Difference(NamedTuple):
    """A place at which a cut gives other results than the model.

    Attributes:
        block: number of the first block (from 0) before which it cannot be cut; None: no single one.
        why: the reason, in words.
    """

    block: int | None
    why: str


class Reference(NamedTuple):
    """Outputs, buffers and gradients of the whole model for two batches, one after the other.

    Attributes:
        batches: the example, and a batch of other data.
        runs: a record for each batch.
        sums: the weighted sums of each batch's gradients; see `sums_of_gradients`.
        buffers: copies made after both batches.
        channels: values that pass aside.
        reads: places of its code between the layers that read data into Python.
    """

    batches: Sequence[Any]
    runs: Sequence[Seen]
    sums: Sequence[Sums]
    buffers: Buffers
    channels: Sequence[Channel]
    reads: Mapping[InCode, Any]


def reference(model: nn.Module, parts: Anatomy, batches: Sequence[Any], shell: Shell) -> Reference:
    """Runs the whole model on two batches.

    Args:
        model: stays as it is.
        parts: its blocks and the code between them.
        batches: the example, and another one.
        shell: the model with its borders.

    Raises:
        ModelError: code that every stage runs changes a buffer with every forward.
    """
    states = States(model)
    carried = [module for modules in shell.carried for module in modules]
    channels = Channels(model, carried)
    runs = []
    sums = []
    after = []
    with states.apart(), channels.spying():
        for batch in batches:
            seen = observe(model, parts, shell.arguments(batch), channels)
            output = shell.result(seen.output)
            sums.append(sums_of_gradients(model, output))
            output = pytree.tree_map_only(Tensor, Tensor.detach, output)
            runs.append(seen._replace(output=output))
            after.append(buffers_of(model.modules()))
    first, last = after
    between = set(shell.spine)
    for module in shell.shared:
        between.update(module.modules())
    everywhere = {key: buffer for key, buffer in last.items() if key[0] in between}
    worst = _worst_of_buffers(everywhere, first)
    if worst is not None:
        raise ModelError(f"a buffer that its own code between the blocks writes changes at every forward by {worst}")
    return Reference(batches, runs, sums, last, list(channels.found.values()), channels.reads)


def _worst_of_buffers(got: Buffers, wanted: Buffers) -> str | None:
    """The difference of some buffers from others of the same modules and names."""
    return worst_difference(list(got.values()), [wanted[key] for key in got])


def entries(shell: Shell, example: Any) -> tuple[list[tuple[list[Any], set[int]]], str]:
    """Runs the code between the blocks with stand-ins only.

    Args:
        shell: the model with its borders.
        example: a batch.

    Returns:
        Of each block that is reached, the leaves of its arguments, and the places of those that are computed from
        stand-ins or weights; and why the others are not reached.
    """
    found = []
    tracker = _tracker_of(shell, -1, {"values": []})

    def note(leaves: list[Any]) -> None:
        foreign = {place for place, leaf in enumerate(leaves) if tracker.is_foreign(leaf)}
        found.append((leaves, foreign))

    try:
        with tracker.following():
            shell.pass_by(example, note)
    except (Exception, Foreign) as problem:
        return found, _why(problem, shell.model)
    return found, ""


def _why(problem: BaseException, model: nn.Module) -> str:
    text = str(problem)
    if isinstance(problem, ModelError | Foreign):
        return text
    if any(sign in text for sign in ("on device meta", "'SparseMeta'", "'Meta'")):
        path, line = place_of(problem, model)
        return f"{path} uses weights of other layers ({line}), which are on other stages"
    return f"its forward fails there: {described(problem, model)}"


def crossed(shell: Shell, seen: Seen, border: int) -> list[Tensor]:
    """The values that cross the border before a layer in a run of the whole model."""
    leaves = seen.leaves_at(border)
    return [leaves[place] for place in shell.crossing[border]]


def borders(shell: Shell, seen: Seen, example: Any) -> list[Difference]:
    """Runs each layer on what enters it in the whole model, without gradients.

    Args:
        shell: the model with its borders.
        seen: a run of the whole model.
        example: its batch.

    Returns:
        The borders before which it cannot be cut.
    """
    found = []
    payload = example
    states = States(shell.model)
    with states.apart(), torch.no_grad():
        for number in range(shell.num_layers):
            proves(number, shell.num_layers)
            if number > 0:
                values = [value.clone() for value in crossed(shell, seen, number)]
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
    last = len(shell.blocks) - 1
    return min(max(number - 1, 0), last)


def run_layer(shell: Shell, number: int, payload: Any, seen: Seen) -> tuple[Any, str | None]:
    """Runs one layer and compares what leaves it with the whole model.

    Returns:
        The payload of the next layer, None if there is none; and what differs, None if nothing does.
    """
    tracker = _tracker_of(shell, number, payload)
    try:
        with tracker.following():
            output = shell.run(number, number, payload, seed_torch)
    except (Exception, Foreign) as problem:
        return None, _why(problem, shell.model)
    if number == shell.num_layers - 1:
        name = "the output"
        got = leaves_of(output)
        wanted = leaves_of(seen.output)
    else:
        name = "what leaves it"
        got = output["values"]
        wanted = crossed(shell, seen, number + 1)
    if tracker.is_foreign(got):
        return output, "its code also uses values of earlier layers that are not arguments of its blocks"
    worst = worst_difference(got, wanted)
    if worst is None:
        return output, None
    return output, f"{name} differs from the whole model's by {worst}"


def _tracker_of(shell: Shell, number: int, payload: Any) -> Tracker:
    """Follows the tensors of a layer that are not there on its stage: stand-ins, and weights of other layers."""
    tracker = Tracker()
    given = Origin(0, -1, "", False)
    elsewhere = given._replace(foreign=True)
    origins = dict.fromkeys(shell.model.parameters(), elsewhere)
    for module in own_modules(shell, number):
        for parameter in module._parameters.values():
            if parameter in origins:
                origins[parameter] = given
    tracker.mark_weights(origins)
    entered = set()
    if number:
        entered = {key for key, _ in storages_of(payload["values"])}

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

    tracker.on_read = read
    tracker.on_write = write
    return tracker


def prove(shell: Shell, whole: Reference) -> list[Difference]:
    """Compares the layers, one by one, with the whole model: outputs, buffers, and gradients of every weight.

    Args:
        shell: the model with its borders.
        whole: runs of the model, each layer with its number as the seed.

    Returns:
        The first difference; nothing where all is equal.
    """
    states = States(shell.model)
    absent = Absent(shell)
    payloads = list(whole.batches)
    for number in range(shell.num_layers):
        proves(number, shell.num_layers)
        own = {*own_modules(shell, number), *shell.spine}
        with states.apart(own):
            for index, seen in enumerate(whole.runs):
                with absent.without_others([number]):
                    output, why = run_layer(shell, number, payloads[index], seen)
                if why is not None:
                    return [Difference(_before(shell, number), why)]
                payloads[index] = output
            mine = buffers_of(module for module in shell.model.modules() if module in own)
        worst = _worst_of_buffers(mine, whole.buffers)
        if worst is not None:
            return [Difference(None, f"a buffer that its own code writes differs from the whole model's by {worst}")]
    with states.apart():
        worst = _difference_of_gradients(shell.model, payloads, whole.sums)
    worst = worst or _together(shell, states, absent, whole)
    if worst is None:
        return []
    return [Difference(None, worst)]


def _difference_of_gradients(model: nn.Module, payloads: Sequence[Any], wanted: Sequence[Sums]) -> str | None:
    for payload, sums in zip(payloads, wanted, strict=True):
        try:
            got = sums_of_gradients(model, payload)
        except Exception as problem:
            return f"its backward fails: {described(problem, model)}"
        worst = compared_sums(got, sums)
        if worst is not None:
            return worst
    return None


def _together(shell: Shell, states: States, absent: Absent, whole: Reference) -> str | None:
    """Compares two halves, each of several layers that run together, with the whole model."""
    half = shell.num_layers // 2
    payload = whole.batches[0]
    for layers in (range(half), range(half, shell.num_layers)):
        with torch.no_grad(), states.apart(), absent.without_others(layers):
            payload = shell.run(layers[0], layers[-1], payload, seed_torch)
    worst = worst_difference(leaves_of(payload), leaves_of(whole.runs[0].output))
    if worst is None:
        return None
    return f"several layers together differ from the same ones one by one by {worst}"


def branches(parts: Anatomy, example: Any, shell: Shell, whole: Reference) -> list[Difference]:
    """Finds places where data decides which blocks run, by reading something else there.

    Args:
        parts: its blocks and the code between them.
        example: a batch.
        shell: the model with its borders.
        whole: runs of the model.
    """
    states = States(shell.model)
    for place, value in whole.reads.items():
        for other in _other_values(value):
            channels = Channels(shell.model)
            channels.varied = place, other
            path = None
            with contextlib.suppress(Exception, Foreign), states.apart(), torch.no_grad():
                calls = calls_of(shell.model, shell.arguments(example), channels)
                path = _first_elsewhere(shell, parts, calls)
            if path is not None:
                module, line = place
                why = f"{module} decides by the data whether {path} runs ({line})"
                return [Difference(None, f"{why}; put the branch into the forward of {path}")]
    return []


def _first_elsewhere(shell: Shell, parts: Anatomy, calls: Paths) -> str | None:
    """The first block that is not in its place among some calls, or the first unit in a layer without its weights."""
    owners = {shell.labels[unit]: own for unit, own in shell.units if unit in shell.stubs}
    last = len(parts.blocks)
    layer = 0
    for path in calls:
        if path in parts.blocks:
            if parts.blocks.index(path) != layer:
                return path
            layer += 1
        elif path in parts.units:
            possible = {layer}
            if layer == last:
                possible.add(last + 1)
            if possible.isdisjoint(owners.get(path, ())):
                return path
    return None


def _other_values(value: Any) -> list[Any]:
    """Values that would take other branches."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [0, value + 1000]
    return [-1e9, 1e9]


def refuse_channels(layers: Sequence[NamedLayer], batch: Any) -> bool:
    """Refuses a sequence of layers of which one takes tensors or attributes of another that are not its input.

    Args:
        layers: the whole sequence; an error in a forward is left to the run.
        batch: the input of the first one.

    Returns:
        Whether the layers ran with the batch; else nothing is proved.

    Raises:
        ModelError: two layers do; the message names them.
    """
    model = joined(layers)
    states = States(model)
    channels = Channels(model)
    channels.tracker.on_write = lambda storage: None
    runs = []
    with kept_outside(model), torch.no_grad():
        with states.apart(), channels.spying():
            for _ in range(2):
                with contextlib.suppress(Exception), channels.following(batch):
                    runs.append(_run_of_layers(layers, batch, channels))
        for channel in channels.found.values():
            raise ModelError(f"layer {channel.why}{_ASIDE}")
        if len(runs) < 2:
            return False
        _refuse_other_alone(layers, states, runs)
        return True


_Run = list[tuple[Any, Any]]
"""The input and output of each layer."""


_ASIDE = (
    ": layers run on other stages and for other micro-batches; return the value as part of the output, or make one "
    "layer of both"
)


def _run_of_layers(layers: Sequence[NamedLayer], batch: Any, channels: Channels) -> _Run:
    """Runs layers one after the other."""
    found = []
    payload = batch
    for number, layer in enumerate(layers):
        proves(number, len(layers))
        seed(number)
        given = own_copy(payload)
        with channels.inside(layer.name, number, payload):
            payload = layer.module(payload)
            channels.hand(payload)
        found.append((given, own_copy(payload)))
    return found


def seed(number: int) -> None:
    """Seeds the random numbers of torch, Python and NumPy."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _refuse_other_alone(layers: Sequence[NamedLayer], states: States, runs: Sequence[_Run]) -> None:
    """Refuses layers of which one gives another output where the others have not run: in a state of its own."""
    for number, layer in enumerate(layers):
        proves(number, len(layers))
        own = set(layer.module.modules())
        with states.apart(own):
            for run in runs:
                given, wanted = run[number]
                seed(number)
                try:
                    output = layer.module(own_copy(given))
                except Exception as problem:
                    why = f"fails where the others have not run ({type(problem).__name__}: {problem})"
                    raise ModelError(f"layer {layer.name} {why}{_ASIDE}") from None
                worst = worst_difference(pytree.tree_leaves(output), pytree.tree_leaves(wanted))
                if worst is not None:
                    why = f"differs by {worst} where the others have not run: it uses what they leave"
                    raise ModelError(f"layer {layer.name} {why}{_ASIDE}")
