"""Dividing a model over processes: the mesh, tensor-parallel layers and losses, buckets of gradients."""

from pipefit.parallel.mesh import Mesh, divide, make_mesh, release, widths_of
from pipefit.parallel.region import Region
from pipefit.parallel.tensor_rule import Cut, TensorRule, rule_of

__all__ = ["Cut", "Mesh", "Region", "TensorRule", "divide", "make_mesh", "release", "rule_of", "widths_of"]
