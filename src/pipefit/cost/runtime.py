"""Costs of the executor itself: what it adds to the work of the layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from pipefit.ir.op import Op

__all__ = ["FREE", "USUAL", "RuntimeCosts"]


class RuntimeCosts(NamedTuple):
    """Seconds of the executor.

    Attributes:
        overhead_s: on an instruction of the compute lane that `host_s` does not name, beyond what the profile measured.
        post_s: of posting one message.
        host_s: on instructions by operation, beyond what the profile measured.
        pass_s: of a rank between two passes over a synchronous program.
        cut_s: of splitting the batch, for each of its micro-batches.
        copy_s_per_byte: of a send, on the sender's core.
        taking_s: of a forward or replay that takes a message, beyond `host_s`.
        arrival_s: on a message that has come, where no core is left for the threads that carry it.
        fit_s: of a call that trains some steps, beyond its passes.
    """

    overhead_s: float
    post_s: float
    host_s: Mapping[str, float] = MappingProxyType({})
    pass_s: float = 0.0
    cut_s: float = 0.0
    copy_s_per_byte: float = 0.2e-9
    taking_s: float = 0.0
    arrival_s: float = 0.0
    fit_s: float = 0.0

    def scaled(self, factor: float) -> RuntimeCosts:
        """The costs on a machine that takes so many times as long for everything but copying."""
        host_s = {name: seconds * factor for name, seconds in self.host_s.items()}
        plain = ("overhead_s", "post_s", "pass_s", "cut_s", "taking_s", "arrival_s", "fit_s")
        return self._replace(host_s=host_s, **{name: getattr(self, name) * factor for name in plain})

    def in_one_pass(self) -> RuntimeCosts:
        """The costs under a schedule that never flushes: one pass holds all steps, and splits batches as it loads."""
        host_s = dict(self.host_s)
        if host_s:
            host_s[Op.LOAD.value] += self.cut_s
        return self._replace(host_s=host_s, pass_s=0.0, cut_s=0.0)


USUAL = RuntimeCosts(10e-6, 20e-6)
"""Where nothing was measured: ranks in one process, or a GPU, whose work hides it."""

FREE = RuntimeCosts(0.0, 0.0, copy_s_per_byte=0.0)
"""An executor that costs nothing: what the planner and `pipefit simulate` compare plans with."""
