"""The GPT's layers over several processes: column-parallel, then row-parallel products; heads and vocabulary sharded.

    embedding   rows of the vocabulary                                     one all-reduce
    attention   enter ─ q k v of its heads (columns) ─ softmax ─ its rows of out ─ leave ─ + bias
    MLP         enter ─ its columns of up ─ GELU ─ its rows of down ─ leave ─ + bias
    head        enter ─ its rows of the vocabulary ─ the loss joins them

Numbers are those of one process, dropout included: masks are drawn for the whole and each process takes its part.

Source: Shoeybi et al. 2019 §3; Korthikanti et al. 2022 §4.2 (sequence parallelism).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn import functional as F

from pipefit.models.gpt import Block, Embedding, Head
from pipefit.parallel.masks import attend
from pipefit.parallel.region import Region
from pipefit.parallel.tensor_rule import ShardSpec, TensorRule

_COLUMNS, _ROWS = ShardSpec(0), ShardSpec(1)  # of the product; torch keeps weights transposed


class SharedEmbedding(Embedding):
    """Token ids (b, s) -> (b, s, h), or (b, s/t, h) under sequence parallelism; each process has V/t tokens."""

    region: Region

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up the tokens of this process, zeros for the others, and sums over the processes."""
        region = self.region
        length = self.length(ids)
        place, here = region.places(ids, self.token.weight.shape[0])
        tokens = F.embedding(place, self.token.weight) * here.unsqueeze(-1)
        (position,) = region.shared(self.position.weight)
        position = position[:length]
        if region.sequence:
            position = region.own(position, 0)
        return region.dropout(region.leave(tokens) + position, self.dropout.p, self.training)


class SharedBlock(Block):
    """(b, s, h) -> (b, s, h), or both with s/t; each process has a/t heads and 4h/t columns of the MLP."""

    region: Region

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP, each with one `enter` and one `leave`."""
        region = self.region
        size = self.norm1.normalized_shape
        n1, b1, n2, b2, after_attention, after_mlp = region.shared(
            self.norm1.weight, self.norm1.bias, self.norm2.weight, self.norm2.bias,
            self.attention.out.bias, self.down.bias,
        )  # fmt: skip
        y = region.enter(F.layer_norm(x, size, n1, b1, self.norm1.eps))
        y = region.leave(F.linear(self._attend(y), self.attention.out.weight)) + after_attention
        x = x + region.dropout(y, self.dropout.p, self.training)
        y = region.enter(F.layer_norm(x, size, n2, b2, self.norm2.eps))
        y = F.gelu(F.linear(y, self.up.weight, self.up.bias), approximate="tanh")
        y = region.leave(F.linear(y, self.down.weight)) + after_mlp
        return x + region.dropout(y, self.dropout.p, self.training)

    def _attend(self, x: Tensor) -> Tensor:
        """The heads of this process: (b, s, h) -> (b, s, h/t)."""
        attention = self.attention
        projected = F.linear(x, attention.qkv.weight, attention.qkv.bias)
        heads = attention.heads // self.region.size
        if self.training and attention.dropout:
            return attention.mix(projected, heads, partial(attend, self.region))
        return attention.mix(projected, heads)


class SharedHead(Head):
    """(b, s, h), or (b, s/t, h) -> logits of this process's part of the vocabulary (b, s, V/t)."""

    region: Region

    def forward(self, x: Tensor) -> Tensor:
        """Logits of its part; the full logits are never gathered."""
        weight, bias = self.region.shared(self.norm.weight, self.norm.bias)
        x = F.layer_norm(x, self.norm.normalized_shape, weight, bias, self.norm.eps)
        return F.linear(self.region.enter(x), self.project.weight)


Embedding.tensor_rule = TensorRule(
    SharedEmbedding,
    {"token.weight": ShardSpec(0)},
    lambda layer: {"vocab": layer.token.num_embeddings},
    takes_whole=True,
)
Block.tensor_rule = TensorRule(
    SharedBlock,
    {
        "attention.qkv.weight": ShardSpec(0, parts=3),
        "attention.qkv.bias": ShardSpec(0, parts=3),
        "attention.out.weight": _ROWS,
        "up.weight": _COLUMNS,
        "up.bias": _COLUMNS,
        "down.weight": _ROWS,
    },
    lambda layer: {"heads": layer.attention.heads, "hidden": layer.up.in_features},
)
Head.tensor_rule = TensorRule(
    SharedHead, {"project.weight": ShardSpec(0)}, lambda layer: {"vocab": layer.project.out_features}, gives_shares=True
)
