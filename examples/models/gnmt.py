"""A translator of LSTMs after GNMT (Wu et al. 2016): residual stacks, the first encoder bidirectional, attention.

    pipefit train --model examples/models/gnmt.py:gnmt --option layers=4,hidden=64,vocab=512 --data synthetic

Shapes: b sentences, s source and t target positions, h hidden, V vocabulary. The layers exchange a
tuple, because the target waits while the source is read, and every decoder layer takes the attention's context:

    (source, target)              embed_source    source (b, s), target (b, t) int64
    (x, target)                   encoder*        x (b, s, h), after the bidirectional layer (b, s, 2h)
    (memory, target)              embed_target    memory (b, s, h)
    (memory, y)                   decoder0        y (b, t, h)
    (y, context)                  decoder1 …      context (b, t, h)
    (y, context)                  head            logits (b, t, V)

Two simplifications, both so that no Python loop runs over time: the decoder does not feed the context of one
position into the attention's query of the next (as NVIDIA's "v2" form), and the attention is scaled dot-product
instead of additive, so no (b, t, s, h) tensor is made. Sentences of a batch have one length; there is no mask.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """Embeds one item of a pair, ids (b, length) -> (b, length, h), and hands the other on."""

    def __init__(self, vocab: int, hidden: int, item: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.item = item

    def forward(self, payload: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The pair with its item embedded."""
        first, second = payload
        return (first, self.token(second)) if self.item else (self.token(first), second)


class Encoder(nn.Module):
    """One LSTM over the source: (x (b, s, i), target ids) -> (x (b, s, h or 2h), target ids)."""

    def __init__(self, inputs: int, hidden: int, dropout: float, bidirectional: bool, residual: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True, bidirectional=bidirectional)
        self.residual = residual

    def forward(self, payload: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Reads the source; the residual, where there is one, goes around dropout and LSTM."""
        x, target = payload
        y, _ = self.lstm(self.dropout(x))
        return (x + y if self.residual else y), target


class AttentionDecoder(nn.Module):
    """The first decoder LSTM, which asks the memory: (memory (b, s, h), y (b, t, h)) -> (y, context)."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)

    def forward(self, payload: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Every target position weighs all source positions by its LSTM output."""
        memory, target = payload
        y, _ = self.lstm(self.dropout(target))
        context = F.scaled_dot_product_attention(self.query(y), self.key(memory), memory)
        return y, context


class Decoder(nn.Module):
    """A later decoder LSTM: (y, context) -> (y, context), both (b, t, h); it reads the two side by side."""

    def __init__(self, hidden: int, dropout: float, residual: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(2 * hidden, hidden, batch_first=True)
        self.residual = residual

    def forward(self, payload: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Advances y and hands the context on."""
        y, context = payload
        z, _ = self.lstm(self.dropout(torch.cat((y, context), dim=-1)))
        return (y + z if self.residual else z), context


class Translation(nn.Module):
    """The projection to the vocabulary: (y (b, t, h), context) -> logits (b, t, V)."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden, vocab)

    def forward(self, payload: tuple[Tensor, Tensor]) -> Tensor:
        """Logits of the next target token; the context ends here."""
        return self.project(payload[0])


def gnmt(
    layers: int = 8, hidden: int = 1024, vocab: int = 32320, dropout: float = 0.2, length: int = 24
) -> tuple[nn.Sequential, None, Any]:
    """A GNMT-like translator: (source (b, s), target (b, t)) int64 -> logits (b, t, vocab) of the next target token.

    The layers are `embed_source`, `encoder0` …, `embed_target`, `decoder0` …, `head`. Residuals start at the third
    LSTM of each stack. At the defaults it has the sizes of PipeDream's GNMT-8. Scaled down:
    `layers=4, hidden=64, vocab=512`.

    Args:
        layers: LSTMs in all, at least 3: the larger half encodes, the rest decodes.
        hidden: width.
        vocab: tokens of either language.
        dropout: rate before each LSTM.
        length: tokens of a sentence of the example.

    Returns:
        The model, no loss of its own, and `example(batch, seed)`.
    """
    if layers < 3:
        raise ValueError(f"expected at least 3 LSTMs (two encode, one decodes), got layers={layers}")
    num_encoders = (layers + 1) // 2
    model: list[tuple[str, nn.Module]] = [("embed_source", Embedding(vocab, hidden, 0))]
    for index in range(num_encoders):
        inputs = 2 * hidden if index == 1 else hidden
        encoder = Encoder(inputs, hidden, dropout, bidirectional=index == 0, residual=index >= 2)
        model.append((f"encoder{index}", encoder))
    model.append(("embed_target", Embedding(vocab, hidden, 1)))
    model.append(("decoder0", AttentionDecoder(hidden, dropout)))
    for index in range(1, layers - num_encoders):
        model.append((f"decoder{index}", Decoder(hidden, dropout, residual=index >= 2)))
    model.append(("head", Translation(hidden, vocab)))
    network = nn.Sequential(OrderedDict(model))
    # Uniform in ±0.1, as the paper trains it.
    with torch.no_grad():
        for parameter in network.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def example(batch: int, seed: int = 0) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Random sentences: x = (source, target) and y, the target one token later; all (batch, length) int64."""
        draw = torch.Generator().manual_seed(seed)
        source = torch.randint(0, vocab, (batch, length), generator=draw)
        ids = torch.randint(0, vocab, (batch, length + 1), generator=draw)
        return (source, ids[:, :-1].contiguous()), ids[:, 1:].contiguous()

    return network, None, example
