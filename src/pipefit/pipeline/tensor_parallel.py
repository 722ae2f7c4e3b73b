"""The tensor parallelism of a pipeline: its sharded layers, and the loss, metrics and data that go with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.errors import DataError
from pipefit.parallel import Mesh, make_mesh, release, rule_of, shard_layers
from pipefit.parallel.loss import shared_loss
from pipefit.runtime.session import Session
from pipefit.spec import Plan
from pipefit.stage.split import NamedLayer


@dataclass(frozen=True)
class TensorParallel:
    """The layers of a model, sharded over the processes of each rank.

    Attributes:
        mesh: of the run.
        layers: of the whole model.
        shards_output: each process has its part of the output's last dimension.
    """

    mesh: Mesh
    layers: Sequence[NamedLayer]
    shards_output: bool

    @classmethod
    def of(cls, layers: Sequence[NamedLayer], plan: Plan, session: Session, device: torch.device) -> TensorParallel:
        """Shards the layers, in place, as a plan says.

        Raises:
            PipefitError: the processes do not go with the plan, or the model cannot be sharded so.
        """
        num_ranks, sequence = plan.placement.num_ranks, plan.sequence_parallel
        return cls.on(layers, make_mesh(num_ranks, plan.tensor, session.rank, session.num_ranks, sequence))

    @classmethod
    def on(cls, layers: Sequence[NamedLayer], mesh: Mesh) -> TensorParallel:
        """Shards the layers, in place, over a mesh.

        Raises:
            ModelError: the model cannot be sharded so.
        """
        last = rule_of(layers[-1].module)
        shard_layers([(layer.prefix, layer.module) for layer in layers], mesh)
        return cls(mesh, layers, mesh.region is not None and last is not None and last.gives_shares)

    def loss(self, loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """The loss of the sharded output."""
        region = self.mesh.region
        return shared_loss(loss, region) if self.shards_output and region is not None else loss

    def metric(self, metric: Callable[[Any, Any], float] | None) -> Callable[[Any, Any], float] | None:
        """A metric of the whole output, from the sharded one."""
        region = self.mesh.region
        if metric is None or region is None or not self.shards_output:
            return metric
        return lambda output, target: metric(region.join(output), target)

    def check(self, x: Any) -> None:
        """Refuses an input whose second dimension sequence parallelism cannot split.

        Raises:
            DataError: it is one.
        """
        if self.mesh.region is None or not self.mesh.region.sequence:
            return
        for leaf in pytree.tree_leaves(x):
            if leaf.dim() < 2 or leaf.shape[1] % self.mesh.tensor:
                raise DataError(
                    f"sequence parallelism divides the sequence by tensor={self.mesh.tensor}, but an input has "
                    f"shape {list(leaf.shape)}; give sequences of a length that {self.mesh.tensor} divides"
                )

    def release(self) -> None:
        """Gives the layers their own classes back."""
        release([(layer.prefix, layer.module) for layer in self.layers])
