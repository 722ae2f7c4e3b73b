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
from pipefit.runtime import reducing, spill_handlers
from pipefit.runtime.executor import Execution, Handlers
from pipefit.runtime.finite import is_taken, may_step, with_losses
from pipefit.runtime.halves import Saved, WeightRun, accumulate_backward, input_half, run_backward, weight_half
from pipefit.runtime.transport import Message
from pipefit.stage import batchnorm
from pipefit.stage.device import to_device
from pipefit.stage.opened import Rest
from pipefit.stage.payload import Structure, carries_gradient, check_values, flatten, flatten_any, sent, unflatten
from pipefit.stage.precision import in_float32, narrowed, widened
from pipefit.stage.training import with_metrics


def _load(run: Execution, i: Instruction) -> None:
    part = run.feed[i.mb]
    device = run.worker.device
    what = "the input of the model"
    source = target = None
    if i.stage == 0:
        leaves, structure = flatten_any(_on(part.input, device, what), what)
        source = Message(leaves, [False] * len(leaves), structure)
    if i.stage == run.compiled.program.header.last_stage:
        target = _on(part.target, device, "the target")
    run.values["input", i.stage, i.mb] = (source, target)


def _on(payload: Any, device: torch.device, what: str) -> Any:
    """A payload on the device; on a CPU, anything as it is."""
    if device.type == "cpu":
        return payload
    leaves, structure = flatten_any(payload, what)
    return unflatten([to_device(leaf, device) for leaf in leaves], structure)


def _forward(run: Execution, i: Instruction) -> None:
    """Runs a forward. One that will be replayed saves nothing; its first run finds the outputs that need gradients."""
    known = run.worker.flags.get((i.stage, run.feed[i.mb].signature))
    replayed = (i.stage, i.mb) in run.compiled.program.recomputed
    trains = torch.is_grad_enabled() and i.stage >= run.compiled.program.header.frozen
    with torch.set_grad_enabled(trains and (not replayed or known is None)):
        saved, act = _run_stage(run, i, replay=False)
    if not trains:
        run.values["act", i.stage, i.mb] = act
        return
    if known is None:
        run.worker.flags[i.stage, run.feed[i.mb].signature] = act.flags
    if known is None:
        run.values["act", i.stage, i.mb] = act
    else:
        run.values["act", i.stage, i.mb] = act._replace(flags=known)
    if not replayed:
        run.values["saved", i.stage, i.mb] = saved


def _recompute(run: Execution, i: Instruction) -> None:
    run.values["saved", i.stage, i.mb], _ = _run_stage(run, i, replay=True)


def _run_stage(run: Execution, i: Instruction, replay: bool) -> tuple[Saved, Message]:
    if i.stage:
        given: Message = run.values["act", i.stage - 1, i.mb]
    else:
        given = run.values["input", 0, i.mb][0]
    leaves = [
        leaf.detach().requires_grad_() if flag else leaf for leaf, flag in zip(given.leaves, given.flags, strict=True)
    ]
    inputs = [leaf for leaf, flag in zip(leaves, given.flags, strict=True) if flag]
    stage = run.worker.stages[i.stage]
    if stage.half is not None:
        leaves = widened(leaves, given.flags, stage.half)
    leaves = _guarded(run, i, leaves)
    versions = list(map(_version, leaves))
    run.worker.stores[i.stage].at(i.version)
    update = run.compiled.program.header.update_of(i.stage, i.mb)
    payload = given.payload(leaves)
    if stage.is_cut and i.stage:
        # The micro-batch's data that every rank has is not sent.
        payload["batch"] = _on(run.feed[i.mb].input, run.worker.device, "the batch")
    with spill_handlers.saving(run, i):
        output = stage.forward(payload, run.feed[i.mb].ordinal, replay, update)
    _note_overwritten(run, i, versions != list(map(_version, leaves)))
    outputs, structure = _flattened(run, i, output)
    # Without a graph there are no edges, though a layer may return an input of the stage that needs a gradient.
    flags = [torch.is_grad_enabled() and carries_gradient(leaf) for leaf in outputs]
    if stage.half is not None and i.stage < run.compiled.program.header.last_stage:
        needed = flags if torch.is_grad_enabled() else run.worker.flags.get((i.stage, run.feed[i.mb].signature), flags)
        outputs = narrowed(outputs, needed, stage.half)
    edges = [get_gradient_edge(leaf) for leaf, flag in zip(outputs, flags, strict=True) if flag]
    return Saved(inputs, edges), Message([leaf.detach() for leaf in outputs], flags, structure)


