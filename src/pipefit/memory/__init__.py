"""Versions of weights."""

from pipefit.memory.weights import WeightStore

__all__ = ["WeightStore"]
