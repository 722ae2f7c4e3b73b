"""The position in a stream of batches: its whole state, so that a resumed run sees the remaining batches."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pipefit.errors import DataError
from pipefit.spec.files import JsonObject

Batch = tuple[Tensor, Tensor]
"""Input and target."""


class Resumable:
    """Batches by number; a checkpoint keeps only the number of the next one."""

    _position = 0
    _identity: JsonObject
    """Seed and sizes: if one differs, a position means other batches."""

    def batch_at(self, index: int) -> Batch:
        """Batch number `index`, counted from the start, without moving the position."""
        raise NotImplementedError

    def _until(self, end: int | None) -> Iterator[Batch]:
        """The batches starting at the position, which moves with every batch taken."""
        while end is None or self._position < end:
            index = self._position
            self._position += 1
            yield self.batch_at(index)

    def state_dict(self) -> JsonObject:
        """The position, the seed, and the sizes to which the position refers."""
        return {"position": self._position, **self._identity}

    def load_state_dict(self, state: JsonObject) -> None:
        """Sets the position to that of `state`.

        Raises:
            DataError: the state belongs to other data, seed or sizes, so the position would mean other batches.
        """
        identity = self._identity
        missing = [key for key in ("position", *identity) if key not in state]
        if missing:
            raise DataError(f"data: the saved position lacks {', '.join(missing)}; it is not a state of these batches")
        other = [f"{key} was {state[key]!r}, is {now!r}" for key, now in identity.items() if state[key] != now]
        if other:
            raise DataError(f"data: cannot resume, because the data differ: {'; '.join(other)}")
        self._position = int(state["position"])


def batch_seed(seed: int, index: int) -> int:
    """A 63-bit seed from a pair; seeds of neighbouring pairs are unrelated (splitmix64's finisher)."""
    mask = (1 << 64) - 1
    mixed = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) >> 1
