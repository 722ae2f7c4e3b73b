"""The process group of a run: the number of this process, and joining the others."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import struct
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipefit.errors import CommunicationError, DisagreementError, PipefitError, is_lost_peer, kind_of
from pipefit.ir.program import Program
from pipefit.parallel.threads import let_go
from pipefit.parallel.waiting import finish_collectives
from pipefit.runtime import repairs
from pipefit.runtime.background import Background
from pipefit.runtime.calls import different_calls
from pipefit.runtime.joining import Door, Entry
from pipefit.runtime.meeting import ENTERED, ENTERS, FULL, RESTART, TIMEOUT, Start, agent_folder, meet
from pipefit.runtime.notes import Notes
from pipefit.runtime.progress import (
    CALLS,
    JOINING,
    LEAVE,
    LEAVING,
    OUTSIDE,
    SAVING,
    TOGETHER,
    Progress,
    position_in,
    progress_file,
)
from pipefit.runtime.repairs import Loss, Repairs
from pipefit.runtime.signals import Stop, answer_with_stack, die_with_parent, listen
from pipefit.runtime.waits import state_of
from pipefit.runtime.watchdog import Watchdog, deadline_from_environment
from pipefit.stage import device
from pipefit.stage.accelerator import give_streams_queues, outlive_others

T = TypeVar("T")


@dataclass(frozen=True)
class Session:
    """This process among the ranks of a run.

    Attributes:
        rank: its number; 0 in a run of one process.
        num_ranks: number of processes; 1: all ranks of a program run in this process.
        folder: private folder of the run where pipefit itself started the ranks, all on this machine; else None.
        progress: this rank's position.
        before_leaving: called before the process group is removed, to wait for open sends, for example.
        after_leaving: called when all ranks have left.
        programs: those that this rank has run, by digest, numbered in order.
        trainings: those that can be recovered, in the order in which they began.
        decisions: names of the plans that it has measured, in order.
        watchdog: ends this rank when it hangs; None in a run of one process.
        stop: whether this process was asked to stop.
        start: of the run: the first one, or another one after a fault.
        group: the process group of small collectives; None: the default one.
        calls: the process group of roll calls, see `pipefit.runtime.calls`; weak, so that `leave` ends its threads.
        background: the checkpoint that is being written while the training goes on.
        notes: about ranks that others wait for in vain.
        is_rehearsal: the other ranks are not there, and each is taken to send what this one does; see `rehearsing`.
        repairs: of the run, in place; None: there are none.
        is_outside: this process was started again, and the others train without it; see `pipefit.runtime.joining`.
    """

    rank: int
    num_ranks: int
    folder: Path | None
    progress: Progress
    before_leaving: list[Callable[[], None]] = field(default_factory=list)
    after_leaving: list[Callable[[], None]] = field(default_factory=list)
    programs: dict[str, int] = field(default_factory=dict)
    trainings: list[object] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    watchdog: Watchdog | None = None
    stop: Stop = field(default_factory=Stop)
    start: Start = field(default_factory=Start)
    group: Any = None
    calls: weakref.ref[dist.ProcessGroup] | None = None
    background: Background = field(default_factory=Background)
    is_rehearsal: bool = False
    repairs: Repairs | None = None
    is_outside: bool = False
    notes: Notes = field(default_factory=lambda: Notes(Progress()))

    @property
    def is_distributed(self) -> bool:
        """Returns whether ranks are processes."""
        return self.num_ranks > 1

    def passing(self, program: Program) -> contextlib.AbstractContextManager[None]:
        """The context of a pass over a program: its position is visible to others, and the watchdog checks it."""
        if self.watchdog is None:
            return contextlib.nullcontext()
        self.progress.program = self.programs.setdefault(program.digest, len(self.programs))
        return self.watchdog.passing(program)

    @contextlib.contextmanager
    def at(self, place: int) -> Iterator[None]:
        """The context of a place outside the programs; see `progress.PLACES`."""
        before = self.progress.position.index
        self.progress.at(place)
        try:
            yield
        finally:
            # The instruction at which a pass ended is over.
            self.progress.at(min(before, OUTSIDE))

    def roll_call(self, name: str) -> None:
        """Waits until every rank calls a method, and compares their names; see `pipefit.runtime.calls`.

        A process that the others do not wait for gets no further than to its first `fit`.

        Args:
            name: one of `progress.CALLS`.

        Raises:
            DisagreementError: on every rank with the same message: two call different methods.
            PipefitError: the others are not there.
        """
        self.notes.check()
        if self.is_outside and name not in _OUTSIDE:
            raise PipefitError(f"it came to {name} before the first fit, without the others")
        if self.repairs is None:
            self._call(name)
        else:
            self.repairs.repeated(lambda: current()._call(name))

    def _call(self, name: str) -> None:
        if self.calls is None:
            return
        mine = CALLS.index(name)
        found = torch.zeros(self.num_ranks, dtype=torch.float64)
        found[self.rank] = mine
        with self.progress.calling(mine):
            self._commit(found)
        called = [CALLS[int(number)] for number in found.tolist()]
        if len(set(called)) > 1:
            raise DisagreementError(different_calls(dict(enumerate(called))))

    def _commit(self, total: torch.Tensor) -> None:
        """Sums a tensor in the group of roll calls; see `Repairs.commit`."""
        assert self.calls is not None
        if self.repairs is not None:
            self.repairs.check_none_is_lost()
        work = dist.all_reduce(total, group=self.calls(), async_op=True)
        if self.repairs is None:
            work.wait()
        else:
            self.repairs.commit(partial(finish_collectives, work), total)

    def unit(self, work: Callable[[], T]) -> T:
        """Does what all ranks do together; again from its beginning, if a rank is lost before all have done it.

        The work must leave nothing behind that changes what a repetition exchanges: some ranks may have ended theirs.
        """
        if self.repairs is None or self.repairs.is_inside:
            return work()

        def whole() -> T:
            assert self.repairs is not None
            with self.repairs.inside():
                result = work()
            current()._call(TOGETHER)
            return result

        return self.repairs.repeated(whole)

    def together(self, work: Callable[[], object]) -> None:
        """A unit after which no rank goes on before all have done it, also where nothing is repaired."""
        self.unit(work)
        if self.repairs is None:
            self._call(TOGETHER)

    def refuse_repair(self, why: str) -> None:
        """Says that this rank was interrupted where it cannot go on, outside of all units."""
        if self.repairs is not None and not self.repairs.is_inside:
            self.repairs.refuse(why)

    @property
    def door(self) -> Door:
        """The door of this process; nobody ever stands at it where nothing is repaired."""
        if self.repairs is None:
            return _CLOSED
        return self.repairs.door

    @property
    def num_faults(self) -> int:
        """Faults of the run so far from which it has recovered."""
        if self.repairs is None:
            return self.start.restart
        return self.repairs.faults

    def without(self, loss: Loss) -> Session:
        """The session of the ranks that are left, which this process joins; this one has ended."""
        assert self.repairs is not None
        self.repairs.end_waits()
        return self._renumbered(loss.left.index(self.rank), len(loss.left))

    def with_newcomer(self, entry: Entry) -> Session:
        """The session of all ranks with a process that enters, which may be this one; the one before has ended."""
        assert self.repairs is not None
        self.repairs.faults = entry.faults
        os.environ[ENTERED] = str(entry.entered)
        return self._renumbered(entry.rank, entry.num_ranks)

    def _renumbered(self, rank: int, num_ranks: int) -> Session:
        """The session of other ranks, among which this process has a number."""
        global _session
        assert self.repairs is not None
        assert self.folder is not None
        groups = [self.calls and self.calls(), self.background.group]
        self.background.abandon()
        if self.watchdog is not None:
            self.watchdog.stop()
        dist.destroy_process_group()
        let_go(groups)
        if device.first_local_rank is None:
            device.first_local_rank = int(os.environ["LOCAL_RANK"])
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        own[RESTART] = self.repairs.faults
        os.environ.update({name: str(number) for name, number in own.items()})
        _check_is_rank()
        if rank == 0:
            self.repairs.take_terminal()
        self.progress.follow(progress_file(self.folder, rank))
        answer_with_stack(self.folder, rank)
        joined = _joined(replace(self, rank=rank, num_ranks=num_ranks), self.folder)
        _session = replace(joined, start=self.start, is_outside=False)
        return _session

    def settle(self) -> None:
        """Waits for the checkpoint that is being written, if there is one."""
        if self.background.is_open:
            with self.at(SAVING):
                self.background.settle(self.progress)

    @contextlib.contextmanager
    def sharing_errors(self, place: Callable[[], str]) -> Iterator[None]:
        """The context of a call of all ranks: an error of one rank is raised by the others that wait for it.

        Args:
            place: returns the name of the call.

        Raises:
            PipefitError: of this rank, or of another one.
            CommunicationError: another rank failed, died or cannot be reached.
        """
        self.notes.check()
        try:
            yield
        except BaseException as problem:
            if not self.is_distributed:
                raise
            if not is_lost_peer(problem):
                self.notes.failed(f"rank {self.rank} failed in {place()}", problem)
                raise
            note = self.notes.found
            if note is not None:
                self.notes.last = note
                raise kind_of(note.kind)(note.text) from None
            if isinstance(problem, CommunicationError):
                raise
            self.refuse_repair(f"it was in {place()}")
            raise CommunicationError(f"rank {self.rank} lost a dead or unreachable peer: {problem}") from None


_PROCESS = "PIPEFIT_PROCESS"
"""Variable in which a process that joins a run leaves its number and its run, for those that it starts."""

_CLOSED = Door()

_OUTSIDE = ("Pipeline()", "Pipeline.fit()")
"""Calls of a process without the others."""

_OF_RUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PIPEFIT_RUN")

_session: Session | None = None


def _forget() -> None:
    """Forgets the session in a fork of a rank, such as a worker of a loader: it is not a rank."""
    global _session
    _session = None


os.register_at_fork(after_in_child=_forget)


def current() -> Session:
    """The session of this process; joins the others when a launcher has started it."""
    global _session
    if _session is None:
        _session = join()
    return _session


@contextlib.contextmanager
def rehearsing(rank: int, num_ranks: int) -> Iterator[Session]:
    """The context in which this process is a rank of a run whose other ranks are not there.

    Messages and reductions go through torch's fake process group, which moves nothing.

    Raises:
        PipefitError: this process is a rank of a real run.
    """
    global _session
    if dist.is_initialized() or "WORLD_SIZE" in os.environ:
        raise PipefitError("a rehearsal needs no ranks: start it as one process, without torchrun or pipefit run")
    before = _session
    hook = sys.excepthook
    _take_fake_group(rank, num_ranks)
    _session = Session(rank, num_ranks, None, Progress(), is_rehearsal=True)
    try:
        yield _session
    finally:
        dist.destroy_process_group()
        _session = before
        sys.excepthook = hook  # torch's names this rank in every traceback


def _take_fake_group(rank: int, num_ranks: int) -> None:
    """Makes torch's fake process group, which moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)


