"""Models of transformers: their arguments, their loss, and batches of their kind."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from pipefit.errors import DataError, ModelError
from pipefit.parallel.loss import Loss

Given = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and keyword arguments of a forward."""

Arguments = Callable[[Any], Given]
"""From a batch to the arguments of a forward."""

Result = Callable[[Any], Any]
"""From the output of a model to the input of the loss."""

Tensors = Mapping[str, Tensor]
"""A batch or an output: tensors by name."""

Leaves = Sequence[Any]
"""The leaves of a tree, such as arguments."""

Paths = Sequence[str]
"""Paths of modules."""

IGNORED = -100
"""The label of tokens that the loss ignores, as everywhere in transformers."""


def is_transformers(model: object) -> bool:
    """Returns whether a model is one of transformers, or one that peft has wrapped."""
    return any(kind.__name__ in ("PreTrainedModel", "PeftModel") for kind in type(model).__mro__)


def without_adapters(model: nn.Module) -> Any:
    """The model without the wrapper of peft."""
    wrapper: Any = model
    if hasattr(wrapper, "get_base_model"):
        return wrapper.get_base_model()
    return model


def arguments_of(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The arguments that a model of transformers takes."""
    return inspect.signature(without_adapters(model).forward).parameters


def text_configuration(config: Any) -> Any:
    """The part of a configuration that is about text, or the whole one."""
    if hasattr(config, "get_text_config"):
        return config.get_text_config()
    return config


def most_positions(config: Any) -> int:
    """The most tokens that a configuration allows; 0: it does not say."""
    return getattr(text_configuration(config), "max_position_embeddings", None) or 0


@dataclass(frozen=True)
class Call:
    """The arguments of a model for a batch: the batch's entries by name, and the settings of a training forward."""

    further: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Call:
        """The call of a model of transformers, without a cache for generation."""
        names = arguments_of(model)
        open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in names.values())
        config = getattr(model, "config", None)
        caches = "use_cache" in names or (open_ended and getattr(config, "use_cache", None) is not None)
        return cls({"use_cache": False} if caches else {})

    def __call__(self, batch: Any) -> Given:
        """No positional arguments, and those by name."""
        if not isinstance(batch, Mapping):
            raise DataError(
                f"expected a batch as transformers takes it, a dict such as {{'input_ids': …, 'labels': …}}, "
                f"got {type(batch).__name__}"
            )
        given = {**batch, **self.further}
        if _ITEMS in given:
            given[_ITEMS] = given[_ITEMS][0]
        return (), given


_ITEMS = "num_items_in_batch"
"""The number of labels by which a loss is divided: in a batch, which is split by samples, once for each sample."""

_TOKENS = 12
_RESULTS = ("loss", "logits", "last_hidden_state", "start_logits", "end_logits")


def result(output: Any) -> dict[str, Tensor]:
    """The parts of an output that a loss may use."""
    return {name: output[name] for name in _RESULTS if name in output and output[name] is not None}


@dataclass(frozen=True)
class Labels:
    """Weight of a batch in the mean: its labels that count, or its samples where labels are numbers.

    Attributes:
        shifted: each place predicts the next one, so the first label of a sequence is never predicted.
        ignored: the label that does not count.
        by_samples: the loss is a mean over samples, or over all places of pictures of one size.
    """

    shifted: bool
    ignored: int = IGNORED
    by_samples: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> Labels:
        """The weights that suit the model's own loss."""
        model = without_adapters(model)
        name = type(model).__name__
        config = getattr(model, "config", None)
        if name.endswith("ForCTC"):
            return cls(shifted=False, by_samples=True)
        if name.endswith("ForSemanticSegmentation"):
            usual = getattr(config, "loss_ignore_index", IGNORED)
            ignored = getattr(config, "semantic_loss_ignore_index", usual)
            return cls(shifted=False, ignored=ignored, by_samples=getattr(config, "num_labels", 2) == 1)
        loss = getattr(getattr(model, "loss_function", None), "__name__", "")
        decodes = not getattr(config, "is_encoder_decoder", False)
        return cls(loss == "ForCausalLMLoss" and decodes and "Masked" not in name)

    def __call__(self, batch: Tensors) -> float:
        """The weight of a micro-batch in the mean of its batch."""
        labels = _labels(batch)
        if self.by_samples or labels.is_floating_point():
            return float(len(labels))
        if self.shifted and labels.dim() > 1:
            labels = labels[..., 1:]
        return float(labels.ne(self.ignored).sum())


