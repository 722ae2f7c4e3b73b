"""Models of libraries without chance, so that a plain loop of torch is their reference."""

from __future__ import annotations

from torch import nn

CHANCES = (
    "drop_prob",
    "drop_rate",
    "p",
    "dropout",
    "dropout_p",
    "attention_dropout",
    "activation_dropout",
    "stochastic_depth_prob",
)
KINDS = ("Drop", "StochasticDepth")
OF_A_MODEL = ("drop_rate",)
"""The dropout of timm's models that call its function."""


def calm(model: nn.Module) -> nn.Module:
    """The model with all probabilities of dropout, of whatever kind, set to 0."""
    for module in model.modules():
        if any(kind in type(module).__name__ for kind in KINDS):
            names = CHANCES
        else:
            names = OF_A_MODEL
        for name in names:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model
