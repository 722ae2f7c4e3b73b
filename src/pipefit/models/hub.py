"""Models of the library transformers: by class from a configuration, or from a folder that `save_pretrained` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pipefit.cutting import Cut, cut
from pipefit.cutting.own import random_batch
from pipefit.errors import ModelError, nearest
from pipefit.models.examples import Example
from pipefit.models.factory_options import literal

PREFIX = "transformers:"
_NEEDED = "models of transformers need that library: pip install 'pipefit[hf]'"


def is_hub(name: str) -> bool:
    """Whether a name means a model of transformers: `transformers:CLASS`, or a folder with its configuration."""
    return name.startswith(PREFIX) or (Path(name) / "config.json").is_file()


def hub_model(name: str, options: Mapping[str, object]) -> nn.Module:
    """A model of transformers in training mode.

    Args:
        name: `transformers:LlamaForCausalLM`, with random weights from torch's global random state; or a folder, whose
            weights are read.
        options: fields of the configuration, as values or as words; none for a folder.

    Raises:
        ModelError: transformers is not installed, there is no such class or field, or the folder cannot be read.
    """
    try:
        import transformers
    except ImportError:
        raise ModelError(f"{name}: {_NEEDED}") from None
    if not name.startswith(PREFIX):
        return _from_folder(Path(name), options)
    kind = name.removeprefix(PREFIX)
    found: Any = getattr(transformers, kind, None)
    if getattr(found, "config_class", None) is None:
        models = [one for one in dir(transformers) if one.endswith(("ForCausalLM", "Model", "ForMaskedLM"))]
        raise ModelError(f"{name}: transformers has no model class {kind!r}; {nearest(kind, models)}")
    usual = found.config_class()
    for field in options:
        if not hasattr(usual, field):
            hint = nearest(field, usual.to_dict())
            raise ModelError(f"{name}: {type(usual).__name__} has no field {field!r}; {hint}")
    given = {field: literal(value) if isinstance(value, str) else value for field, value in options.items()}
    try:
        config = found.config_class(**given)
        # The fused kernels of experts are for GPUs, and know no float64.
        config._experts_implementation = "eager"
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id or 0
        return found(config).train()
    except Exception as problem:
        raise ModelError(f"{name}: {type(problem).__name__}: {problem}") from problem


def _from_folder(folder: Path, options: Mapping[str, object]) -> nn.Module:
    from transformers import AutoConfig

    if options:
        raise ModelError(f"{folder}: its configuration is in config.json; options are for {PREFIX}CLASS")
    pickled = [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")]
    if pickled and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder}: {pickled[0]} is a pickle, which can run any code; convert it where you trust it: "
            "AutoModel.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        import transformers

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        return kind.from_pretrained(folder, config=config, local_files_only=True).train()
    except Exception as problem:
        raise ModelError(f"{folder}: transformers cannot load it: {problem}") from problem


def hub_parts(name: str, options: Mapping[str, object]) -> tuple[Cut, Example]:
    """A model of transformers, cut into layers, and random batches of its kind.

    Raises:
        ModelError: see `hub_model`; or it cannot be cut.
    """
    model = hub_model(name, options)

    def example(batch: int, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        made = random_batch(model, batch, seed)
        return made, made

    return cut(model), example