def _labels(batch: Tensors) -> Tensor:
    if "labels" not in batch:
        raise DataError(f"the model's own loss needs 'labels' in every batch, got {', '.join(batch)}; or give loss=…")
    return batch["labels"]


def own_loss(output: Tensors, batch: Tensors, weigh: Labels) -> Tensor:
    """The model's own loss from the labels of the batch, a mean over the labels that count.

    Args:
        output: what the model gave, with its loss.
        batch: inputs and labels.
        weigh: its weight; 0 where every label is -100: then the loss is 0, and so are its gradients.
    """
    if "loss" not in output:
        _labels(batch)
        raise ModelError("the model gave no loss for these labels; give loss=function(output, batch)")
    # Only a profile that is computed has labels without data.
    if isinstance(_labels(batch), FakeTensor) or weigh(batch) > 0:
        return output["loss"]
    return torch.stack([value.sum() * 0 for name, value in output.items() if name != "loss"]).sum()


def loss_of(model: nn.Module) -> tuple[Loss | None, Labels | None]:
    """A model's own loss as (output, batch) -> mean, and the weight of a batch in it; None: it takes no labels."""
    if "labels" not in arguments_of(model):
        return None, None
    weigh = Labels.of(model)
    return functools.partial(own_loss, weigh=weigh), weigh


@dataclass(frozen=True)
class Routers:
    """The modules whose outputs a mixture of experts gathers for the loss of its routers."""

    kinds: tuple[type, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Routers | None:
        """None: the model gathers nothing."""
        config = getattr(model, "config", None)
        if not getattr(config, "output_router_logits", False):
            return None
        kinds: set[Any] = set()
        for module in model.modules():
            recorded = getattr(module, "_can_record_outputs", None) or {}
            found = recorded.get("router_logits", [])
            if not isinstance(found, list):
                found = [found]
            kinds.update(getattr(one, "target_class", one) for one in found)
        if kinds:
            return cls(tuple(kinds))
        return None

    def __call__(self, module: nn.Module) -> bool:
        """Returns whether a module is one of them."""
        return isinstance(module, self.kinds)


def random_batch(model: nn.Module, samples: int, seed: int = 0, tokens: int = 0) -> dict[str, Tensor]:
    """A random batch of a model's kind: token ids with padding, pixels or audio features, and labels.

    Sequences have 12 tokens, or as many as the model takes; every second one is shorter, and padded. With `tokens` all
    of them have so many, and none is padded.

    Args:
        model: a model of transformers.
        samples: the number of samples.
        seed: the seed of the random numbers.
        tokens: of each sequence; 0: see above.

    Raises:
        ModelError: the model takes another kind of input.
    """
    base = without_adapters(model)
    config = base.config
    text = text_configuration(config)
    takes_labels = "labels" in arguments_of(model)
    generator = torch.Generator().manual_seed(seed)
    name = getattr(base, "main_input_name", "input_ids")
    heads = type(base).__name__
    length = tokens or min(_TOKENS, most_positions(config) or _TOKENS)

    def numbers(*shape: int) -> Tensor:
        kinds = [p.dtype for p in base.parameters() if p.is_floating_point()] or [torch.float32]
        return torch.randn(samples, *shape, generator=generator).to(kinds[0])

    def words() -> Tensor:
        first = min(3, text.vocab_size - 1)
        return torch.randint(first, text.vocab_size, (samples, length), generator=generator)

    def classes() -> Tensor:
        return torch.randint(0, config.num_labels, (samples,), generator=generator)

    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        sides = getattr(vision, "image_size", 32) or 32
        if isinstance(sides, int):
            sides = (sides, sides)
        batch = {name: numbers(getattr(vision, "num_channels", 3), *sides)}
        if takes_labels:
            batch["labels"] = classes()
        return batch
    if name == "input_features" and hasattr(config, "num_mel_bins"):
        features = numbers(config.num_mel_bins, 2 * config.max_source_positions)
        return {name: features, "labels": words()}
    if name != "input_ids":
        raise ModelError(f"{heads} takes {name}; give example=…, one batch of yours")
    padding = getattr(text, "pad_token_id", None) or 0
    seen = torch.ones(samples, length, dtype=torch.int64)
    if not tokens:
        seen[1::2, length - length // 3 :] = 0
    batch = {"input_ids": words().masked_fill(seen == 0, padding)}
    if not tokens:
        batch["attention_mask"] = seen
    if takes_labels:
        if "SequenceClassification" in heads:
            batch["labels"] = classes()
        else:
            batch["labels"] = words().masked_fill(seen == 0, IGNORED)
    return batch
