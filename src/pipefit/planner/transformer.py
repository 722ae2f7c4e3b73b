"""The sizes of a transformer, by name or by text, and its arithmetic: parameters, FLOP, days.

Legend: l layers, h hidden, a heads, c heads of keys and values, f width of the feed-forward, V vocabulary, s sequence,
B batch, P parameters, T tokens, n devices, X FLOP/s of one.
Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters" (SC 2021), section 5 and the
appendix, for c = a and f = 4h without gates; other widths count as the shapes of their products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pipefit.errors import ProfileError

_SECONDS_PER_DAY = 86400.0
ATTENTION = ("softmax", "eager", "flash", "flash1", "cudnn")
"""How attention runs: with one kernel for scale, mask and softmax; with one for each; as FlashAttention 2, or 1; by
cuDNN, which torch chooses on an H200."""


@dataclass(frozen=True)
class Transformer:
    """The sizes of a transformer, and how its parts run; GPT of Megatron-LM of 2021 where nothing is said.

    Attributes:
        layers: l.
        hidden: h.
        heads: a.
        vocab: V.
        sequence: s.
        kv_heads: c; 0: as many as heads.
        ffn: f; 0: 4h.
        gated: 1: the feed-forward has a gate, another product of its size.
        tied: 1: the projection to the vocabulary shares the embedding's weights.
        bias: 1: products have a bias, and positions are learned; 0: neither, and positions are rotations.
        dropout: 1: dropout after attention, its scores and the feed-forward.
        attention: one of `ATTENTION`.
        fused_norms: 1: a norm is one kernel; 0: one for each of its operations.
        fused_passes: 1: a rotation is one kernel, and so is a gate with its activation, as in Megatron-Core and under
            torch.compile; 0: one for each of their operations.
        fused_loss: 1: the loss works in place on each device's own logits, as Megatron-LM's; 0: it works on all
            logits, also where the vocabulary is split over devices, each of its operations makes another copy, an
            accuracy is computed, and where layers are replayed, so is the projection to the vocabulary.
        sequence_parallel: 1: what is between the products is split over a rank's devices, too.
        gathered: 1: a product keeps its whole input for the backward, also where that is split over the devices between
            products, as torch does by default; 0: its part, which the backward gathers again, as in Megatron-LM.
        sums: of a block's backward over a rank's devices: 2; 3 where the gate's product sums its own gradient.
        overlapped: 1: devices compute during sums: products during those over a rank's devices, piece by piece, the
            last backward and the next forward during those over copies, as in Megatron-Core with
            `--tp-comm-overlap`, `--overlap-grad-reduce` and `--overlap-param-gather`; 0: one after the other.
        summed_bytes: of an element of gradients while copies sum them; 0: as of weights.
        added_bytes: of an element of the sum of micro-batches' gradients, to which kernels of their own convert and add
            those of weights, as DeepSpeed does in bf16; 0: it has the type of weights.
        fp8: 1: the products of a block with weights, forward and backward, take numbers of 8 bits; nothing else does.
        torchtitan: 1: as torchtitan runs a Llama, its weights shared by FSDP2; see `pipefit.planner.torchtitan`.
        bytes: of an element of weights and activations: 2 (Adam then has a master copy), or 4.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int = 51200
    sequence: int = 2048
    kv_heads: int = 0
    ffn: int = 0
    gated: int = 0
    tied: int = 1
    bias: int = 1
    dropout: int = 1
    attention: str = "softmax"
    fused_norms: int = 1
    fused_passes: int = 0
    fused_loss: int = 1
    sequence_parallel: int = 0
    gathered: int = 0
    sums: int = 2
    overlapped: int = 0
    summed_bytes: int = 0
    added_bytes: int = 0
    fp8: int = 0
    torchtitan: int = 0
    bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "sequence"):
            if getattr(self, name) < 1:
                raise ProfileError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.bytes not in (2, 4):
            raise ProfileError(f"bytes: expected 2 or 4, got {self.bytes}")
        if self.hidden % self.heads:
            raise ProfileError(f"heads: expected a divisor of the hidden size {self.hidden}, got {self.heads}")
        if self.heads % self.keys:
            raise ProfileError(f"kv_heads: expected a divisor of {self.heads} heads, got {self.kv_heads}")
        if self.attention not in ATTENTION:
            raise ProfileError(f"attention: expected one of {', '.join(ATTENTION)}, got {self.attention}")

    def splits(self, width: int) -> bool:
        """Whether so many devices can share heads and feed-forward evenly."""
        return self.keys % width == 0 == self.wide % width

    @property
    def keys(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def wide(self) -> int:
        """Width of the feed-forward."""
        return self.ffn or 4 * self.hidden

    @property
    def qkv(self) -> int:
        """Width of queries, keys and values together."""
        return self.hidden + 2 * self.hidden * self.keys // self.heads

    @property
    def up(self) -> int:
        """Width of the first product of the feed-forward, with its gate."""
        return self.wide * (1 + self.gated)

    @property
    def matrices(self) -> int:
        """Weights in the products of a layer."""
        return self.hidden * (self.qkv + self.hidden + self.up + self.wide)


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt": {},
    "llama": {
        "gated": 1,
        "tied": 0,
        "bias": 0,
        "dropout": 0,
        "attention": "flash",
        "vocab": 32000,
        "sequence": 4096,
        "gathered": 1,
    },
}
"""The settings that differ from those of a GPT, by the first word of a model's text."""

