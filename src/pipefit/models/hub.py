"""Models of the library transformers: by class from a configuration, or from a folder that `save_pretrained` wrote."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipefit.cutting import Cut, cut
from pipefit.cutting.own import most_positions, random_batch, text_configuration, without_adapters
from pipefit.errors import ModelError, look_up, nearest
from pipefit.models.examples import Example
from pipefit.models.factory import Options
from pipefit.models.factory_options import literal, parse_text
from pipefit.models.hub_folder import FolderWeights, weight_files
from pipefit.runtime.malloc import trim
from pipefit.spec.arguments import checked
from pipefit.stage.accelerator import CPU
from pipefit.stage.materialise import lent_weights, materialise
from pipefit.stage.training import Tensors

PREFIX = "transformers:"
_NEEDED = "models of transformers need that library: pip install 'pipefit[hf]'"


def is_hub(name: str) -> bool:
    """Returns whether a name is that of a model of transformers: `transformers:CLASS`, or a folder."""
    return name.startswith(PREFIX) or is_folder(name)


def has_configuration(name: str) -> bool:
    """Returns whether a name is that of a model of transformers, or of its config.json."""
    return is_hub(name) or name.endswith(".json")


def is_folder(name: str) -> bool:
    """Returns whether a name is that of a model's folder."""
    return Path(name).is_dir()


def hub_parts(name: str, options: Options, lora: str = "") -> tuple[Cut, Example]:
    """A model of transformers in training mode, cut into layers, and random batches of its kind.

    Args:
        name: `transformers:LlamaForCausalLM`, with random weights from torch's global random state; or a folder. Where
            torch's default device is "meta", the weights of a folder are read later, by the process that needs them.
        options: fields of the configuration, as values or as words; none for a folder.
        lora: settings of adapters, like "r=8,alpha=16,target=all-linear"; "": none, all weights are trained.

    Raises:
        ModelError: transformers is not installed, there is no such class or field, the folder cannot be read, or the
            model cannot be cut.
    """
    if name.startswith(PREFIX):
        # Its buffers are computed when it is built, so it is always built with memory.
        with torch.device("cpu"):
            made = _of_class(name, options)
            return cut(made), _examples(made)
    if options:
        raise ModelError(f"{name}: its configuration is in config.json; options are for {PREFIX}CLASS")
    is_later = torch.get_default_device().type == "meta"
    with torch.device("cpu"):
        found = pretrained(name, lora=lora)
    if not is_later:
        materialise(found.layers, 0, CPU, found.initialise_layer)
    return found, _examples(found.shell.model)


@checked()
def pretrained(folder: str | Path, *, lora: str = "") -> Cut:
    """A model from a folder that `save_pretrained` wrote, cut into layers that have no weights yet.

    A `Pipeline` reads the weights: each process those of its stages.

    Args:
        folder: with configuration and safetensors.
        lora: settings of adapters (peft), like "r=8,alpha=16,target=all-linear"; "": none, all weights are trained.

    Raises:
        ModelError: the folder or the settings are wrong, or the model cannot be cut.
    """
    folder = Path(folder)
    config = _configuration(folder)
    files = weight_files(folder)
    model = _empty(folder, config)
    weights = FolderWeights(folder, files, model)
    if lora:
        model = with_adapters(model, lora)
    found = replace(cut(model), initialise_layer=weights)
    # The memory of the proof is free, but malloc would keep it in addition to the weights that are read next.
    trim()
    return found


def without_weights(name: str, options: Options, *, dtype: str = "bfloat16", lora: str = "") -> Any:
    """A model of transformers on the meta device, from its configuration alone: it has shapes, and takes no memory.

    Args:
        name: a folder with a config.json, such a file, or `transformers:LlamaForCausalLM`.
        options: fields of the configuration, in place of its own, as values or as words.
        dtype: of its weights.
        lora: as of `pretrained`.

    Raises:
        ModelError: transformers is not installed, there is no such configuration, class or field, or its sizes are
            impossible.
    """
    own = {}
    if name.startswith(PREFIX):
        kind = _class_named(name)
        with _building(name, kind):
            usual = kind.config_class()
    else:
        usual = _configuration(Path(name))
        kind = _class_of(Path(name), usual)
        own, _ = usual.get_config_dict(name, local_files_only=True)
        # What is trained is not quantised.
        own.pop("quantization_config", None)
    with _building(name, kind), torch.device("meta"):
        config = type(usual)(**own | _fields(name, usual, options))
        model = kind._from_config(_complete(config), dtype=getattr(torch, dtype)).train()
        if lora:
            model = with_adapters(model, lora)
        return model


@contextlib.contextmanager
def _building(name: str | Path, kind: Any) -> Iterator[None]:
    """The context in which a model is built, with errors that name it."""
    try:
        yield
    except ModelError:
        raise
    except Exception as problem:
        raise ModelError(f"{name}: {kind.__name__} cannot be built: {type(problem).__name__}: {problem}") from problem


def most_tokens(model: nn.Module) -> int | None:
    """The most tokens that a model's configuration allows; 0: it does not say; None: its samples have none.

    RoBERTa and its kind have a position for padding, after which those of tokens begin.
    """
    base = without_adapters(model)
    if getattr(base, "main_input_name", "") == "pixel_values":
        return None
    most = most_positions(base.config)
    for path, module in base.named_modules():
        padding = getattr(module, "padding_idx", None)
        if path.endswith(".position_embeddings") and padding is not None:
            return most - padding - 1
    return most


