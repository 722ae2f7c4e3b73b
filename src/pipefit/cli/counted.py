"""Models by their configuration, for verbs that plan them: what their layers do is counted, without weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pipefit.errors import PipefitError
from pipefit.spec.arguments import Number
from pipefit.spec.options import setting

if TYPE_CHECKING:
    from pipefit.spec import Topology
    from pipefit.spec.counted import Counted

_MOST = 8192
"""Tokens of a sample where none are stated and the configuration allows more."""


@dataclass(frozen=True)
class ModelSource:
    """A model of transformers by its configuration."""

    model: str | None = setting(
        None,
        "Count the layers of this model in place of --profile: a folder with a config.json, such a file, or "
        "transformers:CLASS. No weights are needed.",
    )
    option: Sequence[str] = setting(
        (), "Fields of its configuration, like num_hidden_layers=8; may be repeated.", typed=list[str]
    )
    sequence: Number | None = setting(
        None, f"Tokens of a sample; default: as many as its configuration allows, at most {_MOST}."
    )
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = setting(
        "bfloat16", "Type of its weights and activations."
    )
    fp8: bool = setting(
        False, "Linear layers of blocks take numbers of 8 bits, for devices with fp8_flops; embedding and head do not."
    )
    lora: str = setting("", "Train adapters of it only, like r=8,alpha=16,target=all-linear.")


def count_of(source: ModelSource, machine: Topology, tensors: Sequence[int] | None) -> tuple[Counted, str]:
    """Counts a model for a machine; returns also a line on it for people.

    Args:
        source: the model.
        machine: on whose innermost level devices may share a layer.
        tensors: tensor widths to plan; None: the powers of two that the machine allows.

    Raises:
        PipefitError: no such model, a sequence that it does not take, or no product that runs in fp8.
    """
    from pipefit.models.factory_options import parse_text
    from pipefit.models.hub import without_weights
    from pipefit.planner.methods import powers_of_two
    from pipefit.profiling import count_model

    name = source.model or ""
    options = parse_text(",".join(source.option), name)

    def make() -> Any:
        return without_weights(name, options, dtype=source.dtype, lora=source.lora)

    kind, tokens, words = _tokens(make(), source.sequence)
    widths = tensors
    if widths is None:
        inner = machine.levels[0].width
        if machine.name.startswith("local:"):
            inner = 1
        widths = powers_of_two(inner)
    counted = count_model(make, tokens, widths, source.fp8)
    precision: str = source.dtype
    if source.fp8:
        if not counted.needs_fp8:
            raise PipefitError(
                "--fp8: expected linear layers in the blocks of which all sizes, and the tokens of a sample, are "
                "multiples of 16; there are none: leave it out, or change --sequence"
            )
        precision += " with products in fp8"
    return counted, f"counted on the modules of {kind}, {precision}{words}"


def _tokens(model: Any, wanted: int | None) -> tuple[str, int, str]:
    """The class of a model, the tokens of a sample, and a phrase on them."""
    from pipefit.models.hub import most_tokens

    kind = type(model).__name__
    most = most_tokens(model)
    if most is None and wanted is not None:
        raise PipefitError(f"--sequence: {kind} takes no text; leave it out")
    if most is None:
        return kind, 0, ""
    tokens = wanted or min(most, _MOST)
    if not tokens:
        raise PipefitError(f"--sequence: the configuration of {kind} has no max_position_embeddings; give --sequence")
    if not most:
        return kind, tokens, f", sequence {tokens}"
    if tokens > most:
        raise PipefitError(
            f"--sequence {tokens}: the configuration of {kind} allows at most {most} (max_position_embeddings); change "
            "it there, or with --option max_position_embeddings=…"
        )
    return kind, tokens, f", sequence {tokens} (its configuration allows {most})"
