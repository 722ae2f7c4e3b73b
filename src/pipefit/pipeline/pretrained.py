"""Writing a folder in the Hub's format: each process writes the stages that it holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipefit.checkpoint.commit import explaining
from pipefit.checkpoint.sharded import Sharing
from pipefit.checkpoint.state import saved_names, saved_stages, weights_of
from pipefit.checkpoint.tensor_files import write_tensors
from pipefit.checkpoint.trained import Trained
from pipefit.checkpoint.whole import whole_state
from pipefit.cutting.own import is_transformers, without_adapters
from pipefit.errors import ModelError
from pipefit.runtime.collectives import agree, attempt
from pipefit.runtime.progress import SAVING
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import Tensors

_NOT_COPIED = ("model*.safetensors*", "*.bin", "*.pt", "*.pth", "*.gguf", "config.json", "generation_config.json")


def save_folder(pipe: Trained, given: Any, layers: Sequence[NamedLayer], folder: Path) -> None:
    """Writes a folder that `from_pretrained` reads: configuration, and weights in the names of the Hub.

    Of a model with adapters (peft) only these are written, for `PeftModel.from_pretrained`.

    Args:
        pipe: between two steps; every rank calls it.
        given: model of transformers, or a folder of one, whose further files, such as the tokenizer's, are copied.
        layers: into which it was cut.
        folder: made if it does not exist; the same for all ranks. Weights in it are replaced.

    Raises:
        ModelError: the model is not one of transformers.
        PipefitError: on every rank: the folder cannot be written.
    """
    shell = getattr(layers[0].module, "shell", None)
    if shell is None:
        model = given
    else:
        model = shell.model
    source = getattr(getattr(given, "initialise_layer", None), "folder", None)
    if not is_transformers(model) or not hasattr(model, "config"):
        raise ModelError(f"{type(model).__name__} is not a model of transformers; save(path) writes its checkpoints")
    session = pipe.session
    is_first = pipe.session.rank == 0
    with session.at(SAVING):
        agree(session, attempt(lambda: _begin(folder, source) if is_first else None))
        if without_adapters(model) is not model:
            adapters = whole_state(pipe, [name for name, p in model.named_parameters() if p.requires_grad])
            agree(session, attempt(lambda: _write_adapters(model, adapters, folder) if is_first else None))
            return
        files = agree(session, attempt(lambda: _write_stages(pipe, model, folder)))
        index = {name: file for of_rank in files for name, file in of_rank.items()}
        agree(session, attempt(lambda: _end(folder, model, index) if is_first else None))


def _begin(folder: Path, source: Path | None) -> None:
    with explaining(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".new-*.safetensors"):
            stale.unlink()
        if source is not None and source.resolve() != folder.resolve():
            for path in source.iterdir():
                if path.is_file() and not any(map(path.match, _NOT_COPIED)):
                    shutil.copy(path, folder)


def _write_adapters(model: Any, adapters: Tensors, folder: Path) -> None:
    """Writes adapters, and a model card in place of the one of their base, or of the empty one of peft."""
    model.save_pretrained(folder, state_dict=adapters)
    config = next(iter(model.peft_config.values()))
    base = config.base_model_name_or_path
    kind = str(config.peft_type.value)
    facts = {name: getattr(config, name, None) for name in ("r", "lora_alpha", "lora_dropout", "target_modules")}
    lines = [f"- {name}: {_words(value)}" for name, value in facts.items() if value is not None]
    head = ["---", f"base_model: {base}", "library_name: peft", "tags:", f"- {kind.lower()}", "- pipefit", "---", ""]
    text = [f"# {kind} adapters", "", f"Adapters for `{base}`, trained with pipefit.", "", *lines]
    with explaining(folder):
        (folder / "README.md").write_text("\n".join([*head, *text]) + "\n", encoding="utf-8")


def _words(value: Any) -> str:
    if isinstance(value, set | list):
        return ", ".join(sorted(map(str, value)))
    return str(value)


def _write_stages(pipe: Trained, model: Any, folder: Path) -> dict[str, str]:
    """Writes the stages of this process; returns the file of each tensor. One of the processes of a rank writes."""
    from transformers.core_model_loading import revert_weight_conversion

    session = pipe.session
    written: dict[str, str] = {}
    failed = None
    num_stages = len(pipe.plan.partition.stages)
    sharing = Sharing(pipe)
    for worker in pipe.workers:
        own = saved_stages(pipe.plan, worker)
        for stage in worker.stages:
            if stage not in own:
                if session.is_distributed:
                    sharing.send(stage, saved_names(worker, stage))
                continue
            with worker.presence(stage):
                held: Tensors = {}
                for name, saved, value in weights_of(worker, stage):
                    if name == saved:
                        whole = worker.mesh.whole(name, sharing.whole(stage, name, value.detach()))
                        if worker.mesh.is_first:
                            held |= {name: whole}
                if not held or failed is not None:
                    continue
                file = f".new-{stage + 1:05d}-of-{num_stages:05d}.safetensors"
                try:
                    state = revert_weight_conversion(model, held)
                    with explaining(folder / file):
                        write_tensors(folder / file, state, {"format": "pt"})
                    written |= dict.fromkeys(state, file)
                except Exception as problem:  # raised after the last stage: others wait for this process's parts
                    failed = problem
    if failed is not None:
        raise failed
    return written


def _end(folder: Path, model: Any, index: dict[str, str]) -> None:
    """Replaces the old files by the new ones, the index last."""
    with explaining(folder):
        for old in folder.glob("model*.safetensors*"):
            old.unlink()
        names = {file: file.replace(".new", "model", 1) for file in set(index.values())}
        if not (len(names) > 1):
            names = dict.fromkeys(names, "model.safetensors")
        for file, name in names.items():
            (folder / file).replace(folder / name)
        config = model.config.__class__.from_dict(model.config.to_dict())
        config.architectures, config.dtype = [type(model).__name__], next(model.parameters()).dtype
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if len(names) > 1:
            weight_map = {name: names[file] for name, file in sorted(index.items())}
            text = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2)
            (folder / "model.safetensors.index.json").write_text(text + "\n")
