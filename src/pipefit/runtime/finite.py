"""Updates that are not finite: found by all ranks before any of them steps, or by each stage before its own step.

Where the norm of all gradients is known before a step, a loss that is not a number makes it so too, so one small sum
serves clipping, the scale of the loss and this check, and every rank decides alike. Elsewhere (asynchronous schedules,
spilled stages without clipping) a stage looks at its own gradients: no weight ever takes one that is not a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipefit.errors import NonFiniteLossError
from pipefit.spec.options import SKIP, STOP

if TYPE_CHECKING:
    from pipefit.runtime.executor import Execution

CURE = "lower the learning rate, clip the gradients (clip_norm), look at the data, or leave out such batches"
"""Advice for messages, to be followed by the name of the option."""


def with_losses(run: Execution, update: int, square: Tensor) -> Tensor:
    """The square of this rank's norm of an update; not a number if one of its losses is none."""
    header = run.compiled.program.header
    own = [loss.reshape(()) for mb, loss in run.losses if header.update_of(header.last_stage, mb) == update]
    if own:
        return square + torch.stack(own).double().sum().to(square.device) * 0
    return square


def is_taken(run: Execution, update: int) -> bool:
    """Returns whether a rank makes an update; all ranks decide alike, from the norms of all.

    Raises:
        NonFiniteLossError: on every rank, inside a segment of several steps: the update is not finite.
    """
    worker, policy = run.worker, run.worker.training.nonfinite
    if worker.scale is not None:
        # Every rank decides about every update, even if it trains nothing: all must have one scale.
        return worker.scale.decide(update, run.norms[update])
    if policy not in (STOP, SKIP) or update not in run.norms:
        return True
    if update not in run.decided:
        _decide(run, update)
        if not run.decided[update] and policy == STOP and run.compiled.program.header.num_steps > 1:
            raise NonFiniteLossError(
                f"the loss or a gradient of update {update} of this segment is not finite; no rank has made it, but "
                f"the segment cannot be completed: resume from the last checkpoint; {CURE} (nonfinite=skip)"
            )
    return run.decided[update]


def _decide(run: Execution, update: int) -> None:
    """Decides about an update from its norms, which come to the host with its losses: the one wait for a GPU's step."""
    header, norms = run.compiled.program.header, run.norms[update]
    if norms.is_meta:  # a rehearsal has no numbers, and makes every update
        run.decided[update] = True
        return
    own = {mb: loss for mb, loss in run.losses if header.update_of(header.last_stage, mb) == update}
    losses = [loss.reshape(1).double().to(norms.device) for loss in own.values()]
    run.known[update], *losses = torch.cat([norms, *losses]).cpu().split([len(norms), *[1] * len(losses)])
    run.decided[update] = bool(run.known[update].isfinite().all())
    own = dict(zip(own, losses, strict=True))
    run.losses = [(mb, own.get(mb, loss)) for mb, loss in run.losses]


def all_finite(run: Execution) -> bool:
    """Returns whether all updates of a pass were finite, where all ranks know it; True where nobody looks."""
    training = run.worker.training
    if training.loss_scale is not None or training.nonfinite not in (STOP, SKIP):
        return True
    for update in run.norms.keys() - run.decided.keys():
        _decide(run, update)
    return all(run.decided[update] for update in run.norms)


def may_step(run: Execution, stage: int, update: int, gradients: Sequence[Tensor]) -> bool:
    """Returns whether a stage steps with its gradients, where the norm of all is not known.

    Raises:
        NonFiniteLossError: one is not finite, and the training is to stop.
    """
    policy = run.worker.training.nonfinite
    if policy not in (STOP, SKIP) or update in run.norms or not gradients:
        return True
    norms = torch.stack(torch._foreach_norm(list(gradients)))
    if norms.is_meta or norms.isfinite().all():
        return True
    if policy == STOP:
        raise NonFiniteLossError(
            f"a gradient of update {update} of stage {stage} is not finite; this stage has not stepped, others may "
            f"have: resume from the last checkpoint; {CURE} (nonfinite=skip)"
        )
    run.decided[update] = False
    return False