def join() -> Session:
    """Joins the process group that `pipefit run`, `pipefit train --ranks` or `torchrun` prepared.

    Without one it is a session of one process.
    Ranks on one machine meet through a file in a private folder, so no port is opened to the network.

    Raises:
        PipefitError: this process was started by a rank and is not one itself.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Session(0, 1, None, Progress())
    _check_is_rank()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "PIPEFIT_RUN" in os.environ:
        folder = Path(os.environ["PIPEFIT_RUN"])
    else:
        folder = None
    is_elastic = "TORCHELASTIC_RUN_ID" in os.environ
    if folder is None and is_elastic:
        shared = agent_folder()
    else:
        shared = folder
    enters = os.environ.pop(ENTERS, "")
    if enters:
        shared = None  # the place of its position is still that of another rank
    progress = Progress(_own_file(shared, rank) if shared else None)
    stop = Stop()
    listen(stop, folder, ctrl_c=is_elastic)
    if folder is not None:
        answer_with_stack(folder, rank)
    else:
        atexit.register(_leave_well)
    if is_elastic:
        die_with_parent()
    if num_ranks > 1 and repairs.channel is not None:
        outlive_others()
        own_repairs = Repairs(repairs.channel, int(os.environ[RESTART]), progress)
    else:
        own_repairs = None
    give_streams_queues()
    session = Session(rank, num_ranks, folder, progress, stop=stop, repairs=own_repairs, notes=Notes(progress))
    if enters:
        start = Start(int(os.environ[RESTART]), int(os.environ[FULL]))
        _take_fake_group(rank, num_ranks)
        return replace(session, start=start, is_outside=True)
    session = _joined(session, shared)
    if shared is not None and folder is None and os.environ.get("LOCAL_RANK") == "0":
        session.after_leaving.append(lambda: None if stop.requested else shutil.rmtree(shared, ignore_errors=True))
    return session


def _joined(session: Session, shared: Path | None) -> Session:
    """The session, with its process groups and its watchdog."""
    rank = session.rank
    num_ranks = session.num_ranks
    watchdog = None
    if num_ranks > 1:
        deadline = deadline_from_environment()
        own = session.progress, session.folder, shared, session.notes
        watchdog = Watchdog(rank, num_ranks, *own, deadline, session.repairs, before=session.watchdog)
    session.progress.at(JOINING)
    start = meet(rank, num_ranks, session.folder)
    calls = None
    if num_ranks > 1:
        calls = weakref.ref(dist.new_group(backend="gloo", timeout=TIMEOUT))
    session.progress.at(OUTSIDE)
    return replace(session, watchdog=watchdog, start=start, calls=calls)


def _own_file(shared: Path, rank: int) -> Path:
    """The file of this rank's position; those of processes of an earlier start go."""
    for path in shared.glob(progress_file(shared, 0).name.replace("0", "*")):
        with contextlib.suppress(OSError, struct.error):
            if (pid := position_in(path).pid) and state_of(pid) == "ended":
                path.unlink()
    return progress_file(shared, rank)


