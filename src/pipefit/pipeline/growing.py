"""A training that grows again: a process that was started again gets its stages from the others' memory.

The process has made the same `Pipeline` without the others, and has come to its `fit`. At the end of a step all meet
it, take the plan of the ranks that are there now, and send it the state of its stages (`pipefit.pipeline.rearrange`)
and the numbers that every rank has. It leaves out the batches that are done, and all compare the next one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from pipefit.errors import CommunicationError
from pipefit.pipeline.callbacks import Callbacks
from pipefit.pipeline.facts import structure_of
from pipefit.pipeline.loaders import packed, unpacked
from pipefit.pipeline.rearrange import rearrange, why_stays
from pipefit.pipeline.recovery import in_words
from pipefit.pipeline.repairable import why_not
from pipefit.planner import plan_without
from pipefit.runtime.collectives import exchange
from pipefit.runtime.faults import note
from pipefit.runtime.joining import DOOR, READY, ROOM, Entry
from pipefit.runtime.repairs import BACK, Repairs
from pipefit.runtime.session import Session, current
from pipefit.spec import Plan
from pipefit.stage.materialise import forget_others


class _Numbers(NamedTuple):
    """The numbers of a training that a checkpoint has, too; see `SavedState`."""

    ordinal: int
    loss_scale: dict[str, Any] | None
    position: dict[str, Any] | None


class Growing:
    """The growth of a training after repairs.

    Args:
        pipe: that is trained.
    """

    def __init__(self, pipe: Any) -> None:
        self._of = weakref.ref(pipe)
        self._whole: Plan = pipe.plan
        self._is_small = False

    @property
    def _pipe(self) -> Any:
        pipe = self._of()
        assert pipe is not None
        return pipe

    def shrinks(self) -> None:
        """Keeps the plan of all ranks, when the first one is lost."""
        if not self._is_small:
            self._is_small = True
            self._whole = self._pipe.plan

    def has_shrunk(self) -> None:
        """Says whether a process may enter, after a repair."""
        _repairs().say(ROOM, self._why_not())

    def _why_not(self) -> str:
        """The reason why no process can enter; "": one can."""
        pipe = self._pipe
        if len(current().trainings) > 1:
            return "several pipelines are trained"
        if pipe.recovery is None or pipe.recovery.asked is None or pipe.recovery.num_fits > 1:
            return "the training is not in its first fit"
        if pipe.rebalancer is not None:
            return "layers move between the ranks (rebalance)"
        reasons = [why_stays(layer) for layer in pipe.layers]
        return next(filter(None, reasons), "")

    def _facts(self) -> dict[str, Any]:
        """The facts that a process must have in common with the others before it enters."""
        pipe = self._pipe
        asked = pipe.recovery.asked
        kinds = []
        for one in asked.callbacks:
            # Of the others, such as a display, ranks may have different ones.
            if any(hasattr(one, name) for name in ("every", "moving", "state_dict")):
                kinds.append(type(one).__qualname__)
        return {"model": structure_of(pipe.given.work), "steps": asked.steps, "callbacks": kinds}

    # ---- the ranks -------------------------------------------------------------------------------------------------

    def admit(self, number: int, state: dict[str, Any], batch: Any) -> None:
        """Lets a process enter between two steps. Every rank calls it.

        Args:
            number: of its announcement.
            state: of the training, before the next batch was drawn.
            batch: the next one.
        """
        session = current()
        session.settle()
        repairs = _repairs()
        why = self._why_not()
        if not why:
            theirs = repairs.door.facts
            differ = [name for name, fact in self._facts().items() if theirs[name] != fact]
            if differ:
                why = f"of its own it has: {', '.join(differ)}"
        repairs.say(DOOR, (number, why))
        with session.progress.waiting():
            entry = repairs.door.wait(number)
        if entry is not None:
            _certainly(lambda: self._admit(entry, state, batch))

    def _admit(self, entry: Entry, state: dict[str, Any], batch: Any) -> None:
        pipe = self._pipe
        before = current().rank
        session = current().with_newcomer(entry)
        plan = self._plan(entry.absent)
        data = {
            "plan": msgspec.to_builtins(plan),
            "step": pipe.num_updates,
            "state": state,
            "callbacks": packed(pipe.loop.callbacks.states()),
            "programs": session.programs,
            "passes": session.progress.passes,
            "commits": _repairs().commits,
            "verified": pipe.verified,
        }
        exchange(session, data)
        rearrange(pipe, plan, session)
        self._is_small = bool(entry.absent)
        self._end(batch)
        if before == 0 and session.folder is not None:
            facts = {"entered": session.num_ranks, "step": pipe.num_updates, "plan": in_words(plan)}
            note(session.folder, time.time(), **facts, start=session.num_faults)

    def _plan(self, absent: Sequence[int]) -> Plan:
        """The plan of all ranks, without some that are missing."""
        plan = self._whole
        header = self._pipe.program.header
        for rank in reversed(absent):
            plan = plan_without(plan, rank, ties=header.ties, clip=header.clip)
        return plan

    # ---- the process that enters -----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Waits until the others let this process enter, and takes their state; it ends where they do not."""
        pipe = self._pipe
        repairs = _repairs()
        repairs.say(READY, self._facts())
        entry = repairs.door.wait()
        assert entry is not None
        _certainly(lambda: self._enter(entry))
        pipe.comparison.enters = lambda batch: _certainly(lambda: self._end(batch))

    def _enter(self, entry: Entry) -> None:
        pipe = self._pipe
        # Its own weights are those of the beginning.
        pipe.engine.workers = []
        forget_others(pipe.layers, set())
        pipe.loop.callbacks = Callbacks(pipe.recovery.asked.callbacks, current().stop)
        session = current().with_newcomer(entry)
        data = next(filter(None, exchange(session, None)))
        pipe.state.resume(data["step"], _Numbers(**data["state"]))
        pipe.verified = data["verified"]
        pipe.loop.callbacks.take(unpacked(data["callbacks"]))
        session.programs.update(data["programs"])
        session.progress.passes = data["passes"]
        _repairs().commits = data["commits"]
        rearrange(pipe, msgspec.convert(data["plan"], Plan), session)

    # ---- all -------------------------------------------------------------------------------------------------------

    def _end(self, batch: Any) -> None:
        """Compares the next batch, and says that this rank goes on."""
        pipe = self._pipe
        repairs = _repairs()
        pipe.comparison.meet(batch)
        repairs.listen(why_not(pipe.plan))
        repairs.say(BACK, None)


def _repairs() -> Repairs:
    session: Session = current()
    assert session.repairs is not None
    return session.repairs


def _certainly(work: Callable[[], None]) -> None:
    """Does a part of the meeting; where it fails, all ranks are started again.

    Raises:
        CommunicationError: it has failed.
    """
    repairs = _repairs()
    try:
        with repairs.inside():
            work()
    except Exception as problem:  # of any kind: the run can be restored
        why = f"{type(problem).__name__}: {problem}"
        repairs.refuse(why)
        raise CommunicationError(f"a process that was started again could not enter: {why}") from problem
