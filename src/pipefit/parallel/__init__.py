"""A model sharded over processes: the mesh, tensor-parallel layers and losses, buckets of gradients."""

from pipefit.parallel.mesh import Mesh, make_mesh, release, shard_layers, widths_of
from pipefit.parallel.region import Region
from pipefit.parallel.tensor_rule import Ruled, ShardSpec, TensorRule, rules_of
