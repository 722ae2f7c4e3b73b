"""The loss of each step, and over data that is not trained on: the same number on every rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from pipefit.errors import DataError, ModelError, NonFiniteLossError
from pipefit.ir.program import Header
from pipefit.pipeline.batches import samples_of
from pipefit.pipeline.callbacks import Record
from pipefit.runtime.collectives import exchange, start_sum
from pipefit.runtime.engine import Engine
from pipefit.runtime.executor import Execution
from pipefit.runtime.finite import CURE
from pipefit.runtime.microbatches import Weigh, feed_of, pair_of
from pipefit.runtime.progress import LOSS
from pipefit.schedules.forward import forward_only
from pipefit.schedules.registry import Schedule
from pipefit.schedules.shape import Shape
from pipefit.spec.options import SKIP, STOP
from pipefit.stage.training import Training


class PendingLosses:
    """The losses and metrics of a pass, which are being sent to every rank; `wait` waits for them."""

    def __init__(
        self, engine: Engine, runs: Sequence[Execution], num_microbatches: int, num_steps: int, *extra: float
    ) -> None:
        # The last two count the ranks that want to stop, so that all of them stop after the same step.
        own, stop = extra if engine.mesh.is_first else (0.0,) * len(extra), engine.session.stop
        extra = (*own, float(stop.requested), float(stop.wanted))
        # Every micro-batch's loss is known to one rank, and zero on the others: their sum is exact in any order, so the
        # losses of the steps are bitwise the same for every placement of micro-batches.
        self._names = _names(engine, runs)
        figures = torch.zeros(1 + len(self._names), num_steps, num_microbatches, dtype=torch.float64)
        losses = {mb: loss.reshape(()).double() for run in runs for mb, loss in run.losses}
        if losses and engine.mesh.is_first:
            logged = {mb: metrics for run in runs for mb, metrics in run.logged.items()}
            rows = [torch.stack(list(losses.values()))]
            rows += [torch.stack([logged[mb][name] for mb in losses]) for name in self._names]
            figures.view(len(rows), -1)[:, list(losses)] = torch.stack(rows).cpu()
        self._table = torch.cat([figures.view(-1), torch.tensor(extra, dtype=torch.float64)])
        self._figures, self._session = self._table[: figures.numel()].view_as(figures), engine.session
        self._work = start_sum(engine.session, self._table)

    def wait(self) -> Sequence[float]:
        """The losses by step."""
        if self._work is not None:
            with self._session.at(LOSS):
                self._work.wait()
        requested, wanted = self._table[-2:].bool().tolist()
        self._session.stop.agreed |= requested
        self._session.stop.ended |= wanted
        return self._figures[0].sum(1).tolist()

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The means of the metrics that the loss returned, by step, after `wait`."""
        means = self._figures[1:].sum(2).T.tolist()
        return [dict(zip(self._names, of_step, strict=True)) for of_step in means]

    @property
    def of_microbatches(self) -> Sequence[float]:
        """The losses by micro-batch, weighted, after `wait`."""
        return self._figures[0].view(-1).tolist()

    @property
    def extra(self) -> Sequence[float]:
        """The further sums, after `wait`."""
        return self._table[self._figures.numel() : -2].tolist()


def _names(engine: Engine, runs: Sequence[Execution]) -> tuple[str, ...]:
    """The names of the metrics that the loss returns; ranks agree on them after their first pass.

    Raises:
        ModelError: a micro-batch has other metrics than an earlier one, or a name that a record has.
    """
    own = {tuple(sorted(metrics)): mb for run in runs for mb, metrics in run.logged.items()}
    if engine.metric_names is None:
        found = exchange(engine.session, next(iter(own), None))
        engine.metric_names = tuple(next((names for names in found if names is not None), ()))
        if taken := sorted({one.name for one in fields(Record)}.intersection(engine.metric_names)):
            raise ModelError(f"the loss returned a metric named {taken[0]}, which records have already: rename it")
    for names, mb in own.items():
        if names != engine.metric_names:
            first, now = (", ".join(some) or "none" for some in (engine.metric_names, names))
            raise ModelError(
                f"the loss returned the metrics {now} for micro-batch {mb}, but {first} for an earlier one; return the "
                "same names for every micro-batch, in training and evaluation"
            )
    return engine.metric_names


