"""A model as layers, and the table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipefit.cutting.anatomy import num_weights
from pipefit.cutting.shell import Shell
from pipefit.cutting.traced import Traced
from pipefit.parallel.loss import Loss
from pipefit.runtime.microbatches import Weigh
from pipefit.stage.materialise import InitialiseLayer
from pipefit.stage.split import NamedLayer, named_layers
from pipefit.stage.ties import named_at
from pipefit.units import columns, counted, format_bytes, format_count


@dataclass(frozen=True)
class Cut:
    """A model as layers.

    Attributes:
        layers: the sequence; their parameters have the model's own names.
        shell: the model's forward, which the layers share, around its blocks or traced.
        model: the whole one, as its author wrote it; the layers have its weights.
        crossing: (bytes, number of tensors) that cross the border before each layer but the first, for the example.
        merged: blocks before which it cannot be cut, with the reason.
        loss: the model's own, (output, batch) -> mean; None: it has none.
        weigh: the weight of a batch in that mean; None: its number of samples.
        initialise_layer: sets the weights of layers of the meta device; None: they have weights.
    """

    layers: tuple[NamedLayer, ...]
    shell: Shell | Traced
    model: nn.Module
    crossing: tuple[tuple[float, int], ...]
    merged: tuple[tuple[str, str], ...] = ()
    loss: Loss | None = None
    weigh: Weigh | None = None
    initialise_layer: InitialiseLayer | None = None

    @property
    def way(self) -> str:
        """The place of the borders, for people."""
        if isinstance(self.shell, Traced):
            return "of its traced graph"
        return "around its blocks"

    def __len__(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def __str__(self) -> str:
        """A table of the layers, with the bytes that enter each of them for the example."""
        entering = [("the batch", "")]
        for size, number in self.crossing:
            entering.append((format_bytes(size), counted(number, "tensor")))
        rows = [("layer", "parameters", "enters", "")]
        for row, enters in zip(_rows(self.layers), entering, strict=True):
            rows.append((*row, *enters))
        lines = [f"{len(self)} layers {self.way}, proved equal to the whole model", *columns(rows)]
        for name, of in shared_weights(self.layers):
            lines.append(f"{name} is in several layers: {', '.join(of)}")
        for path, why in self.merged:
            lines.append(f"no cut before {path}: {why}")
        return "\n".join(lines)


def shared_weights(layers: Sequence[NamedLayer]) -> list[tuple[str, list[str]]]:
    """Weights that several layers hold, by their first names, with the names of these layers; they stay tied."""
    names = {layer.index: layer.name for layer in layers}
    shared = [found for found in named_at(layers) if len(found) > 1]
    return [(found[0][0], [names[index] for _, _, index in found]) for found in shared]


def table(model: Any) -> str:
    """A table of the layers of a model that is a sequence of them, or was cut."""
    if isinstance(model, Cut):
        return str(model)
    layers = named_layers(model)
    rows = [("layer", "parameters"), *_rows(layers)]
    return "\n".join([f"{len(layers)} layers", *columns(rows)])


def _rows(layers: Sequence[NamedLayer]) -> list[tuple[str, str]]:
    return [(layer.name, format_count(num_weights(layer.module))) for layer in layers]
