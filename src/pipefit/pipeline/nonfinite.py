"""Updates whose loss or gradient is not a finite number: found before any rank steps, and refused or skipped."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipefit.errors import NonFiniteLossError
from pipefit.runtime.finite import CURE
from pipefit.schedules.registry import Schedule
from pipefit.schedules.shape import Shape
from pipefit.spec.options import SKIP, STOP
from pipefit.stage.training import Training


def needs_norm(training: Training, schedule: Schedule, shape: Shape) -> bool:
    """Returns whether a program has the norm of all gradients before its steps.

    To find an update that is not finite before any rank steps, it is added where that makes no rank wait long; spilled
    stages would be fetched twice. Stages that would have to skip one together need it anyhow.

    Args:
        training: its clipping, scale of the loss and policy.
        schedule: of the program.
        shape: of the program, with its spilling, from whichever options that comes.
    """
    spills = schedule.spills or shape.spill is not None
    together = schedule.is_synchronous or spills or shape.tensor > 1
    cheap = schedule.is_synchronous and schedule.flushes and not spills
    return training.needs_norm or {STOP: cheap, SKIP: together}.get(training.nonfinite, False)


def finite(loss: float, update: int, policy: str = STOP) -> float:
    """The loss of an update, if it is finite, or such updates are skipped.

    Raises:
        NonFiniteLossError: it is not finite.
    """
    if not math.isfinite(loss) and policy != SKIP:
        raise NonFiniteLossError(
            f"the loss of update {update} is {loss}; {CURE} (nonfinite=skip); "
            "the weights may hold it already, so resume from an earlier checkpoint"
        )
    return loss


def refusal(losses: Sequence[float], norms: Sequence[float], step: int, where: str) -> NonFiniteLossError:
    """The error of a step that no rank has made, the same on every rank.

    Args:
        losses: of its micro-batches.
        norms: squares of the norms of the ranks' gradients.
        step: its number.
        where: its batch, in words.
    """
    bad = _not_finite(losses)
    if bad:
        what = f"the loss of its micro-batches {bad}"
    else:
        what = f"a gradient on the ranks {_not_finite(norms)}"
    if where:
        where = f" ({where})"
    return NonFiniteLossError(
        f"step {step} was not made: {what} is not finite{where}; "
        f"the weights are those after step {step - 1}; {CURE} (nonfinite=skip)"
    )


def _not_finite(values: Sequence[float]) -> str:
    """The places of the values that are not finite, in words."""
    return ", ".join(str(place) for place, value in enumerate(values) if not math.isfinite(value))
