"""Single-process training without a pipeline: the numbers that a synchronous schedule must compute.

Nothing here comes from the executor. Only the *definition* of the numbers is shared with it: the seeds of a layer's
random numbers and the running averages of batch norm (`pipefit.stage`).

Mixed precision is that of torch, autocast and `GradScaler`. One thing of the pipeline is part of its definition:
activations between stages are rounded to the half type there, and so are their gradients.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.stage.batchnorm import commit
from pipefit.stage.optimizing import OptimizerMaker
from pipefit.stage.split import NamedLayer, named_layers
from pipefit.stage.stage import Stage
from pipefit.stage.training import with_metrics
from pipefit.testing.case import Case, Outcome


def reference(case: Case) -> Outcome:
    """Trains the whole model in this process: forward and backward of each micro-batch, then one optimizer step."""
    layers = named_layers(copy.deepcopy(case.model))
    model = Stage(0, layers, torch.device(case.device), case.updates.seed)
    stages = [model] if case.half is None else _stages(layers, case)
    parameters = model.parameters()
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    make = OptimizerMaker(case.optimizer, layers, case.updates.no_decay)
    optimizer = make.of(named) if named else None
    scheduler = case.updates.scheduler(optimizer) if case.updates.scheduler and optimizer else None
    scale = case.first_scale
    scaler = torch.amp.GradScaler(case.device, scale or 1.0, enabled=scale is not None and optimizer is not None)
    first: dict[str, Tensor] = {}
    losses = []
    for step, batch in enumerate(case.batches):
        losses.append(_accumulate(stages, batch, case, step * case.request.num_microbatches, scaler))
        if optimizer is not None:
            scaler.unscale_(optimizer)
        if case.updates.clip_norm is not None and parameters:
            torch.nn.utils.clip_grad_norm_(parameters, case.updates.clip_norm)
        gradients = first or _gradients(layers)
        if optimizer is None or _taken(scaler, optimizer):
            first = gradients
            if scheduler is not None:
                scheduler.step()
        commit(model.batchnorms, step)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    names = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return Outcome(losses, {0: first}, {0: weights}, names)


def _stages(layers: Sequence[NamedLayer], case: Case) -> list[Stage]:
    """One stage for each group of layers, under autocast."""
    ends = [0, *itertools.accumulate(case.counts)]
    parts = [layers[start:end] for start, end in itertools.pairwise(ends)]
    stages = [Stage(index, part, torch.device(case.device), case.updates.seed) for index, part in enumerate(parts)]
    for stage in stages:
        stage.half = case.half
    return stages


def _taken(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Steps, unless a gradient is not finite; returns whether it did."""
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return not scaler.is_enabled() or scaler.get_scale() >= before


def _accumulate(
    stages: Sequence[Stage], batch: tuple[Any, Any], case: Case, first: int, scaler: torch.amp.GradScaler
) -> float:
    """Adds up the gradients of a batch, micro-batch by micro-batch; returns its loss."""
    total = 0.0
    updates = [first // case.request.num_microbatches] * len(stages)
    for number, part in enumerate(micro_batches(case, batch), first):
        loss = weighted_loss(case, stages, number, updates, *part)
        if loss.requires_grad:
            scaler.scale(loss).backward()
        total += float(loss.detach().double())
    return total


def micro_batches(case: Case, batch: tuple[Any, Any]) -> Iterator[tuple[Any, Any, float]]:
    """The micro-batches of a batch: input, target, and the share in the mean loss of the batch."""
    inputs, targets = (_split(payload, case.request.num_microbatches) for payload in batch)
    weigh = case.updates.weigh or (lambda target: len(pytree.tree_leaves(target)[0]))
    counts = [float(weigh(target)) for target in targets]
    yield from zip(inputs, targets, (count / sum(counts) for count in counts), strict=True)


def _split(batch: Any, count: int) -> list[Any]:
    """A pytree of tensors split along the first dimension: sizes differ by at most one, the larger ones first."""
    return [pytree.tree_map(lambda leaf, part=part: leaf.tensor_split(count)[part], batch) for part in range(count)]


def weighted_loss(
    case: Case, stages: Sequence[Stage], number: int, updates: Sequence[int], x: Any, y: Any, share: float
) -> Tensor:
    """The loss of a micro-batch times its share, by the forwards of all stages.

    Args:
        case: the training.
        stages: of the whole model.
        number: of the micro-batch, counted over all batches.
        updates: for each stage the number of the micro-batch's update.
        x: input.
        y: target.
        share: in the mean loss of the batch.
    """
    half = case.half

    def as_sent(leaf: Tensor) -> Tensor:
        """A leaf rounded to the half type and back to float32, where it carries a gradient."""
        return leaf.to(half).float() if leaf.requires_grad and leaf.dtype in (torch.float32, half) else leaf

    payload, target = (pytree.tree_map(lambda leaf: leaf.to(case.device), item) for item in (x, y))
    for index, (stage, update) in enumerate(zip(stages, updates, strict=True)):
        payload = pytree.tree_map(as_sent, payload) if index and half else payload
        payload = stage.forward(payload, number, update=update)
    if half:
        payload = pytree.tree_map(lambda leaf: leaf.float() if leaf.dtype == half else leaf, payload)
    loss: Tensor = with_metrics(case.loss(payload, target))[0]
    return loss * share


def aliases(layers: Sequence[NamedLayer]) -> list[tuple[nn.Parameter, list[str]]]:
    """Every parameter once, with all its names in the user's model."""
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for layer in layers:
        for name, parameter in layer.module.named_parameters(prefix=layer.prefix, remove_duplicate=False):
            found.setdefault(id(parameter), (parameter, []))[1].append(name)
    return list(found.values())


def _gradients(layers: Sequence[NamedLayer]) -> dict[str, Tensor]:
    """A copy of every gradient under every name; zeros where there is none."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for parameter, names in aliases(layers)
        if parameter.requires_grad
        for name in names
    }
