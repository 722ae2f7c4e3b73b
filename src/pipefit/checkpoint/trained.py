"""Facts of a run that saving and loading need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pipefit.ir.program import Program
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker
from pipefit.schedules import Schedule
from pipefit.spec import Plan
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import Training


class Trained(Protocol):
    """The run that is saved and loaded: a `pipefit.Pipeline`.

    Its `loop` counts updates and micro-batches, its `position` is that in its loader.
    """

    layers: list[NamedLayer]
    plan: Plan
    program: Program
    schedule: Schedule
    _session: Session
    _training: Training
    loop: Any
    position: Any

    @property
    def num_updates(self) -> int:
        """Weight updates since training began."""

    @property
    def workers(self) -> Sequence[Worker]:
        """The ranks that this process runs."""

    def verify_replicas(self) -> None:
        """Compares the weights of replicas; every rank must call it."""
