"""`pipefit.Study`: a study as a Python object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipefit.spec.arguments import check_value, checked
from pipefit.study.board import Observer
from pipefit.study.file import load_study, spec_of
from pipefit.study.results import StudyResult
from pipefit.study.trial import Define, StudyError, Trial
from pipefit.study.trial_search import Search


@checked("trials")
class Study:
    """Trials that share devices a shard at a time.

    Args:
        trials: none is built before a device is ready for it.
        define: from values to a `Trial`, for trials that `search` chooses while the study runs.
        search: chooses trials; see `pipefit.study.trial_search`.
        options: those of a study file: fields of `pipefit.study.trial.StudySpec`.

    Raises:
        PipefitError: an option is unknown, or values do not fit together.
    """

    stopped_by: int | None = None
    """The signal that ended the last run early."""

    def __init__(
        self,
        trials: Sequence[Trial] = (),
        *,
        define: Define | None = None,
        search: Search | None = None,
        **options: Any,
    ) -> None:
        if isinstance(trials, str | Path):
            raise StudyError(f"trials: expected Trial objects, got {trials!r}; Study.load reads a study's file")
        check_value("trials", trials, Sequence[Trial], StudyError)
        if (search is None) != (define is None):
            raise StudyError("search=… chooses values and define=… makes a trial of them: give both, or only trials")
        if search is None and not trials:
            raise StudyError("a study needs trials, or a search that chooses them")
        self._define = define
        self._search = search
        self.spec = spec_of(trials, options)

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """A study from its file."""
        study = cls.__new__(cls)
        study.spec = load_study(path)
        study._define = None
        study._search = None
        return study

    def run(self, *, resume: bool = False, observer: Observer | None = None, forked: bool = True) -> StudyResult:
        """Runs the study to its end.

        A trial that fails has the reason in its row; the others continue. Ctrl-C and SIGTERM end the run after the
        current turns: the result then says `interrupted`, and `resume` continues from there, as after any crash.

        Args:
            resume: continue from the output folder.
            observer: called after each event of the study.
            forked: workers are forks of this program and have all its functions. False: they are separate processes,
                which need trials that can be pickled, and a program with `if __name__ == "__main__"`.

        Raises:
            StudyError: the folder holds another study, or one that was not to be resumed.
        """
        from pipefit.study.execute.study_run import StudyRun

        run = StudyRun(
            self.spec,
            define=self._define,
            search=self._search,
            observer=observer,
            resume=resume,
            forked=forked,
        )
        result = run.run()
        self.stopped_by = run.stopped_by
        return result
