"""Text that a trained language model writes: one of transformers, adapters over it, or a run on bytes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from pipefit.data import sample
from pipefit.errors import ModelError, PipefitError
from pipefit.models import build, parse_options
from pipefit.models.hub import reason_of, tokenizer_of
from pipefit.models.registry import BUILT_IN
from pipefit.pipeline.pipeline import Pipeline
from pipefit.run.config import checkpoints_of
from pipefit.run.result import RESULT
from pipefit.spec.files import read_json


def continued(folder: Path, prompt: str, num_tokens: int, temperature: float, seed: int, chat: bool) -> str:
    """The text that follows a prompt.

    Args:
        folder: of a model or adapters, as `save_pretrained` writes them, or of a run of `pipefit train -o folder`.
        prompt: the beginning.
        num_tokens: at most; of a model of bytes, bytes.
        temperature: the temperature of the sampling; 0: always the most probable token.
        seed: the seed of the sampling.
        chat: whether the prompt is a message to an assistant, in the format of the tokenizer's chat template.

    Raises:
        PipefitError: the folder holds no language model, or the prompt is empty.
    """
    if not prompt:
        raise PipefitError("--prompt: expected a text, got an empty one")
    inside = folder / "model"
    if inside.is_dir():
        place = inside
    else:
        place = folder
    if any((place / name).is_file() for name in ("config.json", "adapter_config.json")):
        return _of_folder(place, prompt, num_tokens, temperature, seed, chat)
    if not (folder / RESULT).is_file():
        raise PipefitError(f"{folder}: expected the folder of a model or of a run that has ended, got neither")
    if chat:
        raise PipefitError(f"--chat: the model of {folder} has no tokenizer with a chat template")
    return _of_run(folder, prompt, num_tokens, temperature, seed)


def _of_folder(place: Path, prompt: str, num_tokens: int, temperature: float, seed: int, chat: bool) -> str:
    tokenizer = tokenizer_of(place)
    if chat and not getattr(tokenizer, "chat_template", None):
        raise PipefitError(f"--chat: the tokenizer of {place} has no chat template")
    model = _whole_model(place)
    if chat:
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    given = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat)
    how: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": num_tokens}
    if temperature > 0:
        how["temperature"] = temperature
    torch.manual_seed(seed)
    tokens = model.generate(given["input_ids"], attention_mask=given["attention_mask"], **how)
    return str(tokenizer.decode(tokens[0, given["input_ids"].shape[1] :], skip_special_tokens=True))


def _whole_model(place: Path) -> Any:
    """The model of a folder, or adapters over the one that they name, with all its weights."""
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    try:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        if not (place / "adapter_config.json").is_file():
            from transformers import AutoModelForCausalLM

            return AutoModelForCausalLM.from_pretrained(place, **safe).eval()
        from peft import AutoPeftModelForCausalLM

        with warnings.catch_warnings():  # peft asks transformers 5 by an old name
            warnings.simplefilter("ignore", FutureWarning)
            return AutoPeftModelForCausalLM.from_pretrained(place, **safe).eval()
    except Exception as problem:  # of any kind, for the files are the user's
        raise ModelError(f"{place}: its language model cannot be read: {reason_of(problem)}") from None


def _of_run(folder: Path, prompt: str, num_bytes: int, temperature: float, seed: int) -> str:
    config = read_json(folder / RESULT)["config"]
    entry = BUILT_IN.get(config["model"])
    if entry is None or entry.data != "text":
        raise PipefitError(f"{folder}: {config['model']} is no language model that pipefit can run alone")
    bundle = build(config["model"], **parse_options(config["option"], config["model"]))
    pipe = Pipeline(bundle.layers, loss=bundle.loss, optimizer=lambda weights: torch.optim.SGD(weights, 0.0), stages=1)
    pipe.load(checkpoints_of(folder), weights_only=True)
    model: Any = bundle.layers
    context = bundle.example(1, 0)[0].shape[1]
    beginning = prompt.encode()
    whole = sample(model.eval(), beginning, num_bytes, temperature, seed, context)
    return whole.removeprefix(prompt)
