"""Costs of the executor itself: what it adds to the work of the layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class RuntimeCosts(NamedTuple):
    """Seconds of the executor.

    Attributes:
        overhead_s: on an instruction of the compute lane that `host_s` does not name, beyond what the profile measured.
        post_s: of posting one message.
        host_s: on instructions by operation, beyond what the profile measured.
        pass_s: of a rank before each pass over the program.
        copy_s_per_byte: of a send, on the sender's core.
        arrival_s: on a message that has come, where no core is left for the threads that carry it.
    """

    overhead_s: float
    post_s: float
    host_s: Mapping[str, float] = MappingProxyType({})
    pass_s: float = 0.0
    copy_s_per_byte: float = 0.2e-9
    arrival_s: float = 0.0


USUAL = RuntimeCosts(10e-6, 20e-6)
"""Where nothing was measured: ranks in one process, or a GPU, whose work hides it."""

FREE = RuntimeCosts(0.0, 0.0, copy_s_per_byte=0.0)
"""An executor that costs nothing: what the planner and `pipefit simulate` compare plans with."""