def tokenizer_of(folder: str | Path) -> Any:
    """The tokenizer in a model's folder.

    Raises:
        ModelError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as problem:
        raise ModelError(f"{folder}: transformers finds no tokenizer in it: {reason_of(problem)}") from problem


def limits_of(folder: str | Path) -> tuple[int, int]:
    """The maximum number of tokens of a folder's model (0: no limit), and its vocabulary size.

    Raises:
        ModelError: it is no folder of a model.
    """
    config = _configuration(Path(folder))
    return most_positions(config), text_configuration(config).vocab_size


def _configuration(folder: Path) -> Any:
    """The configuration in a model's folder, or of a file."""
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: expected a folder that save_pretrained wrote, but it has no config.json")
    if not folder.exists():
        raise ModelError(f"{folder}: there is no such folder or file; a model's configuration is its config.json")
    try:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ImportError:
        raise ModelError(f"{folder}: {_NEEDED}") from None
    except Exception as problem:
        raise ModelError(f"{folder}: transformers cannot read its config.json: {reason_of(problem)}") from problem


def reason_of(problem: Exception) -> str:
    """The message of an error of transformers, without its advice to run the code of a folder."""
    if "trust_remote_code" in str(problem):
        return (
            "it needs Python code of the folder, which pipefit never runs; import it in a FILE.py:FACTORY of your own"
        )
    return str(problem)


def _examples(model: nn.Module) -> Example:
    def example(batch: int, seed: int = 0) -> tuple[Tensors, Tensors]:
        made = random_batch(model, batch, seed)
        return made, made

    return example


def _of_class(name: str, options: Options) -> nn.Module:
    found = _class_named(name)
    with _building(name, found):
        given = _fields(name, found.config_class(), options)
        return _built(found, found.config_class(**given))


def _class_named(name: str) -> Any:
    """The class of transformers that a name such as `transformers:LlamaForCausalLM` names."""
    try:
        import transformers
    except ImportError:
        raise ModelError(f"{name}: {_NEEDED}") from None
    kind = name.removeprefix(PREFIX)
    found: Any = getattr(transformers, kind, None)
    if getattr(found, "config_class", None) is None:
        kinds = ("ForCausalLM", "Model", "ForMaskedLM")
        models = [one for one in dir(transformers) if one.endswith(kinds)]
        raise ModelError(f"{name}: transformers has no model class {kind!r}; {nearest(kind, models)}")
    return found


def _fields(name: str, usual: Any, options: Options) -> dict[str, object]:
    """Options as fields of a configuration, words as the values that they mean.

    Raises:
        ModelError: it has no such field.
    """
    given = dict(options)
    for field, value in options.items():
        if not hasattr(usual, field):
            hint = nearest(field, usual.to_dict())
            raise ModelError(f"{name}: {type(usual).__name__} has no field {field!r}; {hint}")
        if isinstance(value, str):
            given[field] = literal(value)
    return given


def _built(kind: Any, config: Any) -> nn.Module:
    # The fused kernels of experts are for GPUs, and do not support float64.
    config._experts_implementation = "eager"
    model: nn.Module = kind(_complete(config))
    return model.train()


def _complete(config: Any) -> Any:
    """The configuration with the token with which a decoder begins."""
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0
    return config


def _class_of(folder: Path, config: Any) -> Any:
    """The class of transformers that a configuration names."""
    import transformers

    named = (getattr(config, "architectures", None) or ["none"])[0]
    kind = getattr(transformers, named, None)
    if kind is None:
        raise ModelError(
            f"{folder}: its configuration names the class {named!r}, which transformers does not have; name one in its "
            '"architectures", as in "architectures": ["LlamaForCausalLM"]'
        )
    return kind


def _empty(folder: Path, config: Any) -> nn.Module:
    """The model of a folder, its weights on the meta device, its other buffers as they are computed."""
    import transformers
    from accelerate import init_empty_weights

    if getattr(config, "quantization_config", None):
        raise ModelError(f"{folder}: its weights are quantised, which cannot be trained; use weights that are not")
    kind = _class_of(folder, config)
    with _building(folder, kind):
        with init_empty_weights(include_buffers=False):
            model: Any = _built(kind, config)
        # Adapters name their base by this; a relative path would hold only in this working folder.
        model.name_or_path = str(folder.resolve())
        model.tie_weights()
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def with_adapters(model: nn.Module, settings: str) -> nn.Module:
    """A model with LoRA adapters of peft, of which only the adapters are trained.

    Args:
        model: of transformers.
        settings: like "r=8,alpha=16,target=all-linear"; targets are names with + between them, or all-linear.

    Raises:
        ModelError: an unknown setting, or no module of a name.
    """
    from peft import LoraConfig, get_peft_model

    known = {"r": "8", "alpha": "16", "dropout": "0", "target": "all-linear"}
    for name, value in parse_text(settings, "lora").items():
        look_up(name, known, "lora: unknown setting", ModelError)
        known[name] = value
    targets: str | list[str] = known["target"]
    if targets != "all-linear":
        targets = known["target"].split("+")
    task = None
    if type(model).__name__.endswith("ForCausalLM"):
        task = "CAUSAL_LM"
    try:
        config = LoraConfig(
            r=int(known["r"]),
            lora_alpha=float(known["alpha"]),  # type: ignore[arg-type] # peft takes fractions too
            lora_dropout=float(known["dropout"]),
            target_modules=targets,
            task_type=task,
        )
        # Adapters are made in memory, because no folder has them. peft asks transformers 5 by an old name.
        with contextlib.ExitStack() as contexts:
            if torch.get_default_device().type != "meta":
                contexts.enter_context(lent_weights(model))
            contexts.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", FutureWarning)
            adapted: nn.Module = get_peft_model(model, config)
    except ValueError as problem:
        raise ModelError(f"lora={settings}: {problem}") from problem
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return adapted.train()
