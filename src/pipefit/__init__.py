"""pipefit: pipeline-parallel training for PyTorch, with schedules as programs.

The torch half loads when it is first used; `import pipefit` needs neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as`: checkers of types take a name for public only so
    from pipefit import draw as draw
    from pipefit import study as study
    from pipefit.cutting.cut import cut as cut
    from pipefit.errors import PipefitError as PipefitError
    from pipefit.ir import Instruction as Instruction
    from pipefit.ir import Program as Program
    from pipefit.ir import bwd as bwd
    from pipefit.ir import bwd_input as bwd_input
    from pipefit.ir import bwd_weight as bwd_weight
    from pipefit.ir import fwd as fwd
    from pipefit.models.hub import pretrained as pretrained
    from pipefit.pipeline.callbacks import EMA as EMA
    from pipefit.pipeline.callbacks import STOP as STOP
    from pipefit.pipeline.callbacks import Checkpoints as Checkpoints
    from pipefit.pipeline.callbacks import EarlyStopping as EarlyStopping
    from pipefit.pipeline.loggers import csv_log as csv_log
    from pipefit.pipeline.loggers import json_log as json_log
    from pipefit.pipeline.loggers import tensorboard_log as tensorboard_log
    from pipefit.pipeline.loggers import wandb_log as wandb_log
    from pipefit.pipeline.pipeline import Pipeline as Pipeline
    from pipefit.pipeline.plan_model import plan as plan
    from pipefit.pipeline.resume import committed_step as committed_step
    from pipefit.schedules import Shape as Shape
    from pipefit.schedules import schedule as schedule
    from pipefit.spec import Partition as Partition
    from pipefit.spec import Placement as Placement
    from pipefit.spec import Plan as Plan
    from pipefit.spec import Profile as Profile
    from pipefit.spec import Topology as Topology
    from pipefit.spec.options import Parallelism as Parallelism
    from pipefit.spec.options import Precision as Precision
    from pipefit.spec.options import Request as Request
    from pipefit.spec.options import Spilled as Spilled
    from pipefit.spec.options import Updates as Updates
    from pipefit.study.api import Study as Study
    from pipefit.study.trial import Trial as Trial
    from pipefit.timeline import Timeline as Timeline
    from pipefit.verify import Report as Report

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
    "spec.options": ("Parallelism", "Precision", "Request", "Spilled", "Updates"),
    "study": ("study",),
    "study.api": ("Study",),
    "study.trial": ("Trial",),
    "timeline": ("Timeline",),
    "verify": ("Report",),
}
_HOMES = {name: home for home, names in _NAMES_OF.items() for name in names}

__all__ = [*_HOMES, "__version__"]


if not TYPE_CHECKING:  # to a checker of types this would make every name a public one

    def __getattr__(name: str) -> Any:
        """Loads a public name when it is first used."""
        if name not in _HOMES:
            raise AttributeError(f"module 'pipefit' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        home = importlib.import_module(f"pipefit.{_HOMES[name]}")
        # `pipefit.draw` is a module that can be called.
        if name == _HOMES[name]:
            value = home
        else:
            value = getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
