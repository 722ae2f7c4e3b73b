"""Updates of a stage's weights: the norm of all gradients, and the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pipefit.ir.instruction import Instruction
from pipefit.runtime.executor import Execution
from pipefit.runtime.finite import make_step, may_step, norms_of, with_losses
from pipefit.runtime.reducing import start_sum
from pipefit.stage.batchnorm_update import update_averages


def update_of(run: Execution, i: Instruction) -> Callable[[], bool]:
    """Returns the function that makes an update once the optimizer has the gradients; the rank is looked up now.

    It returns whether the update was made.
    """
    worker = run.worker
    optimizer = worker.optimizers[i.stage]
    scheduler = worker.schedulers.get(i.stage)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    scale = _scale(run, i.stage, i.version)
    factor = None
    clip_norm = worker.training.clip_norm
    if clip_norm is not None:
        steps_on_host = bool(parameters) and parameters[0].device.type == "cpu"
        norm = gradient_norm(run, i.stage, i.version, steps_on_host)
        assert norm is not None
        factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        if parameters:
            # To the host now, where that steps: its thread knows nothing of the stream that has yet to compute it.
            factor = factor.to(parameters[0].device)

    def update() -> bool:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not may_step(run, i.stage, i.version, gradients, optimizer):
            return False
        if scale != 1:
            torch._foreach_mul_(gradients, scale)
        if factor is not None and gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype.to_real()))
        run.rates[i.stage, i.version] = tuple(float(group["lr"]) for group in optimizer.param_groups)
        make_step(run, i.stage, optimizer)
        if scheduler is not None:
            scheduler.step()
        return True

    return update


def count_batchnorms(run: Execution, i: Instruction, taken: bool) -> None:
    """Updates the running averages of a stage, also by an update without a step because of the scale of the loss."""
    norms = run.worker.stages[i.stage].batchnorms
    if taken or run.worker.scale is not None:
        update_averages(norms, i.version)
        return
    for norm in norms:
        norm.forget(i.version)


# ---- the norm of all gradients -------------------------------------------------------------------------------------


def reduce_norm(run: Execution, i: Instruction) -> None:
    """Starts the sum over all ranks; of a stage that leaves the device, its part is taken while gradients are there."""
    worker = run.worker
    if i.stage >= 0:
        run.spilling.parts[i.version, i.stage] = _norms_of(worker.counted_gradients(i.stage))
        return
    # Each rank has its own entry and zeros for the others, so the sum is bitwise the same in any order.
    squares = torch.zeros(run.header.num_processes, dtype=torch.float64, device=worker.device)
    squares[worker.process] = with_losses(run, i.version, _local_square(run, i.version))
    run.norms[i.version] = squares
    if worker.scale is not None:
        # A rank whose stages are all frozen has no step that decides.
        run.at_end.append(partial(worker.scale.decide, i.version, squares))
    run.wait_later(start_sum(run, i, [squares]))


def _local_square(run: Execution, update: int) -> Tensor:
    """The sum of squares of the gradients that this rank counts: each weight counts once over all ranks."""
    header, worker = run.header, run.worker
    sharded = [stage for stage in worker.stages if header.is_sharded(stage)]
    counted = []
    for stage in sharded:
        counted += _counted_parts(run, stage)
    norms = _norms_of(counted)
    parts = worker.spilling.parts if worker.spilling else {}
    for stage in worker.stages:
        if stage in sharded or header.placement[stage][0] != worker.rank:
            continue
        if (update, stage) in parts:
            norms += parts[update, stage]
        else:
            norms += _norms_of(worker.counted_gradients(stage))
    if norms:
        return torch.cat(norms).square().sum()
    return torch.zeros((), dtype=torch.float64, device=worker.device)


def _counted_parts(run: Execution, stage: int) -> list[Tensor]:
    """Gradients of a sharded stage that this rank counts in the norm: this replica's parts, and tied weights once."""
    worker = run.worker
    owned = worker.owned[stage]
    found = []
    for index, gradient in worker.stores[stage].part_gradients():
        if worker.mesh.is_first or owned[index].name in worker.mesh.shards:
            found.append(gradient)
    if run.header.placement[stage][0] == worker.rank:
        tied = {id(own.parameter.grad) for own in owned if own.tie}
        found += [gradient for gradient in worker.counted_gradients(stage) if id(gradient) in tied]
    return found


def _norms_of(gradients: list[Tensor]) -> list[Tensor]:
    """The norm of each gradient in double precision, in one tensor; none where there are no gradients."""
    if gradients:
        return [norms_of(gradients).double()]
    return []


def gradient_norm(run: Execution, stage: int, update: int, on_host: bool) -> Tensor | None:
    """Norm of all gradients of an update of a stage, before clipping; None: no instruction has computed it.

    Args:
        run: of the rank.
        stage: of the update.
        update: of the pass.
        on_host: whether it is read there; on a GPU, what the host knows already is not waited for again.
    """
    norms = run.norms
    if on_host:
        norms = run.norms | run.known
    if update in norms:
        return norms[update].sum().sqrt() * _scale(run, stage, update)
    return None


def _scale(run: Execution, stage: int, update: int) -> float:
    """The factor of summed gradients that gives those of the mean loss."""
    size = run.header.updates[stage]
    # Of the steps whose micro-batches an update averages, the last one may have fewer.
    covered = min(size, run.header.total_microbatches - update * size)
    scale = 1 / -(-covered // run.header.num_microbatches)
    if run.worker.scale is None:
        return scale
    return scale / run.worker.scale.of(run.compiled.program, update)
