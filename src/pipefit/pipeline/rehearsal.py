"""A rehearsal of one process of a run: its real program on the meta device, where tensors have shapes and no numbers.

The other processes are not there. Torch's fake process group takes messages and moves nothing:

    as in the run     plan, stages, program, process groups, handlers, optimizer, messages with their shapes and bytes
    in advance        the contracts of the values that would arrive, from one forward of the model
    not there         numbers (every update is taken to be finite), times, NCCL
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _world
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import Optimizer

from pipefit.errors import ModelError, PlanError
from pipefit.ir.instruction import Indices, Instruction
from pipefit.ir.op import Op
from pipefit.ir.program import Program
from pipefit.models.examples import Batch
from pipefit.parallel.weights import WeightStore
from pipefit.pipeline.pipeline import Pipeline
from pipefit.profiling.live_bytes import MetaCount
from pipefit.runtime.compiled import compile_rank
from pipefit.runtime.distributed import DistributedTransport
from pipefit.runtime.executor import Execution
from pipefit.runtime.handlers import HANDLERS
from pipefit.runtime.local import LocalTransport, Mailbox
from pipefit.runtime.microbatches import MicroBatch, feed_of
from pipefit.runtime.progress import Progress
from pipefit.runtime.session import rehearsing
from pipefit.runtime.transport import Message
from pipefit.runtime.worker import Worker, layers_of
from pipefit.spec import Plan
from pipefit.spec.options import Updates
from pipefit.stage.materialise import stand_in
from pipefit.stage.payload import ONLY_SHAPES, Contract, Structure
from pipefit.stage.record_layout import storage_bytes
from pipefit.stage.replay import AttentionCores
from pipefit.stage.split import named_layers
from pipefit.stage.stage import Stage
from pipefit.stage.training import Loss

_ASYNCHRONOUS_STEPS = 4
"""Rounds of updates of a schedule without a flush: enough that its micro-batches overlap, as in a long run."""


@dataclass(frozen=True)
class Rehearsed:
    """The figures of one process.

    Attributes:
        process: its number.
        rank: of the program.
        program: that the process has run.
        stages: of the rank.
        weight_bytes: of parameters and buffers.
        grad_bytes: of the gradients of all its weights.
        optim_bytes: of the states of its optimizers, after the first step.
        peak_bytes: the most bytes of live tensors in a pass.
        sent_bytes: to other ranks, per update.
        inside_bytes: to processes of the same rank, per update.
        num_messages: tensors sent to other processes, per update.
        num_collectives: reductions and gathers, per update.
        num_groups: process groups that the process is a member of.
        made_groups: process groups of the run, all of which every process makes.
    """

    process: int
    rank: int
    program: Program
    stages: Indices
    weight_bytes: int
    grad_bytes: int
    optim_bytes: int
    peak_bytes: int
    sent_bytes: float
    inside_bytes: float
    num_messages: float
    num_collectives: float
    num_groups: int
    made_groups: int


def rehearse(
    model: Any,
    loss: Loss,
    batch: Batch,
    plan: Plan,
    process: int,
    *,
    optimizer: Callable[[Any], Optimizer],
    updates: Updates = Updates(),
) -> Rehearsed:
    """Runs the program of one process of a plan without the others, and counts.

    Args:
        model: an `nn.Sequential`, a list of layers or a `Cut`, best built under `torch.device("meta")`; it becomes that
            of the process.
        loss: of an output and its target.
        batch: (input, target) of one update.
        plan: of the run.
        process: from 0 to `plan.num_processes` - 1.
        optimizer: as for `Pipeline`.
        updates: as for `Pipeline`.

    Raises:
        PipefitError: as the run itself would raise it; or the plan spills, which needs real memory.
    """
    if plan.spill is not None:
        raise PlanError("a spilled plan moves its stages through real memory, which a rehearsal does not have")
    if not 0 <= process < plan.num_processes:
        raise PlanError(f"rank {process}: the plan has processes 0 to {plan.num_processes - 1}")
    # Here, where weights that are shared stay shared.
    stand_in(named_layers(model), lambda tensor: tensor.to("meta"), lambda tensor: not tensor.is_meta)
    with rehearsing(process, plan.num_processes):
        made = Pipeline(model, loss=loss, optimizer=optimizer, plan=plan, updates=updates)
        return _counted(made, process, batch)


def _counted(pipe: Pipeline, process: int, batch: Batch) -> Rehearsed:
    """Runs the pass of a step that is not the first, so that its optimizers have states, and counts."""
    engine = pipe.engine
    worker = engine.workers[0]
    program = pipe.program
    if not pipe.schedule.is_synchronous:
        program = pipe.programs.of(program.header.num_steps * _ASYNCHRONOUS_STEPS)
    num_steps = program.header.num_steps
    engine.mesh.compared.update(worker.stages)  # by numbers, of the first gradients
    engine.check(batch[0])
    feed = _feed(pipe, batch, num_steps)
    for optimizer in worker.optimizers.values():
        _make_states(optimizer)
    with AttentionCores(_fused), _without_numbers():
        contracts = _contracts(pipe, program, feed)
        if isinstance(engine.transports[0], DistributedTransport):
            engine.transports[0].predict(contracts)
        engine.prepare(program)
        counts = MetaCount()
        counts.add(_kept(worker))
        with counts:
            engine.run(program, feed)
    sent, inside = engine.moved_bytes
    return Rehearsed(
        process=process,
        rank=worker.rank,
        program=program,
        stages=tuple(worker.stages),
        weight_bytes=_num_bytes(_weights(worker)),
        grad_bytes=_num_bytes(_gradients(worker)),
        optim_bytes=_num_bytes(_states(worker)),
        peak_bytes=counts.peak_bytes,
        sent_bytes=sent / num_steps,
        inside_bytes=inside / num_steps,
        num_messages=counts.calls["send"] / num_steps,
        num_collectives=(counts.calls.total() - counts.calls["send"] - counts.calls["recv_"]) / num_steps,
        num_groups=len(_world.pg_map),
        made_groups=_world.group_count,
    )


def _feed(pipe: Pipeline, batch: Batch, num_steps: int) -> list[MicroBatch]:
    """The batch as the data of every step; no line about it is compared, since nobody else has one."""
    size = pipe.plan.num_microbatches
    found: list[MicroBatch] = []
    for step in range(num_steps):
        found += feed_of(batch, size, step * size, "train", pipe.given.weigh)
    return [part._replace(batch=None) for part in found]


def _contracts(pipe: Pipeline, program: Program, feed: list[MicroBatch]) -> dict[tuple[int, str], Contract]:
    """The contract of each stage's output for each shape of micro-batches, by a forward of all stages but the last."""
    worker = pipe.workers[0]
    stages = dict(worker.stages)
    for index, spec in enumerate(pipe.plan.partition.stages):
        if index not in stages:
            stages[index] = Stage(index, [pipe.layers[layer] for layer in spec.layers], pipe.device)
            stages[index].half = worker.training.half
    whole = Worker(worker.rank, worker.training, pipe.device, stages, {}, mesh=worker.mesh)
    whole.stores = {index: WeightStore([]) for index in stages}
    last = program.header.last_stage
    found = {}
    seen = set()
    for mb, part in enumerate(feed):
        if part.signature in seen:
            continue
        seen.add(part.signature)
        run = Execution(compile_rank(program, worker.rank), whole, LocalTransport(0, Mailbox()), feed, Progress())
        HANDLERS[Op.LOAD](run, Instruction(Op.LOAD, 0, mb))
        for stage in range(last):
            HANDLERS[Op.FWD](run, Instruction(Op.FWD, stage, mb, version=0))
            made: Message = run.values["act", stage, mb]
            assert isinstance(made.structure, Structure)
            found[stage, part.signature] = Contract.of(made.leaves, made.flags, made.structure)
    return found


