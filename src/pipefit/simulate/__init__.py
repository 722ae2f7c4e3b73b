"""When everything in a program happens under a cost model, without running it."""

from pipefit.simulate.simulate import simulate

__all__ = ["simulate"]
