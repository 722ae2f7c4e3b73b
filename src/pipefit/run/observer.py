"""An observer of a run, such as the display of the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipefit.models import ModelBundle
    from pipefit.pipeline.callbacks import Record
    from pipefit.pipeline.step_figures import ModelFlop
    from pipefit.run.config import RunConfig
    from pipefit.run.sources import Source
    from pipefit.spec import Plan, Profile


Say = Callable[[str], None]
"""Takes a line about the work that begins."""


class Observer:
    """An observer of a run and callback of its training, such as the display of the command line; this one is silent.

    Only rank 0 has one that does anything.
    """

    def begins(self, config: RunConfig) -> None:
        """All options are known, the number of steps too."""

    def says(self, text: str) -> None:
        """A fact about the run that its user should know."""

    def planned(self, plan: Plan, profile: Profile | None, bundle: ModelBundle, source: Source) -> None:
        """The plan is made; training begins."""

    def doing(self, what: str) -> None:
        """Another part of the run begins."""

    def counted(self, flop: ModelFlop | None) -> None:
        """The FLOP of model and devices are known; None: the model's cannot be counted."""

    def step(self, record: Record) -> None:
        """A step's loss is known."""
