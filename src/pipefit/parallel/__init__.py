"""Dividing a model over processes: the mesh, tensor-parallel layers and losses, buckets of gradients."""

from pipefit.parallel.cut import Cut, TensorRule, rule_of
from pipefit.parallel.mesh import Mesh, divide, make_mesh, release, widths_of
from pipefit.parallel.region import Region

__all__ = ["Cut", "Mesh", "Region", "TensorRule", "divide", "make_mesh", "release", "rule_of", "widths_of"]
