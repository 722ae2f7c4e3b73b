"""Single-process training in plain torch: the numbers that a synchronous schedule must compute.

The model is the user's own with its own forward; autograd, optimizer, clipping, autocast and loss scales are torch's.
Nothing of the pipeline runs here. What training by micro-batches adds to torch is stated in this folder alone:

    random numbers     a seed for each layer and micro-batch           `users_model`
    batch norm         averages change once per mini-batch             `averages`
    half precision     what crosses a border of stages is rounded      `users_model`
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from pipefit.models.examples import Batch
from pipefit.testing.averages import MiniBatchAverages
from pipefit.testing.case import Case, Outcome, Tensors
from pipefit.testing.users_model import Whole, whole


def reference(case: Case) -> Outcome:
    """Trains the whole model in this process: forward and backward of each micro-batch, then one optimizer step."""
    model = whole(case)
    averages = MiniBatchAverages(model.root)
    trained = {name: parameter for name, parameter in model.root.named_parameters() if parameter.requires_grad}
    optimizer = None
    scheduler = None
    if trained:
        optimizer = optimizer_of(case, model.root, list(trained.items()))
        if case.updates.scheduler:
            scheduler = case.updates.scheduler(optimizer)
    is_scaled = case.first_scale is not None and optimizer is not None
    scaler = torch.amp.GradScaler(case.device, case.first_scale or 1.0, enabled=is_scaled)
    first: Tensors = {}
    losses = []
    for step, batch in enumerate(case.batches):
        number = step * case.request.num_microbatches
        losses.append(_accumulate(model, averages, batch, number, scaler))
        if optimizer is not None:
            scaler.unscale_(optimizer)
        if case.updates.clip_norm and trained:
            torch.nn.utils.clip_grad_norm_(trained.values(), case.updates.clip_norm)
        gradients = first or _gradients(model)
        if optimizer is None or _taken(scaler, optimizer):
            first = gradients
            if scheduler is not None:
                scheduler.step()
        averages.update()
    return Outcome(losses, {0: first}, {0: model.state()}, tuple(trained))


def _accumulate(
    model: Whole, averages: MiniBatchAverages, batch: Batch, first: int, scaler: torch.amp.GradScaler
) -> float:
    """Adds up the gradients of a batch, micro-batch by micro-batch; returns its loss."""
    total = 0.0
    for number, (x, y, share) in enumerate(micro_batches(model.case, batch), first):
        with averages.micro_batch() as forward:
            with forward:
                loss = model.loss(number, x, y, share)
            if loss.requires_grad:
                scaler.scale(loss).backward()
        total += float(loss.detach().double())
    return total


def _taken(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Steps, unless a gradient is not finite; returns whether it did."""
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return not scaler.is_enabled() or scaler.get_scale() >= before


def _gradients(model: Whole) -> Tensors:
    """A copy of every gradient under every name; zeros where there is none."""
    found = {}
    for name, parameter in model.root.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            grad = parameter.grad
            if grad is None:
                grad = torch.zeros_like(parameter)
            found[name] = grad.clone()
    return found


MicroBatch = tuple[Any, Any, float]
"""Input, target, and the share in the mean loss of the batch."""


def _num_samples(target: Any) -> int:
    return len(pytree.tree_leaves(target)[0])


def micro_batches(case: Case, batch: Batch) -> Iterator[MicroBatch]:
    """The micro-batches of a batch."""
    inputs, targets = (_split(payload, case.request.num_microbatches) for payload in batch)
    weigh = case.updates.weigh or _num_samples
    counts = [float(weigh(target)) for target in targets]
    total = sum(counts)
    for x, y, count in zip(inputs, targets, counts, strict=True):
        yield x, y, count / total


def _split(batch: Any, count: int) -> list[Any]:
    """A pytree of tensors split along the first dimension: sizes differ by at most one, the larger ones first."""
    leaves, structure = pytree.tree_flatten(batch)
    parts = [leaf.tensor_split(count) for leaf in leaves]
    return [pytree.tree_unflatten(list(own), structure) for own in zip(*parts, strict=True)]


def optimizer_of(case: Case, root: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """The user's optimizer of some parameters, without weight decay for those that `no_decay` names.

    Args:
        case: has the user's function, from parameters, or from (name, parameter) pairs if its argument says so.
        root: the model, whose modules have a part in the choice.
        named: the parameters, each under the first of its names.
    """
    given: Any = list(named)
    first_argument = next(iter(inspect.signature(case.optimizer).parameters), "")
    if first_argument not in ("named", "named_parameters"):
        given = [parameter for _, parameter in named]
    optimizer = case.optimizer(given)
    spared = _spared(case.updates.no_decay, root)
    without_decay = {parameter for name, parameter in named if name in spared}
    for group in list(optimizer.param_groups):
        group.pop("param_names", None)
        own = [parameter for parameter in group["params"] if parameter in without_decay]
        if own:
            group["params"] = [parameter for parameter in group["params"] if parameter not in without_decay]
            optimizer.add_param_group({**group, "params": own, "weight_decay": 0.0})
    return optimizer


def _spared(no_decay: Sequence[str] | str, root: nn.Module) -> set[str]:
    """All names of the parameters with one of some words in a name, or in the class of a module that holds them."""
    if isinstance(no_decay, str):
        no_decay = no_decay.split(",")
    words = [word.strip().lower() for word in no_decay if word.strip()]
    chosen = set()
    for path, module in root.named_modules(remove_duplicate=False):
        kind = type(module).__name__
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            text = f"{path}.{key}\n{kind}".lower()
            if any(word in text for word in words):
                chosen.add(parameter)
    named = root.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if parameter in chosen}
