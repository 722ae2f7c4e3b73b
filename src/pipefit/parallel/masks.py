"""Dropout inside modules that others wrote: each process takes its part of the mask that one process would draw.

attention   (b, heads/t, s, s)      its heads
MLP         (b, s, columns/t)       its columns
elsewhere   (b, s, h)               the same mask everywhere, from the same seed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from pipefit.parallel.region import Region
from pipefit.stage.replay import attention_core


class WholeMasks(TorchFunctionMode):
    """While it is entered, dropout between a column-parallel product and the row-parallel one that follows is split.

    Args:
        region: says by `is_divided` whether the module is between the two.
    """

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch, dropout in the way described."""
        kwargs = kwargs or {}
        if self._region.is_divided and func is F.dropout:
            return self._dropout(*args, **kwargs)
        if self._region.is_divided and func is F.scaled_dot_product_attention:
            return attend(self._region, *args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p:
            return x
        dim = -1
        if x.dim() == 4:
            dim = 1
        return self._region.own_dropout(x, p, dim)


@attention_core
def attend(
    region: Region,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` of this process's heads, whose dropout is part of the mask of all heads.

    Args:
        region: the processes.
        query: (b, heads/t, s, d).
        key: (b, key-value heads/t, s, d).
        value: like the key.
        attn_mask: True where a key counts, or what is added to the scores.
        dropout_p: rate of dropout; 0: torch's own function does it.
        is_causal: keys after the query do not count.
        scale: of the scores; None: 1/√d.
        enable_gqa: there may be fewer keys and values than queries.
    """
    if has_torch_function((query, key, value)):
        more = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        given = (query, key, value)
        return handle_torch_function(attend, given, region, *given, **more, enable_gqa=enable_gqa)
    if not dropout_p:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        times = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(times, 1)
        value = value.repeat_interleave(times, 1)
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril_()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
    return region.own_dropout(scores.softmax(-1), dropout_p, 1) @ value
