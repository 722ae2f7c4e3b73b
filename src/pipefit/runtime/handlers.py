"""The handlers of operations on a rank: one short function per operation, and the table that the executor reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from pipefit.errors import ModelError
from pipefit.ir.graph import collective_members
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import PIECE_OF, WHOLE_OF, Kind, Op, Reduction
from pipefit.ir.values import tied_stages
from pipefit.runtime import reducing
from pipefit.runtime.executor import Execution, Handlers
from pipefit.runtime.halves import Saved, WeightRun, input_half, run_backward, weight_half
from pipefit.runtime.spill_handlers import evict, fetch, norm_part, norms_of, saving, step_on_host
from pipefit.runtime.transport import Message
from pipefit.stage import batchnorm
from pipefit.stage.payload import carries_gradient, flatten, unflatten
from pipefit.stage.precision import in_float32, narrowed, widened


def _load(run: Execution, i: Instruction) -> None:
    header = run.compiled.program.header
    source = run.feed.inputs[i.mb] if i.stage == 0 else None
    target = run.feed.targets[i.mb] if i.stage == header.last_stage else None
    device = run.worker.device
    run.values["input", i.stage, i.mb] = (_message(source, device), _on(target, device))


def _fetch(run: Execution, i: Instruction) -> None:
    """As `fetch`; an input of the model that has left the device is loaded again."""
    if i.kind == Kind.INPUT:
        _load(run, Instruction(Op.LOAD, i.stage, i.version))
    else:
        fetch(run, i)


def _message(source: Any, device: torch.device) -> Message | None:
    if source is None:
        return None
    leaves, structure = flatten(source, "the input of the model")
    leaves = [leaf.to(device, non_blocking=True) for leaf in leaves]
    return Message(leaves, [False] * len(leaves), structure)


def _on(target: Any, device: torch.device) -> Any:
    if target is None or device.type == "cpu":
        return target
    leaves, structure = flatten(target, "the target")
    return unflatten([leaf.to(device, non_blocking=True) for leaf in leaves], structure)


def _forward(run: Execution, i: Instruction) -> None:
    """A forward that will be replayed keeps nothing; which of its outputs need gradients it learns the first time."""
    known = run.flags.get((i.stage, run.feed.signatures[i.mb]))
    replayed = (i.stage, i.mb) in run.compiled.program.recomputed
    with torch.set_grad_enabled(not replayed or known is None):
        saved, act = _run_stage(run, i, replay=False)
    if not torch.is_grad_enabled():
        run.values["act", i.stage, i.mb] = act
        return
    if known is None:
        run.flags[i.stage, run.feed.signatures[i.mb]] = act.flags
    run.values["act", i.stage, i.mb] = act if known is None else act._replace(flags=known)
    if not replayed:
        run.values["saved", i.stage, i.mb] = saved


def _recompute(run: Execution, i: Instruction) -> None:
    run.values["saved", i.stage, i.mb], _ = _run_stage(run, i, replay=True)


def _run_stage(run: Execution, i: Instruction, replay: bool) -> tuple[Saved, Message]:
    given = run.stage_input(i)
    leaves = [
        leaf.detach().requires_grad_() if flag else leaf for leaf, flag in zip(given.leaves, given.flags, strict=True)
    ]
    inputs = [leaf for leaf, flag in zip(leaves, given.flags, strict=True) if flag]
    stage = run.worker.stages[i.stage]
    if stage.half is not None:
        leaves = widened(leaves, given.flags, stage.half)
    run.worker.stores[i.stage].at(i.version)
    update = run.compiled.program.header.update_of(i.stage, i.mb)
    payload = unflatten(leaves, given.structure)
    if stage.is_cut and i.stage:
        # What every rank has of the micro-batch never travels.
        payload["batch"] = _on(run.feed.inputs[i.mb], run.worker.device)
    with saving(run, i):
        output = stage.forward(payload, run.feed.ordinals[i.mb], replay, update)
    if stage.is_cut and i.stage < run.compiled.program.header.last_stage:
        output = output | {"batch": ()}
    outputs, structure = flatten(output, f"the output of stage {i.stage}")
    # Without a graph there are no edges, though a layer may hand on an input of the stage that needs a gradient.
    flags = [torch.is_grad_enabled() and carries_gradient(leaf) for leaf in outputs]
    if stage.half is not None and i.stage < run.compiled.program.header.last_stage:
        known = flags if torch.is_grad_enabled() else run.flags.get((i.stage, run.feed.signatures[i.mb]), flags)
        outputs = narrowed(outputs, known, stage.half)
    edges = [get_gradient_edge(leaf) for leaf, flag in zip(outputs, flags, strict=True) if flag]
    return Saved(inputs, edges), Message([leaf.detach() for leaf in outputs], flags, structure)


def _loss(run: Execution, i: Instruction) -> None:
    last = run.compiled.program.header.last_stage
    act: Message = run.values["act", last, i.mb]
    _, target = run.values["input", last, i.mb]
    leaves = [leaf.detach().requires_grad_(flag) for leaf, flag in zip(act.leaves, act.flags, strict=True)]
    needed = [leaf for leaf, flag in zip(leaves, act.flags, strict=True) if flag]
    half = run.worker.training.half
    given = leaves if half is None else in_float32(leaves, half)
    loss = run.worker.training.loss(unflatten(given, act.structure), target)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ModelError(f"the loss must be one number (the mean over a micro-batch), got {_describe(loss)}")
    share = run.feed.shares[i.mb]
    run.losses.append((i.mb, loss.detach() * share))
    if run.metric is not None:
        run.metrics.append(float(run.metric(unflatten(act.leaves, act.structure), target)) * share)
    if not torch.is_grad_enabled():
        return
    if (scale := run.worker.scale) is not None:
        program = run.compiled.program
        share *= scale.of(program, program.header.update_of(last, i.mb))
    grads = run_backward((loss,), (torch.full_like(loss, share),), tuple(needed)) if needed else ()
    run.values["grad", last, i.mb] = _whole(grads, needed)


def _describe(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _backward(run: Execution, i: Instruction) -> None:
    saved: Saved = run.values.pop(("saved", i.stage, i.mb))
    grads = run.values.pop(("grad", i.stage, i.mb)).leaves
    run.worker.stores[i.stage].at(i.version)
    if saved.edges:
        if i.stage in run.worker.buckets:
            reducing.backward(run, i, lambda: run_backward(tuple(saved.edges), tuple(grads)))
        else:
            run_backward(tuple(saved.edges), tuple(grads))
    if i.stage:
        run.values["grad", i.stage - 1, i.mb] = _whole([leaf.grad for leaf in saved.inputs], saved.inputs)


def _whole(grads: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> Message:
    """Gradients of some leaves, zero where autograd found no way to one."""
    return Message([torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)])


def _backward_input(run: Execution, i: Instruction) -> None:
    saved: Saved = run.values["saved", i.stage, i.mb]
    grads = run.values.pop(("grad", i.stage, i.mb)).leaves
    run.worker.stores[i.stage].at(i.version)
    found, run.values["half", i.stage, i.mb] = input_half(saved, grads)
    if i.stage:
        run.values["grad", i.stage - 1, i.mb] = _whole(found, saved.inputs)


def _backward_weight(run: Execution, i: Instruction) -> None:
    saved = run.values.pop(("saved", i.stage, i.mb))
    runs: list[WeightRun] = run.values.pop(("half", i.stage, i.mb))
    run.worker.stores[i.stage].at(i.version)
    if runs and i.stage in run.worker.buckets:
        reducing.backward(run, i, lambda: weight_half(runs))
    else:
        weight_half(runs)
    del saved  # Autograd does not hold the nodes of functions written in Python: what leads to them does.


def _send(run: Execution, i: Instruction) -> None:
    run.transport.send(i, run.values[WHOLE_OF.get(i.kind, i.kind), i.stage, i.mb])


def _receive(run: Execution, i: Instruction) -> None:
    key = (i.kind, i.stage, i.mb)
    run.endings[run.index] = run.transport.receive(i, partial(run.values.__setitem__, key))


def _gather(run: Execution, i: Instruction) -> None:
    """Joins the pieces that the processes of a rank have; tensors that cannot be divided came whole."""
    region = run.worker.mesh.region
    assert region is not None
    message: Message = run.values.pop((PIECE_OF[i.kind], i.stage, i.mb))
    leaves = [
        leaf if leaf.shape == shape else region.gathered(leaf, 0).view(shape)
        for leaf, shape in zip(message.leaves, message.shapes, strict=True)
    ]
    run.values[i.kind, i.stage, i.mb] = message._replace(leaves=leaves, shapes=())


def _reduce(run: Execution, i: Instruction) -> None:
    program, worker = run.compiled.program, run.worker
    members = collective_members(program.header, i)
    if i.kind == Reduction.NORM and i.stage >= 0:
        norm_part(run, i)
        return
    if i.kind == Reduction.NORM:
        # Each rank brings its own entry and zeros for the others: the sum is the same to the bit in any order.
        squares = torch.zeros(program.header.num_processes, dtype=torch.float64, device=worker.device)
        squares[worker.process] = _local_square(run, i.version)
        run.norms[i.version] = squares
        tensors = [squares]
    elif i.kind == Reduction.TIED:
        tensors = worker.tied_gradients(tied_stages(program.header, i.stage, worker.rank))
    elif i.kind == Reduction.SHARDS:
        return reducing.gather_shards(run, i)
    else:
        return reducing.reduce_gradients(run, i)
    run.endings[run.index] = run.transport.all_reduce(members, (i.kind, i.stage, i.version), tensors)


def _local_square(run: Execution, update: int) -> Tensor:
    """The sum of squares of the gradients that count here: each weight once over all ranks."""
    header, worker = run.compiled.program.header, run.worker
    mine = [s for s in worker.stages if header.placement[s][0] == worker.rank and not header.is_sharded(s)]
    parts = reducing.counted_parts(run) if header.sharded else []
    norms = [norm.double() for norm in torch._foreach_norm(parts)] if parts else []
    gone = worker.spilling.parts if worker.spilling else {}
    for stage in mine:
        norms += gone[update, stage] if (update, stage) in gone else norms_of(worker.counted_gradients(stage))
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=worker.device)


def _step(run: Execution, i: Instruction) -> None:
    worker = run.worker
    store, optimizer = worker.stores[i.stage], worker.optimizers.get(i.stage)
    worker.forget_idle_gradients(i.stage)
    store.begin_step(i.version, in_place=run.index in run.compiled.in_place)
    batchnorm.commit(worker.stages[i.stage].batchnorms, i.version)
    # Every rank decides about every update, whatever it trains: all must have one scale.
    taken = worker.scale is None or worker.scale.decide(i.version, run.norms[i.version])
    if optimizer is None:
        return
    if taken:
        _update(run, i)()
    store.end_step()


def _host_step(run: Execution, i: Instruction) -> None:
    """The step on the host, asynchronously: gradients, weights and states are there."""
    worker = run.worker
    batchnorm.commit(worker.stages[i.stage].batchnorms, i.version)
    taken = worker.scale is None or worker.scale.decide(i.version, run.norms[i.version])
    step_on_host(run, i, _update(run, i) if taken and i.stage in worker.optimizers else None)


def _update(run: Execution, i: Instruction) -> Callable[[], None]:
    """Returns the function that makes an update once the gradients are with the optimizer; it looks up the rank now."""
    worker, header = run.worker, run.compiled.program.header
    optimizer, scheduler = worker.optimizers[i.stage], worker.schedulers.get(i.stage)
    scale = 1 / _steps_in(header, i.stage, i.version)
    if worker.scale is not None:
        scale /= worker.scale.of(run.compiled.program, i.version)
    factor = None
    if worker.training.clip_norm is not None:
        norm = run.norms[i.version].sum().sqrt() * scale
        # To the host now, where that steps: its thread knows nothing of the stream that has yet to compute the norm.
        place = optimizer.param_groups[0]["params"][0].device
        factor = (worker.training.clip_norm / (norm + 1e-6)).clamp(max=1.0).to(place)

    def update() -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if scale != 1:
            torch._foreach_mul_(gradients, scale)
        if factor is not None and gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

    return update


def _steps_in(header: Any, stage: int, update: int) -> int:
    """How many steps' worth of micro-batches an update of a stage averages: its replicas, but for a ragged last one."""
    size, total = header.updates[stage], header.total_microbatches
    covered = min(size, total - update * size)
    return -(-covered // header.num_microbatches)


def _drop(run: Execution, i: Instruction) -> None:
    run.worker.stores[i.stage].drop(i.version)


def _barrier(run: Execution, i: Instruction) -> None:
    members = collective_members(run.compiled.program.header, i)
    token = [torch.zeros(1)]
    run.endings[run.index] = run.transport.all_reduce(members, ("barrier", run.index), token)


HANDLERS: Handlers = {
    Op.LOAD: _load,
    Op.FWD: _forward,
    Op.LOSS: _loss,
    Op.RECOMPUTE: _recompute,
    Op.BWD: _backward,
    Op.BWD_INPUT: _backward_input,
    Op.BWD_WEIGHT: _backward_weight,
    Op.SEND: _send,
    Op.RECV: _receive,
    Op.REDUCE: _reduce,
    Op.STEP: _step,
    Op.HOST_STEP: _host_step,
    Op.DROP: _drop,
    Op.BARRIER: _barrier,
    Op.GATHER: _gather,
    Op.FETCH: _fetch,
    Op.EVICT: evict,
}
