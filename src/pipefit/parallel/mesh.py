"""The processes of a run as a mesh: ranks of the program by tensor-parallel processes, the latter innermost.

        j=0  j=1      process t·rank + j is the j-th of the t processes that run the list of a rank
rank 0   0    1       messages go from (a, j) to (b, j), gradients are summed among equal j
rank 1   2    3       rows: tensor parallelism, on the fastest links
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.utils import _pytree as pytree

from pipefit.errors import DataError, ModelError, PlanError
from pipefit.parallel.alike import Shapes, compare
from pipefit.parallel.loss import Loss, shared_loss
from pipefit.parallel.region import Region
from pipefit.parallel.tensor_rule import Ruled, ShardSpec, rules_of
from pipefit.parallel.threads import let_carriers_wait, let_go
from pipefit.parallel.waiting import collective
from pipefit.parallel.weights import refuse_hooks
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import Metric, Owned

_ELEMENTWISE = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
"""Optimizers of torch that treat every number separately, so that each process can step its part of a weight."""


@dataclass
class Mesh:
    """The place of this process. The default is a run without tensor parallelism.

    Attributes:
        tensor: processes that share a rank, t.
        index: of this process among them, j.
        region: their communication; None without tensor parallelism.
        shards: the split of each sharded weight, by the user's name; tied ones under all their names.
        shards_output: each process has its part of the output's last dimension.
        modules: that run in another way than their own.
        compared: stages whose first gradients are the same on all processes of the rank, see `compare`.
    """

    tensor: int = 1
    index: int = 0
    region: Region | None = None
    shards: Mapping[str, ShardSpec] = field(default_factory=dict)
    shards_output: bool = False
    modules: list[nn.Module] = field(default_factory=list)
    compared: set[int] = field(default_factory=set)

    @property
    def is_first(self) -> bool:
        """Returns whether this process represents its rank: weights that all hold whole are counted and saved once."""
        return self.index == 0

    def rank_of(self, process: int) -> int:
        """The rank that a process belongs to."""
        return process // self.tensor

    def process_of(self, rank: int) -> int:
        """The process that represents a rank."""
        return rank * self.tensor

    def meet_again(self) -> None:
        """Meets the other processes of the rank in a new group, after all process groups are gone."""
        if self.region is not None:
            before = [self.region.group]
            self.region.group = _group_of_rank(dist.group.WORLD, self.tensor)
            let_go(before)

    def check_optimizer(self, optimizer: optim.Optimizer) -> None:
        """Refuses an optimizer that would take this process's part of a weight for a whole one.

        Raises:
            PlanError: it is not known to treat every number separately, or has hooks.
        """
        if self.region is None:
            return
        refuse_hooks(optimizer)
        kind = type(optimizer)
        if kind in _ELEMENTWISE or getattr(kind, "elementwise", False):
            return
        raise PlanError(
            f"with tensor parallelism an optimizer must treat every number separately, as SGD and AdamW do, and "
            f"{kind.__name__} is not known to: use another one, or tensor=1; if yours does, say so in its class: "
            "elementwise = True"
        )

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a weight, or all of one that is not sharded."""
        spec = self.shards.get(name)
        if spec is None:
            return whole
        return spec.part(whole, self.index, self.tensor)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """A weight from its parts; every process of the rank must call it, in one order."""
        spec = self.shards.get(name)
        if spec is None or self.region is None:
            return part
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.tensor)]
        collective(dist.all_gather, parts, part.detach().contiguous(), group=self.region.group)
        return spec.whole(parts)

    def whole_shape(self, name: str, part: torch.Size) -> torch.Size:
        """The shape of the whole weight."""
        spec = self.shards.get(name)
        if spec is None:
            return part
        return spec.shape(part, self.tensor)

    def compare(self, stage: int, owned: Iterable[Owned]) -> None:
        """Compares the first gradients of the weights that every process of the rank has whole; all call it alike.

        Args:
            stage: whose first gradients are complete; for others that follow nothing is done.
            owned: its weights.

        Raises:
            ModelError: the processes have different gradients, so their weights would become different.
        """
        if self.region is None or stage in self.compared:
            return
        self.compared.add(stage)
        whole = {}
        for name, parameter, _ in owned:
            if name not in self.shards and parameter.grad is not None:
                whole[name] = parameter.grad
        if not whole:
            return
        found = torch._foreach_norm(list(whole.values()))
        norms = torch.stack([norm.double() for norm in found]).nan_to_num()
        parts = [torch.empty_like(norms) for _ in range(self.tensor)]
        collective(dist.all_gather, parts, norms, group=self.region.group)
        low, high = torch.stack(parts).aminmax(dim=0)
        differ = high - low > 1e-3 * high
        for name, far in zip(whole, differ.tolist(), strict=True):
            if far:
                raise ModelError(
                    f"the gradient of {name} is not the same on the {self.tensor} processes that have it: its module "
                    "uses it on their parts, which the model's plan does not say; use tensor=1"
                )

    def loss(self, loss: Loss) -> Loss:
        """The loss of this process's part of the output."""
        if self.shards_output and self.region is not None:
            return shared_loss(loss, self.region)
        return loss

    def metric(self, metric: Metric) -> Metric:
        """A metric of this process's part of the output."""
        region = self.region
        if region is None or not self.shards_output:
            return metric
        return lambda output, target: metric(region.join(output), target)

    def check(self, x: Any) -> None:
        """Compares the input with those of the processes that share the rank; all of them call it.

        Raises:
            DataError: two differ in shape, or sequence parallelism cannot split the second dimension.
        """
        assert self.region is not None
        compare(Shapes.of(x), self.region.group)
        if not self.region.sequence:
            return
        for leaf in pytree.tree_leaves(x):
            if leaf.dim() < 2 or leaf.shape[1] % self.tensor:
                raise DataError(
                    f"sequence parallelism splits the sequence by tensor={self.tensor}, but an input has "
                    f"shape {list(leaf.shape)}; give sequences of a length that {self.tensor} divides"
                )