def _guarded(run: Execution, i: Instruction, leaves: list[Tensor]) -> list[Tensor]:
    """Copies of a stage's inputs if it changes them in place: others have the inputs too, and a replay needs them."""
    is_changed = run.worker.overwritten.get((i.stage, run.feed[i.mb].signature), True)
    if is_changed:
        return [leaf.clone() for leaf in leaves]
    return leaves


def _version(leaf: Tensor) -> int:
    """A number that changes with a tensor's values."""
    if leaf.is_inference():
        return 0
    return leaf._version


def _note_overwritten(run: Execution, i: Instruction, is_changed: bool) -> None:
    """Notes whether a forward has changed its inputs.

    Raises:
        ModelError: it did not for the first micro-batch of this shape; or the target shares memory with them, so that
            the loss depends on which of the two the model has changed.
    """
    part = run.feed[i.mb]
    known = run.worker.overwritten.setdefault((i.stage, part.signature), is_changed)
    if is_changed and not known:
        raise ModelError(
            f"stage {i.stage} changes its input in place for micro-batch {i.mb}, but did not for an earlier one of the "
            "same shape: let it change a copy (x = x.clone())"
        )
    is_changed = is_changed or run.worker.stages[i.stage].overwrites
    if is_changed and i.stage == 0 and _memory(part.input) & _memory(part.target):
        raise ModelError(
            "the model changes its input in place, which is its target too: let it change a copy (x = x.clone()), or "
            "give the target as a copy"
        )


def _memory(payload: Any) -> set[int]:
    """The addresses of the memory that the tensors of a payload are in."""
    leaves, _ = flatten_any(payload, "a batch")
    storages = [leaf.untyped_storage() for leaf in leaves if leaf.layout == torch.strided]
    return {storage.data_ptr() or storage._cdata for storage in storages}  # the meta device has no addresses


def _flattened(run: Execution, i: Instruction, output: Any) -> tuple[list[Tensor], Structure | Rest]:
    """The tensors of a stage's output and its structure; that of the last stage goes to the loss only."""
    where = f"the output of stage {i.stage}"
    if i.stage == run.compiled.program.header.last_stage:
        return flatten_any(output, where)
    outputs, structure = flatten(sent(output), where)
    known = run.worker.structures.setdefault((i.stage, run.feed[i.mb].signature), structure)
    check_values(i.stage, i.mb, known, structure)
    return outputs, structure


def _loss(run: Execution, i: Instruction) -> None:
    last = run.compiled.program.header.last_stage
    act: Message = run.values["act", last, i.mb]
    _, target = run.values["input", last, i.mb]
    leaves = [leaf.detach().requires_grad_(flag) for leaf, flag in zip(act.leaves, act.flags, strict=True)]
    needed = [leaf for leaf, flag in zip(leaves, act.flags, strict=True) if flag]
    half = run.worker.training.half
    if half is None:
        given = leaves
    else:
        given = in_float32(leaves, half)
    compute = run.loss or run.worker.training.loss
    loss, metrics = with_metrics(compute(act.payload(given), target))
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        if isinstance(loss, Tensor):
            got = f"a tensor of shape {list(loss.shape)}, {loss.dtype}"
        else:
            got = type(loss).__name__
        raise ModelError(f"the loss must be one number (the mean over a micro-batch), got {got}")
    share = run.feed[i.mb].share
    run.losses.append((i.mb, loss.detach() * share))
    run.logged[i.mb] = {name: _number(name, value) * share for name, value in metrics.items()}
    if run.metric is not None:
        run.metrics.append(float(run.metric(act.payload(), target)) * share)
    if not torch.is_grad_enabled():
        return
    if (scale := run.worker.scale) is not None:
        program = run.compiled.program
        share *= scale.of(program, program.header.update_of(last, i.mb))
    if needed:
        grads = run_backward((loss,), (torch.full_like(loss, share),), tuple(needed))
    else:
        grads = ()
    run.values["grad", last, i.mb] = _whole(grads, needed)


def _number(name: str, value: Any) -> Tensor:
    """A metric that the loss returned.

    Raises:
        ModelError: it is not one number.
    """
    if isinstance(value, int | float | Tensor):
        found = torch.as_tensor(value, dtype=torch.float64)
    else:
        found = torch.empty(0)
    if found.numel() != 1:
        if isinstance(value, Tensor):
            got = f"a tensor of shape {list(value.shape)}"
        else:
            got = f"{value!r:.60}"
        raise ModelError(f"the loss returned the metric {name!r}, which must be one number, got {got}")
    return found.detach().reshape(())


