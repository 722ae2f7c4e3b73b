"""The handlers of operations on a rank: one short function per operation, and the table that the executor reads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipefit.errors import ModelError
from pipefit.ir.graph import collective_members
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import PIECE_OF, WHOLE_OF, Kind, Op, Reduction
from pipefit.runtime import reducing, spill_handlers
from pipefit.runtime.executor import Execution, Handlers
from pipefit.runtime.finite import is_taken
from pipefit.runtime.forwarding import on_device, run_stage, shape_of
from pipefit.runtime.halves import (
    WeightRun,
    accumulate_backward,
    input_half,
    refuse_other_weights,
    run_backward,
    weight_half,
)
from pipefit.runtime.transport import Message
from pipefit.runtime.updating import count_batchnorms, reduce_norm, update_of
from pipefit.stage.payload import flatten_any
from pipefit.stage.precision import in_float32, narrowed
from pipefit.stage.training import checked_loss

_log = logging.getLogger("pipefit.runtime")

_UNREACHED = (
    "stage %d gives no gradient to an output of the stages before it, as after detach(): the gradients of weights that "
    "have no other are zeros, by which weight decay and momentum still change them, while plain torch has none and "
    "leaves them as they are; freeze them: requires_grad_(False)"
)


def _load(run: Execution, i: Instruction) -> None:
    part = run.feed[i.mb]
    device = run.worker.device
    source = target = None
    if i.stage == 0:
        what = "the input of the model"
        given = on_device(part.input, device, what)
        leaves, structure = flatten_any(given, what)
        source = Message(leaves, [False] * len(leaves), structure)
    if i.stage == run.header.last_stage:
        target = on_device(part.target, device, "the target")
    run.values["input", i.stage, i.mb] = (source, target)


def _forward(run: Execution, i: Instruction) -> None:
    """Runs a forward. One that will be replayed saves nothing; its first run finds the outputs that need gradients."""
    flags = run.worker.flags
    shape = shape_of(run, i)
    replayed = (i.stage, i.mb) in run.compiled.program.recomputed
    trains = torch.is_grad_enabled() and i.stage >= run.header.frozen
    with torch.set_grad_enabled(trains and (not replayed or shape not in flags)):
        saved, act = run_stage(run, i, replay=False)
    if trains:
        act = act._replace(flags=flags.setdefault(shape, act.flags))
        if not replayed:
            run.values["saved", i.stage, i.mb] = saved
    run.values["act", i.stage, i.mb] = act


def _recompute(run: Execution, i: Instruction) -> None:
    run.values["saved", i.stage, i.mb], _ = run_stage(run, i, replay=True)


def _number(value: Any) -> float:
    """The value of a metric.

    Raises:
        ModelError: it is not one number.
    """
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ModelError(f"metric: expected a function that returns one number, got {value!r:.60}") from None


def _loss(run: Execution, i: Instruction) -> None:
    last = run.header.last_stage
    worker = run.worker
    act: Message = run.values["act", last, i.mb]
    _, target = run.values["input", last, i.mb]
    leaves, needed = act.as_inputs()
    compute = run.loss or worker.training.loss
    output = act.payload([in_float32(leaf, worker.training.half) for leaf in leaves])
    loss, metrics = checked_loss(compute(output, target))
    refuse_other_weights(loss, needed)
    share = run.feed[i.mb].share
    if share == 0:
        # It counts for nothing, even where the mean over its labels is 0/0.
        loss = torch.zeros_like(loss)
        metrics = {name: torch.zeros_like(value) for name, value in metrics.items()}
    run.losses.append((i.mb, loss.detach() * share))
    run.logged[i.mb] = {name: value * share for name, value in metrics.items()}
    if run.metric is not None and share > 0:
        run.metrics.append(_number(run.metric(act.payload(), target)) * share)
    if not torch.is_grad_enabled():
        return
    if worker.scale is not None:
        update = run.header.update_of(last, i.mb)
        share *= worker.scale.of(run.compiled.program, update)
    grads: Sequence[Any] = []
    if share == 0:
        grads = [torch.zeros_like(leaf) for leaf in needed]
    elif needed:
        if not loss.requires_grad:
            raise ModelError(
                "the loss has no gradient: it does not depend on the model's output, or by detach(), a comparison or a "
                "conversion to numbers only"
            )
        start = torch.full_like(loss, share)
        grads = run_backward((loss,), (start,), tuple(needed))
    # Weights behind an output that the loss does not use have no gradient, which is not a gradient of zeros.
    run.values["grad", last, i.mb] = Message(list(grads))


def _backward(run: Execution, i: Instruction) -> None:
    saved, grads = run.values.pop(("saved", i.stage, i.mb)).entered(run.values.pop(("grad", i.stage, i.mb)).leaves)
    if saved.edges:
        _run_backward(run, i, partial(accumulate_backward, saved.edges, grads))
    if i.stage > run.header.frozen:
        leaves: Sequence[Any] = saved.inputs
        found = [leaf.grad for leaf in leaves]
        run.values["grad", i.stage - 1, i.mb] = _crossing(run, i, found, leaves)


def _run_backward(run: Execution, i: Instruction, work: Callable[[], None]) -> None:
    """Runs what adds to the gradients of a stage's weights."""
    run.worker.stores[i.stage].at(i.version)
    with run.worker.stages[i.stage].replaying(i.version):
        if i.stage in run.worker.buckets:
            reducing.backward(run, i, work)
        else:
            work()


