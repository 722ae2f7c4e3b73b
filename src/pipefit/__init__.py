"""pipefit: pipeline-parallel training for PyTorch, with schedules as programs.

The torch half loads when it is first used; `import pipefit` alone needs neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipefit.draw import draw
    from pipefit.errors import PipefitError
    from pipefit.ir import Instruction, Program, bwd, bwd_input, bwd_weight, fwd
    from pipefit.schedules import Shape, schedule
    from pipefit.simulate import simulate
    from pipefit.spec import Partition, Placement, Plan, Profile, Topology
    from pipefit.timeline import Timeline
    from pipefit.train.pipeline import Pipeline
    from pipefit.verify import Report, verify

__version__ = "0.1.0"

_HOMES = {
    "Instruction": "ir",
    "Partition": "spec",
    "Pipeline": "train.pipeline",
    "PipefitError": "errors",
    "Placement": "spec",
    "Plan": "spec",
    "Profile": "spec",
    "Program": "ir",
    "Report": "verify",
    "Shape": "schedules",
    "Timeline": "timeline",
    "Topology": "spec",
    "bwd": "ir",
    "bwd_input": "ir",
    "bwd_weight": "ir",
    "draw": "draw",
    "fwd": "ir",
    "schedule": "schedules",
    "simulate": "simulate",
    "verify": "verify",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  (the names of the table)


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pipefit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pipefit.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
