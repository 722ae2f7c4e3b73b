"""The data of a training run: ranks compare it before the first step; long programs draw it when needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from pipefit.checkpoint.run_state import RunState
from pipefit.errors import DataError
from pipefit.parallel.alike import CURE, content_sum, described
from pipefit.profiling.tensors import tensors_of
from pipefit.runtime.collectives import check_alike
from pipefit.runtime.microbatches import MicroBatch, Weigh, feed_of
from pipefit.runtime.session import Session
from pipefit.spec.files import JsonObject

_KEPT_STEPS = 4
_MOST_IN_FLIGHT = 256


class DataComparison:
    """Compares the first data of each `fit` among its ranks, and the first batch of those given one by one.

    Args:
        session: of the run.
        state: of the training, to be compared, too.

    Attributes:
        session: of the run now.
        is_due: whether ranks compare the next batch of `step`.
        enters: takes the first batch of a process that enters the run, where the others do not begin; see `meet`.
    """

    def __init__(self, session: Session, state: RunState) -> None:
        self.session = session
        self._state = state
        self.is_due = session.is_distributed
        self.enters: Callable[[Any], None] | None = None

    def batches(self, batches: Iterator[Any], number: int | None, steps: int | None) -> Iterator[Any]:
        """The batches, after a check that all ranks have equally many and the same first one.

        Args:
            batches: of the training.
            number: of batches in an epoch; None: unknown.
            steps: number of batches to take; None: all.

        Raises:
            DataError: on every rank with the same message: they differ.
        """
        if not self.session.is_distributed:
            return batches
        first = list(islice(batches, 1))
        if self.enters is not None:
            self.enters(next(iter(first), None))
            self.enters = None
            return chain(first, batches)
        facts: JsonObject = {"batches": number, "steps": steps}
        if first:
            facts |= _facts_of(first[0])
        self._compare(facts)
        return chain(first, batches)

    def meet(self, batch: Any) -> None:
        """Compares the next batch with that of a process that enters.

        Raises:
            DataError: on every rank with the same message: they differ.
        """
        self._compare(_facts_of(batch))

    def batch(self, batch: Any) -> None:
        """Compares a batch.

        Raises:
            DataError: on every rank with the same message: it differs.
        """
        if self.is_due:
            self.session.roll_call("Pipeline.step()")
            self._compare(_facts_of(batch))

    def _compare(self, facts: JsonObject) -> None:
        self.is_due = False
        facts |= {"steps trained": self._state.num_updates, "position in the data": self._state.position.words}
        self.session.unit(lambda: check_alike(self.session, lambda: facts, DataError, CURE))


def _facts_of(batch: Any) -> JsonObject:
    """The facts of a first batch that ranks compare."""
    return {"shapes of the first batch": described(batch), "checksum of the first batch": _checksum(batch)}


def samples_of(batch: Any) -> int | None:
    """Number of samples of a batch; None: it has no tensors."""
    return max((tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()), default=None)


def check_fit(steps: int | None, held_out: object, evaluate_every: int) -> None:
    """Checks the numbers of a `fit`.

    Raises:
        DataError: one is too small, or there is nothing to evaluate on.
    """
    if steps is not None and steps < 1:
        raise DataError(f"steps: expected at least 1, got {steps}")
    if evaluate_every < 0:
        raise DataError(f"evaluate_every: expected a number of steps of at least 0, got {evaluate_every}")
    if evaluate_every and held_out is None:
        raise DataError(f"evaluate_every={evaluate_every}: give held_out=…, the batches to evaluate on")


def size_of(x: Any) -> tuple[int, int]:
    """Number of samples of a model's input, and of tokens where it consists of token ids; masked ones do not count."""
    if isinstance(x, Mapping):
        ids = x.get("input_ids")
        mask = x.get("attention_mask")
    else:
        ids = x
        mask = None
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 2:
        return samples_of(x) or 0, 0
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return len(ids), int(mask.sum())
    return len(ids), ids.numel()


def _checksum(batch: Any) -> int:
    checksum = 0
    for tensor in tensors_of(batch):
        checksum = content_sum(tensor, checksum)
    return checksum


class BatchStream:
    """The feed of a program of many steps: draws (input, target) batches in order, one for each step.

    Args:
        batches: as many as the program has steps.
        num_microbatches: of a step.
        first_ordinal: number of the first micro-batch since training began.
        weigh: from a target to the weight of its micro-batch.
    """

    def __init__(
        self, batches: Iterator[Any], num_microbatches: int, first_ordinal: int, weigh: Weigh | None = None
    ) -> None:
        self._batches = batches
        self._size = num_microbatches
        self._first = first_ordinal
        self._weigh = weigh
        # A micro-batch has left the pipeline long before this many later ones have entered it.
        most_steps = _KEPT_STEPS + -(-_MOST_IN_FLIGHT // num_microbatches)
        self._kept: deque[MicroBatch] = deque(maxlen=most_steps * num_microbatches)
        self._drawn = 0

    def __getitem__(self, mb: int) -> MicroBatch:
        step = mb // self._size
        while self._drawn <= step:
            try:
                batch = next(self._batches)
            except StopIteration:
                raise DataError(
                    f"the data ended after {self._drawn} batches, before step {step}; give `steps` at most that many"
                ) from None
            ordinal = self._first + self._drawn * self._size
            if self._kept:
                before = self._kept[-1].batch
            else:
                before = None
            self._kept += feed_of(batch, self._size, ordinal, "train", self._weigh, before)
            self._drawn += 1
        return self._kept[mb - self._drawn * self._size]
