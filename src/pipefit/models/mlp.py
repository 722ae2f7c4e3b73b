"""A multi-layer perceptron, the smallest model that shows a pipeline."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from pipefit.errors import ModelError
from pipefit.models.blocks import Named, chain, require_positive, require_probability

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


def _hidden(
    inputs: int, width: int, activation: Callable[[], nn.Module], batch_norm: bool, dropout: float
) -> list[Named]:
    parts: list[Named] = [("linear", nn.Linear(inputs, width, bias=not batch_norm))]
    if batch_norm:
        parts.append(("norm", nn.BatchNorm1d(width)))
    parts.append(("activation", activation()))
    if dropout:
        parts.append(("dropout", nn.Dropout(dropout)))
    return parts


def mlp(
    layers: int = 8,
    width: int = 256,
    inputs: int = 64,
    classes: int = 10,
    activation: str = "relu",
    batch_norm: bool = False,
    dropout: float = 0.0,
) -> nn.Sequential:
    """A perceptron of layers `hidden0` … and `head`: (b, inputs) or anything that flattens to it -> (b, classes).

    Args:
        layers: linear maps in all, the last of which is the head; at least 1.
        width: units of each hidden layer.
        inputs: features of a sample; the first layer flattens images.
        classes: logits of the head.
        activation: relu, gelu, tanh, silu, sigmoid or identity.
        batch_norm: normalise between the linear map and the activation.
        dropout: rate after the activation.

    Raises:
        ModelError: a size is not positive, the activation unknown, or the rate outside [0, 1).
    """
    require_positive("mlp", layers=layers, width=width, inputs=inputs, classes=classes)
    require_probability("mlp", dropout=dropout)
    if activation not in _ACTIVATIONS:
        raise ModelError(f"mlp: activation must be one of {', '.join(_ACTIVATIONS)}; got {activation!r}")
    sizes = [inputs, *[width] * (layers - 1)]
    kind = _ACTIVATIONS[activation]
    parts = [_hidden(size, width, kind, batch_norm, dropout) for size in sizes[:-1]]
    parts.append([("linear", nn.Linear(sizes[-1], classes))])
    parts[0].insert(0, ("flatten", nn.Flatten()))
    names = [*(f"hidden{index}" for index in range(layers - 1)), "head"]
    return chain((name, chain(part)) for name, part in zip(names, parts, strict=True))
