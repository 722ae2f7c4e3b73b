"""The asynchronous schedules by their formulas: gradients of old weights, applied to new ones.

Mini-batch k computes all its gradients at the weights w_s^{(version(s, k))} of every stage s, and stage s adds them to
its newest version. The schedules differ only in `version`, which is written here from the papers, without a program.

    pipedream        version(s, k) = ⌊max(⌊k/R_s⌋ − W_s, 0) / m⌋      W_s = ⌊(N − 1 − Σ_{t<s} R_t) / R_s⌋
    vertical sync    version(s, k) = version(f, k) of pipedream
    2BW              version(s, k) = max(⌊k/m⌋ − 1, 0)

R_s replicas of stage s, f the first stage that trains, N workers, m micro-batches per mini-batch, k counts
micro-batches. Replica k mod R_s runs W_s forwards before its first backward and then alternates one of each, so when it
begins its j-th forward (j = ⌊k/R_s⌋) it has finished max(j − W_s, 0) backwards, of which every m make a version. With
R_s = 1, m = 1 and n stages that is k − min(k, n−1−s).

Source: PipeDream (SOSP 2019) §3.2–3.4; PipeDream-2BW (ICML 2021) §3.1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.errors import PipefitError
from pipefit.stage.batchnorm import commit
from pipefit.stage.optimizing import OptimizerMaker
from pipefit.stage.split import named_layers
from pipefit.stage.stage import Stage
from pipefit.testing.case import Case, Outcome
from pipefit.testing.reference import aliases, micro_batches, weighted_loss

Rule = Callable[[int, int], int]
Gradients = dict[str, Tensor | None]
"""Gradients by a weight's name; of a tied weight the first in the model's order."""


def version_rule(
    schedule: str, replicas: Sequence[int], num_microbatches: int, warmup: int = 1, first: int = 0
) -> Rule:
    """The function version(stage, micro-batch) of an asynchronous schedule whose stages train from `first` on."""
    workers, m = sum(replicas), num_microbatches

    def stashed(stage: int, mb: int) -> int:
        copies = replicas[stage]
        ahead = warmup * ((workers - 1 - sum(replicas[:stage])) // copies)
        return max(mb // copies - ahead, 0) // m

    rules: dict[str, Rule] = {
        "pipedream": stashed,
        "pipedream-vertical-sync": lambda stage, mb: stashed(first, mb),
        "pipedream-2bw": lambda stage, mb: max(mb // m - 1, 0),
    }
    return rules[schedule]


class _Part:
    """One stage: its layers with their live parameters, all versions of their weights, and its optimizer.

    It is a stage of a deep copy of the model, so that two stages that share a weight can hold different versions of it.

    Args:
        case: the training.
        index: of the stage.
        size: micro-batches per update.
        owners: the name of each weight, by all of its names.
    """

    def __init__(self, case: Case, index: int, size: int, owners: dict[str, str]) -> None:
        start = sum(case.counts[:index])
        layers = named_layers(copy.deepcopy(case.model))[start : start + case.counts[index]]
        self.stage = Stage(index, layers, torch.device(case.device), case.updates.seed)
        self.stage.half = case.half
        self.names = {owners[names[0]]: names for p, names in aliases(layers) if p.requires_grad}
        self.parameters = {owners[names[0]]: p for p, names in aliases(layers) if p.requires_grad}
        self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in self.parameters.items()}
        self.versions = [{name: p.detach().clone() for name, p in self.parameters.items()}]
        optimizers = OptimizerMaker(case.optimizer, named_layers(case.model), case.updates.no_decay)
        self.optimizer = optimizers.of(list(self.masters.items())) if self.masters else None
        make = case.updates.scheduler
        self.scheduler = make(self.optimizer) if make and self.optimizer else None
        self.size = size
        self.sums: dict[int, Gradients] = {}

    @torch.no_grad()
    def point(self, version: int) -> None:
        """Sets the weights to those of a version."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.versions[version][name])

    def accumulate(self, update: int, scale: float) -> None:
        """Adds the gradients of the micro-batch that has just run to those of its update.

        Raises:
            PipefitError: one is not finite; the formulas here do not cover the scales of later losses.
        """
        grads = {name: p.grad for name, p in self.parameters.items()}
        if scale != 1 and not all(torch.isfinite(grad).all() for grad in grads.values() if grad is not None):
            raise PipefitError(
                f"a gradient overflows at a loss scale of {scale:g}, and skipped updates are not compared without a "
                "flush; give a smaller loss scale"
            )
        sums = self.sums.setdefault(update, {})
        for name, grad in grads.items():
            sums[name] = _plus(sums.get(name), None if grad is None else grad / scale)
            self.parameters[name].grad = None

    def step(self, gradients: Gradients, update: int) -> None:
        """w(t+1) = optimizer(w(t), gradient), for a gradient of any version."""
        for name, master in self.masters.items():
            gradient = gradients[name]
            master.grad = None if gradient is None else gradient.clone()
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.versions.append({name: master.detach().clone() for name, master in self.masters.items()})
        commit(self.stage.batchnorms, update)


