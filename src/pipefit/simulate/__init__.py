"""When everything in a program happens under a cost model, without running it."""

from pipefit.simulate.metrics import metrics, steady_period_s
from pipefit.simulate.simulate import simulate

__all__ = ["metrics", "simulate", "steady_period_s"]
