"""Going on after a fault: the first `fit` of a run that was started again resumes, and skips the steps that are done.

A script runs from its beginning again, and asks again for all its steps. Those that are done are not repeated:

    before the fault    fit(a, steps=50) ─► fit(a, steps=50) ─► step 70 is saved ─► step 73, a rank dies
    started again       fit(a, steps=50): nothing to train ─► fit(a, steps=50): 30 steps, from 71 on
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pipefit.checkpoint import load
from pipefit.checkpoint.commit import make_folder
from pipefit.checkpoint.manifest import candidates, step_of
from pipefit.checkpoint.memory import memory_of, recall
from pipefit.errors import PipefitError
from pipefit.pipeline.callbacks import Checkpoints, Record
from pipefit.pipeline.loaders import has_position, number_of
from pipefit.pipeline.loggers import Logger, entries_of, json_log
from pipefit.pipeline.repairable import why_not
from pipefit.runtime.collectives import from_first
from pipefit.runtime.faults import IN_PLACE, note, noted
from pipefit.runtime.outliving import outliving_folder
from pipefit.runtime.session import Session
from pipefit.spec import Plan
from pipefit.spec.files import JsonObject, read_json, write_json

_log = logging.getLogger("pipefit.checkpoint")

LOSSES = "metrics.jsonl"
"""The figures of every step, in the folder of checkpoints, unless the user's own logger writes them."""

EARLIER = "earlier.json"
"""Names of the checkpoints in a folder that are not of this run."""


class Fit(NamedTuple):
    """The part of a `fit` that is still to be trained.

    Attributes:
        done: losses of those of its steps that are done.
        is_done: whether all are.
        batches: without theirs.
        steps: without them; None: all batches.
        callbacks: with those of the recovery.
    """

    done: list[float]
    is_done: bool
    batches: Iterable[Any]
    steps: int | None
    callbacks: Sequence[Any]


