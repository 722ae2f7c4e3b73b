"""The comparison of pipeline training with single-process training."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.cutting import Cut
from pipefit.errors import ModelError, PipefitError
from pipefit.ir.instruction import Indices
from pipefit.models.examples import Example, mean_cross_entropy
from pipefit.parallel.loss import Loss
from pipefit.planner import by_hand, ranks_of
from pipefit.runtime.launch import launch
from pipefit.runtime.microbatches import weigh_of
from pipefit.schedules import find
from pipefit.spec.files import JsonObject
from pipefit.spec.options import Parallelism, Precision, Request, Updates
from pipefit.stage.precision import half_of
from pipefit.stage.split import named_layers
from pipefit.stage.training import MakeOptimizer
from pipefit.testing.averages import tracking_norms
from pipefit.testing.case import Case, Outcome, descend
from pipefit.testing.delayed import delayed_reference
from pipefit.testing.pipelined import run_pipeline
from pipefit.testing.reference import reference
from pipefit.testing.users_model import whole

Tables = Mapping[int, Mapping[str, Tensor]]
"""The tensors of each rank, by name."""


@dataclass(frozen=True)
class CheckResult:
    """The result of a comparison of a pipeline with one process.

    Differences are relative: the largest difference inside a tensor, over the largest number in the reference's tensor
    (or a hundredth of the largest among all of them, where a tensor holds nothing but rounding).

    Attributes:
        equal: every difference is within the tolerance.
        loss_diff: the largest among the losses of all steps.
        grad_diff: the largest among the gradients of the first update.
        weight_diff: the largest among weights and buffers at the end.
        first_difference: the first parameter or buffer, in the model's order, that differs: by its gradient of the
            first update, else by its value at the end; a loss where only that differs; None when all are equal.
        tolerance: the largest difference that counts as equal.
        num_norms: batch norms with running averages; both sides normalise each micro-batch by its own statistics, and
            change the averages once per mini-batch.
    """

    equal: bool
    loss_diff: float
    grad_diff: float
    weight_diff: float
    first_difference: str | None
    tolerance: float
    num_norms: int = 0

    def as_dict(self) -> JsonObject:
        """For JSON."""
        return asdict(self)


def check(
    model: Any,
    *,
    schedule: str = "1f1b",
    microbatches: int = 4,
    stages: Sequence[int] | None = None,
    parallelism: Parallelism = Parallelism(),
    precision: Precision | str = "fp32",
    updates: Updates = Updates(),
    optimizer: MakeOptimizer = descend,
    steps: int = 3,
    batch_size: int | Sequence[int] | None = None,
    loss: Loss | None = None,
    example: Example | None = None,
    dtype: torch.dtype = torch.float64,
    transport: str | None = None,
) -> CheckResult:
    """Trains a model by a pipeline and by one process on the same random data, and compares all numbers.

    A synchronous schedule is compared with ordinary training; an asynchronous one with its formulas of delayed
    gradients. The model stays as it is.

    Args:
        model: an `nn.Sequential`, a list of layers, or anything with `layers`, `loss` and `example` (a model bundle).
        schedule: its name.
        microbatches: per step.
        stages: layers of each stage; None: as even as possible.
        parallelism: the pipeline's parallelism; 2 ranks where it gives no number.
        precision: "bf16" or "fp16": both sides run their layers under autocast; needs float32. Where layers are
            compiled, only the layers of the pipeline are.
        updates: clipping, learning rates, weights of micro-batches, seed of data and dropout.
        optimizer: makes an optimizer of parameters; SGD, not Adam, which hides a wrongly scaled gradient.
        steps: number of updates.
        batch_size: samples per step, one number or one for each step; None: two for each micro-batch, and one more so
            that micro-batches differ in size.
        loss: gives the mean from output and target; None: the bundle's, else cross entropy.
        example: (batch, seed) -> random (input, target); None: the bundle's.
        dtype: the type to which model and data are converted.
        transport: "local" (all ranks in this process) or "distributed" (one process each); None: local, except for
            tensor parallelism, which needs processes.

    Raises:
        PipefitError: the arguments do not fit together.
    """
    precision = Precision.of(precision)
    if half_of(precision.dtype) is not None and dtype != torch.float32:
        raise PipefitError(
            f"precision {precision.dtype}: autocast takes float32 only, but weights and data are {dtype}"
        )
    layers, loss, example = _parts(model, loss, example)
    updates = replace(updates, weigh=updates.weigh or getattr(layers, "weigh", None) or weigh_of(loss))
    sizes = _sizes(batch_size, steps, microbatches)
    num_ranks = ranks_of(parallelism.ranks or 2, parallelism.tensor)
    num_layers = len(named_layers(layers))
    counts = layer_counts(num_layers, num_ranks, schedule, parallelism.chunks, parallelism.copies, stages)
    batches = []
    for step, size in enumerate(sizes):
        batch = example(size, updates.seed + 1 + step)
        batches.append(_cast(batch, dtype))
    converted = _converted(layers, dtype)
    request = Request(schedule, microbatches, parallelism=parallelism)
    case = Case(converted, batches, counts, request, precision, updates, loss, optimizer)
    if transport is None:
        transport = "local"
        if parallelism.tensor > 1:
            transport = "distributed"
    is_compiled = precision.compile is not False
    tolerance = tolerance_of(dtype, case.half, parallelism.tensor, is_compiled, isinstance(converted, Cut))
    found = compare(run(case, transport), expected(case), tolerance)
    return replace(found, num_norms=len(tracking_norms(whole(case).root)))


def run(case: Case, transport: str = "local") -> Outcome:
    """The pipeline's outcome over all ranks, in this process or in one process each."""
    if transport == "local":
        return run_pipeline(case)
    if transport == "distributed":
        return Outcome.joined(launch(run_pipeline, case.num_processes, case, quiet=True))
    raise PipefitError(f'transport: expected "local" or "distributed", got {transport!r}')


