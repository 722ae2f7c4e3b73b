"""Versions of weights, and the tiers that hold what is not on the device."""

from pipefit.memory.weights import WeightStore

__all__ = ["WeightStore"]
