"""The forward of a stage for one micro-batch: from the message before it to the message after it.

What the first micro-batch of a shape finds out holds for all of that shape: the structure of the output, which of its
tensors need gradients, and whether the stage changes its input in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from pipefit.errors import ModelError
from pipefit.ir.instruction import Instruction
from pipefit.runtime import spill_handlers
from pipefit.runtime.executor import Execution
from pipefit.runtime.halves import Saved
from pipefit.runtime.transport import Message
from pipefit.stage.device import to_device
from pipefit.stage.opened import Rest
from pipefit.stage.payload import Structure, carries_gradient, check_values, flatten, flatten_any, sent, unflatten
from pipefit.stage.precision import narrowed, widened


def shape_of(run: Execution, i: Instruction) -> tuple[int, str]:
    """The stage of an instruction and the shapes of its micro-batch."""
    return i.stage, run.feed[i.mb].signature


def on_device(payload: Any, device: torch.device, what: str) -> Any:
    """A payload on the device; on a CPU, anything as it is."""
    if device.type == "cpu":
        return payload
    leaves, structure = flatten_any(payload, what)
    return unflatten([to_device(leaf, device) for leaf in leaves], structure)


def run_stage(run: Execution, i: Instruction, replay: bool) -> tuple[Saved, Message]:
    """Runs a stage; returns what its backward needs, and its output."""
    worker = run.worker
    stage = worker.stages[i.stage]
    part = run.feed[i.mb]
    if i.stage:
        given: Message = run.values["act", i.stage - 1, i.mb]
    else:
        given = run.values["input", 0, i.mb][0]
    given = given._replace(leaves=widened(given.leaves, given.flags, stage.half))
    leaves, inputs = given.as_inputs()
    leaves = _guarded(run, i, leaves)
    versions = list(map(_version, leaves))
    worker.stores[i.stage].at(i.version)
    stage.halves.at(i.version)
    payload = given.payload(leaves)
    if stage.is_cut and i.stage:
        # The micro-batch's data that every rank has is not sent.
        payload["batch"] = on_device(part.input, worker.device, "the batch")
    update = run.header.update_of(i.stage, i.mb)
    with spill_handlers.saving(run, i):
        output = stage.forward(payload, part.ordinal, replay, update)
    _note_overwritten(run, i, versions != list(map(_version, leaves)))
    return _closed(run, i, inputs, output)


def _closed(run: Execution, i: Instruction, inputs: list[Tensor], output: Any) -> tuple[Saved, Message]:
    """The edges and the message of a stage's output."""
    outputs, structure = _flattened(run, i, output)
    has_graph = torch.is_grad_enabled()
    # Without a graph there are no edges, though a layer may return an input of the stage that needs a gradient.
    flags = [has_graph and carries_gradient(leaf) for leaf in outputs]
    agreed = run.worker.flags.get(shape_of(run, i), flags)
    if any(flags) and agreed != flags:
        outputs = _with_agreed_gradients(i, outputs, agreed)
        flags = list(agreed)
    if i.stage < run.header.last_stage:
        outputs = narrowed(outputs, agreed, run.worker.stages[i.stage].half)
    edges = [get_gradient_edge(leaf) for leaf, flag in zip(outputs, flags, strict=True) if flag]
    detached = [leaf.detach() for leaf in outputs]
    return Saved(inputs, edges), Message(detached, flags, structure)


def _with_agreed_gradients(i: Instruction, outputs: list[Tensor], agreed: Sequence[bool]) -> list[Tensor]:
    """Outputs of which those need a gradient for which one will come back; new ones among them pass it to nothing.

    Raises:
        ModelError: another output needs one.
    """
    changed = list(outputs)
    for index, (leaf, comes) in enumerate(zip(outputs, agreed, strict=True)):
        if comes and not leaf.requires_grad:
            changed[index] = leaf.detach().requires_grad_()
        if carries_gradient(leaf) and not comes:
            raise ModelError(
                f"output {index} of stage {i.stage} needs a gradient for micro-batch {i.mb}, but needed none for an "
                "earlier one of the same shape, so none comes back: make another Pipeline after requires_grad_(True) "
                "of weights that were frozen in the first step, and detach() the same outputs for every micro-batch"
            )
    return changed


def _flattened(run: Execution, i: Instruction, output: Any) -> tuple[list[Tensor], Structure | Rest]:
    """The tensors of a stage's output and its structure; that of the last stage goes to the loss only."""
    where = f"the output of stage {i.stage}"
    if i.stage == run.header.last_stage:
        return flatten_any(output, where)
    outputs, structure = flatten(sent(output), where)
    known = run.worker.structures.setdefault(shape_of(run, i), structure)
    check_values(i.stage, i.mb, known, structure)
    return outputs, structure


# ---- inputs that a stage changes in place --------------------------------------------------------------------------


def _guarded(run: Execution, i: Instruction, leaves: list[Tensor]) -> list[Tensor]:
    """Copies of a stage's inputs if it changes them in place: others have the inputs too, and a replay needs them."""
    if run.worker.overwritten.get(shape_of(run, i), True):
        return [leaf.clone() for leaf in leaves]
    return leaves


def _version(leaf: Tensor) -> int:
    """A number that changes with a tensor's values."""
    if leaf.is_inference():
        return 0
    return leaf._version


def _note_overwritten(run: Execution, i: Instruction, is_changed: bool) -> None:
    """Notes whether a forward has changed its inputs.

    Raises:
        ModelError: it did not for the first micro-batch of this shape; or the target shares memory with them, so that
            the loss depends on which of the two the model has changed.
    """
    known = run.worker.overwritten.setdefault(shape_of(run, i), is_changed)
    if is_changed and not known:
        raise ModelError(
            f"stage {i.stage} changes its input in place for micro-batch {i.mb}, but did not for an earlier one of the "
            "same shape: let it change a copy (x = x.clone())"
        )
    part = run.feed[i.mb]
    is_changed = is_changed or run.worker.stages[i.stage].overwrites
    if is_changed and i.stage == 0 and _memory(part.input) & _memory(part.target):
        raise ModelError(
            "the model changes its input in place, which is its target too: let it change a copy (x = x.clone()), or "
            "give the target as a copy"
        )


def _memory(payload: Any) -> set[int]:
    """The addresses of the memory that the tensors of a payload are in."""
    leaves, _ = flatten_any(payload, "a batch")
    storages = [leaf.untyped_storage() for leaf in leaves if leaf.layout == torch.strided]
    return {storage.data_ptr() or storage._cdata for storage in storages}  # the meta device has no addresses
