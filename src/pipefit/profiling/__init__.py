"""What each layer of a model costs: measured on the device at hand, or computed for devices that are not."""

from pipefit.profiling.layers import as_chain
from pipefit.profiling.measure import profile_layers, profile_sizes

__all__ = ["as_chain", "profile_layers", "profile_sizes"]
