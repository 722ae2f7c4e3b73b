"""A training that grows again: a process that was started again gets its stages from the others' memory.

The process has made the same `Pipeline` without the others, and has come to its `fit`. At the end of a step all meet
it, take the plan of the ranks that are there now, and send it the state of its stages (`pipefit.pipeline.rearrange`)
and the numbers that every rank has. It leaves out the batches that are done, and all compare the next one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from pipefit.errors import CommunicationError, PipefitError, is_lost_peer
from pipefit.pipeline.callbacks import Callbacks
from pipefit.pipeline.facts import structure_of
from pipefit.pipeline.rearrange import rearrange, why_stay
from pipefit.pipeline.repairable import why_lost, why_not
from pipefit.planner import plan_without
from pipefit.runtime.collectives import exchange
from pipefit.runtime.faults import note
from pipefit.runtime.joining import DOOR, OWN, READY, Entry
from pipefit.runtime.repairs import BACK, Repairs
from pipefit.runtime.session import current
from pipefit.spec import Plan
from pipefit.spec.files import JsonObject
from pipefit.stage.materialise import forget_others
from pipefit.stage.ties import tied_groups


class Growing:
    """The growth of a training after repairs.

    Args:
        pipe: that is trained.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe: Any = weakref.proxy(pipe)
        self._whole: Plan = pipe.plan

    def _why_not(self) -> str:
        """The reason why no process can enter; "": one can."""
        pipe = self._pipe
        if len(current().trainings) > 1 or pipe.recovery.first is None:
            return "the training is not in the first fit of one pipeline"
        if why := why_lost(self._whole):
            return why
        if self._whole.tensor > 1:
            return f"ranks share layers (tensor={self._whole.tensor})"
        if self._shares and pipe.device.type != "cpu":
            return "copies of a stage share its weights on GPUs"
        if self._shares and (pipe.recovery.every != 1 or pipe.loop.callbacks.moving):
            return "copies of a stage share its weights, and not all of each step is copied in memory"
        return why_stay(pipe.layers)

    def leave(self, plan: Plan) -> None:
        """Notes the plan that the ranks leave at a loss; the last one with all ranks is taken again."""
        if plan.num_processes == self._whole.num_processes:
            self._whole = plan

    @property
    def _shares(self) -> bool:
        """Whether copies of a stage share its weights or states."""
        return self._whole.shard != "none"

    def _facts(self) -> list[Any]:
        """The facts that a process must have in common with the others before it enters."""
        pipe = self._pipe
        return [structure_of(pipe.given.work), pipe.recovery.first.steps]

    # ---- the ranks -------------------------------------------------------------------------------------------------

    def saved(self) -> JsonObject:
        """The state of the training, before a process may enter. Every rank calls it.

        Where copies of a stage share weights, a copy in memory has the same state. It was made after the step, unless
        the ranks share nothing now, or something was changed since.
        """
        pipe = self._pipe

        def is_newest() -> bool:
            return pipe.plan.shard != "none" and pipe.recovery.memory.is_newest()

        if self._shares and pipe.recovery.memory is not None:
            if not all(current().unit(lambda: exchange(current(), is_newest()))):
                pipe.recovery.memory.keep()
        return dict(pipe.state.saved())

    def admit(self, number: int, state: JsonObject, batch: Any) -> None:
        """Lets a process enter between two steps. Every rank calls it.

        Args:
            number: of its announcement.
            state: that `saved` returned.
            batch: the next one.
        """
        session = current()
        session.settle()
        repairs = _repairs()
        why = self._why_not()
        if not why and repairs.door.facts != self._facts():
            why = "its model or its number of steps is another one"
        repairs.say(DOOR, (number, why))
        with session.progress.waiting():
            entry = repairs.door.wait(number)
        if entry:
            _certainly(self._admit, entry, state, batch)

    def _admit(self, entry: Entry, state: JsonObject, batch: Any) -> None:
        pipe = self._pipe
        before = current().rank
        session = current().with_newcomer(entry)
        data = {
            "plan": msgspec.to_builtins(self._whole),
            "step": pipe.num_updates,
            "state": state,
            "callbacks": pipe.loop.callbacks.common,
            "programs": session.programs,
            "passes": session.progress.passes,
            "commits": _repairs().commits,
            "verified": pipe.verified,
        }
        exchange(session, data)
        rearrange(pipe, without(pipe, self._whole, entry.absent), session, is_restored=self._shares)
        if pipe.rebalancer is not None:
            pipe.rebalancer.policy = None  # the process that enters has none
        self._end(batch)
        if before == 0:
            facts = {"entered": session.num_ranks, "step": pipe.num_updates, "start": session.num_faults}
            note(pipe.session.folder, time.time(), **facts)

    # ---- the process that enters -----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Waits until the others let this process enter, and takes their state; it ends where they do not."""
        pipe = self._pipe
        repairs = _repairs()
        repairs.say(READY, self._facts())
        entry = repairs.door.wait(OWN)
        if entry is None:
            raise PipefitError("the others go on without this process")
        _certainly(self._enter, entry)
        pipe.comparison.enters = partial(_certainly, self._end)

    def _enter(self, entry: Entry) -> None:
        pipe = self._pipe
        # Its own weights are those of the beginning.
        for worker in pipe.workers:
            worker.let_go()
        pipe.engine.workers = []
        forget_others(pipe.layers, set())
        callbacks = list(pipe.recovery.first.callbacks)
        if pipe.rebalancer is not None:
            callbacks.append(pipe.rebalancer)
        pipe.loop.callbacks = Callbacks(callbacks, current().stop)
        session = current().with_newcomer(entry)
        data = next(filter(None, exchange(session, None)))
        pipe.state.resume(data["step"], **data["state"])
        pipe.verified = data["verified"]
        pipe.loop.callbacks.take(data["callbacks"])
        session.programs.update(data["programs"])
        session.progress.passes = data["passes"]
        _repairs().commits = data["commits"]
        self._whole = msgspec.convert(data["plan"], Plan)
        rearrange(pipe, without(pipe, self._whole, entry.absent), session, is_restored=self._shares)

    # ---- all -------------------------------------------------------------------------------------------------------

    def _end(self, batch: Any) -> None:
        """Compares the next batch, and says that this rank goes on."""
        pipe = self._pipe
        repairs = _repairs()
        pipe.comparison.meet(batch)
        repairs.listen(why_not(pipe.plan))
        repairs.say(BACK, None)


def without(pipe: Any, plan: Plan, lost: Sequence[int]) -> Plan:
    """A plan of a pipeline without some ranks."""
    ties = tied_groups(pipe.layers, plan.partition)
    for rank in sorted(lost, reverse=True):
        plan = plan_without(plan, rank, ties=ties, clip=pipe.program.header.clip)
    return plan


def _repairs() -> Repairs:
    repairs = current().repairs
    assert repairs is not None
    return repairs


def _certainly(work: Callable[..., None], *args: Any) -> None:
    """Does a part of the meeting; where it fails, all ranks are started again.

    Raises:
        CommunicationError: it has failed.
    """
    repairs = _repairs()
    try:
        with repairs.inside():
            work(*args)
    except Exception as problem:  # of any kind: the run can be restored
        if is_lost_peer(problem):
            repairs.await_word()
        repairs.refuse(repr(problem))
        raise CommunicationError("a process that was started again could not enter") from problem