class Evaluation(NamedTuple):
    """Means over held-out data.

    Attributes:
        loss: of the training.
        measured: of the caller's metric; 0 without one.
        metrics: that the loss returned, by name.
    """

    loss: float
    measured: float
    metrics: dict[str, float]


def needs_norm(training: Training, schedule: Schedule, shape: Shape) -> bool:
    """Returns whether a program has the norm of all gradients before its steps.

    To find an update that is not finite before any rank steps, it is added where that makes no rank wait long; spilled
    stages would be fetched twice. Stages that would have to skip one together need it anyhow.

    Args:
        training: its clipping, scale of the loss and policy.
        schedule: of the program.
        shape: of the program, with its spilling, from whichever options that comes.
    """
    spills = schedule.spills or shape.spill is not None
    together = schedule.is_synchronous or spills or shape.tensor > 1
    cheap = schedule.is_synchronous and schedule.flushes and not spills
    return training.needs_norm or {STOP: cheap, SKIP: together}.get(training.nonfinite, False)


def finite(loss: float, update: int, policy: str = STOP) -> float:
    """The loss of an update, if it is finite, or such updates are skipped.

    Raises:
        NonFiniteLossError: it is not finite.
    """
    if not math.isfinite(loss) and policy != SKIP:
        raise NonFiniteLossError(
            f"the loss of update {update} is {loss}; {CURE} (nonfinite=skip); "
            "the weights may hold it already, so resume from an earlier checkpoint"
        )
    return loss


def refusal(losses: Sequence[float], norms: Sequence[float], step: int, where: str) -> NonFiniteLossError:
    """The error of a step that no rank has made, the same on every rank.

    Args:
        losses: of its micro-batches.
        norms: squares of the norms of the ranks' gradients.
        step: its number.
        where: its batch, in words.
    """
    bad = [str(mb) for mb, loss in enumerate(losses) if not math.isfinite(loss)]
    ranks = [str(rank) for rank, norm in enumerate(norms) if not math.isfinite(norm)]
    what = f"the loss of its micro-batches {', '.join(bad)}" if bad else f"a gradient on the ranks {', '.join(ranks)}"
    return NonFiniteLossError(
        f"step {step} was not made: {what} is not finite{where and f' ({where})'}; "
        f"the weights are those after step {step - 1}; {CURE} (nonfinite=skip)"
    )


def evaluate(
    engine: Engine,
    header: Header,
    batches: Iterable[Any],
    metric: Callable[[Any, Any], float] | None,
    weigh: Weigh | None,
) -> Evaluation:
    """Mean loss and mean metrics over some batches, the same on every rank.

    Args:
        engine: the ranks.
        header: of the training's program: its stages, and the micro-batches of a full batch.
        batches: of (input, target).
        metric: from output and target to a number.
        weigh: from a target to the weight of its micro-batch.

    Raises:
        DataError: there are no batches.
    """
    total = loss = measured = 0.0
    metrics: Counter[str] = Counter()
    measure = engine.mesh.metric(metric) if metric else None
    for batch in batches:
        x, y = pair_of(batch)
        engine.mesh.check(x)
        samples = samples_of(y) or 0
        num = max(min(header.num_microbatches, samples), 1)
        count = weigh(y) if weigh else samples
        feed = feed_of((x, y), num, 0, "eval", weigh)
        for worker in engine.workers:
            worker.train(False)
        with torch.no_grad():
            runs = engine.run(forward_only(header, num), feed, measure)
        sums = PendingLosses(engine, runs, num, 1, sum(value for run in runs for value in run.metrics))
        loss += sums.wait()[0] * count
        measured += sums.extra[0] * count
        metrics.update({name: value * count for name, value in sums.metrics[0].items()})
        total += count
    if not total:
        raise DataError("there is no data to evaluate: the iterable of batches is empty")
    return Evaluation(loss / total, measured / total, {name: value / total for name, value in metrics.items()})
