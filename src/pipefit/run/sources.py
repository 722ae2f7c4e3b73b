"""Model and data of a run by name: first weights, batches to train on, batches to evaluate on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipefit.cutting import Cut
from pipefit.data import ArrayBatches, SyntheticBatches, TextBatches, digits, split_corpus, text, unigram_entropy
from pipefit.data.records import TokenBatches, token_samples
from pipefit.errors import DataError, ModelError
from pipefit.models import ModelBundle, build
from pipefit.models.hub import is_folder, tokenizer_of
from pipefit.models.registry import hub_bundle
from pipefit.stage.materialise import can_be_drawn, initialise, is_meta
from pipefit.stage.split import named_layers

_USUAL_CONTEXT, _MOST_HELD_OUT = 512, 32


@dataclass(frozen=True)
class Source:
    """The source of a run's batches.

    Attributes:
        name: for people.
        batches: (input, target), one for each step, with `state_dict` and `load_state_dict`.
        held_out: batches to evaluate on; () when there are none.
        baseline: a loss that a trained model should beat, and its name; None when there is none.
        tokens_per_sample: mean of a text; 0 otherwise.
        counts_hits: whether accuracy is defined.
        example: one of its batches, where it is known without drawing one.
        is_tuned: whether the model was trained before, so that the held-out loss before training is informative.
        tokenizer: of the text for the model of a folder; None: other data.
    """

    name: str
    batches: Any
    held_out: tuple[Any, ...] = ()
    baseline: tuple[str, float] | None = None
    tokens_per_sample: int = 0
    counts_hits: bool = False
    example: tuple[Any, Any] | None = None
    is_tuned: bool = False
    tokenizer: Any = None


def example_of(bundle: ModelBundle, source: Source, batch: int) -> tuple[Any, Any]:
    """A batch of `batch` samples in the shapes of the run: the model's random example, else one from the data.

    Raises:
        ModelError: there is neither.
    """
    if source.is_tuned and source.example is not None:
        return source.example
    try:
        return bundle.example(batch, 0)
    except ModelError:
        if source.example is None:
            raise
        return source.example


def source_of(
    bundle: ModelBundle, data: Sequence[str], batch: int, seed: int, context: int = 0, packed: bool = False
) -> Source:
    """The data of a run.

    Args:
        bundle: the model.
        data: "text", "digits" or "synthetic", or text files; (): the data that suits the model.
        batch: samples per step.
        seed: of the order of the data.
        context: maximum tokens of a sequence, for models with a tokenizer; 0: the model's own, at most 512.
        packed: whether records follow each other without padding; see `token_samples`.

    Raises:
        DataError: unknown, missing, empty, or unsuitable for the model.
    """
    wanted = tuple(data) or ((bundle.data,) if bundle.data else ("synthetic",))
    if wanted == ("digits",):
        images = digits(seed=seed)
        batches = ArrayBatches(images.train_x, images.train_y, batch, seed=seed)
        first = images.train_x[:batch], images.train_y[:batch]
        return Source("digits", batches, ((images.test_x, images.test_y),), counts_hits=True, example=first)
    if wanted == ("synthetic",):
        return Source("synthetic", SyntheticBatches(bundle.example, batch, seed=seed))
    paths = None if wanted == ("text",) else [Path(path) for path in wanted]
    name = "text" if paths is None else ", ".join(map(str, paths))
    if is_folder(bundle.name):
        return _of_tokens(name, bundle, paths, batch, seed, context, packed)
    if context or packed:
        raise DataError(f"--context and --pack are for models with a tokenizer, in a folder; {bundle.name} takes bytes")
    x, _ = bundle.example(1, 0)
    if not isinstance(x, Tensor) or x.dtype != torch.int64 or x.dim() != 2:
        raise DataError(f"text is for language models; {bundle.name} takes other data: use --data synthetic or digits")
    context = x.shape[1]
    train, held = split_corpus(text(paths))
    batches = TextBatches(train, batch, context, seed=seed)
    held_out = TextBatches(held, batch, context, seed=1, num_batches=4)
    return Source(
        name,
        batches,
        tuple(held_out),
        ("unigram entropy", unigram_entropy(train)),
        tokens_per_sample=context,
    )


def _of_tokens(
    name: str, bundle: ModelBundle, paths: list[Path] | None, batch: int, seed: int, context: int, packed: bool
) -> Source:
    """Text for the model of a folder, by the tokenizer in it; its last tenth is held out."""
    assert isinstance(bundle.layers, Cut)
    tokenizer, longest, vocabulary = tokenizer_of(bundle.layers, bundle.name)
    if context > longest > 0:
        raise DataError(f"--context {context}: {bundle.name} takes at most {longest} tokens")
    context = context or min(longest or _USUAL_CONTEXT, _USUAL_CONTEXT)
    samples = token_samples(paths, tokenizer, context, packed)
    highest = samples.highest
    if highest >= vocabulary:
        raise DataError(
            f"{bundle.name}: its tokenizer gives the token {highest}, but the model knows {vocabulary} tokens; they do "
            "not belong together"
        )
    num_held, lengths = len(samples) // 10, samples.lengths
    padding = next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)
    batches = TokenBatches(samples[: len(samples) - num_held], batch, padding, context, seed)
    held_out: tuple[Any, ...] = ()
    if num_held:
        held = TokenBatches(samples[-num_held:], batch, padding, context, 1, ragged=True)
        held_out = tuple(islice(held, _MOST_HELD_OUT))
    example = batches.batch_at(max(range(len(batches)), key=lambda k: lengths[batches.longest_at(k)]))
    mean = round(float(lengths.mean()))
    more: dict[str, Any] = {"example": (example, example), "is_tuned": True, "tokenizer": tokenizer}
    return Source(name, batches, held_out, tokens_per_sample=mean, **more)


def bundle_of(model: str, options: dict[str, Any], seed: int, empty: bool, lora: str = "") -> ModelBundle:
    """A model for a run, whose weights are the same with and without a cap.

    A model with its own function for a layer's weights draws or reads them layer by layer; with `empty` it comes
    without weights, because each layer gets them later in its place. Any other model is built in memory by its factory.
    """
    with torch.device("meta") if empty else contextlib.nullcontext():
        bundle = hub_bundle(model, options, lora) if lora else build(model, **options)
    layers, own = named_layers(bundle.layers), getattr(bundle.layers, "initialise_layer", None)
    if own is None or not can_be_drawn(layers, own):
        return build(model, **options) if is_meta(layers) else bundle
    if not empty and not is_folder(model):
        initialise(layers, seed, own)
    return bundle
