"""Weight versions and memory tiers."""

from pipefit.memory.weights import WeightStore

__all__ = ["WeightStore"]
