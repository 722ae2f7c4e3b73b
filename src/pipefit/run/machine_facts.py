"""The machine and the versions of a run, in words for its report."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from importlib.metadata import version

import torch

from pipefit.profiling.measure import description
from pipefit.run.config import num_cores
from pipefit.runtime.collectives import exchange
from pipefit.runtime.session import Session
from pipefit.spec.host import usable_bytes
from pipefit.units import format_bytes


def machine_facts(session: Session, device: torch.device) -> dict[str, str]:
    """The devices of all processes, this machine, and the versions; every rank makes the same call.

    Args:
        session: the ranks of the run.
        device: of this rank.
    """
    devices = Counter(exchange(session, description(device, None)))
    return {
        "processes": ", ".join(f"{count} × {device}" for device, count in devices.items()),
        "cores": str(num_cores()),
        "memory": format_bytes(usable_bytes()),
        "system": platform.platform(terse=True),
        "pipefit": sys.modules["pipefit"].__version__,
        "torch": str(torch.__version__),
        "numpy": version("numpy"),
        "Python": platform.python_version(),
    }