def _backward(run: Execution, i: Instruction) -> None:
    saved: Saved = run.values.pop(("saved", i.stage, i.mb))
    grads = run.values.pop(("grad", i.stage, i.mb)).leaves
    run.worker.stores[i.stage].at(i.version)
    if saved.edges:
        with run.worker.stages[i.stage].replaying():
            if i.stage in run.worker.buckets:
                reducing.backward(run, i, lambda: accumulate_backward(saved.edges, grads))
            else:
                accumulate_backward(saved.edges, grads)
    if i.stage > run.compiled.program.header.frozen:
        leaves: Sequence[Any] = saved.inputs
        run.values["grad", i.stage - 1, i.mb] = _whole([leaf.grad for leaf in leaves], leaves)


def _whole(grads: Sequence[Tensor | None], leaves: Sequence[Any]) -> Message:
    """Gradients of some leaves, zero where autograd found no path to a leaf."""
    return Message([torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)])


def _backward_input(run: Execution, i: Instruction) -> None:
    saved: Saved = run.values["saved", i.stage, i.mb]
    grads = run.values.pop(("grad", i.stage, i.mb)).leaves
    run.worker.stores[i.stage].at(i.version)
    with run.worker.stages[i.stage].replaying():
        found, run.values["half", i.stage, i.mb] = input_half(saved, grads)
    if i.stage > run.compiled.program.header.frozen:
        run.values["grad", i.stage - 1, i.mb] = _whole(found, saved.inputs)


def _backward_weight(run: Execution, i: Instruction) -> None:
    saved = run.values.pop(("saved", i.stage, i.mb))
    runs: list[WeightRun] = run.values.pop(("half", i.stage, i.mb))
    run.worker.stores[i.stage].at(i.version)
    with run.worker.stages[i.stage].replaying():
        if runs and i.stage in run.worker.buckets:
            reducing.backward(run, i, lambda: weight_half(runs))
        else:
            weight_half(runs)
    del saved  # Autograd does not hold the nodes of functions written in Python; the edges to them do.


def _send(run: Execution, i: Instruction) -> None:
    ending = run.transport.send(i, run.values[WHOLE_OF.get(i.kind, i.kind), i.stage, i.mb])
    if ending is not None:
        run.endings[run.index] = ending


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
        return _norm_part(run, i)
    if i.kind == Reduction.NORM:
        # Each rank has its own entry and zeros for the others, so the sum is bitwise the same in any order.
        squares = torch.zeros(program.header.num_processes, dtype=torch.float64, device=worker.device)
        squares[worker.process] = with_losses(run, i.version, _local_square(run, i.version))
        run.norms[i.version] = squares
        tensors = [squares]
        if worker.scale is not None:
            # A rank whose stages are all frozen has no step that decides.
            run.at_end.append(partial(worker.scale.decide, i.version, squares))
    elif i.kind == Reduction.TIED:
        tensors = worker.tied_gradients(tied_stages(program.header, i.stage, worker.rank))
    elif i.kind == Reduction.SHARDS:
        return reducing.gather_shards(run, i)
    else:
        return reducing.reduce_gradients(run, i)
    run.endings[run.index] = run.transport.all_reduce(members, (i.kind, i.stage, i.version), tensors)


def _local_square(run: Execution, update: int) -> Tensor:
    """The sum of squares of the gradients that this rank counts: each weight counts once over all ranks."""
    header, worker = run.compiled.program.header, run.worker
    mine = [s for s in worker.stages if header.placement[s][0] == worker.rank and not header.is_sharded(s)]
    norms = _norms_of(reducing.counted_parts(run) if header.sharded else [])
    if worker.spilling:
        gone = worker.spilling.parts
    else:
        gone = {}
    for stage in mine:
        if (update, stage) in gone:
            norms += gone[update, stage]
        else:
            norms += _norms_of(worker.counted_gradients(stage))
    if norms:
        return torch.stack(norms).square().sum()
    return torch.zeros((), dtype=torch.float64, device=worker.device)


def _step(run: Execution, i: Instruction) -> None:
    worker = run.worker
    store, optimizer = worker.stores[i.stage], worker.optimizers.get(i.stage)
    worker.forget_idle_gradients(i.stage)
    worker.mesh.compare(i.stage, ((owned.name, owned.parameter) for owned in worker.owned[i.stage]))
    store.begin_step(i.version, in_place=run.index in run.compiled.in_place)
    taken = is_taken(run, i.version)
    if optimizer is not None:
        taken = taken and _update(run, i)()
        store.end_step()
    _count_batchnorms(run, i, taken)