def delayed_reference(case: Case) -> Outcome:
    """Trains in this process with the delays of an asynchronous schedule."""
    m, depth = case.request.num_microbatches, len(case.counts)
    replicas = case.copies
    owners = {name: names[0] for _, names in aliases(named_layers(case.model)) for name in names}
    whole = case.schedule == "pipedream-2bw"  # its mini-batch of m micro-batches is split among the replicas
    parts = [_Part(case, s, m if whole else m * replicas[s], owners) for s in range(depth)]
    frozen = next((s for s, part in enumerate(parts) if part.masters or part.stage.batchnorms), depth - 1)
    warmup = case.request.parallelism.options.get("warmup", 1)
    version = version_rule(case.schedule, replicas, m, warmup, frozen)
    first: dict[str, Tensor] = {}
    losses = [0.0] * len(case.batches)
    data = [part for batch in case.batches for part in micro_batches(case, batch)]
    for k, micro_batch in enumerate(data):
        losses[k // m] += _run(case, parts, version, k, *micro_batch)
        done = {part: k // part.size for part in parts if (k + 1) % part.size == 0 or k + 1 == len(data)}
        # A weight that several stages hold is stepped on all of them by the sum of their gradients.
        gradients = _clipped(_summed(done, m, len(data)), case.updates.clip_norm)
        for part, update in done.items():
            if update == 0:
                for name, parameter in part.parameters.items():
                    gradient = gradients[name]
                    shown = torch.zeros_like(parameter) if gradient is None else gradient.clone()
                    first.update(dict.fromkeys(part.names[name], shown))
            part.step(gradients, update)
    weights: dict[str, Tensor] = {}
    for part in parts:
        part.point(-1)
        weights.update({name: value.detach().clone() for name, value in part.stage.state_dict().items()})
    return Outcome(
        losses, {0: first}, {0: weights}, tuple(dict.fromkeys(name for part in parts for name in part.names))
    )


def _run(case: Case, parts: Sequence[_Part], version: Rule, k: int, *micro_batch: Any) -> float:
    """Runs forward and backward of micro-batch k at the versions of the rule; returns its weighted loss."""
    for s, part in enumerate(parts):
        part.point(version(s, k))
    updates = [k // part.size for part in parts]
    loss = weighted_loss(case, [part.stage for part in parts], k, updates, *micro_batch)
    scale = case.first_scale or 1.0
    if loss.requires_grad:
        (loss * scale).backward()
    for part, update in zip(parts, updates, strict=True):
        part.accumulate(update, scale)
    return float(loss.detach().double())


def _summed(done: dict[_Part, int], m: int, total: int) -> Gradients:
    """The gradients of the complete updates: the mean over their mini-batches, tied ones summed over stages."""
    found: Gradients = {}
    for part, update in done.items():
        mini_batches = -(-min(part.size, total - update * part.size) // m)
        for name, gradient in part.sums.pop(update).items():
            found[name] = _plus(found.get(name), None if gradient is None else gradient / mini_batches)
    return found


def _plus(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    return old if new is None else new.clone() if old is None else old + new


def _clipped(gradients: Gradients, clip_norm: float | None) -> Gradients:
    """The gradients of an update, scaled to a global norm of at most `clip_norm`; a tied weight counts once."""
    if clip_norm is None:
        return gradients
    norm = sum(float(g.double().square().sum()) for g in gradients.values() if g is not None) ** 0.5
    factor = min(1.0, clip_norm / (norm + 1e-6))
    return {name: None if g is None else g * factor for name, g in gradients.items()}
