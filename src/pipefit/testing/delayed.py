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

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.errors import PipefitError
from pipefit.testing.averages import MiniBatchAverages
from pipefit.testing.case import Case, Outcome, Tensors
from pipefit.testing.reference import MicroBatch, micro_batches, optimizer_of
from pipefit.testing.users_model import Whole, first_layers, whole

Rule = Callable[[int, int], int]
Gradients = dict[str, Tensor | None]
"""Gradients by a weight's name; of a tied weight the first in the model's order."""


def version_rule(
    schedule: str, replicas: Sequence[int], num_microbatches: int, warmup: int = 1, first: int = 0
) -> Rule:
    """The function version(stage, micro-batch) of an asynchronous schedule whose stages train from `first` on."""
    workers = sum(replicas)
    m = num_microbatches

    def stashed(stage: int, mb: int) -> int:
        copies = replicas[stage]
        ahead = warmup * ((workers - 1 - sum(replicas[:stage])) // copies)
        return max(mb // copies - ahead, 0) // m

    rules = {
        "pipedream": stashed,
        "pipedream-vertical-sync": lambda stage, mb: stashed(first, mb),
        "pipedream-2bw": lambda stage, mb: max(mb // m - 1, 0),
    }
    return rules[schedule]


class _Part:
    """One stage: all versions of its weights, and its optimizer.

    A forward finds in the whole model the weights of each stage as parameters of the micro-batch's own. Two stages that
    share a weight can hold different versions of it, and autograd keeps their gradients apart.

    Args:
        model: the user's.
        index: the stage's index.
        size: micro-batches per update.

    Attributes:
        held: the names of its weights and buffers.
        leaves: its weights in the micro-batch that runs, each under its first name, as those that follow.
        masters: its newest weights, which the optimizer steps.
        versions: its weights after each update.
        sums: the gradients of each update that is not complete.
    """

    def __init__(self, model: Whole, index: int, size: int) -> None:
        case = model.case
        start = sum(case.counts[:index])
        layers = model.held[start : start + case.counts[index]]
        self.held = frozenset[str]().union(*layers)
        self.size = size
        self.names: dict[str, Sequence[str]] = {}
        self.masters: dict[str, nn.Parameter] = {}
        aliases = model.aliases()
        for name, parameter in model.root.named_parameters():
            if parameter.requires_grad and not self.held.isdisjoint(aliases[name]):
                self.names[name] = aliases[name]
                self.masters[name] = nn.Parameter(parameter.detach().clone())
        self.versions: list[Tensors] = []
        self._keep_version()
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: Any = None
        if self.masters:
            self.optimizer = optimizer_of(case, model.root, list(self.masters.items()))
            if case.updates.scheduler:
                self.scheduler = case.updates.scheduler(self.optimizer)
        self.sums: dict[int, Gradients] = {}
        self.leaves: dict[str, nn.Parameter] = {}
        self._slots: dict[str, list[tuple[nn.Module, str]]] = {}
        for name, names in self.names.items():
            self._slots[name] = [_slot(model.root, alias) for alias in names]

    def _keep_version(self) -> None:
        self.versions.append({name: master.detach().clone() for name, master in self.masters.items()})

    def load(self, version: int) -> None:
        """Makes the leaves of a micro-batch from a version."""
        self.leaves = {name: nn.Parameter(value) for name, value in self.versions[version].items()}

    def point(self) -> None:
        """Puts the leaves into the model."""
        for name, leaf in self.leaves.items():
            for module, key in self._slots[name]:
                setattr(module, key, leaf)

    def accumulate(self, update: int, scale: float) -> None:
        """Adds the gradients of the micro-batch that has just run to the sums of its update.

        Raises:
            PipefitError: one is not finite; the formulas here do not cover the scales of later losses.
        """
        grads = {name: leaf.grad for name, leaf in self.leaves.items()}
        is_finite = all(bool(torch.isfinite(grad).all()) for grad in grads.values() if grad is not None)
        if scale != 1 and not is_finite:
            raise PipefitError(
                f"a gradient overflows at a loss scale of {scale:g}, and skipped updates are not compared without a "
                "flush; give a smaller loss scale"
            )
        sums = self.sums.setdefault(update, {})
        for name, grad in grads.items():
            if grad is not None:
                grad = grad / scale
            sums[name] = _plus(sums.get(name), grad)

    def step(self, gradients: Gradients) -> None:
        """w(t+1) = optimizer(w(t), gradient), for a gradient of any version."""
        for name, master in self.masters.items():
            gradient = gradients[name]
            if gradient is None:
                master.grad = None
            else:
                master.grad = gradient.clone()
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self._keep_version()


def _slot(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a weight, and the weight's name there."""
    path, _, key = name.rpartition(".")
    return root.get_submodule(path), key


def delayed_reference(case: Case) -> Outcome:
    """Trains in this process with the delays of an asynchronous schedule."""
    m = case.request.num_microbatches
    depth = len(case.counts)
    model = whole(case)
    averages = MiniBatchAverages(model.root)
    sizes = [m] * depth
    if case.schedule != "pipedream-2bw":  # its mini-batch of m micro-batches is split among the replicas
        sizes = [m * copies for copies in case.copies]
    parts = [_Part(model, stage, size) for stage, size in enumerate(sizes)]
    changing = [stage for stage, part in enumerate(parts) if part.masters or averages.are_in(part.held)]
    warmup = case.request.parallelism.options.get("warmup", 1)
    version = version_rule(case.schedule, case.copies, m, warmup, min(changing, default=depth - 1))
    first: Tensors = {}
    losses = [0.0] * len(case.batches)
    data: list[MicroBatch] = []
    for batch in case.batches:
        data += micro_batches(case, batch)
    for k, micro_batch in enumerate(data):
        for stage, part in enumerate(parts):
            part.load(version(stage, k))
        losses[k // m] += _run(model, averages, parts, k, micro_batch)
        is_last = k + 1 == len(data)
        done = {part: k // part.size for part in parts if is_last or (k + 1) % part.size == 0}
        # A weight that several stages hold is stepped on all of them by the sum of their gradients.
        gradients = _clipped(_summed(done, m, len(data)), case.updates.clip_norm)
        for part, update in done.items():
            if update == 0:
                first.update(_shown(part, gradients))
            part.step(gradients)
            averages.update(part.held)
    names: dict[str, None] = {}
    for part in parts:
        names |= dict.fromkeys(part.names)
    return Outcome(losses, {0: first}, {0: _newest(model, parts)}, tuple(names))


def _run(model: Whole, averages: MiniBatchAverages, parts: Sequence[_Part], k: int, micro_batch: MicroBatch) -> float:
    """Runs forward and backward of micro-batch k at the leaves of all stages; returns its weighted loss."""
    _require_one_version(model, parts)
    starts = dict(zip(first_layers(model.case), parts, strict=True))
    for part in reversed(parts):
        part.point()

    def begin(layer: int) -> None:
        if layer in starts:
            starts[layer].point()

    x, y, share = micro_batch
    scale = model.case.first_scale or 1.0
    with averages.micro_batch() as forward:
        with forward:
            loss = model.loss(k, x, y, share, begin)
        if loss.requires_grad:
            (loss * scale).backward()
    for part in parts:
        part.accumulate(k // part.size, scale)
    return float(loss.detach().double())


def _require_one_version(model: Whole, parts: Sequence[_Part]) -> None:
    """Refuses a model whose forward cannot be given two versions of a weight.

    Raises:
        PipefitError: two stages hold different versions of one.
    """
    if model.begins_layers:
        return
    seen: Tensors = {}
    for part in parts:
        for name, leaf in part.leaves.items():
            if not torch.equal(seen.setdefault(name, leaf), leaf):
                raise PipefitError(
                    f"{name} is in two stages that hold different versions of it, and the model is cut at lines of its "
                    f"graph, so its own forward cannot use both: check it with a schedule other than "
                    f"{model.case.schedule}"
                )


def _shown(part: _Part, gradients: Gradients) -> Iterable[tuple[str, Tensor]]:
    """A copy of the gradients of a stage, under all names; zeros where there is none."""
    for name, names in part.names.items():
        gradient = gradients[name]
        if gradient is None:
            shown = torch.zeros_like(part.masters[name])
        else:
            shown = gradient.clone()
        yield from dict.fromkeys(names, shown).items()


def _newest(model: Whole, parts: Sequence[_Part]) -> Tensors:
    """The newest weights and buffers."""
    weights = model.state()
    for part in parts:
        part.load(-1)
        part.point()
        state = model.state()
        weights |= {name: state[name] for name in state if name in part.held}
    return weights


def _summed(done: dict[_Part, int], m: int, total: int) -> Gradients:
    """The gradients of the complete updates: the mean over their mini-batches, tied ones summed over stages."""
    found: Gradients = {}
    for part, update in done.items():
        size = min(part.size, total - update * part.size)
        mini_batches = math.ceil(size / m)
        for name, gradient in part.sums.pop(update).items():
            if gradient is not None:
                gradient = gradient / mini_batches
            found[name] = _plus(found.get(name), gradient)
    return found


def _plus(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    if new is None:
        return old
    if old is None:
        return new.clone()
    return old + new


def _clipped(gradients: Gradients, clip_norm: float | None) -> Gradients:
    """The gradients of an update, scaled to a global norm of at most `clip_norm`; a tied weight counts once."""
    if not clip_norm:
        return gradients
    present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    norm = sum(float(gradient.double().square().sum()) for gradient in present.values()) ** 0.5
    factor = min(1.0, clip_norm / (norm + 1e-6))
    scaled = {name: gradient * factor for name, gradient in present.items()}
    return gradients | scaled
