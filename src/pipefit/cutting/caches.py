"""Keys and values of earlier tokens: each stage of a cut model keeps what its own layers made."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipefit.cutting.own import Given
from pipefit.cutting.shell import CutLayer


@dataclass
class Past:
    """The state of a generation.

    Attributes:
        name: the name of the argument that holds the model's cache.
        cache: a cache of the model's own class; it only counts tokens, see `count`.
        length: tokens that all caches have seen.
        options: arguments of the next forward that are not tensors.
    """

    name: str
    cache: Any
    length: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Past | None:
        """Finds the empty cache among the arguments of a model; None: there is none with known layers."""
        from transformers.cache_utils import DynamicCache

        found = [cls(name, value) for name, value in arguments.items() if isinstance(value, DynamicCache)]
        if len(found) == 1 and found[0].cache.layers:
            return found[0]
        return None


class CachedArguments:
    """The arguments of the model for one stage, with the stage's own cache.

    Args:
        past: the state of the generation, the same for all stages.
    """

    def __init__(self, past: Past) -> None:
        self.past = past
        self.cache = copy.deepcopy(past.cache)

    def __call__(self, batch: Mapping[str, Tensor]) -> Given:
        """No positional arguments, and those by name."""
        count(self.cache, self.past.length)
        return (), {**batch, **self.past.options, self.past.name: self.cache}

    def filled(self) -> list[int]:
        """The layers of the cache that the stage has written to."""
        return [
            index
            for index, layer in enumerate(self.cache.layers)
            if getattr(layer, "keys", None) is not None or any(getattr(layer, "has_previous_state", {}).values())
        ]


@contextlib.contextmanager
def caching(stages: Iterable[Sequence[CutLayer]], past: Past) -> Iterator[list[CachedArguments]]:
    """The context in which stages, each given by its layers, run with their own caches."""
    before = []
    made = []
    try:
        for layers in stages:
            made.append(CachedArguments(past))
            # Nothing is trained, so no outputs of routers need to be sent.
            shell = replace(layers[0].shell, arguments=made[-1], carried=())
            for layer in layers:
                before.append((layer, layer.shell))
                layer.shell = shell
        yield made
    finally:
        for layer, shell in before:
            layer.shell = shell


def count(cache: Any, length: int) -> None:
    """Sets the number of tokens in a cache for the layers that another stage computes.

    A model makes its masks and positions from the length of one layer, such as the first, which may be on another
    stage. For such layers a byte per token replaces keys and values; layers of this stage stay as they are.
    """
    from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

    if length == 0:
        return
    for layer in cache.layers:
        if isinstance(layer, CacheLayerMixin) and layer.get_seq_length() < length:
            token = torch.zeros(1, 1, length - layer.get_seq_length(), 1, dtype=torch.int8)
            layer.update(token, token)
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)


def not_filled_once(cache: Any, filled: Iterable[Iterable[Iterable[int]]]) -> list[int]:
    """The layers of a cache that no stage has written to, or several, though they hold something.

    Args:
        cache: a cache of the model's own class.
        filled: the layers that each stage of each process has written to.
    """
    from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

    # A layer without attention has one that holds nothing.
    holders = CacheLayerMixin, LinearAttentionCacheLayerMixin
    times = Counter(index for process in filled for stage in process for index in stage)
    return [i for i, layer in enumerate(cache.layers) if isinstance(layer, holders) and times[i] != 1]