@functools.lru_cache(maxsize=1)
def _group_of_rank(world: dist.ProcessGroup, tensor: int) -> dist.ProcessGroup:
    """The processes that share this one's rank. Groups are made once: each costs threads and connections."""
    group, _ = dist.new_subgroups(tensor, group=world)
    let_carriers_wait()
    return group


def make_mesh(num_ranks: int, tensor: int, process: int, num_processes: int, sequence: bool = False) -> Mesh:
    """The mesh of a run; every process must call it with the same arguments.

    Raises:
        PlanError: there is only one process, or ranks × width is not the number of processes.
    """
    if tensor == 1:
        return Mesh()
    if num_processes == 1:
        raise PlanError(
            f"tensor={tensor} needs a process for each part: start {num_ranks * tensor} with "
            "`pipefit run -n N script.py` or `pipefit train --ranks N`, or torchrun; all ranks in one process cannot"
        )
    if num_ranks * tensor != num_processes:
        raise PlanError(
            f"{num_ranks} ranks of {tensor} tensor-parallel processes make {num_ranks * tensor}, but {num_processes} "
            "processes were started"
        )
    region = Region(_group_of_rank(dist.group.WORLD, tensor), tensor, process % tensor, sequence)
    return Mesh(tensor, process % tensor, region)


def shard_layers(layers: Sequence[NamedLayer], mesh: Mesh) -> None:
    """Turns the layers of a whole model into those of this process, in place: same names, smaller weights.

    Args:
        layers: all of them, with the same weights on all processes.
        mesh: gets the specification of each sharded weight.

    Raises:
        ModelError: a layer has no rule, or a size that is not a multiple of the width; nothing is changed then.
    """
    if mesh.region is None:
        return
    found = rules_of(layer.module for layer in layers)
    rules = [_checked(layer, own, mesh.tensor) for layer, own in zip(layers, found, strict=True)]
    first, last = rules[0].get(""), rules[-1].get("")
    mesh.shards_output = last is not None and last.rule.gives_shares
    takes_whole = first is not None and first.rule.takes_whole
    if mesh.region.sequence and not (takes_whole and mesh.shards_output):
        raise ModelError(
            "sequence parallelism shards the values between layers, so the model must begin with a layer that takes "
            f"the input whole and end with one that joins it; {layers[0].name} … {layers[-1].name} do not"
        )
    shards = {}
    done = set()
    for named, own in zip(layers, rules, strict=True):
        parameters = dict(named.module.named_parameters(remove_duplicate=False))
        for path, (module, rule) in own.items():
            for name, spec in rule.shards.items():
                if path:
                    name = f"{path}.{name}"
                if (parameter := parameters.get(name)) is not None:
                    shards[named.dotted + name] = spec
                    if id(parameter) not in done:
                        done.add(id(parameter))
                        parameter.data = spec.part(parameter.data, mesh.index, mesh.tensor)
            module.__class__ = rule.becomes
            vars(module)["region"] = mesh.region
            mesh.modules.append(module)
    mesh.shards = shards


def release(mesh: Mesh) -> None:
    """Restores the classes of modules; their weights stay this process's parts."""
    for module in {id(module): module for module in mesh.modules}.values():
        module.__class__ = type(module).__bases__[-1]
        del module.region
    mesh.modules.clear()


def widths_of(layers: Sequence[nn.Module], most: int) -> tuple[int, ...]:
    """The tensor widths up to `most` that a model's layers allow; only 1 where one of them has no rule."""
    try:
        rules = rules_of(layers)
    except ModelError:
        return (1,)
    sizes: set[int] = set()
    for own in rules:
        if own is None:
            return (1,)
        for module, rule in own.values():
            if not rule.may_stay_whole:
                sizes.update(rule.sizes(module).values())
    # A width divides all sizes if it divides their greatest common divisor, which is 0 for none.
    common = math.gcd(*sizes)
    return tuple(width for width in range(1, most + 1) if common % width == 0)


def _checked(named: NamedLayer, rules: Mapping[str, Ruled] | None, width: int) -> dict[str, Ruled]:
    """The rules of a layer, but of modules that stay whole."""
    if rules is None:
        raise ModelError(
            f"layer {named.name} ({type(named.module).__name__}) has no tensor rule, so {width} processes cannot share "
            "it; use tensor=1, a gpt, or give its class a `tensor_rule` (pipefit.parallel.TensorRule)"
        )
    kept = dict(rules)
    for path, (module, rule) in rules.items():
        for what, size in rule.sizes(module).items():
            if size % width and rule.may_stay_whole:
                kept.pop(path, None)
            elif size % width:
                divisors = [str(width) for width in range(1, min(size, 64) + 1) if size % width == 0]
                where = named.dotted + path
                if not path:
                    where = f"layer {named.name}"
                raise ModelError(
                    f"{where}: {what}={size} is no multiple of tensor={width}; widths that divide it: "
                    + ", ".join(divisors)
                )
    return kept