@contextlib.contextmanager
def _without_numbers() -> Iterator[None]:
    """The context of the user's code: says why an operation fails on tensors without numbers.

    Raises:
        ModelError: an operation needs numbers.
    """
    try:
        yield
    except (ModelError, RuntimeError) as problem:
        cause = problem.__cause__ or problem
        if isinstance(cause, ModelError) or "meta" not in str(cause).lower():
            raise
        raise ModelError(
            f"{problem}: the model reads the numbers of a tensor, which a rehearsal does not have; where shapes depend "
            f"on them the run fails too: {ONLY_SHAPES}"
        ) from problem


def _fused(core: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Attention as a fused kernel runs it: no matrix of scores is kept. The meta device would take the unfused one."""
    is_plain = core is scaled_dot_product_attention and len(args) == 3 and args[0].dim() == 4
    if not is_plain or kwargs.keys() - {"dropout_p", "is_causal"} or kwargs.get("dropout_p"):
        return core(*args, **kwargs)
    is_causal = kwargs.get("is_causal", False)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, is_causal=is_causal)[0]


def _make_states(optimizer: Optimizer) -> None:
    """Lets an optimizer make its states by a step."""
    for group in optimizer.param_groups:
        if group.get("fused"):  # a kernel that the meta device does not have
            group["fused"] = False
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _states(worker: Worker) -> list[Any]:
    """The states of a rank's optimizers."""
    found = []
    for optimizer in worker.optimizers.values():
        for state in optimizer.state.values():
            found += state.values()
    return found


def _weights(worker: Worker) -> list[Tensor]:
    """Parameters and buffers of a rank, and its parts of shared weights."""
    found = []
    for store in worker.stores.values():
        found += store.kept()
    for layer in layers_of([worker]):
        found += layer.module.parameters()
        found += layer.module.buffers()
    return found


def _gradients(worker: Worker) -> list[Tensor]:
    """Tensors as large as the gradients of a rank: the buckets of its replicated stages, other weights that train."""
    found: list[Tensor] = []
    for index, owned in worker.owned.items():
        store = worker.stores[index]
        if index not in worker.buckets:
            found += [own.parameter for own in owned]
            continue
        found += worker.buckets[index].flats
        found += [own.parameter for own in owned if own.tie is not None]
        found += [gradient for _, gradient in store.part_gradients()]
    return found


def _kept(worker: Worker) -> list[Tensor]:
    """Tensors of a rank that are there before a pass."""
    found = [*_weights(worker), *_states(worker)]
    for buckets in worker.buckets.values():
        found += buckets.flats
    for store in worker.stores.values():
        found += [gradient for _, gradient in store.part_gradients()]
    return found


def _num_bytes(values: Iterable[Any]) -> int:
    """Bytes of the tensors of the meta device among some values."""
    return storage_bytes(one for one in values if isinstance(one, Tensor) and one.is_meta)
