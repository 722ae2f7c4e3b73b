"""Model and data of a run by name: first weights, batches to train on, batches to evaluate on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipefit.data import ArrayBatches, TextBatches, digits, split_corpus, synthetic, text, unigram_entropy
from pipefit.errors import DataError, ModelError
from pipefit.models import ModelBundle, build
from pipefit.stage.materialise import can_be_drawn, initialise
from pipefit.stage.split import named_layers


@dataclass(frozen=True)
class Source:
    """Where a run's batches come from.

    Attributes:
        name: for people.
        batches: endless, (input, target); one step's worth each.
        held_out: batches to evaluate on; () when there are none.
        baseline: a loss that any learner should beat, and its name; None when there is none.
        tokens_per_sample: of a text; 0 otherwise.
        counts_hits: whether accuracy has a meaning.
        example: a batch of it, where that is known without drawing one.
    """

    name: str
    batches: Any
    held_out: tuple[tuple[Tensor, Tensor], ...] = ()
    baseline: tuple[str, float] | None = None
    tokens_per_sample: int = 0
    counts_hits: bool = False
    example: tuple[Tensor, Tensor] | None = None

    def endless(self) -> Iterator[tuple[Any, Any]]:
        """Batches without end: epoch after epoch."""
        while True:
            drawn = False
            for batch in self.batches:
                drawn = True
                yield batch
            if not drawn:
                raise DataError(f"{self.name} has no batch")

    def state(self) -> dict[str, Any]:
        """Where the data stands, for a checkpoint."""
        return dict(self.batches.state_dict()) if hasattr(self.batches, "state_dict") else {}

    def resume(self, state: dict[str, Any]) -> None:
        """Resumes where a checkpoint stood."""
        if state and hasattr(self.batches, "load_state_dict"):
            self.batches.load_state_dict(state)


class _Counted:
    """Batches of an endless iterator, with the position that a checkpoint keeps."""

    def __init__(self, batches: Iterator[tuple[Any, Any]]) -> None:
        self._batches, self._position = batches, 0

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self._batches:
            self._position += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for _ in islice(self._batches, state["position"] - self._position):
            self._position += 1


def example_of(bundle: ModelBundle, source: Source, batch: int) -> tuple[Any, Any]:
    """A batch like those that come, of `batch` samples: random ones of the model's, or, where it has none, of the data.

    Raises:
        ModelError: neither has one.
    """
    try:
        return bundle.example(batch, 0)
    except ModelError:
        if source.example is None:
            raise
        return source.example


def source_of(bundle: ModelBundle, data: Sequence[str], batch: int, seed: int) -> Source:
    """The data of a run.

    Args:
        bundle: the model.
        data: "text", "digits" or "synthetic", or text files; (): what the model is made for.
        batch: samples per step.
        seed: of the order of the data.

    Raises:
        DataError: unknown, missing, empty, or not what the model takes.
    """
    wanted = tuple(data) or ((bundle.data,) if bundle.data else ("synthetic",))
    if wanted == ("digits",):
        images = digits(seed=seed)
        batches = ArrayBatches(images.train_x, images.train_y, batch, seed=seed)
        first = images.train_x[:batch], images.train_y[:batch]
        return Source("digits", batches, ((images.test_x, images.test_y),), counts_hits=True, example=first)
    if wanted == ("synthetic",):
        return Source("synthetic", _Counted(synthetic(bundle.example, batch, seed=seed)))
    paths = None if wanted == ("text",) else [Path(path) for path in wanted]
    x, _ = bundle.example(1, 0)
    if not isinstance(x, Tensor) or x.dtype != torch.int64 or x.dim() != 2:
        raise DataError(
            f"text is for language models; {bundle.name} takes something else: use --data synthetic or digits"
        )
    context = x.shape[1]
    train, held = split_corpus(text(paths))
    batches = TextBatches(train, batch, context, seed=seed)
    held_out = TextBatches(held, batch, context, seed=1, num_batches=4)
    return Source(
        "text" if paths is None else ", ".join(map(str, paths)),
        batches,
        tuple(held_out),
        ("unigram entropy", unigram_entropy(train)),
        tokens_per_sample=context,
    )


def bundle_of(model: str, options: dict[str, Any], seed: int, capped: bool) -> ModelBundle:
    """A model for a run, whose weights are the same with and without a cap.

    One that says how a layer draws its weights draws them so, layer by layer; under a cap it comes without weights, for
    a layer draws them once it has a slot. Any other is built in memory, for only its factory knows how.
    """
    with torch.device("meta") if capped else contextlib.nullcontext():
        bundle = build(model, **options)
    layers = named_layers(bundle.layers)
    if not hasattr(bundle.layers, "initialise_layer") or not can_be_drawn(layers):
        return build(model, **options) if capped else bundle
    if not capped:
        initialise(layers, seed, bundle.layers.initialise_layer)
    return bundle
