"""Data for a long program, drawn as it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pipefit.errors import DataError
from pipefit.runtime.executor import Feed
from pipefit.runtime.microbatches import Weigh, feed_of

__all__ = ["stream_feed"]


class _Source:
    """Draws batches in order and keeps the micro-batches of those that are still in use."""

    def __init__(self, batches: Iterator[Any], num_microbatches: int, first: int, weigh: Weigh | None) -> None:
        self._batches, self._size, self._first, self._weigh = batches, num_microbatches, first, weigh
        self._steps: dict[int, Feed] = {}
        self._drawn = 0

    def at(self, mb: int) -> tuple[Feed, int]:
        step, offset = divmod(mb, self._size)
        while self._drawn <= step:
            try:
                batch = next(self._batches)
            except StopIteration:
                raise DataError(
                    f"the data ended after {self._drawn} batches, before step {step}; give `steps` at most that many"
                ) from None
            ordinal = self._first + self._drawn * self._size
            self._steps[self._drawn] = feed_of([batch], self._size, ordinal, "train", self._weigh)
            # A micro-batch is out of the pipeline long before this many later ones have entered it.
            self._steps.pop(self._drawn - _KEPT_STEPS - self._most_in_flight(), None)
            self._drawn += 1
        return self._steps[step], offset

    def _most_in_flight(self) -> int:
        return -(-_MOST_IN_FLIGHT // self._size)


_KEPT_STEPS = 4
_MOST_IN_FLIGHT = 256


class _Column:
    """One field of the micro-batches, by number."""

    def __init__(self, source: _Source, field: Callable[[Feed, int], Any], length: int) -> None:
        self._source, self._field, self._length = source, field, length

    def __getitem__(self, mb: int) -> Any:
        return self._field(*self._source.at(mb))

    def __len__(self) -> int:
        return self._length


def stream_feed(
    batches: Iterator[Any], num_steps: int, num_microbatches: int, first_ordinal: int, weigh: Weigh | None = None
) -> Feed:
    """The feed of a program of many steps over an iterator of (input, target) batches, each one step's worth."""
    source = _Source(batches, num_microbatches, first_ordinal, weigh)
    total = num_steps * num_microbatches
    columns = [
        _Column(source, field, total)
        for field in (
            lambda feed, offset: feed.inputs[offset],
            lambda feed, offset: feed.targets[offset],
            lambda feed, offset: feed.shares[offset],
            lambda feed, offset: feed.signatures[offset],
        )
    ]
    inputs, targets, shares, signatures = columns
    return Feed(inputs, targets, shares, range(first_ordinal, first_ordinal + total), signatures)