def _whole(grads: Sequence[Tensor | None], leaves: Sequence[Any]) -> Message:
    """Gradients of some leaves, zero where autograd found no path to a leaf."""
    whole = []
    for grad, leaf in zip(grads, leaves, strict=True):
        if grad is None:
            grad = torch.zeros_like(leaf)
        whole.append(grad)
    return Message(whole)


def _crossing(run: Execution, i: Instruction, grads: Sequence[Tensor | None], leaves: Sequence[Any]) -> Message:
    """The gradients of a stage's inputs, in the type in which these came."""
    unreached = run.worker.unreached
    if leaves and i.stage not in unreached and any(grad is None for grad in grads):
        unreached.add(i.stage)
        _log.warning(_UNREACHED, i.stage)
    message = _whole(grads, leaves)
    flags = [True] * len(message.leaves)
    return Message(narrowed(message.leaves, flags, run.worker.stages[i.stage].half))


def _backward_input(run: Execution, i: Instruction) -> None:
    saved, grads = run.values["saved", i.stage, i.mb].entered(run.values.pop(("grad", i.stage, i.mb)).leaves)
    run.worker.stores[i.stage].at(i.version)
    with run.worker.stages[i.stage].replaying(i.version):
        found, run.values["half", i.stage, i.mb] = input_half(saved, grads)
    if i.stage > run.header.frozen:
        run.values["grad", i.stage - 1, i.mb] = _crossing(run, i, found, saved.inputs)


def _backward_weight(run: Execution, i: Instruction) -> None:
    saved = run.values.pop(("saved", i.stage, i.mb))
    runs: list[WeightRun] = run.values.pop(("half", i.stage, i.mb))
    if runs:
        _run_backward(run, i, partial(weight_half, runs))
    del saved  # Autograd does not hold the nodes of functions written in Python; the edges to them do.


def _send(run: Execution, i: Instruction) -> None:
    message = run.values[WHOLE_OF.get(i.kind, i.kind), i.stage, i.mb]
    ending = run.transport.send(i, message)
    if ending is not None:
        run.wait_later(ending)


def _receive(run: Execution, i: Instruction) -> None:
    key = (i.kind, i.stage, i.mb)
    run.wait_later(run.transport.receive(i, partial(run.values.__setitem__, key)))


def _gather(run: Execution, i: Instruction) -> None:
    """Joins the pieces that the processes of a rank have; tensors that cannot be divided came whole."""
    region = run.worker.mesh.region
    assert region is not None
    message: Message = run.values.pop((PIECE_OF[i.kind], i.stage, i.mb))
    leaves = list(message.leaves)
    for number, shape in enumerate(message.shapes):
        if leaves[number].shape != shape:
            leaves[number] = region.gathered(leaves[number], 0).view(shape)
    run.values[i.kind, i.stage, i.mb] = message._replace(leaves=leaves, shapes=())


def _reduce(run: Execution, i: Instruction) -> None:
    if i.kind == Reduction.NORM:
        reduce_norm(run, i)
    elif i.kind == Reduction.TIED:
        reducing.reduce_ties(run, i)
    elif i.kind == Reduction.SHARDS:
        reducing.gather_shards(run, i)
    else:
        reducing.reduce_gradients(run, i)


def _step(run: Execution, i: Instruction) -> None:
    worker = run.worker
    store = worker.stores[i.stage]
    worker.forget_halves()
    worker.forget_idle_gradients(i.stage)
    worker.mesh.compare(i.stage, worker.owned[i.stage])
    store.begin_step(i.version, in_place=run.index in run.compiled.in_place)
    taken = is_taken(run, i.version)
    if i.stage in worker.optimizers:
        taken = taken and update_of(run, i)()
        store.end_step()
    count_batchnorms(run, i, taken)


def _host_step(run: Execution, i: Instruction) -> None:
    """Starts the step on the host, where gradients, weights and states are, asynchronously."""
    taken = is_taken(run, i.version)
    count_batchnorms(run, i, taken)
    work = None
    if taken and i.stage in run.worker.optimizers:
        work = update_of(run, i)
    spill_handlers.step_on_host(run, i, work)


def _drop(run: Execution, i: Instruction) -> None:
    run.worker.forget_halves()
    run.worker.stores[i.stage].drop(i.version)


def _barrier(run: Execution, i: Instruction) -> None:
    if run.commit is not None:
        run.wait_later(run.commit(run))
        return
    members = collective_members(run.header, i)
    run.wait_later(run.transport.all_reduce(members, ("barrier", run.index), [torch.zeros(1)]))


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
    Op.UNSHARD: reducing.gather_weights,
    Op.FREE: reducing.free_gradients,
    Op.FETCH: _fetch,
    Op.EVICT: _evict,
}
