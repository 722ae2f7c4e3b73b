"""Studies: many trials on few devices, a shard at a time. `pf.study(trials, …)` runs one; `pf.Study` is the object.

What plans, simulates and judges a study needs no torch; `execute` does, and loads when a study runs.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipefit.study.api import Study, StudyResult
    from pipefit.study.trial import Trial

__all__ = ["Study", "StudyResult", "Trial", "study"]

_HOMES = {"Study": "api", "StudyResult": "api", "Trial": "trial"}


def study(trials: Any, **options: Any) -> StudyResult:
    """Runs a study to its end; see `Study` for the arguments."""
    from pipefit.study.api import Study

    return Study(trials, **options).run()


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pipefit.study' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pipefit.study.{_HOMES[name]}"), name)


class _Callable(ModuleType):
    """`pipefit.study` is this module; calling it must still run a study."""

    def __call__(self, trials: Any, **options: Any) -> StudyResult:
        return study(trials, **options)


sys.modules[__name__].__class__ = _Callable