def _host_step(run: Execution, i: Instruction) -> None:
    """Starts the step on the host, where gradients, weights and states are, asynchronously."""
    worker, taken = run.worker, is_taken(run, i.version)
    _count_batchnorms(run, i, taken)
    spill_handlers.step_on_host(run, i, _update(run, i) if taken and i.stage in worker.optimizers else None)


def _count_batchnorms(run: Execution, i: Instruction, taken: bool) -> None:
    """Updates the running averages of a stage, also by an update without a step because of the scale of the loss."""
    norms = run.worker.stages[i.stage].batchnorms
    if taken or run.worker.scale is not None:
        batchnorm.commit(norms, i.version)
    else:
        batchnorm.forget(norms, i.version)


def _update(run: Execution, i: Instruction) -> Callable[[], bool]:
    """Returns the function that makes an update once the optimizer has the gradients; the rank is looked up now.

    It returns whether the update was made.
    """
    worker = run.worker
    optimizer, scheduler = worker.optimizers[i.stage], worker.schedulers.get(i.stage)
    scale, factor = _scale(run, i.stage, i.version), None
    if worker.training.clip_norm is not None:
        norm = gradient_norm(run, i.stage, i.version)
        assert norm is not None
        # To the host now, where that steps: its thread knows nothing of the stream that has yet to compute the norm.
        places = (p.device for group in optimizer.param_groups for p in group["params"])
        factor = (worker.training.clip_norm / (norm + 1e-6)).clamp(max=1.0).to(next(places, worker.device))

    def update() -> bool:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not may_step(run, i.stage, i.version, gradients):
            return False
        if scale != 1:
            torch._foreach_mul_(gradients, scale)
        if factor is not None and gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        run.rates[i.stage, i.version] = tuple(float(group["lr"]) for group in optimizer.param_groups)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return True

    return update


def gradient_norm(run: Execution, stage: int, update: int) -> Tensor | None:
    """Norm of all gradients of an update of a stage, before clipping; None: no instruction has computed it."""
    if update in run.norms:
        return run.norms[update].sum().sqrt() * _scale(run, stage, update)
    return None


def _scale(run: Execution, stage: int, update: int) -> float:
    """The factor of summed gradients that gives those of the mean loss."""
    scale = 1 / _steps_in(run.compiled.program.header, stage, update)
    if run.worker.scale is None:
        return scale
    return scale / run.worker.scale.of(run.compiled.program, update)


def _steps_in(header: Any, stage: int, update: int) -> int:
    """Number of steps whose micro-batches an update of a stage averages: its replicas, or fewer in the last update."""
    size, total = header.updates[stage], header.total_microbatches
    covered = min(size, total - update * size)
    return -(-covered // header.num_microbatches)


def _drop(run: Execution, i: Instruction) -> None:
    run.worker.stores[i.stage].drop(i.version)


def _barrier(run: Execution, i: Instruction) -> None:
    members = collective_members(run.compiled.program.header, i)
    token = [torch.zeros(1)]
    run.endings[run.index] = run.transport.all_reduce(members, ("barrier", run.index), token)


def _norm_part(run: Execution, i: Instruction) -> None:
    """Takes a stage's part of the global norm while its gradients are on the device."""
    spill_handlers.spilling_of(run).parts[i.version, i.stage] = _norms_of(run.worker.counted_gradients(i.stage))


def _norms_of(gradients: list[Tensor]) -> list[Tensor]:
    """The norm of each gradient, as a scalar in double precision."""
    if gradients:
        # In one tensor: a conversion for each of them would be as many operations.
        return list(torch.stack(torch._foreach_norm(gradients)).double())
    return []


def _fetch(run: Execution, i: Instruction) -> None:
    """Starts to load a stage's weights, states or gradients, or data at a cut."""
    if i.kind == Kind.INPUT:
        _load(run, Instruction(Op.LOAD, i.stage, i.version))
    else:
        spill_handlers.fetch(run, i)


def _evict(run: Execution, i: Instruction) -> None:
    """Starts to write back changed values, or data at a cut; an input of the model is only freed."""
    if i.kind == Kind.INPUT:
        del run.values[i.kind, i.stage, i.version]
    else:
        spill_handlers.evict(run, i)


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
    Op.EVICT: _evict,
}
