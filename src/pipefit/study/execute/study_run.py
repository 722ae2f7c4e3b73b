"""A run of a study: gives turns to workers, writes the ends of trials, and can be stopped and resumed at any time."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pipefit.errors import DamageError, PipefitError, TierError
from pipefit.runtime.signals import handling
from pipefit.spec.files import write_json
from pipefit.study.board import Board, Observer
from pipefit.study.execute.device_worker import Answer, Settings, reason_of
from pipefit.study.execute.folder import StudyFolder
from pipefit.study.execute.pool import Pool
from pipefit.study.execute.trial_files import read_progress
from pipefit.study.results import StudyResult, read_entry, result_of, save_result, write_entry
from pipefit.study.trial import Define, Job, StudyError, StudySpec, Trial, Values, file_name
from pipefit.study.trial_progress import TrialProgress
from pipefit.study.trial_search import Search

_GRACE_S = 10.0
_MOST_RESTARTS = 20


class StudyRun:
    """One run of a study, from its start or from the end of an earlier run.

    Args:
        spec: the study.
        define: makes a trial from the values that `search` chooses.
        search: chooses further trials; None: only those of the spec.
        observer: called after each event.
        resume: continue from the output folder.
        forked: workers are forks of this process and have all its functions; else they come from a server that has
            torch loaded, and trials must be pickled.

    Attributes:
        board: the state of the study.
        stopped_by: the signal that ended the run before the study was over.

    Raises:
        StudyError: workers cannot be forks of this program.
    """

    def __init__(
        self,
        spec: StudySpec,
        *,
        define: Define | None = None,
        search: Search | None = None,
        observer: Observer | None = None,
        resume: bool = False,
        forked: bool = True,
    ) -> None:
        if forked and _has_used_cuda():
            raise StudyError(
                "this program has used the GPU already, which a fork of it cannot: run the study first, in another "
                "program, or from a study file"
            )
        self.spec = spec
        self._define = define
        self._search = search
        self._observer = observer or (lambda board: None)
        self._resume = resume
        self._forked = forked
        self.board = Board([], spec.workers, spec.policy, spec.stop, self._ended, admits_singly=spec.tier_bytes > 0)
        self.stopped_by: int | None = None
        self._trouble: str | None = None
        self._restarts = 0
        self._has_died_over_weights = False
        self._chosen: dict[int, Values] = {}
        self._kept: TrialProgress | None = None

    # ---- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> StudyResult:
        """Runs to the end, or to the first signal; all committed state is kept in both cases.

        Raises:
            StudyError: the folder holds another study, or one that was not to be resumed.
            TierError: the tier is full or missing; the study can be resumed after a repair.
        """
        with contextlib.closing(StudyFolder(self.spec, self._resume)) as self._folder, self._listening():
            for number, trial in enumerate(self.spec.trials):
                self._place(trial, file_name(number, trial))
            self._recall()
            self._ask()
            try:
                with contextlib.closing(Pool(self._settings, self.spec.workers, self._forked)) as pool:
                    self._loop(pool)
            except PipefitError:
                if self.stopped_by is None:  # a signal also ends workers, before they can ignore it
                    raise
            return self._finish()

    def _place(self, trial: Trial, name: str) -> TrialProgress:
        """Adds a trial to the board; it may have ended in an earlier run."""
        self.board.entries.append(read_entry(len(self.board.entries), trial, name, self._folder.path))
        return self.board.entries[-1]

    def _settings(self, number: int) -> Settings:
        log = self._folder.logs / f"worker-{number}.log"
        trials = [entry.trial for entry in self.board.entries]
        return Settings(number, self.spec, self._folder.state, log, trials, self._define)

    def _loop(self, pool: Pool) -> None:
        deadline_s = math.inf
        while time.monotonic() < deadline_s:  # after it the current turns are not committed, and will be repeated
            for number in sorted(pool.idle):
                if (job := self._next_job(number, pool)) is not None:
                    pool.give(number, job)
            if not pool.jobs:
                break
            if self.stopped_by is not None:
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
            pool.end_stopped()
            for number, job, answer in pool.answers(0.2):
                if answer is None:
                    self._lost(pool, number, job)
                else:
                    self._take(number, job, answer)
                if self._search is None:
                    self.board.predict()
                self._ask()
                self._observer(self.board)

    def _next_job(self, number: int, pool: Pool) -> Job | None:
        """The next job of a free worker; the last one writes the best trial's weights."""
        if self.stopped_by is not None or self._trouble is not None:
            return None
        job = self.board.next_job(number)
        if job is None and not pool.jobs and (best := self._unwritten_best()) is not None:
            job = Job("export", best.number, str(self._folder.best.absolute()))
        if job is None:
            return None
        if job.kind == "admit":
            argument = self._room_bytes()
        else:
            argument = job.argument
        name = self.board.entries[job.trial].name
        values = self._chosen.get(job.trial)
        return job._replace(argument=argument, name=name, values=values, alive=self.board.alive)

    def _unwritten_best(self) -> TrialProgress | None:
        """The best trial of a study that is over, while its weights are on the tier only."""
        best = self.board.best
        if best is not None and self.board.is_over and self._state_of(best.number).is_dir():
            return best
        return None

    def _room_bytes(self) -> float:
        """Space for a trial on the tier now."""
        free = self._folder.free_bytes
        limit = self.spec.tier_bytes
        if limit:
            return min(free, limit - self.board.tier_bytes)
        return free

    def _take(self, number: int, job: Job, answer: Answer) -> None:
        self.board.book([turn._replace(device=number) for turn in answer.turns])
        done = answer.outcome == "done"
        if job.kind == "start":
            if not done:
                raise PipefitError(f"device: {self.spec.device!r} cannot be used: {answer.result}")
        elif job.kind == "export":
            self._exported(job.trial, "" if done else answer.result)
        elif done and job.kind == "turn":
            self.board.settle(job.trial)
        elif done:
            with self._failing(job.trial):
                self.board.admitted(job.trial, answer.result, read_progress(self._state_of(job.trial)))
        elif answer.outcome == "no-room":
            self.board.sent_back(job.trial)
        elif answer.outcome == "tier":
            # Not the trial's fault, and perhaps repaired soon: no trial ends, and no further turn begins.
            self._trouble = answer.result
            self.board.set_back(job.trial)
        else:
            self.board.failed(job.trial, answer.result)

    def _lost(self, pool: Pool, number: int, job: Job) -> None:
        """A worker died: its trial continues from its last commit, in another process."""
        how = pool.how_it_died(number)
        if job.kind == "start":
            raise PipefitError(f"worker {number} did not start ({how}); its log is in {self._folder.logs}")
        if job.kind != "export":
            with self._failing(job.trial):
                self.board.lost(job.trial, how, read_progress(self._state_of(job.trial)))
        elif self._has_died_over_weights:
            self._exported(job.trial, f"two workers died over it ({how})")
        self._has_died_over_weights = job.kind == "export"
        self._restarts += 1
        if self._restarts > _MOST_RESTARTS:
            raise PipefitError(f"{self._restarts} workers died ({how}); their logs: {self._folder.logs}")
        pool.start(number)

    @contextlib.contextmanager
    def _failing(self, number: int) -> Iterator[None]:
        """Ends a trial whose files are found to be damaged."""
        try:
            yield
        except DamageError as problem:
            self.board.failed(number, reason_of(problem))

    def _state_of(self, number: int) -> Path:
        return self._folder.state / self.board.entries[number].name

    # ---- adding trials ---------------------------------------------------------------------------------------------

    def _recall(self) -> None:
        """Adds the trials that a search chose in an earlier run, and reports to the search those that have ended."""
        if self._resume and self._search is not None:
            for values in self._folder.chosen():
                self._search.again(values)
                self._add(values)
        self._kept = self.board.best

    def _ask(self) -> None:
        """Asks the search for further trials while there are fewer than workers could take."""
        if self._search is None:
            return
        while self.stopped_by is None and len(self.board.alive) < 2 * self.spec.workers:
            values = self._search.ask()
            if values is None:
                return
            self._folder.choose([*self._chosen.values(), values])
            self._add(values)

    def _add(self, values: Values) -> None:
        """Adds a trial with values that the search chose; if it cannot be made, only that trial fails."""
        assert self._define is not None
        number = len(self.board.entries)
        reason = ""
        self._chosen[number] = values
        try:
            trial = self._define(values)
            self.spec.check_further(trial, [entry.trial for entry in self.board.entries])
            trial = replace(trial, values={**dict(trial.values), **dict(values)})
        except Exception as problem:
            trial = Trial(values=dict(values))
            reason = reason_of(problem, "while it was defined")
        name = file_name(number, trial)
        if name in {entry.name for entry in self.board.entries}:
            name = f"{name}-{number}"  # a search may choose the same twice
        entry = self._place(trial, name)
        if entry.has_ended:  # in an earlier run
            self._report(entry)
        elif reason:
            self.board.failed(number, reason)

    def _report(self, entry: TrialProgress) -> None:
        if entry.number in self._chosen and self._search is not None:
            self._search.tell(self._chosen[entry.number], None if entry.status == "failed" else entry.score)

    def _ended(self, entry: TrialProgress) -> None:
        try:
            write_entry(entry, self._folder.path)
        except PipefitError as problem:
            self._trouble = str(problem)  # its state stays, so that it ends again when the study is resumed
            return
        self._report(entry)
        best = self.board.best
        # The state of the best so far stays until its weights are written.
        for other in (entry, self._kept):
            if other is not None and (best is None or other.number != best.number):
                self._folder.forget(other.name)
        self._kept = best

    def _exported(self, number: int, problem: str) -> None:
        """Records that the best trial's weights are written, or the reason why they are not."""
        entry = self.board.entries[number]
        target = self._folder.best
        if problem:
            self._trouble = f"the best trial's weights could not be written: {problem}"
            return
        write_json(target.with_name("trial.json"), {"name": entry.name, **entry.trial.as_dict()})
        self._folder.forget(entry.name)

    def _finish(self) -> StudyResult:
        over = self.board.is_over and self._trouble is None and self._unwritten_best() is None
        place = self._folder.path
        result = result_of(self.board, self.spec.name, not over, self._resume, place)
        if self._folder.best.exists():
            result.paths["best"] = str(self._folder.best)
        if self._trouble is not None:
            with contextlib.suppress(PipefitError):
                save_result(result, self.board, place)
            raise TierError(f"{self._trouble}; all committed state is kept: repair that, and resume the study")
        save_result(result, self.board, place)
        if over:
            self._folder.forget()
        return result

    # ---- signals ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Lets the current turns end at SIGINT and SIGTERM; a second signal does not wait for them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, frame: object) -> None:
            if self.stopped_by is not None:
                raise KeyboardInterrupt
            self.stopped_by = number

        with handling(on_signal, signal.SIGINT, signal.SIGTERM):
            yield


def _has_used_cuda() -> bool:
    """Returns whether this program has opened a GPU: to ask whether there is one is enough."""
    for handle in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            if str(handle.readlink()).startswith("/dev/nvidia"):
                return True
    return False
