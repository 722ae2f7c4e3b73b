"""The run that is saved and loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pipefit.checkpoint.run_state import RunState
from pipefit.ir.program import Program
from pipefit.runtime.engine import Engine
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker
from pipefit.schedules import Schedule
from pipefit.spec import Plan
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import Training


class Trained(Protocol):
    """The run that is saved and loaded: a `pipefit.Pipeline`. Its `loop` reports a checkpoint to the callbacks."""

    layers: list[NamedLayer]
    plan: Plan
    program: Program
    schedule: Schedule
    session: Session
    engine: Engine
    training: Training
    state: RunState
    loop: Any

    @property
    def workers(self) -> Sequence[Worker]:
        """The ranks that this process runs."""

    def verify_replicas(self) -> None:
        """Compares the weights of replicas; every rank must call it."""
