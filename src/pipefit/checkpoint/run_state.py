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


class SavedState(Protocol):
    """The numbers of a `RunState` as a file has them: the manifest of a checkpoint, or the commit of a tier."""

    @property
    def ordinal(self) -> int:
        """Micro-batches seen."""

    @property
    def loss_scale(self) -> JsonObject | None:
        """The scale of the loss with its history; None: the loss was not scaled."""

    @property
    def position(self) -> JsonObject | None:
        """The position in the training data; None: there was none."""


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
        """Returns the numbers as JSON data, by the names of `SavedState`; the step is saved with its tensors."""
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

    def resume(self, step: int, saved: SavedState) -> None:
        """Restores the state after a step."""
        self.num_updates = step
        self.ordinal = saved.ordinal
        self.position.resume(saved.position)
        if saved.loss_scale is not None:
            for scale in self.scales:
                scale.load(saved.loss_scale)
