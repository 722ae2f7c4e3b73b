"""The whole model: its weights and buffers on every rank, or in one safetensors file, for use without pipefit."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pipefit.checkpoint.commit import explaining, make_folder
from pipefit.checkpoint.sharded import Sharing
from pipefit.checkpoint.state import aliases_of, saved_stages, tensors_of, weights_of
from pipefit.checkpoint.tensor_files import write_tensors
from pipefit.checkpoint.trained import Trained
from pipefit.errors import ModelError, PipefitError
from pipefit.runtime.collectives import agree, attempt, broadcast, exchange
from pipefit.runtime.progress import SAVING
from pipefit.spec.files import sync_folder
from pipefit.stage.training import Tensors

_OF_TORCH = nn.Module._load_from_state_dict, _NormBase._load_from_state_dict
"""The functions by which modules read a state under the names that they save it."""


def whole_state(pipeline: Trained, names: Iterable[str] | None = None) -> Tensors:
    """Weights and buffers under the user's names, in the model's order, on the CPU. Every rank must call it.

    Args:
        pipeline: between two steps.
        names: of the requested ones; None: all.
    """
    forms = _forms(pipeline)
    if names is not None:
        forms = {name: forms[name] for name in names}
    values = (value.to("cpu", copy=True) for value in _whole_tensors(pipeline, forms))
    return dict(zip(forms, values, strict=True))


def load_whole(pipeline: Trained, state: Mapping[str, Tensor]) -> None:
    """Loads weights and buffers under the user's names. Every rank must call it.

    Raises:
        ModelError: a name is missing, unknown or has another shape, or names of one weight have different values.
    """
    pipeline.engine.check_weights()
    forms = _forms(pipeline)
    plain = [layer for layer in pipeline.layers if _reads_as_torch(layer.module)]
    # Other layers may read further names, such as older ones.
    prefixes = tuple(layer.dotted for layer in pipeline.layers if layer.dotted and layer not in plain)
    for name in state:
        if name not in forms and not name.startswith(prefixes):
            raise ModelError(f"the model has no weight or buffer named {name}")
    for name in tensors_of(plain):
        shape = getattr(state.get(name), "shape", "no value")
        if shape != forms[name].shape and not name.endswith("num_batches_tracked"):
            raise ModelError(f"{name}: the model has {forms[name].shape}, the state {shape}; nothing was loaded")
    for name, tie in pipeline.workers[0].ties.items():
        if name in state and tie.owner in state and not torch.equal(state[name], state[tie.owner]):
            raise ModelError(f"{name} and {tie.owner} are one weight in this model, but have different values here")
    own = {name: pipeline.engine.mesh.part(name, value) for name, value in state.items()}
    for worker in pipeline.workers:
        for index, stage in worker.stages.items():
            with worker.presence(index, change=True), worker.stores[index].overwritten():
                stage.load_state_dict(own)


def _reads_as_torch(module: nn.Module) -> bool:
    """Returns whether a layer reads a state under its own names and in its own shapes."""
    for inner in module.modules():
        if inner._load_state_dict_pre_hooks or type(inner)._load_from_state_dict not in _OF_TORCH:
            return False
    return True


def export(pipeline: Trained, path: str | Path) -> Path:
    """Writes all weights and buffers under the user's names. Every rank must call it; rank 0 writes.

    A tied weight is saved once; its other names are noted as safetensors itself does: read the file with
    `safetensors.torch.load_model(model, path)`, or without ties with `model.load_state_dict(load_file(path))`.

    Args:
        pipeline: between two steps.
        path: of the file, such as "model.safetensors"; replaced as a whole when it exists.

    Raises:
        PipefitError: on every rank: the path is a directory, the disk is full, …
    """
    session = pipeline.session
    path = Path(path)
    with session.at(SAVING):
        own: dict[str, str] = {}
        for worker in pipeline.workers:
            own |= aliases_of(worker, saved_stages(pipeline.plan, worker))
        aliases: dict[str, str] = {}
        for of_process in exchange(session, own):
            aliases |= of_process
        forms = {name: form for name, form in _forms(pipeline).items() if name not in aliases}
        values = _whole_tensors(pipeline, forms)
        first = session.rank == 0
        outcome = attempt(lambda: write_whole(path, forms, aliases, values) if first else None)
        # The processes wait for each other at each value, so the loop always runs to its end.
        rest = attempt(lambda: [None for _ in values] and None)
        agree(session, outcome if "error" in outcome else rest)
    return path


def _forms(pipeline: Trained) -> Tensors:
    """The shapes and types of the whole model, by name; every rank knows them."""
    shape = pipeline.engine.mesh.whole_shape
    forms = {}
    for name, value in tensors_of(pipeline.layers).items():
        forms[name] = torch.empty(shape(name, value.shape), dtype=value.dtype, device="meta")
    return forms


def _whole_tensors(pipeline: Trained, forms: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The tensors of some names, whole, each broadcast by the first rank that has it, and valid until the next.

    Args:
        pipeline: of which every rank walks them together.
        forms: of the tensors, in the model's order.
    """
    mesh = pipeline.engine.mesh
    device = pipeline.workers[0].device
    left = set(forms)
    sharing = Sharing(pipeline)
    for stage, (first, *_) in enumerate(pipeline.plan.placement.ranks):
        layers = [pipeline.layers[index] for index in pipeline.plan.partition.stages[stage].layers]
        worker = next((worker for worker in pipeline.workers if worker.rank == first), None)
        with contextlib.ExitStack() as stack:
            held = {}
            if worker is not None:
                stack.enter_context(worker.presence(stage))
                held = {name: value for name, _, value in weights_of(worker, stage)}
            for name in tensors_of(layers):
                if name not in left:
                    continue
                left.remove(name)
                if held:
                    value = mesh.whole(name, sharing.whole(stage, name, held[name].detach()))
                else:
                    sharing.send(stage, [name])
                    value = torch.empty_like(forms[name], device=device)
                # Bytes are sent, so it can be of any type.
                row = value.contiguous().view(-1)
                broadcast(pipeline.session, row.view(torch.uint8), mesh.process_of(first))
                yield row.view(value.shape)


def write_whole(path: Path, forms: Mapping[str, Tensor], aliases: Mapping[str, str], values: Iterator[Tensor]) -> None:
    """Writes a model to a file, or nothing; see `write_tensors`.

    Raises:
        PipefitError: the path is a directory, the disk is full, …
    """
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}"
    try:
        with explaining(path):
            if path.is_dir():
                raise PipefitError(f"{path}: expected a file to write, found a directory")
            make_folder(path.parent)
            write_tensors(temporary, forms, {"format": "pt", **aliases}, values)
            temporary.replace(path)
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
