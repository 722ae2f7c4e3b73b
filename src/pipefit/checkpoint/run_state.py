"""The state of a training between two steps that is not in its tensors: one object that every save and resume uses.

checkpoints ─┐                        ┌─ a training: reads it, and advances it after each pass
disk tiers  ─┼─ save ◄─ RunState ─► ──┤
memory      ─┘                        └─ resume, from any of the three
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipefit.spec.files import JsonObject
from pipefit.stage.precision import LossScale


class Position(Protocol):
    """The position in the training data: a `LoaderPosition`."""

    @property
    def words(self) -> str:
        """The last batch taken, in words; "": there is no loader."""

    def state(self) -> JsonObject | None:
        """Returns the position as JSON data; None: there is none."""

    def resume(self, state: JsonObject | None) -> None:
        """Sets the position that `state` returned."""


@dataclass
class RunState:
    """The state of a training between two steps.

    Attributes:
        position: in the loader of the training data.
        scales: of the loss, one for each rank of this process, all with the same numbers; (): it is not scaled.
        num_updates: weight updates since training began.
        ordinal: micro-batches seen, which seeds the random numbers of the next one.
        last_step: after a fault the training resumes before this step, so that it can be measured; None: anywhere.
    """

    position: Position
    scales: Sequence[LossScale] = ()
    num_updates: int = 0
    ordinal: int = 0
    last_step: int | None = None

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of the loss; None: it is not scaled."""
        return next(iter(self.scales), None)

    def saved(self) -> JsonObject:
        """Returns the numbers as JSON data, by the names that `resume` takes; the step is saved with its tensors."""
        scale = None
        if self.loss_scale is not None:
            scale = self.loss_scale.state()
        return {"ordinal": self.ordinal, "loss_scale": scale, "position": self.position.state()}

    @contextlib.contextmanager
    def attempted(self) -> Iterator[None]:
        """The context of a step; where it fails the state is as before, apart from the position: the batch is there."""
        counts = self.num_updates, self.ordinal
        scales = [(scale, scale.state()) for scale in self.scales]
        try:
            yield
        except BaseException:
            self.num_updates, self.ordinal = counts
            for scale, before in scales:
                scale.load(before)
            raise

    def resume(self, step: int, ordinal: int, loss_scale: JsonObject | None, position: JsonObject | None) -> None:
        """Restores the state after a step, from the numbers that were saved."""
        self.num_updates = step
        self.ordinal = ordinal
        self.position.resume(position)
        if loss_scale is not None:
            for scale in self.scales:
                scale.load(loss_scale)
