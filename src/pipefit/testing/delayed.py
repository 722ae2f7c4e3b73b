"""The asynchronous schedules by their formulas: gradients of old weights, applied to new ones.

Mini-batch k computes all its gradients at the weights w_s^{(version(s, k))} of every stage s, and stage s adds them to
its newest version. `version` is the whole difference between the schedules; it is written here from the papers, and no
program is read.

    pipedream        version(s, k) = ⌊max(⌊k/R_s⌋ − W_s, 0) / m⌋      W_s = ⌊(N − 1 − Σ_{t<s} R_t) / R_s⌋
    vertical sync    version(s, k) = version(0, k) of pipedream
    2BW              version(s, k) = max(⌊k/m⌋ − 1, 0)

R_s replicas of stage s, N workers, m micro-batches per mini-batch, k counts micro-batches. Replica k mod R_s runs W_s
forwards before its first backward and then alternates one of each, so when it begins its j-th forward (j = ⌊k/R_s⌋) it
has finished max(j − W_s, 0) backwards, of which every m make a version. With R_s = 1, m = 1 and n stages that is
k − min(k, n−1−s).

Source: PipeDream (SOSP 2019) §3.2–3.4; PipeDream-2BW (ICML 2021) §3.1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipefit.errors import PipefitError
from pipefit.stage.batchnorm import commit
from pipefit.stage.split import NamedLayer, named_layers
from pipefit.stage.stage import Stage
from pipefit.testing.case import Case, Outcome
from pipefit.testing.reference import aliases, as_sent, for_the_loss, micro_batches, on_device, shares_of

Rule = Callable[[int, int], int]
Gradients = list[Tensor | None]


def version_rule(schedule: str, replicas: Sequence[int], num_microbatches: int, warmup: int = 1) -> Rule:
    """The function version(stage, micro-batch) of an asynchronous schedule."""
    workers, m = sum(replicas), num_microbatches

    def stashed(stage: int, mb: int) -> int:
        copies = replicas[stage]
        ahead = warmup * ((workers - 1 - sum(replicas[:stage])) // copies)
        return max(mb // copies - ahead, 0) // m

    rules: dict[str, Rule] = {
        "pipedream": stashed,
        "pipedream-vertical-sync": lambda stage, mb: stashed(0, mb),
        "pipedream-2bw": lambda stage, mb: max(mb // m - 1, 0),
    }
    return rules[schedule]


@dataclass
class _Part:
    """One stage: its layers with their live parameters, all versions of their weights, and its optimizer.

    `names` are those of the parameters that train; `masters` are what the optimizer steps; `size` counts micro-batches
    per update; `sums` are the gradients of each update so far.
    """

    stage: Stage
    parameters: list[nn.Parameter]
    names: list[list[str]]
    masters: list[nn.Parameter]
    versions: list[list[Tensor]]
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    size: int
    sums: dict[int, Gradients]

    def accumulate(self, update: int, scale: float) -> None:
        """Adds the gradients of the micro-batch that has just run to those of its update.

        Raises:
            PipefitError: one is not finite; which later losses would have another scale is in no formula here.
        """
        if scale != 1 and not all(torch.isfinite(p.grad).all() for p in self.parameters if p.grad is not None):
            raise PipefitError(
                f"a gradient overflows at a loss scale of {scale:g}, and skipped updates are not compared without a "
                "flush; give a smaller loss scale"
            )
        sums = self.sums.setdefault(update, [None] * len(self.parameters))
        for index, parameter in enumerate(self.parameters):
            sums[index] = _plus(sums[index], None if parameter.grad is None else parameter.grad / scale)
        for parameter in self.parameters:
            parameter.grad = None


def delayed_reference(case: Case) -> Outcome:
    """Trains in this process with the delays of an asynchronous schedule."""
    m, depth = case.request.microbatches, len(case.counts)
    replicas = case.copies
    version = version_rule(case.schedule, replicas, m, case.request.parallelism.options.get("warmup", 1))
    whole = case.schedule == "pipedream-2bw"  # its mini-batch of m micro-batches is shared out among the replicas
    parts = [_part(case, s, m if whole else m * replicas[s]) for s in range(depth)]
    owners = {name: names[0] for _, names in aliases(named_layers(case.model)) for name in names}
    first: dict[str, Tensor] = {}
    losses = [0.0] * len(case.batches)
    data = list(_stream(case))
    for k, (x, y, share) in enumerate(data):
        losses[k // m] += _run(case, parts, version, k, x, y, share)
        done = {s: k // part.size for s, part in enumerate(parts) if (k + 1) % part.size == 0 or k + 1 == len(data)}
        # A weight that several stages hold is stepped on all of them by the sum of their gradients.
        gradients = _summed(parts, done, owners, m, len(data))
        _clip(gradients, parts, owners, case.updates.clip_norm)
        for s, update in done.items():
            if update == 0:
                for names, parameter, gradient in zip(parts[s].names, parts[s].parameters, gradients[s], strict=True):
                    shown = torch.zeros_like(parameter) if gradient is None else gradient.clone()
                    first.update(dict.fromkeys(names, shown))
            _step(parts[s], gradients[s], update)
    weights: dict[str, Tensor] = {}
    for part in parts:
        _point(part, -1)
        weights.update({name: value.detach().clone() for name, value in part.stage.state_dict().items()})
    names = dict.fromkeys(owners[n] for part in parts for names in part.names for n in names)
    return Outcome(losses, {0: first}, {0: weights}, tuple(names))


def _part(case: Case, index: int, size: int) -> _Part:
    """A stage on a deep copy of the model, so that two stages that share a weight can hold different versions of it."""
    layers = named_layers(copy.deepcopy(case.model))
    start = sum(case.counts[:index])
    mine: list[NamedLayer] = layers[start : start + case.counts[index]]
    stage = Stage(index, mine, torch.device(case.device), case.updates.seed)
    stage.half = case.half
    trained = [(p, names) for p, names in aliases(mine) if p.requires_grad]
    parameters = [p for p, _ in trained]
    masters = [nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer = case.optimizer(masters) if masters else None
    scheduler = case.updates.scheduler(optimizer) if case.updates.scheduler and optimizer else None
    versions = [[p.detach().clone() for p in parameters]]
    return _Part(stage, parameters, [names for _, names in trained], masters, versions, optimizer, scheduler, size, {})


def _stream(case: Case) -> Any:
    for x, y in case.batches:
        targets = micro_batches(y, case.request.microbatches)
        yield from zip(
            micro_batches(x, case.request.microbatches), targets, shares_of(targets, case.updates.weigh), strict=True
        )


def _run(case: Case, parts: Sequence[_Part], version: Rule, k: int, x: Any, y: Any, share: float) -> float:
    """Forward and backward of micro-batch k at the versions of the rule; its weighted loss."""
    payload = on_device(x, case.device)
    for s, part in enumerate(parts):
        _point(part, version(s, k))
        payload = part.stage.forward(as_sent(payload, case.half) if s else payload, k, update=k // part.size)
    scale = case.first_scale or 1.0
    loss = case.loss(for_the_loss(payload, case.half), on_device(y, case.device)) * share
    if loss.requires_grad:
        (loss * scale).backward()
    for part in parts:
        part.accumulate(k // part.size, scale)
    return float(loss.detach().double())


@torch.no_grad()
def _point(part: _Part, version: int) -> None:
    for parameter, tensor in zip(part.parameters, part.versions[version], strict=True):
        parameter.copy_(tensor)


def _summed(
    parts: Sequence[_Part], done: dict[int, int], owners: dict[str, str], m: int, total: int
) -> dict[int, Gradients]:
    """The gradients of the complete updates: the mean over their mini-batches, tied ones summed over stages."""
    tied: dict[str, Tensor | None] = {}
    for s, update in done.items():
        size = parts[s].size
        mini_batches = -(-min(size, total - update * size) // m)
        for names, gradient in zip(parts[s].names, parts[s].sums.pop(update), strict=True):
            mean = None if gradient is None else gradient / mini_batches
            tied[owners[names[0]]] = _plus(tied.get(owners[names[0]]), mean)
    return {s: [tied[owners[names[0]]] for names in parts[s].names] for s in done}


def _plus(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    return old if new is None else new.clone() if old is None else old + new


def _clip(
    gradients: dict[int, Gradients], parts: Sequence[_Part], owners: dict[str, str], clip_norm: float | None
) -> None:
    """Scales all gradients of an update to a global norm of at most `clip_norm`; a tied weight counts once."""
    if clip_norm is None or not gradients:
        return
    once = {owners[names[0]]: g for s in gradients for names, g in zip(parts[s].names, gradients[s], strict=True)}
    norm = sum(float(g.double().square().sum()) for g in once.values() if g is not None) ** 0.5
    factor = min(1.0, clip_norm / (norm + 1e-6))
    for s in gradients:
        gradients[s] = [None if g is None else g * factor for g in gradients[s]]


def _step(part: _Part, gradients: Gradients, update: int) -> None:
    """w(t+1) = optimizer(w(t), gradient), whatever version the gradient was taken at."""
    for master, gradient in zip(part.masters, gradients, strict=True):
        master.grad = None if gradient is None else gradient.clone()
    if part.optimizer is not None:
        part.optimizer.step()
    if part.scheduler is not None:
        part.scheduler.step()
    part.versions.append([master.detach().clone() for master in part.masters])
    commit(part.stage.batchnorms, update)