class Recovery:
    """The recovery of a training whose processes can be started again; a callback of its `fit`s.

    Args:
        pipe: that is trained.

    Attributes:
        every: steps between copies in memory; 0: there are none.
        memory: the copies of the plan that the training has now; None: there are none.
        folder: of these copies, and of the log of a training without checkpoints; None: there is none.
        first: the first `fit` of this process, while it runs.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self.every = 0
        self._session: Session = pipe.session
        self.folder = self._own_folder()
        self.follow(pipe.session)
        self._is_first_fit = True
        self.first: Fit | None = None
        self._losses: list[float] = []
        self._facts: JsonObject = {}
        self._log: Logger | None = None

    def follow(self, session: Session) -> None:
        """Follows the plan that the training has now; one that was copied in memory still is."""
        self._session = session
        self.memory = memory_of(self._pipe, self.folder, self._pipe.schedule.is_synchronous, self.every)
        self._pipe.loop.memory = None
        if self.memory:
            self.every = self.memory.every
        if self.every == 1 and not why_not(self._pipe.plan):
            self._pipe.loop.memory = self.memory

    def _own_folder(self) -> Path | None:
        """The folder in memory of this training, among those of a script."""
        folder = outliving_folder(self._session)
        trainings = self._session.trainings
        trainings.append(self)
        if folder is None:
            return None
        own = folder / f"training-{len(trainings)}"
        own.mkdir(mode=0o700, exist_ok=True)
        return own

    # ---- resuming --------------------------------------------------------------------------------------------------

    def begin(self, asked: Fit) -> Fit:
        """Begins a `fit`; the first one of a run that was started again resumes. Every rank must call it."""
        asked = asked._replace(callbacks=[self, *asked.callbacks, self.copy])
        self.first = None
        if self._is_first_fit:
            self.first = asked
        self._resume(asked.callbacks)
        batches = asked.batches
        steps = asked.steps
        most = len(self._losses)
        if steps is not None:
            most = min(steps, most)
        if not most:
            return asked
        if has_position(batches):
            # The checkpoint holds the position in them.
            if steps is None:
                most = min(most, number_of(batches) or most)
            is_done = most == (number_of(batches) if steps is None else steps)
        else:
            batches = iter(batches)
            most = sum(1 for _ in islice(batches, most))
            is_done = most == steps
        done = self._losses[:most]
        self._losses = self._losses[most:]
        if is_done and not self._losses:
            self._end(asked.callbacks, done[-1])
        return Fit(done, is_done, batches, steps and steps - len(done), asked.callbacks)

    def _end(self, callbacks: Sequence[Any], loss: float) -> None:
        """Saves the checkpoint of a `fit` that had ended before the fault, if it is missing."""
        step = self._pipe.num_updates
        for one in callbacks:
            if isinstance(one, Checkpoints):
                if step not in map(step_of, self._checkpoints(one.folder)):
                    one.end(Record(step, loss))

    def _checkpoints(self, folder: Path | None) -> list[Path]:
        paths = from_first(self._session, lambda: [str(path) for path in _checkpoints(folder)])
        return [Path(path) for path in paths]

    def _resume(self, callbacks: Sequence[Any]) -> None:
        at = next((index for index, one in enumerate(callbacks) if isinstance(one, Checkpoints)), len(callbacks))
        if at < len(callbacks):
            folder = callbacks[at].folder
        else:
            folder = None
        logs = [one for one in callbacks[:at] if isinstance(one, Logger) and one.place.suffix == ".jsonl"]
        place = folder or self.folder
        if not logs and self._log is None and place is not None:
            self._log = json_log(place / LOSSES)
        if not self._is_first_fit:
            return
        self._is_first_fit = False
        log = logs[0] if logs else self._log
        if self._session.is_outside:
            self._pipe.repair.growing.enter()
            assert log is not None
            self._take_losses(0, _losses_in(log.place))
        elif not self._session.start.restart:
            if log is not None:
                log.begin(self._pipe.num_updates + 1)
            if folder is not None:
                from_first(self._session, lambda: _write_earlier(folder))
        else:
            self._go_on(folder, log.place if log else None)

    def _go_on(self, folder: Path | None, log: Path | None) -> None:
        """Resumes a run that was started again."""
        before = self._pipe.num_updates
        if before:
            source = f"step {before}, from which it was told to resume"
        else:
            source = "the beginning"
        if any(worker.spilling and worker.spilling.resumed for worker in self._pipe.workers):
            source = "the records on its disk"
        known = from_first(self._session, lambda: _losses_in(log))
        if self._pipe.state.last_step is None:
            most = math.inf
        else:
            most = self._pipe.state.last_step - 1
        if self._pipe.plan.shard != "none" and known:
            # A step is committed with its copy, before its loss is in the log.
            most = min(most, max(map(int, known)))
        found = self._checkpoints(folder)
        found = [path for path in found if before < step_of(path) <= most]
        newest = max([step_of(path) for path in found[:1]] + [before + 1])
        if self.folder is not None and recall(self._pipe, self.folder, newest, most) is not None:
            source = "memory"
        else:
            for path in found:
                try:
                    source = str(load(self._pipe, path).path)
                    break
                except PipefitError as problem:  # an earlier one may be whole
                    _log.warning("skipped a checkpoint: %s", problem)
        now = self._pipe.num_updates
        self._take_losses(before, known)
        ranks = self._pipe.plan.num_processes
        lost = max([0, *(int(step) - now for step in known)])
        self._facts = {"resumed": now, "source": source, "lost": lost, "ranks": ranks}
        if ranks != self._session.start.full:
            self._facts["plan"] = f"planned anew: {_in_words(self._pipe.plan)}"

    def _take_losses(self, before: int, known: Mapping[str, float]) -> None:
        """Takes the losses of the steps from a number on, as the log has them."""
        now = self._pipe.num_updates
        self._losses = [known.get(str(step), math.nan) for step in range(before + 1, now + 1)]
        unknown = sum(map(math.isnan, self._losses))
        if unknown and self._session.rank == 0:
            _log.warning("the losses of %d steps are in no log, and are returned as NaN", unknown)

    def mended(self) -> None:
        """Notes that the training has gone on without a rank, after its next step; completes the logs before a copy."""
        plan = self._pipe.plan
        self._facts = {
            "resumed": self._pipe.num_updates,
            "source": IN_PLACE,
            "lost": 0,
            "ranks": plan.num_processes,
            "plan": f"planned anew: {_in_words(plan)}",
        }
        self._pipe.loop.callbacks.follow("repaired")

    # ---- the callback ----------------------------------------------------------------------------------------------

    def step(self, record: Record) -> None:
        """Logs a step's loss, and notes a recovery after its first step."""
        if self._log is not None:
            self._log.step(record)
        facts = {}
        if self._facts and record.step > self._facts["resumed"]:
            facts = self._facts
            self._facts = {}
        folder = self._session.folder or (self._log.place.parent if self._log else None)
        if facts and folder is not None and self._session.rank == 0:
            start = self._session.num_faults
            faults = [line for line in noted(folder) if line.get("start") == start - 1 and "fault" in line]
            now = time.time()
            # A clock that was set back gives no duration.
            if faults and now >= faults[-1]["time"]:
                facts["seconds"] = now - faults[-1]["time"]
            note(folder, now, **facts, start=start)

    def repaired(self, record: Record) -> None:
        """Completes the log after the loss of a rank."""
        if self._log is not None:
            self._log.repaired(record)

    def copy(self, record: Record) -> None:
        """Copies the training in memory if it is due, after all other callbacks: their logs have the step, too."""
        if self.memory is not None and record.step == self._pipe.num_updates != self._pipe.loop.copied:
            self.memory.keep()


def _in_words(plan: Plan) -> str:
    copies = ", ".join(str(len(found)) for found in plan.placement.ranks)
    return f"{plan.schedule}, copies of the stages {copies}"


def _write_earlier(folder: Path) -> None:
    """Writes down the checkpoints that an earlier run has left in a folder."""
    make_folder(folder)
    write_json(folder / EARLIER, [path.name for path in candidates(folder)])


def _checkpoints(folder: Path | None) -> list[Path]:
    """The checkpoints of this run in a folder, newest first."""
    if folder is None or not folder.is_dir():
        return []
    found = candidates(folder)
    names = folder / EARLIER
    if not names.exists():
        return found
    try:
        earlier = read_json(names)
        return [path for path in found if path.name not in earlier]
    except (PipefitError, TypeError) as problem:
        _log.warning(
            "%s is damaged (%s): only checkpoints that are newer are taken for those of this run", names, problem
        )
        began = names.stat().st_mtime
        return [path for path in found if path.stat().st_mtime > began]


def _losses_in(path: Path | None) -> dict[str, float]:
    """The losses in a log, by step, as JSON data."""
    if path is None:
        return {}
    return {str(entry["step"]): entry["loss"] for entry in entries_of(path) if isinstance(entry.get("loss"), float)}