def _check_is_rank() -> None:
    """Refuses a process that a rank has started: it has the rank's environment, and would take its place.

    Raises:
        PipefitError: a rank has started it.
    """
    own = " ".join(os.environ.get(name, "") for name in _OF_RUN)
    pid, _, run = os.environ.get(_PROCESS, "").partition(" ")
    if run == own and pid != str(os.getpid()):
        raise PipefitError(
            f"rank {os.environ['RANK']} of a run has started this process, which is not a rank but runs pipefit: with "
            "the start methods spawn and forkserver, multiprocessing runs a script again in each process that it "
            'starts; put the work of the script under `if __name__ == "__main__":`, or give a DataLoader '
            'multiprocessing_context="fork"; a subprocess with a run of its own needs an environment without RANK'
        )
    os.environ[_PROCESS] = f"{os.getpid()} {own}"


def _leave_well() -> None:
    """Ends a script under torchrun; one that raised leaves at once, because the others may not be there."""
    if hasattr(sys, "last_value"):
        return
    try:
        with contextlib.suppress(RuntimeError):
            leave()
    except PipefitError as problem:
        sys.stdout.flush()
        sys.stderr.write(f"{problem}\n")
        sys.stderr.flush()
        os._exit(1)  # the script has ended well, but the run has not


def leave() -> None:
    """Leaves the process group, once all ranks are done.

    The group goes even where another rank is gone already. Otherwise its threads would give back tensors while Python
    ends, which aborts the process: "terminate called without an active exception".
    """
    global _session
    if _session is None:
        return
    try:
        if dist.is_initialized():
            _session.notes.check()
            _session.settle()
            with _session.at(LEAVING):
                for end in _session.before_leaving:
                    end()
                _session.roll_call(LEAVE)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for end in _session.after_leaving:
            end()
        if _session.watchdog is not None:
            _session.watchdog.stop()
        _session = None
