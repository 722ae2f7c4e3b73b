"""`pipefit.Study`: a study as a Python object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipefit.study.file import load_study, rule_of
from pipefit.study.results import StudyResult
from pipefit.study.simulation import StudyTimeline, TrialCost, simulate_study
from pipefit.study.stopping import Rule
from pipefit.study.trial import StudyError, StudySpec, Trial
from pipefit.study.trial_search import Search
from pipefit.units import parse_quantity

if TYPE_CHECKING:
    from pipefit.study.execute.study_run import StudyObserver

__all__ = ["Study", "StudyResult"]


class Study:
    """Trials that share devices a shard at a time.

    Args:
        trials: what to train; nothing of them is built before a device is ready for it.
        define: from values to a `Trial`, for trials that `search` chooses while the study runs.
        search: who chooses them; see `pipefit.study.trial_search`.
        workers: processes, one per device.
        policy: which trial a free device takes: "lrtf", "fifo", "round-robin" or "whole-task".
        device_memory: what a device has, as 64 << 20 or "64 MiB"; models are cut for it. None: they are not.
        tier: "disk" or "host": where trials live between turns.
        memory: what they may take there together; None: what is free.
        threads: CPU threads of each worker; 0: the cores divided among them.
        stop: a stopping rule, its name, or its name and numbers as `{"rule": "median", "min_steps": 10}`.
        output: the study's folder.
        name: for people.
        device: where workers compute; "": GPUs when there are some, else the CPU.

    Raises:
        PipefitError: what was given does not fit together.
    """

    stopped_by: int | None = None
    """The signal that ended the last run early."""

    def __init__(
        self,
        trials: Sequence[Trial] = (),
        *,
        define: Callable[[Mapping[str, Any]], Trial] | None = None,
        search: Search | None = None,
        workers: int = 2,
        policy: str = "lrtf",
        device_memory: float | str | None = None,
        tier: str = "disk",
        memory: float | str | None = None,
        threads: int = 0,
        stop: Rule | str | Mapping[str, Any] | None = None,
        output: str | Path = "runs/study",
        name: str = "study",
        device: str = "",
    ) -> None:
        if (search is None) != (define is None):
            raise StudyError("search=… chooses values and define=… makes a trial of them: give both, or trials alone")
        if search is None and not trials:
            raise StudyError("a study needs trials, or a search that chooses them")
        self._define, self._search = define, search
        self.spec = StudySpec(
            tuple(trials),
            workers,
            policy,
            parse_quantity(device_memory, "bytes", "device_memory") if device_memory is not None else 0.0,
            tier,
            parse_quantity(memory, "bytes", "memory") if memory is not None else 0.0,
            threads,
            rule_of({"rule": stop} if isinstance(stop, str) else stop) if isinstance(stop, str | Mapping) else stop,
            str(output),
            name,
            device,
        )

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """A study from its file."""
        study = cls.__new__(cls)
        study.spec, study._define, study._search = load_study(path), None, None
        return study

    @staticmethod
    def simulate(costs: Sequence[TrialCost], workers: int, policy: str = "lrtf") -> StudyTimeline:
        """A study on paper; see `pipefit.study.simulation.simulate_study`."""
        return simulate_study(costs, workers, policy)

    def run(self, *, resume: bool = False, observer: StudyObserver | None = None, forked: bool = True) -> StudyResult:
        """Runs the study to its end.

        A trial that fails says why in its row, and the others go on. Ctrl-C and SIGTERM end the run after the turns
        under way; the result then says `interrupted`, and `resume` goes on from there, as it does after any death.

        Args:
            resume: go on from what the output folder holds.
            observer: is told what happens.
            forked: workers are forks of this program and know all that it knows. A program that starts with
                `if __name__ == "__main__"` and tells its trials in words may say False.

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
