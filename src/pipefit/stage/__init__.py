"""Splitting a model into stages, and running one."""

from pipefit.stage.batchnorm import DeferredBatchNorm
from pipefit.stage.payload import Contract, flatten, unflatten
from pipefit.stage.split import NamedLayer, named_layers, split
from pipefit.stage.stage import Stage

__all__ = ["Contract", "DeferredBatchNorm", "NamedLayer", "Stage", "flatten", "named_layers", "split", "unflatten"]
