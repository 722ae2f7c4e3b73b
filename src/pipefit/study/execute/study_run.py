"""A run of a study: gives turns to workers, writes how trials ended, and can be stopped and resumed at any moment."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipefit.errors import DamageError, PipefitError, TierError
from pipefit.spec.files import write_json
from pipefit.study.board import Board, TrialProgress
from pipefit.study.execute.device_worker import Order, Settings, damage_of, reason_of
from pipefit.study.execute.folder import StudyFolder
from pipefit.study.execute.pool import Pool
from pipefit.study.execute.trial_files import read_losses, read_state
from pipefit.study.results import StudyResult, read_entry, result_of, save_result, with_figures_of, write_entry
from pipefit.study.trial import Job, StudyError, StudySpec, Trial, file_name
from pipefit.study.trial_search import Search

_GRACE_S = 10.0
_MOST_RESTARTS = 20
Define = Callable[[Mapping[str, Any]], Trial]


class StudyObserver:
    """Methods that a study calls while it runs; these do nothing."""

    def changed(self, board: Board) -> None:
        """Something has happened."""

    def predicted(self, seconds: float, bound_s: float) -> None:
        """Every trial was measured: the study should take so long in all."""


class StudyRun:
    """One run of a study, from its start or from where an earlier run left it.

    Args:
        spec: the study.
        define: makes a trial of the values that `search` chooses.
        search: chooses further trials; None: there are those of the spec.
        observer: called when something happens.
        resume: continue from the output folder.
        forked: workers are forks of this process and have all its functions; else they come from a server that has
            torch loaded, and trials must be pickled.

    Raises:
        StudyError: the folder holds another study, or one that was not to be resumed.
    """

    def __init__(
        self,
        spec: StudySpec,
        *,
        define: Define | None = None,
        search: Search | None = None,
        observer: StudyObserver | None = None,
        resume: bool = False,
        forked: bool = True,
    ) -> None:
        if forked and _has_used_cuda():
            raise StudyError(
                "this program has used the GPU already, which a fork of it cannot: run the study first, in another "
                "program, or from a study file"
            )
        self._forked = forked
        self.spec, self._define, self._search = spec, define, search
        self._observer: StudyObserver = observer or StudyObserver()
        self._resume, self._folder = resume, StudyFolder(spec, resume)
        try:
            entries = [
                read_entry(n, trial, file_name(n, trial), self._folder.path) for n, trial in enumerate(spec.trials)
            ]
        except BaseException:
            self._folder.close()
            raise
        self.board = Board(entries, spec.workers, spec.policy, spec.stop)
        self.board.on_end = self._ended
        self.board.admits_singly = spec.tier_bytes > 0
        self._predicted_s: float | None = None
        self._stop: int | None = None
        self._trouble: str | None = None
        self._restarts = 0
        self._chosen: dict[int, Mapping[str, Any]] = {}
        self._kept: TrialProgress | None = None

    # ---- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> StudyResult:
        """Runs to the end, or to the first signal; everything that was committed is kept either way.

        Raises:
            TierError: the tier is full or gone; the study can be resumed when that is repaired.
        """
        with contextlib.closing(self._folder), self._listening():
            self._recall()
            self._ask()
            try:
                pool = Pool([self._settings(number) for number in range(self.spec.workers)], self._forked)
            except PipefitError:
                if self._stop is None:
                    raise
                return self._finish(None)  # a signal ended the workers, too, before they could ignore it
            try:
                self._loop(pool)
                return self._finish(pool)
            finally:
                pool.close(grace_s=0.5)

    @property
    def stopped_by(self) -> int | None:
        """The signal that ended the run before the study was over."""
        return self._stop

    def _settings(self, number: int) -> Settings:
        threads = self.spec.threads or max(1, (os.cpu_count() or 1) // self.spec.workers)
        return Settings(
            number,
            threads,
            self.spec.device,
            self.spec.device_memory_bytes,
            self._folder.state,
            self._folder.logs / f"worker-{number}.log",
            {entry.number: entry.trial for entry in self.board.entries},
            self._define,
            dict(os.environ),
        )

    def _loop(self, pool: Pool) -> None:
        idle, busy = set(range(self.spec.workers)), dict[int, Job]()
        stopped_s = 0.0
        while True:
            if self._stop is None and self._trouble is None:
                self._deal(pool, idle, busy)
            if not busy:
                break
            if self._stop is not None:
                stopped_s = stopped_s or time.monotonic()
                if time.monotonic() - stopped_s > _GRACE_S:
                    break  # the current turns are not committed, and will be done again
            for number, answer in pool.answers(set(busy), 0.2):
                job = busy[number]
                if answer is None:
                    self._lost(pool, number, job)
                else:
                    self._take(answer, number)
                if answer is None or answer[0] != "turned" or not self.board.entries[job.trial].in_hand:
                    del busy[number]
                    idle.add(number)
                self._predict()
                self._ask()
                self._observer.changed(self.board)

    def _deal(self, pool: Pool, idle: set[int], busy: dict[int, Job]) -> None:
        for number in sorted(idle):
            job = self.board.next_job(number)
            if job is None:
                continue
            argument = self._room_bytes() if job.kind == "admit" else job.num_turns
            pool.send(number, self._order(job.kind, job.trial, argument))
            idle.discard(number)
            busy[number] = job

    def _order(self, kind: str, number: int, argument: Any) -> Order:
        name, values = self.board.entries[number].name, self._chosen.get(number)
        return Order(kind, number, name, argument, values, self.board.alive)

    def _room_bytes(self) -> float:
        """The most that a trial may take on the tier now."""
        free = self._folder.free_bytes
        limit = self.spec.tier_bytes
        return min(free, limit - self.board.tier_bytes) if limit else free

    def _take(self, answer: tuple[Any, ...], device: int) -> None:
        kind, number, result = answer
        if kind == "turned":
            self.board.turned(result, device)
        elif kind == "admitted":
            found, start_s, end_s = result
            entry = self.board.entries[number]
            try:
                entry.losses, entry.held_out = read_losses(self._state_of(number), found.step)
                self.board.admitted(number, found, device, start_s, end_s)
            except DamageError as problem:
                self.board.failed(number, damage_of(problem))
        elif kind == "no-room":
            self.board.sent_back(number)
        elif kind == "tier":
            # Not the trial's fault, and perhaps repaired soon: nothing ends, nothing more begins.
            self._trouble = result
            self.board.set_back(number)
        elif kind == "failed":
            self.board.failed(number, result)

    def _lost(self, pool: Pool, number: int, job: Job) -> None:
        """A worker died: its trial continues from its last commit, in another process."""
        how = pool.how_it_died(number)
        try:
            found = read_state(self._state_of(job.trial))
            step, turn = (found[0], found[1].turn) if found is not None else (0, 0)
            self.board.lost(job.trial, how, step, turn, *read_losses(self._state_of(job.trial), step))
        except DamageError as problem:
            self.board.failed(job.trial, damage_of(problem))
        self._restarts += 1
        if self._restarts > _MOST_RESTARTS:
            raise PipefitError(f"{self._restarts} workers died ({how}); their logs: {self._folder.logs}")
        pool.restart(number, self._settings(number))

    def _state_of(self, number: int) -> Path:
        return self._folder.state / self.board.entries[number].name

    def _predict(self) -> None:
        """Simulates the whole study once every trial was measured twice; the first turns are slow."""
        if self._predicted_s is not None or self._search is not None:
            return
        entries = [entry for entry in self.board.entries if not entry.has_ended]
        if not entries or any(min((n for _, n in e.turn_s.values()), default=0) < 2 for e in entries):
            return
        if found := self.board.predicted():
            self._predicted_s = found.makespan_s
            self._observer.predicted(found.makespan_s, found.bound_s)

    # ---- trials come and go ----------------------------------------------------------------------------------------

    def _recall(self) -> None:
        """Adds the trials that a search chose in an earlier run, and reports to the search those that have ended."""
        if self._resume and self._search is not None:
            for values in self._folder.chosen():
                self._search.again(values)
                self._add(values)
        self._kept = self.board.best

    def _ask(self) -> None:
        """Asks for further trials while there are fewer than workers could take."""
        while self._search is not None and self._stop is None and len(self.board.alive) < 2 * self.spec.workers:
            if (values := self._search.ask()) is None:
                return
            self._folder.choose([*self._chosen.values(), values])
            self._add(values)

    def _add(self, values: Mapping[str, Any]) -> None:
        """Adds a trial of values that the search chose; where it cannot be made, only that trial fails."""
        assert self._define is not None
        number, reason = len(self.board.entries), ""
        self._chosen[number] = values
        try:
            trial = self._define(values)
            self.spec.check_further(trial, [entry.trial for entry in self.board.entries])
            trial = replace(trial, values={**dict(trial.values), **dict(values)})
        except Exception as problem:
            trial, reason = Trial(values=dict(values)), reason_of(problem, "while it was defined")
        name = file_name(number, trial)
        if name in {entry.name for entry in self.board.entries}:
            name = f"{name}-{number}"  # a search may choose the same twice
        entry = read_entry(number, trial, name, self._folder.path)
        self.board.entries.append(entry)
        if entry.has_ended:  # in an earlier run
            self._report(entry)
        elif reason:
            self.board.failed(number, reason)

    def _report(self, entry: TrialProgress) -> None:
        if entry.number in self._chosen and self._search is not None:
            score = entry.score if entry.status != "failed" and entry.score < float("inf") else None
            self._search.tell(self._chosen[entry.number], score)

    def _ended(self, entry: TrialProgress) -> None:
        try:
            write_entry(entry, self._folder.path)
        except PipefitError as problem:
            self._trouble = str(problem)  # its state stays, so that it ends again when the study is resumed
            return
        self._report(entry)
        best = self.board.best
        # The state of the best so far stays until its weights are written.
        for other in {e.number: e for e in (entry, self._kept) if e is not None}.values():
            if best is None or other.number != best.number:
                self._folder.forget(other.name)
        self._kept = best

    def _finish(self, pool: Pool | None) -> StudyResult:
        over = pool is not None and self.board.is_over and self._trouble is None
        result = result_of(self.board, self.spec.name, self._predicted_s, not over, self._resume)
        if self._resume and not self.board.turns:
            result = with_figures_of(result, self._folder.path)
        if pool is not None and over:
            self._export(pool)
        if self._folder.best.exists():
            result.paths["best"] = str(self._folder.best)
        if self._trouble is not None:
            with contextlib.suppress(PipefitError):
                save_result(result, self.board, self._folder.path)
            raise TierError(f"{self._trouble}; what was committed is kept: repair that, and resume the study")
        save_result(result, self.board, self._folder.path)
        if over:
            self._folder.forget()
        return result

    def _export(self, pool: Pool) -> None:
        """Writes the best trial's weights, unless an earlier run has; a worker that dies meanwhile is replaced once."""
        best, target = self.board.best, self._folder.best
        if best is None or not self._state_of(best.number).is_dir():
            return
        for _ in range(2):
            pool.send(0, self._order("export", best.number, str(target.absolute())))
            answer = pool.answer(0)
            if answer is not None:
                break
            how = pool.how_it_died(0)
            pool.restart(0, self._settings(0))
        else:
            answer = ("failed", best.number, f"two workers died over it ({how})")
        if answer[0] != "exported":
            self._trouble = f"the best trial's weights could not be written: {answer[2]}"
            return
        write_json(target.with_name("trial.json"), {"name": best.name, **best.trial.as_dict()})

    # ---- signals ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Lets the current turns end at SIGINT and SIGTERM; a second signal does not wait for them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, frame: object) -> None:
            if self._stop is not None:
                raise KeyboardInterrupt
            self._stop = number

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _has_used_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()
