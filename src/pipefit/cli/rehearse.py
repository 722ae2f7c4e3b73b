"""`pipefit rehearse`: runs the program of one rank of a plan without machines, weights or data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipefit.cli.answer import Answer
from pipefit.cli.models import ModelName, ModelOptions, batch_of, make_model
from pipefit.cli.options import Count, Json, verb
from pipefit.errors import PipefitError
from pipefit.ir.instruction import Indices
from pipefit.spec import Plan
from pipefit.spec.files import JsonObject
from pipefit.spec.options import Updates
from pipefit.units import columns, counted, format_bytes

if TYPE_CHECKING:
    from pipefit.models import ModelBundle
    from pipefit.pipeline.predicted_memory import PredictedMemory
    from pipefit.pipeline.rehearsal import Rehearsed

_NOT_CHECKED = (
    "not checked: NCCL and the network, numbers, speed, half precision, compiled layers,\n"
    "  memory beyond tensors (workspaces of kernels, fragments, buffers of NCCL)"
)


@verb()
def command(
    *,
    plan: Path,
    model: ModelName,
    option: ModelOptions = None,
    rank: str = "0",
    batch: Count | None = None,
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
    clip: float = 1.0,
    json: Json = False,
) -> Answer:
    """Rehearse one rank of a plan: every process group, message and shape of its program, without machines.

    Example: pipefit rehearse --plan plan.json --model gpt --option layers=8 --rank 3

    Weights, activations and messages are tensors of torch's meta device, which have shapes and no numbers, and torch's
    fake process group takes the place of the other ranks. A model that does not fit its plan fails as it would in the
    run. Memory is counted in the model's own type.

    Args:
        plan: Of the run.
        rank: Number of a process of the run, from 0; or all: one of those that have the same stages.
        batch: Samples of an update; default: the plan's.
        optimizer: Of every stage.
        clip: Clip gradients to this global norm, as train does; 0: do not.
    """
    from pipefit.pipeline.predicted_memory import plan_costs, predicted_memory
    from pipefit.pipeline.rehearsal import rehearse
    from pipefit.run.optimizers import STATE_PER_WEIGHT, make_optimizer
    from pipefit.stage.split import named_layers

    given = Plan.load(plan)
    processes = _processes(rank, given)
    size = batch or given.num_microbatches * max(given.microbatch_size, 1)
    make = make_optimizer(optimizer, 1e-3)
    found = []
    cost = None
    predicted: list[PredictedMemory] = []
    for process in processes:
        bundle = _made(model, option)
        data = batch_of(bundle, size)
        if process == processes[0]:
            layers = named_layers(bundle.layers)
            cost = plan_costs(layers, bundle.loss, data, given, STATE_PER_WEIGHT[optimizer])
        updates = Updates(clip_norm=clip or None)
        found.append(rehearse(bundle.layers, bundle.loss, data, given, process, optimizer=make, updates=updates))
        if cost is not None and not predicted:
            predicted = predicted_memory(found[0].program, cost)
    rows = [_figures(one, given, predicted) for one in found]
    head = f"{bundle.describe()}\n{given.schedule}, {counted(given.num_processes, 'rank')}: rehearsed without a failure"
    text = "\n".join([head, "", *_table(rows), "", _NOT_CHECKED])
    return Answer({"model": model, "ranks": rows, "not_checked": " ".join(_NOT_CHECKED.split())}, text)


def _made(model: str, option: list[str] | None) -> ModelBundle:
    """The model on the meta device; one that is cut by an example needs its numbers, and is built in memory."""
    try:
        return make_model(model, option, device="meta")
    except PipefitError:
        return make_model(model, option)


def _processes(rank: str, plan: Plan) -> list[int]:
    """The processes to rehearse.

    Raises:
        PipefitError: the text is neither a number nor "all".
    """
    if rank != "all":
        if not rank.isdecimal():
            raise PipefitError(f"--rank: expected the number of a process or all, got {rank!r}")
        return [int(rank)]
    first: dict[Indices, int] = {}
    for number in range(plan.placement.num_ranks):
        stages = [stage for stage, ranks in enumerate(plan.placement.ranks) if number in ranks]
        first.setdefault(tuple(stages), number * plan.tensor)
    return list(first.values())


def _figures(one: Rehearsed, plan: Plan, predicted: list[PredictedMemory]) -> JsonObject:
    """The counted figures of a process next to the predicted ones, as JSON data."""
    figures = {name: value for name, value in asdict(one).items() if name != "program"}
    figures["simulated"] = predicted[one.rank]._asdict() if predicted else None
    figures["plan_peak_bytes"] = plan.prediction.peak_bytes[one.rank] if plan.prediction else None
    return figures


def _table(rows: list[JsonObject]) -> Iterator[str]:
    """Lines of memory and of traffic, one for each process."""
    memory: list[tuple[str, ...]] = [("memory of rank", "", "weights", "gradients", "states", "activations", "peak")]
    heads = ("per update", "messages", "sent", "inside the rank", "collectives", "process groups", "of the run")
    traffic: list[tuple[str, ...]] = [heads]
    for row in rows:
        memory.append((str(row["process"]), "counted", *_parts(row)))
        if row["simulated"]:
            memory.append(("", "simulated", *_parts(row["simulated"])))
        if row["plan_peak_bytes"]:
            memory.append(("", "by the plan", "", "", "", "", format_bytes(row["plan_peak_bytes"])))
        moved = format_bytes(row["sent_bytes"]), format_bytes(row["inside_bytes"])
        counts = [f"{row[name]:g}" for name in ("num_collectives", "num_groups", "made_groups")]
        traffic.append((f"rank {row['process']}", f"{row['num_messages']:g}", *moved, *counts))
    yield from columns(memory, right=True)
    yield ""
    yield from columns(traffic, right=True)


def _parts(row: JsonObject) -> list[str]:
    """Weights, gradients, states, what is held beyond them, and the peak."""
    weights, grads, states, peak = (row[f"{name}_bytes"] for name in ("weight", "grad", "optim", "peak"))
    return [format_bytes(size) for size in (weights, grads, states, peak - weights - grads - states, peak)]
