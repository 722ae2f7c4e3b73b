"""The loss of each step, and over data that is not trained on: the same number on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from pipefit.errors import DataError, ModelError
from pipefit.ir.program import Header
from pipefit.parallel.alike import CURE, NO_BATCH, Shapes, compare
from pipefit.parallel.waiting import finish_collectives
from pipefit.pipeline.batches import samples_of
from pipefit.pipeline.callbacks import Record
from pipefit.runtime.collectives import check_alike, exchange, start_sum
from pipefit.runtime.engine import Engine
from pipefit.runtime.executor import Execution
from pipefit.runtime.microbatches import Weigh, feed_of, pair_of
from pipefit.runtime.notes import Note
from pipefit.runtime.progress import LOSS
from pipefit.runtime.worker import evaluating
from pipefit.schedules.forward import forward_only
from pipefit.stage.training import Metric

_END = Shapes(0, "no more batches", 0)


class PendingLosses:
    """The losses and metrics of a pass, which are being sent to every rank; `wait` waits for them.

    Attributes:
        extra: the further sums, after `wait`.
    """

    def __init__(
        self, engine: Engine, runs: Sequence[Execution], num_microbatches: int, num_steps: int, *extra: float
    ) -> None:
        # The last ones count the ranks that want to stop, so that all of them stop after the same step, and add up
        # checksums of the batches and their squares, also of their values on the ranks that know them, and likewise the
        # numbers of the newcomers of which ranks know.
        own = extra if engine.mesh.is_first else (0.0,) * len(extra)
        stop = engine.session.stop
        self._shapes = runs[0].feed[num_steps * num_microbatches - 1].batch or NO_BATCH
        mark, values = self._shapes.checksum, self._shapes.values
        newcomer = engine.session.door.known
        of_batches = mark, mark**2, values, values**2, values > 0
        sums = *own, stop.requested, stop.wanted, *of_batches, newcomer, newcomer**2
        # Every micro-batch's loss is known to one rank, and zero on the others: their sum is exact in any order, so the
        # losses of the steps are bitwise the same for every placement of micro-batches.
        self._names = _names(engine, runs)
        figures = [[0.0] * (num_steps * num_microbatches) for _ in range(1 + len(self._names))]
        losses = {mb: loss for run in runs for mb, loss in run.losses}
        if losses and engine.mesh.is_first:
            logged = {mb: metrics for run in runs for mb, metrics in run.logged.items()}
            columns = [list(losses.values())]
            columns += [[logged[mb][name] for mb in losses] for name in self._names]
            for row, column in zip(figures, columns, strict=True):
                for mb, value in zip(losses, torch.stack(column).flatten().cpu().tolist(), strict=True):
                    row[mb] = value
        self._table = torch.tensor([*chain(*figures), *sums], dtype=torch.float64)
        self._figures = self._table[: -len(sums)].view(len(figures), num_steps, num_microbatches)
        self._means: list[list[float]] = []
        self.extra: list[float] = []
        self._session = engine.session
        self._num_ranks = engine.session.num_ranks  # of those that share in the sum
        self._work = start_sum(engine.session, self._table)

    def commit(self) -> bool:
        """Waits in the pass, before its step: all ranks then know the losses, or no rank makes the step."""
        assert self._session.repairs is not None
        self._session.repairs.commit(partial(finish_collectives, self._work), self._table)
        self._work = None
        return True

    def wait(self) -> Sequence[float]:
        """The losses by step.

        Raises:
            DataError: on every rank: ranks had batches of different shapes or values.
        """
        if self._work is not None:
            # After a commit there is nothing to wait for.
            with self._session.at(LOSS):
                finish_collectives(self._work)
        self._session.notes.check()
        *self.extra, requested, wanted, marks, of_marks, values, of_values, known, newcomers, of_newcomers = (
            self._table[self._figures.numel() :].tolist()
        )
        try:
            if marks**2 != of_marks * self._num_ranks:
                compare(self._shapes)
            if values**2 != of_values * known:
                check_alike(self._session, lambda: {"checksum of the batch": self._shapes.values}, DataError, CURE)
        except DataError as problem:
            if torch.is_grad_enabled():  # in an evaluation it is not
                self._session.notes.last = Note(0, True, "DataError", str(problem))
            raise
        self._session.stop.agreed |= requested > 0
        self._session.stop.ended |= wanted > 0
        self._session.door.agree(newcomers, of_newcomers, self._num_ranks)
        self._means = self._figures.sum(2).tolist()
        return self._means[0]

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The means of the metrics that the loss returned, by step, after `wait`."""
        steps = zip(*self._means, strict=True)
        return [dict(zip(self._names, metrics, strict=True)) for _, *metrics in steps]

    @property
    def of_microbatches(self) -> Sequence[float]:
        """The losses by micro-batch, weighted, after `wait`."""
        return self._figures[0].view(-1).tolist()


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
        loss: the loss of the training.
        measured: the value of the caller's metric; 0 without one.
        metrics: that the loss returned, by name.
    """

    loss: float
    measured: float
    metrics: dict[str, float]


def evaluate(
    engine: Engine,
    header: Header,
    batches: Iterable[Any],
    metric: Metric | None,
    weigh: Weigh | None,
) -> Evaluation:
    """Mean loss and mean metrics over some batches, the same on every rank.

    Args:
        engine: the ranks.
        header: the header of the training's program: its stages, and the micro-batches of a full batch.
        batches: pairs of (input, target).
        metric: gives a number from output and target.
        weigh: gives the weight of a micro-batch from its target.

    Raises:
        DataError: there are no batches, or ranks have different ones.
    """
    total = loss = measured = 0.0
    metrics: Counter[str] = Counter()
    if metric:
        measure = engine.mesh.metric(metric)
    else:
        measure = None
    with evaluating(engine.workers), torch.no_grad():
        for batch in _compared(engine, batches):
            x, y = pair_of(batch)
            engine.check(x)
            count: float = samples_of(y) or 1
            num = min(header.num_microbatches, int(count))
            if weigh:
                count = float(weigh(y))
            feed = feed_of((x, y), num, 0, "eval", weigh)
            runs = engine.run(forward_only(header, num), feed, measure)
            sums = PendingLosses(engine, runs, num, 1, sum(value for run in runs for value in run.metrics))
            loss += sums.wait()[0] * count
            measured += sums.extra[0] * count
            metrics.update({name: value * count for name, value in sums.metrics[0].items()})
            total += count
    if not total:
        raise DataError("there is no data to evaluate: the batches are empty, or an iterator that was read before")
    return Evaluation(loss / total, measured / total, {name: value / total for name, value in metrics.items()})


def _compared(engine: Engine, batches: Iterable[Any]) -> Iterator[Any]:
    """The batches; ranks compare each, because programs depend on the number of samples, and their end."""
    for batch in chain(batches, [None]):
        if engine.session.is_distributed:
            with engine.session.progress.waiting():
                compare(_END if batch is None else Shapes.of(batch))
        if batch is not None:
            yield batch
