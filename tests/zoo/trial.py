"""One model of the zoo: cut, trained as a pipeline in several ways, and compared with plain torch."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import pipefit as pf
from pipefit.errors import PipefitError
from tests.zoo.outcome import BROKEN, EXACT, LATE, RAW, REFUSED, WRONG, Result
from tests.zoo.plain import LEARNING_RATE, Trained, difference, sensitivity, train
from tests.zoo.specimen import Specimen

EXAMPLE = 4
SCALES = (1.0, 0.05, 20.0)
TOLERANCE = 1e-9


class Way(NamedTuple):
    """A way to train: stages, schedule, micro-batches, and the chunks of each rank."""

    stages: int
    schedule: str
    micro_batches: int
    chunks: int = 1

    def __str__(self) -> str:
        """The way for people."""
        return f"{self.stages} stages, {self.schedule}, {self.micro_batches} micro-batches"


WAYS = (Way(2, "1f1b", 4), Way(4, "gpipe", 4), Way(4, "gpipe", 1))
IN_PROCESSES = Way(2, "1f1b", 4)


class EndError(Exception):
    """A trial ended before its end."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(outcome, detail)
        self.outcome, self.detail = outcome, detail


def tried(specimen: Specimen, show: Callable[[BaseException], None] = lambda problem: None) -> Result:
    """The outcome of a model over all ways in one process.

    Args:
        specimen: the model.
        show: called with the error that ended the trial, if one did.
    """
    begun = time.perf_counter()
    result = Result(specimen.name, EXACT, by_hand=specimen.by_hand, why=specimen.why)
    try:
        references = _References(specimen)
        references.of(1)
        made = _cut(specimen)
        result.layers = len(made)
        cuts = _cuts(specimen, made)
        for way in ways_of(specimen):
            if way.stages <= len(made) and (specimen.splits or way.micro_batches == 1):
                _compare(specimen, way, references, cuts)
    except EndError as end:
        show(end.__cause__ or end)
        result.outcome, result.detail = end.outcome, end.detail
    result.seconds = time.perf_counter() - begun
    return result


def tried_as_rank(specimen: Specimen, folder: Path, rank: int) -> Result:
    """The outcome of a model over two processes, of which this is one."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "PIPEFIT_RUN": str(folder)})
    result = Result(specimen.name, EXACT)
    way = IN_PROCESSES if specimen.splits else IN_PROCESSES._replace(micro_batches=1)
    try:
        references = _References(specimen)
        made = _cut(specimen)
        if len(made) >= way.stages:
            _compare(specimen, way, references, _cuts(specimen, made))
    except EndError as end:
        result.outcome, result.detail = end.outcome, f"{end.detail} (in two processes)"
    return result


class _References:
    """The training of a model by plain torch, by the number of micro-batches."""

    def __init__(self, specimen: Specimen) -> None:
        self.specimen = specimen
        self.loss = specimen.loss or _own_loss
        self._known: dict[int, Trained] = {}

    def of(self, micro_batches: int) -> Trained:
        """The reference for a number of micro-batches, up to the first step whose loss is not finite."""
        if micro_batches not in self._known:
            try:
                found = train(self.specimen.model(), self.loss, _batches(self.specimen), micro_batches)
            except Exception as problem:
                raise EndError(BROKEN, _words(problem)) from problem
            finite = [torch.tensor(loss).isfinite().item() for loss in found.losses]
            count = finite.index(False) if False in finite else len(finite)
            self._known[micro_batches] = Trained(found.losses[:count], found.states[:count])
        return self._known[micro_batches]

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether the model draws random numbers, also where its library does not say so."""
        if self.specimen.is_random:
            return True
        batches = _batches(self.specimen)[:1]
        found = []
        with torch.random.fork_rng(devices=[]):
            for seed in (1, 2):
                model = self.specimen.model()
                torch.manual_seed(seed)
                found.append(train(model, self.loss, batches, 1))
        return difference(*found).size > TOLERANCE

    def rounding(self, micro_batches: int) -> float:
        """The difference that rounding makes."""
        wanted = self.of(micro_batches)
        batches = _batches(self.specimen)[: len(wanted.losses)]
        return sensitivity(self.specimen.model(), self.loss, batches, micro_batches, wanted)


