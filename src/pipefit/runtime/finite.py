"""Updates that are not finite: found by all ranks before any of them steps, or by each stage before its own step.

Where the norm of all gradients is known before a step, a loss that is not a number makes it so too, so one small sum
serves clipping, the scale of the loss and this check, and every rank decides alike. Elsewhere (asynchronous schedules,
spilled stages without clipping) a stage looks at its own gradients: no weight ever takes one that is not a number.

A GPU is waited for once in a step, for its losses and what there is to decide. A stage that looks at its own gradients
would wait in addition; with a fused optimizer the GPU itself leaves out a bad step, and the host learns of it later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipefit.errors import NonFiniteLossError
from pipefit.spec.options import SKIP, STOP
from pipefit.stage.accelerator import is_accelerator

if TYPE_CHECKING:
    from pipefit.runtime.executor import Execution

CURE = "lower the learning rate, clip the gradients (clip_norm), look at the data, or leave out such batches"
"""Advice for messages, to be followed by the name of the option."""


def with_losses(run: Execution, update: int, square: Tensor) -> Tensor:
    """The square of this rank's norm of an update; not a number if a loss is none and the update depends on it."""
    training = run.worker.training
    if training.loss_scale is None and training.nonfinite not in (STOP, SKIP):
        return square
    own = _losses_of(run, update)
    if own:
        return square + _together(own).sum().to(square.device) * 0
    return square


def _losses_of(run: Execution, update: int) -> dict[int, Tensor]:
    """The losses of an update on this rank, by micro-batch."""
    header = run.compiled.program.header
    return {mb: loss for mb, loss in run.losses if header.update_of(header.last_stage, mb) == update}


def _together(losses: dict[int, Tensor]) -> Tensor:
    return torch.stack([loss.reshape(()) for loss in losses.values()]).double()


def is_taken(run: Execution, update: int) -> bool:
    """Returns whether a rank makes an update; all ranks decide alike, from the norms of all.

    Raises:
        NonFiniteLossError: on every rank, inside a segment of several steps: the update is not finite.
    """
    worker, policy = run.worker, run.worker.training.nonfinite
    if worker.scale is not None:
        # Every rank decides about every update, even if it trains nothing: all must have one scale.
        return worker.scale.decide(update, _known(run, update))
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
    """Decides about an update from its norms."""
    if run.norms[update].is_meta:  # a rehearsal has no numbers, and makes every update
        run.decided[update] = True
        return
    run.decided[update] = bool(_known(run, update).isfinite().all())


def _known(run: Execution, update: int) -> Tensor:
    """The norms of an update on the host, where its losses come with them."""
    if update not in run.known:
        run.known[update] = _read(run, run.norms[update], _losses_of(run, update))
    return run.known[update]


def _read(run: Execution, figures: Tensor, own: dict[int, Tensor]) -> Tensor:
    """Brings figures to the host, and with them some losses, by micro-batch: the one wait for a GPU's step."""
    rows = [figures.double()]
    if own:
        rows.append(_together(own).to(figures.device))
    found, losses = torch.cat(rows).cpu().split([len(figures), len(own)])
    own = dict(zip(own, losses, strict=True))
    run.losses = [(mb, own.get(mb, loss)) for mb, loss in run.losses]
    return found


def all_finite(run: Execution) -> bool:
    """Returns whether all updates of a pass were finite, where all ranks know it; True where nobody looks."""
    training = run.worker.training
    if training.loss_scale is not None or training.nonfinite not in (STOP, SKIP):
        return True
    for update in run.norms.keys() - run.decided.keys():
        _decide(run, update)
    return all(run.decided[update] for update in run.norms)


def norms_of(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of each gradient, which may be sparse, as of an embedding."""
    values = []
    for gradient in gradients:
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        values.append(gradient)
    return torch.stack(torch._foreach_norm(values))


def may_step(run: Execution, stage: int, update: int, gradients: Sequence[Tensor], optimizer: Optimizer) -> bool:
    """Returns whether a stage steps with its gradients, where the norm of all is not known.

    Raises:
        NonFiniteLossError: one is not finite, and the training is to stop.
    """
    policy = run.worker.training.nonfinite
    if policy not in (STOP, SKIP) or update in run.norms or not gradients:
        return True
    norms = norms_of(gradients)
    if norms.is_meta:
        return True
    is_finite = norms.isfinite().all()
    if policy == STOP and _can_leave_out(run, stage, norms.device, optimizer):
        run.unread[stage] = is_finite
        return True
    if is_finite:
        return True
    if policy == STOP:
        raise _bad_gradient(stage, update)
    run.decided[update] = False
    return False


def _can_leave_out(run: Execution, stage: int, device: torch.device, optimizer: Optimizer) -> bool:
    """Returns whether a GPU can leave out a step, and nothing else must know of it before the end of the pass."""
    is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    is_only = run.compiled.program.header.num_updates(stage) == 1
    return is_accelerator(device) and is_fused and is_only and not run.worker.stages[stage].batchnorms


def make_step(run: Execution, stage: int, optimizer: Optimizer) -> None:
    """Lets an optimizer step; where `may_step` has not read whether it may, the GPU leaves out a bad step."""
    if stage not in run.unread:
        optimizer.step()
        return
    fused: Any = optimizer
    fused.found_inf = 1 - run.unread[stage].float()
    try:
        optimizer.step()
    finally:
        del fused.found_inf


def check_unread(run: Execution) -> None:
    """Reads whether stages have left out their steps.

    Raises:
        NonFiniteLossError: one has.
    """
    if not run.unread:
        return
    found = _read(run, torch.stack(list(run.unread.values())), dict(run.losses))
    for stage, is_finite in zip(run.unread, found.tolist(), strict=True):
        if not is_finite:
            raise _bad_gradient(stage, 0)


def _bad_gradient(stage: int, update: int) -> NonFiniteLossError:
    return NonFiniteLossError(
        f"a gradient of update {update} of stage {stage} is not finite; this stage has not stepped, others may "
        f"have: resume from the last checkpoint; {CURE} (nonfinite=skip)"
    )