_NEEDED = ("layers", "hidden", "heads")


def is_transformer(text: str) -> bool:
    """Returns whether a model is given by its sizes: "gpt:layers=…" or "llama:layers=…"."""
    family, colon, _ = text.partition(":")
    return bool(colon) and family in FAMILIES


def settings_of(text: str) -> dict[str, int | str]:
    """The sizes that a text such as "gpt:layers=96,hidden=12288,heads=96" names.

    Raises:
        ProfileError: a size is missing, unknown or not a whole number.
    """
    family, _, rest = text.partition(":")
    known = [each.name for each in fields(Transformer)]
    found: dict[str, int | str] = {}
    for part in rest.split(","):
        name, _, value = map(str.strip, part.partition("="))
        if name == "attention" and value in ATTENTION:
            found[name] = value
        elif name in known and name != "attention" and value.isdecimal():
            found[name] = int(value)
        else:
            raise ProfileError(f"{text}: expected NAME=NUMBER with one of {', '.join(known)}; got {part!r}")
    for name in _NEEDED:
        if name not in found:
            raise ProfileError(f"{text}: expected {name}=…, as in {family}:layers=96,hidden=12288,heads=96")
    return found


def transformer_of(text: str) -> Transformer:
    """The transformer of a text such as "llama:layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336".

    Raises:
        ProfileError: it is malformed, or a size makes no sense.
    """
    if not is_transformer(text):
        raise ProfileError(f"{text}: expected gpt:layers=… or llama:layers=…, with the sizes of a transformer")
    given: dict[str, Any] = {**FAMILIES[text.partition(":")[0]], **settings_of(text)}
    return Transformer(**given)


def text_of(model: Transformer) -> str:
    """The text of a transformer, without what is usual in its family.

    >>> text_of(Transformer(2, 64, 4, vocab=100))
    'gpt:layers=2,hidden=64,heads=4,vocab=100'
    """
    family = "llama" if model.gated else "gpt"
    usual = asdict(Transformer(1, 1, 1)) | dict(FAMILIES[family])
    named = [f"{name}={size}" for name, size in asdict(model).items() if name in _NEEDED or usual[name] != size]
    return f"{family}:" + ",".join(named)


def num_parameters(model: Transformer) -> float:
    """P = 12·l·h²·(1 + 13/(12h) + (V+s)/(12·l·h)) for a GPT.

    >>> round(num_parameters(Transformer(96, 12288, 96)) / 1e9, 1)
    174.6
    """
    h = model.hidden
    norms = 2 * h
    table = model.vocab * h * (2 - model.tied)
    if not model.bias:
        return model.layers * (model.matrices + norms) + table + h
    biases = model.qkv + h + model.up + h
    # Norms have a shift, too; the last one is left out, as in the paper.
    return model.layers * (model.matrices + biases + 2 * norms) + table + model.sequence * h


def flops_per_iteration(model: Transformer, batch: int, recompute: bool = False) -> float:
    """F = 72·B·s·l·h²·(1 + s/(6h)) + 6·B·s·h·V for a GPT; 96 in place of 72 with recompute (the head is not replayed).

    Attention counts whole, as in the paper, also where the half above the diagonal is not computed.
    """
    times = 3
    if recompute:
        times = 4
    tokens = batch * model.sequence
    scores = 2 * model.hidden * model.sequence
    blocks = 2 * times * tokens * model.layers * (model.matrices + scores)
    head = 6 * tokens * model.hidden * model.vocab
    return blocks + head


def training_days(parameters: float, tokens: float, devices: int, flops_per_device: float) -> float:
    """6·T·P/(n·X) seconds in days.

    >>> round(training_days(174.6e9, 300e9, 1024, 140e12 * 6 / 8))  # the paper counts a replay too: 8·T·P
    34
    """
    return 6 * tokens * parameters / (devices * flops_per_device) / _SECONDS_PER_DAY
