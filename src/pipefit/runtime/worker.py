"""A rank's persistent state: its stages, their weights and optimizers. Many programs run with it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipefit.errors import ModelError
from pipefit.ir.instruction import Indices
from pipefit.parallel.buckets import GradientBuckets
from pipefit.parallel.mesh import Mesh
from pipefit.parallel.sharded_weights import ShardedStore
from pipefit.parallel.shared_stores import SharedGradientsStore, SharedWeightsStore
from pipefit.parallel.weights import Store, WeightStore
from pipefit.spec.plan import Shard
from pipefit.spill.rank import Spilling
from pipefit.stage.accelerator import is_accelerator
from pipefit.stage.compiler import compiled_forwards
from pipefit.stage.optimizing import optimizer_of, scheduler_of
from pipefit.stage.payload import Structure
from pipefit.stage.precision import LossScale
from pipefit.stage.record_layout import is_absent
from pipefit.stage.split import NamedLayer
from pipefit.stage.stage import Stage, restoring_modes
from pipefit.stage.ties import shared_parameters
from pipefit.stage.training import Owned, Tie, Training


class Stepped(NamedTuple):
    """The state that steps the parameters of a stage, apart from the number of the stage.

    Attributes:
        store: of their versions.
        optimizer: made for the masters of the store.
        scheduler: of the optimizer; None: there is none.
    """

    store: Store
    optimizer: Optimizer
    scheduler: LRScheduler | None


@dataclass
class Worker:
    """The state that one rank keeps between programs.

    Attributes:
        rank: its number.
        training: loss, optimizer and other settings.
        device: of the rank.
        stages: by index.
        owned: the parameters each stage trains.
        stores: the weight versions of each stage.
        optimizers: of each stage; none where nothing trains.
        schedulers: of each optimizer.
        ties: all tied parameters of the model by name, in the model's order.
        buckets: the gradients of each stage that is replicated.
        scale: of the loss; None: it is not scaled.
        spilling: tier, slots and lanes of the rank; None: all its stages stay on the device.
        mesh: the processes that share the rank by tensor parallelism.
        structures: of each output of a stage, from the first micro-batch of each shape.
        flags: for each output of a stage, whether it needs a gradient, from the first micro-batch of each shape.
        overwritten: whether a stage changes its input in place, from the first micro-batch of each shape.
        frozen: parameters that no optimizer has, by name.
        unreached: stages that gave no gradient to the one before them.
    """

    rank: int
    training: Training
    device: torch.device
    stages: dict[int, Stage]
    ties: dict[str, Tie]
    owned: dict[int, list[Owned]] = field(default_factory=dict)
    stores: dict[int, Store] = field(default_factory=dict)
    optimizers: dict[int, Optimizer] = field(default_factory=dict)
    schedulers: dict[int, LRScheduler] = field(default_factory=dict)
    spilling: Spilling | None = None
    mesh: Mesh = field(default_factory=Mesh)
    buckets: dict[int, GradientBuckets] = field(default_factory=dict)
    scale: LossScale | None = None
    structures: dict[tuple[int, str], Structure] = field(default_factory=dict)
    flags: dict[tuple[int, str], Sequence[bool]] = field(default_factory=dict)
    overwritten: dict[tuple[int, str], bool] = field(default_factory=dict)
    frozen: dict[str, nn.Parameter] = field(default_factory=dict)
    unreached: set[int] = field(default_factory=set)
    _idle: dict[int, list[tuple[nn.Parameter, Tensor]]] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        rank: int,
        training: Training,
        layers: dict[int, list[NamedLayer]],
        ties: dict[str, Tie],
        device: torch.device,
        spilling: Spilling | None = None,
        mesh: Mesh | None = None,
        shards: Mapping[int, tuple[int, int]] = MappingProxyType({}),
        shard: Shard = "optimizer",
        fill: Callable[[Sequence[NamedLayer]], None] | None = None,
        kept: Mapping[Indices, Stepped] = MappingProxyType({}),
    ) -> Worker:
        """Builds the stages of a rank one after the other from their layers, those of `spilling` without their weights.

        Args:
            rank: its number.
            training: loss, optimizer and other settings.
            layers: of each stage.
            ties: all tied parameters of the model.
            device: of the rank.
            spilling: of its spilled stages.
            mesh: the processes that share the rank.
            shards: (replica, replicas) of each stage whose replicas share something.
            shard: what they share.
            fill: gives the layers of a stage their weights when its turn comes; None: they have them.
            kept: of stages whose parameters stay together, by the ids of the parameters; see `stepped`.

        Raises:
            PlanError: an optimizer cannot be sharded.
        """
        worker = cls(rank, training, device, {}, ties, spilling=spilling, mesh=mesh or Mesh())
        spilled = spilling.stores if spilling else {}
        if training.loss_scale is not None:
            worker.scale = LossScale(training.loss_scale)
        seen = set()
        several = shared_parameters(layers, ties)
        for index, own_layers in layers.items():
            # By name: those of the meta device are others once they are filled.
            shared = _names_of(own_layers, several)
            if fill is not None and index not in spilled:
                fill(own_layers)
            stage = worker.stages[index] = Stage(index, own_layers, device, training.seed)
            stage.compiled = compiled_forwards(stage.layers, training.compiler)
            stage.compute_in(training.half)
            owned: list[Owned] = []
            worker.owned[index] = owned
            for name, parameter in stage.named_parameters():
                if not parameter.requires_grad:
                    worker.frozen[name] = parameter
                # A weight that two stages of the rank share is trained by the first.
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    owned.append(Owned(name, parameter, ties.get(name)))
            parameters = [own.parameter for own in owned]
            before = kept.get(tuple(map(id, parameters)))
            if before is not None:
                worker.stores[index] = before.store
                worker.optimizers[index] = before.optimizer
                if before.scheduler is not None:
                    worker.schedulers[index] = before.scheduler
                continue
            store: Store
            if index in spilled:
                store = spilled[index]
                spilled[index].make_masters(parameters)
            elif index in shards:
                tied = [own.tie is not None for own in owned]
                if shard == "weights":
                    frozen = _frozen_alone(stage, shared)
                    store = SharedWeightsStore(parameters, tied, *shards[index], frozen)
                elif shard == "gradients":
                    store = SharedGradientsStore(parameters, tied, *shards[index])
                else:
                    store = ShardedStore(parameters, tied, *shards[index])
            else:
                store = WeightStore(parameters)
            worker.stores[index] = store
            if owned:
                named = [(own.saved_name, master) for own, master in zip(owned, store.masters, strict=True)]
                optimizer = optimizer_of(training.optimizer, named)
                worker.mesh.check_optimizer(optimizer)
                worker.optimizers[index] = optimizer
                store.take_optimizer(optimizer)
                if training.scheduler:
                    worker.schedulers[index] = scheduler_of(training.scheduler, optimizer)
        return worker

    def stepped(self) -> dict[Indices, Stepped]:
        """The state that steps the parameters of each stage that trains, by the ids of the parameters."""
        found = {}
        for stage, optimizer in self.optimizers.items():
            ids = tuple(id(own.parameter) for own in self.owned[stage])
            found[ids] = Stepped(self.stores[stage], optimizer, self.schedulers.get(stage))
        return found

    @property
    def process(self) -> int:
        """The number of this process in a run of one process for each part of each rank."""
        return self.rank * self.mesh.tensor + self.mesh.index

    def take_changes(self) -> None:
        """Takes what the user has changed in weights since the last program; gradients of the user's own are dropped.

        Raises:
            ModelError: a weight that was frozen is to be trained, or one has another shape or type.
        """
        for name, parameter in self.frozen.items():
            if parameter.requires_grad:
                raise ModelError(
                    f"{name} was frozen when the Pipeline was made, so no optimizer has it, but it needs a gradient "
                    "now: make another Pipeline after requires_grad_(True)"
                )
        for store in self.stores.values():
            store.take_changes()
        for owned in self.owned.values():
            for own in owned:
                own.parameter.grad = None

    def forget_halves(self) -> None:
        """Forgets the half copies of all weights, before some of them change: stages may share one."""
        for stage in self.stages.values():
            stage.halves.clear()

    def forget_pass(self) -> None:
        """Forgets what a pass that failed has left: gradients, and statistics of batch norms.

        Those of spilled stages are in records and slots: there is no next pass.
        """
        self._idle.clear()
        for index, stage in self.stages.items():
            for norm in stage.batchnorms:
                norm.forget_all()
            if self.spilling is None or index not in self.spilling.stores:
                self.stores[index].forget_pass()
        for buckets in self.buckets.values():
            buckets.forget_pass()

    def let_go(self) -> None:
        """Gives all weights memory of their own, in place of the stores, which cannot be used afterwards."""
        for store in self.stores.values():
            store.release()
        for stage in self.stages.values():
            for hook in stage.hooks:
                hook.remove()

    def presence(self, stage: int, optim: bool = False, change: bool = False) -> AbstractContextManager[None]:
        """The context, between programs, in which a stage is on the device; see `Store.present`."""
        return self.stores[stage].present(optim, change)

    def tied_gradients(self, stages: Indices) -> list[Tensor]:
        """Gradients of all tied parameters in the model's order, and a mark for those that are real.

        The others, of parameters that none of these stages holds, are zeros.
        """
        held: dict[str, tuple[int, nn.Parameter]] = {}
        for stage in stages:
            held.update((own.saved_name, (stage, own.parameter)) for own in self.owned[stage] if own.tie)
        ties = {tie.owner: tie for tie in self.ties.values()}
        # The same type on every rank, also without the parameter; the sum is the number of ranks with each gradient.
        marks = torch.zeros(len(ties), dtype=next(iter(ties.values())).dtype, device=self.device)
        gradients = []
        for (name, tie), mark in zip(ties.items(), marks, strict=True):
            if name not in held:
                gradients.append(torch.zeros(tie.shape, dtype=tie.dtype, device=self.device))
                continue
            stage, parameter = held[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self.mark_idle(stage, parameter, mark)
            else:
                mark.fill_(1)
            gradients.append(parameter.grad)
        return [*gradients, marks]

    def mark_idle(self, stage: int, parameter: nn.Parameter, mark: Tensor) -> None:
        """Records a parameter without a gradient here; the reduced `mark` is the number of ranks that have one."""
        self._idle.setdefault(stage, []).append((parameter, mark))

    def forget_idle_gradients(self, stage: int) -> None:
        """Removes zeros in place of gradients that no rank had: the optimizer then skips such weights."""
        idle = self._idle.pop(stage, ())
        if not idle or idle[0][1].is_meta:  # a rehearsal takes another rank to have one
            return
        counts = torch.stack([mark.double() for _, mark in idle]).tolist()
        for (parameter, _), count in zip(idle, counts, strict=True):
            if not count:
                parameter.grad = None

    def counted_gradients(self, stage: int) -> list[Tensor]:
        """Gradients that this stage counts in the global norm: a tied weight counts at the first of its stages.

        Of the processes that share the rank each counts its parts, and the first one also the weights that all hold.
        """
        counted = [own for own in self.owned[stage] if own.tie is None or own.tie.stage == stage]
        if not self.mesh.is_first:
            counted = [own for own in counted if own.name in self.mesh.shards]
        return [own.parameter.grad for own in counted if own.parameter.grad is not None]


def layers_of(workers: Iterable[Worker]) -> Iterator[NamedLayer]:
    """The layers of some ranks."""
    for worker in workers:
        for stage in worker.stages.values():
            yield from stage.layers


@torch.no_grad()
def follow_model(workers: Iterable[Worker], model: Sequence[NamedLayer]) -> None:
    """Gives copies of layers in one process the weights and modes of the user's own, who may have changed these.

    Weights on a GPU stay as they are: to compare them the host would wait in every step.

    Args:
        workers: of this process, between two programs.
        model: all of its layers.
    """
    for layer in layers_of(workers):
        given = model[layer.index].module
        if given is layer.module:
            continue
        for own_module, module in zip(layer.module.modules(), given.modules(), strict=False):
            own_module.training = module.training
        for own, weight in zip(layer.module.parameters(), given.parameters(), strict=False):
            own.requires_grad = weight.requires_grad
            can_differ = own is not weight and own.shape == weight.shape
            if not can_differ or is_accelerator(own.device):
                continue
            is_there = not is_absent(own) and not is_absent(weight)
            # A copy in memory of weights that nobody has written to stays the newest.
            if is_there and not torch.equal(own, weight):
                own.copy_(weight)


@contextmanager
def evaluating(workers: Sequence[Worker]) -> Iterator[None]:
    """The context in evaluation mode; each module's own mode, such as that of a frozen norm, is restored afterwards."""
    stages = [stage for worker in workers for stage in worker.stages.values()]
    with restoring_modes([part for stage in stages for part in stage.with_modes()]):
        for stage in stages:
            stage.train(False)
        yield


def _names_of(layers: Sequence[NamedLayer], among: Container[int]) -> set[str]:
    """The names of the parameters with some ids."""
    found: set[str] = set()
    for layer in layers:
        own = layer.module.named_parameters(prefix=layer.prefix)
        found.update(name for name, parameter in own if id(parameter) in among)
    return found


def _frozen_alone(stage: Stage, shared: Container[str]) -> list[nn.Parameter]:
    """The weights of a stage that it does not train and that no other stage of the rank has.

    Args:
        stage: of the rank.
        shared: names of weights that several stages of the rank have.
    """
    return [p for name, p in stage.named_parameters() if not p.requires_grad and name not in shared]
