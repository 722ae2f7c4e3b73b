"""Studies: many trials on few devices, a shard at a time. `pf.study(trials, …)` runs one; `pf.Study` is the object.

Planning, simulation and stopping rules need no torch; `execute` does, and loads when a study runs.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from pipefit.study.api import Study, StudyResult
from pipefit.study.trial import Trial


class _Callable(ModuleType):
    """`pipefit.study` is this module; calling it must still run a study."""

    def __call__(self, trials: Any, **options: Any) -> StudyResult:
        """Runs a study to its end; see `Study` for the arguments."""
        return Study(trials, **options).run()


sys.modules[__name__].__class__ = _Callable