def expected(case: Case) -> Outcome:
    """The outcome that the schedule of a case must have, by the reference."""
    if find(case.schedule).is_synchronous:
        return reference(case)
    return delayed_reference(case)


def tolerance_of(
    dtype: torch.dtype, half: torch.dtype | None = None, tensor: int = 1, compiled: bool = False, is_cut: bool = False
) -> float:
    """The largest relative difference that rounding can cause.

    Under autocast both sides round the same numbers to the half type, and add up in float32. Only processes that share
    a layer add up parts that are already rounded, compiled layers do not round between operations that they fuse, and
    the forward of a model that was cut does not round what crosses the borders of stages. Layers of float64 may have
    parts that compute in float32, as norms and routers of transformers do.
    """
    if half is not None and (tensor > 1 or compiled or is_cut):
        return torch.finfo(half).eps ** 0.5
    if compiled and dtype == torch.float64:
        dtype = torch.float32
    if dtype == torch.float64:
        return 1e-10
    if dtype == torch.float32:
        return 1e-4
    return torch.finfo(dtype).eps ** 0.5


def compare(got: Outcome, wanted: Outcome, tolerance: float) -> CheckResult:
    """Compares every rank's numbers with the reference's."""
    got_losses = torch.tensor(got.losses, dtype=torch.float64)
    wanted_losses = torch.tensor(wanted.losses, dtype=torch.float64)
    loss_diff = _difference(got_losses, wanted_losses, floor=0.0)
    gradients = dict(_differences(got.gradients, wanted.gradients[0], wanted.names))
    weights = dict(_differences(got.weights, wanted.weights[0], tuple(wanted.weights[0])))
    differing = []
    for table in (gradients, weights, {"the loss": loss_diff}):
        differing += [name for name, difference in table.items() if not difference <= tolerance]
    first = next(iter(differing), None)
    grad_diff = max(gradients.values(), default=0.0)
    weight_diff = max(weights.values(), default=0.0)
    return CheckResult(not differing, loss_diff, grad_diff, weight_diff, first, tolerance)


def _differences(got: Tables, wanted: Mapping[str, Tensor], names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """The difference of each tensor of each rank, in the reference's order; infinite for missing or extra tensors.

    Args:
        got: what the ranks have.
        wanted: each tensor under every name; tied weights have several.
        names: that some rank must have.
    """
    floor = max(map(_largest, wanted.values()), default=0.0) / 100
    for name, tensor in wanted.items():
        holders = [rank for rank in sorted(got) if name in got[rank]]
        if not holders and name in names:
            yield name, float("inf")
        for rank in holders:
            label = name
            if rank != holders[0]:
                label += f" (rank {rank})"
            yield label, _difference(got[rank][name], tensor.cpu(), floor)
    for rank, table in got.items():
        for name in table:
            if name not in wanted:
                yield f"{name} (rank {rank})", float("inf")


def _largest(tensor: Tensor) -> float:
    if tensor.numel() and tensor.is_floating_point():
        return float(tensor.double().abs().max())
    return 0.0


def _difference(got: Tensor, wanted: Tensor, floor: float) -> float:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    if not wanted.numel() or torch.equal(got, wanted):
        return 0.0
    if not wanted.is_floating_point():
        return float("inf")
    scale = max(_largest(wanted), floor) or 1.0
    difference = _largest(got.double() - wanted.double()) / scale
    if difference == difference:
        return difference
    return float("inf")


def _parts(model: Any, loss: Loss | None, example: Example | None) -> tuple[Any, Loss, Example]:
    layers = model
    if not isinstance(model, nn.Module | list | tuple | Cut):
        layers = model.layers
        loss = loss or model.loss
        example = example or model.example
    if example is None:
        raise ModelError(
            "a check needs random data of the model's shapes: give example=function(batch, seed) -> (input, target)"
        )
    own = getattr(layers, "loss", None)
    return layers, loss or own or mean_cross_entropy, example


def layer_counts(
    num_layers: int,
    num_ranks: int,
    schedule: str,
    num_chunks: int = 1,
    replicas: Sequence[int] = (),
    stages: Sequence[int] | None = None,
) -> Indices:
    """Layers of each stage: as given, else as even as possible, with one more in the first stages."""
    made = by_hand(
        num_layers,
        num_ranks=num_ranks,
        schedule=schedule,
        num_microbatches=1,
        num_chunks=num_chunks,
        replicas=replicas,
        stages=stages,
    )
    return tuple(len(stage.layers) for stage in made.partition.stages)


def _sizes(batch_size: int | Sequence[int] | None, steps: int, num_microbatches: int) -> list[int]:
    if batch_size is None:
        batch_size = 2 * num_microbatches + 1
    if isinstance(batch_size, int):
        sizes = [batch_size] * steps
    else:
        sizes = list(batch_size)
    if steps < 1 or len(sizes) != steps:
        raise PipefitError(f"a check of {steps} steps needs as many batch sizes and at least one, got {len(sizes)}")
    return sizes


def _converted(layers: Any, dtype: torch.dtype) -> Any:
    copied = copy.deepcopy(layers)
    for layer in named_layers(copied):
        layer.module.to(dtype)
    if isinstance(copied, Cut):
        copied.model.to(dtype)
    return copied


def _cast(payload: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            return leaf.to(dtype)
        return leaf

    return pytree.tree_map(cast, payload)
