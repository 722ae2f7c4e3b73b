"""A decoder-only transformer like GPT-2 (Radford et al. 2019), one block per layer.

Shapes: b sequences, s positions, h hidden, a heads, V vocabulary. Weights are normal(0, 0.02), and the two
projections that end in the residual stream normal(0, 0.02/sqrt(2·layers)), as in that paper.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.errors import ModelError
from pipefit.models.blocks import chain, require_positive, require_probability

if TYPE_CHECKING:
    from pipefit.parallel.tensor_rule import TensorRule


class Embedding(nn.Module):
    """Token ids (b, s) int64 -> (b, s, h): token plus learned position."""

    tensor_rule: ClassVar[TensorRule]

    def __init__(self, vocab: int, context: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(context, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        """Adds the first s positions to the embedded tokens."""
        return self.dropout(self.token(ids) + self.position.weight[: self.length(ids)])

    def length(self, ids: Tensor) -> int:
        """The positions of the tokens, which the context must have."""
        length = ids.shape[1]
        if length > self.position.num_embeddings:
            raise ValueError(f"gpt: {length} positions given, but context={self.position.num_embeddings}")
        return length


class Attention(nn.Module):
    """Causal self-attention (b, s, h) -> (b, s, h) with one fused projection for query, key and value."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Each position attends to itself and to earlier positions."""
        return self.out(self.mix(self.qkv(x), self.heads))

    def mix(
        self, projected: Tensor, heads: int, attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    ) -> Tensor:
        """Query, key and value of some heads (b, s, 3 · heads · h/a) -> their mix (b, s, heads · h/a)."""
        b, s, _ = projected.shape
        q, k, v = projected.view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
        rate = 0.0
        if self.training:
            rate = self.dropout
        return attend(q, k, v, dropout_p=rate, is_causal=True).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """One layer of the transformer: x + attention(norm(x)), then x + mlp(norm(x)); the MLP is 4 h wide with GELU."""

    tensor_rule: ClassVar[TensorRule]

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class Head(nn.Module):
    """Final norm and the projection to the vocabulary: (b, s, h) -> logits (b, s, V)."""

    tensor_rule: ClassVar[TensorRule]

    def __init__(self, hidden: int, vocab: int, tied_to: nn.Embedding | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.project = nn.Linear(hidden, vocab, bias=False)
        if tied_to is not None:
            self.project.weight = tied_to.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        return self.project(self.norm(x))


def _initialise_layer(layers: int, layer: str, module: nn.Module) -> None:
    """Draws the weights of one layer of a model of `layers` blocks; those of norms stay as torch makes them."""
    residual_std = 0.02 / math.sqrt(2 * layers)
    with torch.no_grad():
        for name, part in module.named_modules(prefix=layer):
            if isinstance(part, nn.Linear | nn.Embedding):
                if name.endswith(("attention.out", "down")):
                    std = residual_std
                else:
                    std = 0.02
                nn.init.normal_(part.weight, std=std)
                if isinstance(part, nn.Linear) and part.bias is not None:
                    nn.init.zeros_(part.bias)


def gpt(
    layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    vocab: int = 256,
    context: int = 128,
    dropout: float = 0.0,
    tied: bool = True,
) -> nn.Sequential:
    """A GPT of layers `embed`, `block0` … `block{layers-1}`, `head`: ids (b, s) int64 -> logits (b, s, vocab).

    Args:
        layers: number of transformer blocks.
        hidden: width of the residual stream, a multiple of `heads`.
        heads: attention heads per block.
        vocab: number of tokens (256: bytes).
        context: the longest sequence.
        dropout: rate after the embedding, in attention and after both halves of a block.
        tied: the head's weight is the same Parameter as the token embedding, in the first and in the last layer.

    Raises:
        ModelError: a size is not positive, or `heads` does not divide `hidden`.
    """
    require_positive("gpt", layers=layers, hidden=hidden, heads=heads, vocab=vocab, context=context)
    if hidden % heads:
        below = hidden // heads * heads
        nearest = " or ".join(str(width) for width in (below, below + heads) if width)
        raise ModelError(
            f"gpt: hidden={hidden} is not a multiple of heads={heads}; nearest that work: hidden={nearest}"
        )
    require_probability("gpt", dropout=dropout)
    embed = Embedding(vocab, context, hidden, dropout)
    blocks = [(f"block{index}", Block(hidden, heads, dropout)) for index in range(layers)]
    head = Head(hidden, vocab, embed.token if tied else None)
    model = chain([("embed", embed), *blocks, ("head", head)])
    # Built on the meta device, the model gets its weights layer by layer when there is memory for them.
    vars(model)["initialise_layer"] = functools.partial(_initialise_layer, layers)
    for name, module in model.named_children():
        _initialise_layer(layers, name, module)
    return model
