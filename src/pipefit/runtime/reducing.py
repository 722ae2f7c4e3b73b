"""Reductions of a replicated stage, bucket by bucket, begun while its last backward of an update still runs.

Under a sharded optimizer each replica gets the sum of its own part of every bucket and steps that part of the weights;
then the new weights are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import SparseAdam

from pipefit.errors import PlanError
from pipefit.ir.graph import collective_members
from pipefit.ir.instruction import Instruction
from pipefit.ir.liveness import SUMMED
from pipefit.ir.op import Op, Reduction
from pipefit.ir.program import Program
from pipefit.ir.values import tied_stages
from pipefit.parallel.buckets import Launch
from pipefit.parallel.shared_stores import SharedGradientsStore, SharedWeightsStore
from pipefit.runtime.transport import Ending, all_of, then

if TYPE_CHECKING:
    from pipefit.runtime.executor import Execution
    from pipefit.runtime.worker import Worker


def make_buckets(worker: Worker, program: Program) -> None:
    """Makes the buckets of a rank's stages that the program reduces over replicas; they stay with the worker.

    Raises:
        PlanError: an optimizer takes sparse gradients only.
    """
    reduced = {i.stage for i in program.ranks[worker.rank] if i.op is Op.REDUCE and i.kind in SUMMED}
    for stage in reduced:
        if isinstance(worker.optimizers.get(stage), SparseAdam):
            raise PlanError(
                f"stage {stage}: its copies add up their gradients as dense tensors, which SparseAdam does not take: "
                "give it one copy (replicas), or another optimizer"
            )
        if stage not in worker.buckets:
            untied = [owned.parameter for owned in worker.owned[stage] if owned.tie is None]
            worker.buckets[stage] = worker.stores[stage].make_buckets(untied)


def backward(run: Execution, i: Instruction, work: Callable[[], None]) -> None:
    """Runs a backward of a replicated stage; the last of an update starts the reduction of each full bucket."""
    buckets = run.worker.buckets[i.stage]
    buckets.hold()
    reduce = run.compiled.early.get(run.index)
    if reduce is None:
        work()
        buckets.adopt()
    else:
        buckets.begin(_launcher(run, reduce))
        buckets.watch(work)


def _launcher(run: Execution, reduce: Instruction) -> Launch:
    """A function that starts the reduction of a bucket and keeps it for the `reduce` instruction."""
    members = collective_members(run.header, reduce)
    under_way: list[Ending] = []
    run.values["launched", reduce.stage, reduce.version] = under_way
    store = run.worker.stores[reduce.stage]
    key = (reduce.kind, reduce.stage, reduce.version, store.rounds)

    def launch(number: int, flat: Tensor) -> None:
        part = store.own_part(number)
        if part is None:
            under_way.append(run.transport.all_reduce(members, (*key, number), [flat]))
        else:
            under_way.append(run.transport.reduce_scatter(members, (*key, number), flat, part))

    return launch


def reduce_gradients(run: Execution, i: Instruction) -> None:
    """The `reduce` of a stage over its replicas: starts what its last backward has not started."""
    worker, buckets = run.worker, run.worker.buckets[i.stage]
    buckets.hold()  # no backward has, where all weights of the stage were frozen since
    if ("launched", i.stage, i.version) not in run.values:
        buckets.begin(_launcher(run, i))
    buckets.finish()
    if not run.header.shares_gradients(i.stage):
        for index in buckets.idle:
            worker.mark_idle(i.stage, buckets.parameters[index], buckets.marks[index])
    under_way: list[Ending] = run.values.pop(("launched", i.stage, i.version))
    rest = []
    if run.index not in run.compiled.partial:
        gathered = (norm.gathered(i.version) for norm in worker.stages[i.stage].batchnorms)
        rest = [sums for sums in gathered if sums is not None]
    if i.kind == Reduction.SCATTER and len(buckets.marks):
        rest.append(buckets.marks)
    if rest:
        key = i.kind, i.stage, i.version, worker.stores[i.stage].rounds
        under_way.append(run.transport.all_reduce(collective_members(run.header, i), key, rest))
    run.wait_later(then(all_of(under_way), worker.stores[i.stage].end_sum))


def gather_weights(run: Execution, i: Instruction) -> None:
    """Gathers the whole weights of a stage from the parts that its replicas keep."""
    store = run.worker.stores[i.stage]
    assert isinstance(store, SharedWeightsStore)
    parts = list(store.gather(i.version))
    _gather(run, i, parts, (i.op, i.stage, i.version, store.gathers))


def gather_shards(run: Execution, i: Instruction) -> None:
    """Gathers the new weights on each replica from the parts that the replicas have stepped."""
    parts = run.worker.stores[i.stage].weight_parts(i.version + 1)
    _gather(run, i, parts, (i.kind, i.stage, i.version))


def _gather(run: Execution, i: Instruction, parts: Iterable[tuple[Tensor, Tensor]], key: tuple[object, ...]) -> None:
    """Starts to join this replica's part of each bucket with the others' parts."""
    members = collective_members(run.header, i)
    under_way = []
    for number, (part, whole) in enumerate(parts):
        under_way.append(run.transport.all_gather(members, (*key, number), part, whole))
    run.wait_later(all_of(under_way))


def free_gradients(run: Execution, i: Instruction) -> None:
    """Frees whole gradients of a stage, of which this replica has its part of the sum."""
    store = run.worker.stores[i.stage]
    assert isinstance(store, SharedGradientsStore)
    store.end_round()


def start_sum(run: Execution, i: Instruction, tensors: list[Tensor]) -> Ending:
    """Starts the sum of some tensors over the ranks of a `reduce`."""
    return run.transport.all_reduce(collective_members(run.header, i), (i.kind, i.stage, i.version), tensors)


def reduce_ties(run: Execution, i: Instruction) -> None:
    """The `reduce` of the gradients of tied weights over the ranks that hold them."""
    stages = tied_stages(run.header, i.stage, run.worker.rank)
    run.wait_later(start_sum(run, i, run.worker.tied_gradients(stages)))