def _batches(specimen: Specimen) -> list[Any]:
    """The data of a training, made anew: a model may write into it."""
    steps = 2 if specimen.group == "hand" else 1
    return [
        specimen.batch(specimen.samples, 100 * place + step, scale)
        for place, scale in enumerate(SCALES, 1)
        for step in range(steps)
    ]


def _own_loss(output: Any, batch: Any) -> torch.Tensor:
    return output.loss


def ways_of(specimen: Specimen) -> list[Way]:
    """The ways to train in one process.

    A hand-written model has trained in two processes before. One of a library takes seconds for each step.
    """
    left_out = WAYS[0] if specimen.group == "hand" else WAYS[1]
    return [way for way in WAYS if way != left_out]


def _cut(specimen: Specimen) -> Any:
    model = specimen.model()
    if isinstance(model, nn.Sequential):
        return model
    return _accepted(lambda: pf.cut(model, specimen.batch(EXAMPLE, 0)[0]))


def _cuts(specimen: Specimen, made: Any) -> Iterator[Any]:
    """A cut, and others like it; those of a hand-written model are made anew: a copy may share what it hides."""
    untrained = None
    if specimen.group != "hand":
        # A weight that a hook computes, as by the old weight norm, cannot be copied.
        with contextlib.suppress(RuntimeError):
            untrained = copy.deepcopy(made)
    yield made
    while True:
        yield _cut(specimen) if untrained is None else copy.deepcopy(untrained)


def _accepted(make: Callable[[], Any]) -> Any:
    """The cut of a model, or the end of the trial."""
    try:
        return make()
    except PipefitError as problem:
        raise EndError(REFUSED, str(problem)) from problem
    except Exception as problem:
        raise EndError(RAW, f"before training: {_words(problem)}") from problem


def _compare(specimen: Specimen, way: Way, references: _References, cuts: Iterator[Any]) -> None:
    """Trains in one way, and ends the trial if the numbers are not those of the reference."""
    wanted = references.of(way.micro_batches)
    if references.is_random:
        alone = Way(1, "gpipe", way.micro_batches)
        wanted = _trained(specimen, alone, _batches(specimen), next(cuts))
    batches = _batches(specimen)[: len(wanted.losses)]
    found = _trained(specimen, way, batches, next(cuts))
    apart = difference(wanted, found)
    if apart.size <= TOLERANCE:
        return
    if not references.is_random and apart.size <= 100 * references.rounding(way.micro_batches):
        return
    raise EndError(WRONG, f"{way}: {apart}")


def _trained(specimen: Specimen, way: Way, batches: list[Any], made: Any) -> Trained:
    def make() -> pf.Pipeline:
        return pf.Pipeline(
            made,
            loss=specimen.loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
            stages=way.stages,
            schedule=way.schedule,
            microbatches=way.micro_batches,
            example=specimen.batch(EXAMPLE, 0) if isinstance(made, nn.Sequential) else None,
            parallelism=pf.Parallelism(ranks=way.stages // way.chunks, chunks=way.chunks),
        )

    pipe = _accepted(make)
    found = Trained([], [])
    try:
        for batch in batches:
            found.losses.append(pipe.step(*batch))
            found.states.append({name: value.clone() for name, value in pipe.state_dict().items()})
        pipe.close()
    except PipefitError as problem:
        raise EndError(LATE, f"{way}, step {len(found.losses) + 1}: {problem}") from problem
    except Exception as problem:
        raise EndError(RAW, f"{way}, step {len(found.losses) + 1}: {_words(problem)}") from problem
    return found


def _words(problem: Exception) -> str:
    """An error and the line of code where it rose."""
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if "pipefit" in frame.filename and "tests" not in frame.filename]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text[:400]}{place}"
