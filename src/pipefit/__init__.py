"""pipefit: pipeline-parallel training for PyTorch, with schedules as programs.

The torch half loads when it is first used; `import pipefit` needs neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipefit import draw, study
    from pipefit.cutting.cut import cut
    from pipefit.errors import PipefitError
    from pipefit.ir import Instruction, Program, bwd, bwd_input, bwd_weight, fwd
    from pipefit.models.hub import pretrained
    from pipefit.pipeline.callbacks import EMA, STOP, Checkpoints, EarlyStopping
    from pipefit.pipeline.loggers import csv_log, json_log, tensorboard_log, wandb_log
    from pipefit.pipeline.pipeline import Pipeline
    from pipefit.pipeline.plan_model import plan
    from pipefit.pipeline.resume import committed_step
    from pipefit.schedules import Shape, schedule
    from pipefit.spec import Partition, Placement, Plan, Profile, Topology
    from pipefit.spec.options import Parallelism, Precision, Spilled, Updates
    from pipefit.study.api import Study
    from pipefit.study.trial import Trial
    from pipefit.timeline import Timeline
    from pipefit.verify import Report

__version__ = "0.1.0"

_NAMES_OF = {
    "cutting.cut": ("cut",),
    "draw": ("draw",),
    "errors": ("PipefitError",),
    "ir": ("Instruction", "Program", "bwd", "bwd_input", "bwd_weight", "fwd"),
    "models.hub": ("pretrained",),
    "pipeline.callbacks": ("EMA", "STOP", "Checkpoints", "EarlyStopping"),
    "pipeline.loggers": ("csv_log", "json_log", "tensorboard_log", "wandb_log"),
    "pipeline.pipeline": ("Pipeline",),
    "pipeline.plan_model": ("plan",),
    "pipeline.resume": ("committed_step",),
    "schedules": ("Shape", "schedule"),
    "spec": ("Partition", "Placement", "Plan", "Profile", "Topology"),
    "spec.options": ("Parallelism", "Precision", "Spilled", "Updates"),
    "study": ("study",),
    "study.api": ("Study",),
    "study.trial": ("Trial",),
    "timeline": ("Timeline",),
    "verify": ("Report",),
}
_HOMES = {name: home for home, names in _NAMES_OF.items() for name in names}

__all__ = [
    "EMA",
    "STOP",
    "Checkpoints",
    "EarlyStopping",
    "Instruction",
    "Parallelism",
    "Partition",
    "PipefitError",
    "Pipeline",
    "Placement",
    "Plan",
    "Precision",
    "Profile",
    "Program",
    "Report",
    "Shape",
    "Spilled",
    "Study",
    "Timeline",
    "Topology",
    "Trial",
    "Updates",
    "__version__",
    "bwd",
    "bwd_input",
    "bwd_weight",
    "committed_step",
    "csv_log",
    "cut",
    "draw",
    "fwd",
    "json_log",
    "plan",
    "pretrained",
    "schedule",
    "study",
    "tensorboard_log",
    "wandb_log",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pipefit' has no attribute {name!r}")
    home = importlib.import_module(f"pipefit.{_HOMES[name]}")
    # `pipefit.draw` is a module that can be called.
    value = home if name == _HOMES[name] else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
