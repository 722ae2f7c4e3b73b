"""One stage: consecutive layers with their weights, run for one micro-batch at a time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipefit.errors import ModelError, is_lost_peer
from pipefit.stage import batchnorm
from pipefit.stage.accelerator import generator_of
from pipefit.stage.compiler import Forwards
from pipefit.stage.half_copies import HalfCopies
from pipefit.stage.precision import Half
from pipefit.stage.replay import AttentionCores, replayed_forwards
from pipefit.stage.split import NamedLayer, modules_of
from pipefit.stage.training import Tensors


def layer_seed(seed: int, ordinal: int, layer: int) -> int:
    """The seed of a layer's random numbers for one micro-batch of the whole training.

    It depends on neither ranks, stages nor schedule, so dropout draws the same masks for every split of the model, and
    a replay draws them again.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + ordinal * 0xBF58476D1CE4E5B9 + layer * 0x94D049BB133111EB) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) & (2**63 - 1)


@contextlib.contextmanager
def replaced_forwards(forwards: Forwards) -> Iterator[None]:
    """Modules with other forwards for a while; their hooks stay."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


@contextlib.contextmanager
def in_mode(training: bool, *roots: nn.Module) -> Iterator[None]:
    """The context with all modules in training or evaluation mode; each one's own mode is restored afterwards."""
    with restoring_modes([module for root in roots for module in root.modules()]):
        for root in roots:
            root.train(training)
        yield


@contextlib.contextmanager
def restoring_modes(parts: Iterable[Any]) -> Iterator[None]:
    """The context after which each part has its own mode again.

    By `train`, because a module may change its weights with its mode, as adapters that are merged for evaluation do.

    Args:
        parts: modules and the like; each comes before those inside it.
    """
    modes = [(part, part.training) for part in parts]
    try:
        yield
    finally:
        for part, mode in modes:
            if part.training != mode:
                part.train(mode)


class Stage:
    """The layers of one stage on one rank.

    Attributes:
        index: of the stage.
        layers: with the user's names.
        device: where it runs.
        half: the type that autocast computes in; None: no autocast.
        halves: copies of its weights in this type.
        compiled: modules that train by other forwards, which are compiled.
        replayed: modules that the backward replays, with the forwards by which they train.
        hooks: on its modules, until its run ends.
        batchnorms: the running averages of its batch norms.
        is_cut: the layers are parts of one model's forward and run together; each of them needs the micro-batch.
    """

    def __init__(self, index: int, layers: Sequence[NamedLayer], device: torch.device, seed: int = 0) -> None:
        self.index = index
        self.layers = list(layers)
        self.device = device
        self.seed = seed
        self.training = True
        self.half: Half = None
        self.halves = HalfCopies()
        self.compiled: Forwards = {}
        self.hooks: list[RemovableHandle] = []
        for layer in self.layers:
            layer.module.to(device)
        modules = (module for layer in self.layers for _, module in modules_of(layer.module))
        self.batchnorms = batchnorm.adopt(modules)
        self._norm_forwards: Forwards = {}
        for norm in self.batchnorms:
            if not norm.has_own_forward:
                self._norm_forwards[norm.module] = norm.forward
        norms = {norm.module for norm in self.batchnorms}
        self._buffers = [one for one in _places_of_buffers(self.layers) if one[1] not in norms]
        self._is_replicated = False
        self.replayed: Forwards = {}
        self._cores: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self.is_cut = hasattr(self.layers[0].module, "through")
        self._generator = generator_of(device)

    @property
    def overwrites(self) -> bool:
        """Whether a copy of the batch stands in for it because the model, which was cut, writes into it."""
        return self.is_cut and getattr(self.layers[0].module.shell, "overwrites", False)

    def compute_in(self, half: Half) -> None:
        """Sets the type that layers compute in, under autocast; after `compiled`, whose forwards cast their weights."""
        self.half = half
        if half is not None and not self.compiled:
            self.halves.take([layer.module for layer in self.layers], half, self.device.type)

    def replay(self, recompute: str, num_layers: int) -> None:
        """Lets the backward replay layers or attention.

        Args:
            recompute: a kind of `pipefit.spec.plan.RECOMPUTE`; others than "layer" and "selective" change nothing.
            num_layers: of the whole model.

        Raises:
            ModelError: a layer is TorchScript.
        """
        if recompute == "layer":
            self.replayed = replayed_forwards(self.layers, num_layers)
            for module in self.replayed:
                if isinstance(module, torch.jit.ScriptModule):
                    raise ModelError(
                        f"stage {self.index}: {type(module).__name__} is TorchScript, which cannot be replayed: give "
                        "it as Python code, or train without recomputation (recompute none)"
                    )
                self._not_inplace(module)
        elif recompute == "selective":
            self._cores = AttentionCores()

    def _not_inplace(self, module: nn.Module) -> None:
        """Prevents an in-place first operation: the input is kept for a replay."""
        while children := list(module.children()):
            if not isinstance(module, nn.Sequential):
                return
            module = children[0]
        operation: Any = module  # only some modules of torch have the attribute
        if getattr(operation, "inplace", False) is True:
            operation.inplace = False

    def replicate(self) -> None:
        """Notes that there are several copies of the stage: a forward must not change weights or saved buffers.

        Raises:
            ModelError: an embedding with `max_norm` would.
        """
        for layer in self.layers:
            for path, module in modules_of(layer.module, layer.prefix):
                if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                    raise ModelError(
                        f"stage {self.index}: {path} has max_norm, by which a forward changes weights, and each copy "
                        "of the stage would change its own: give it one copy (replicas), or leave out max_norm"
                    )
        self._is_replicated = True
        self._buffers = [one for one in self._buffers if one[2] not in one[1]._non_persistent_buffers_set]
        for norm in self.batchnorms:
            norm.is_replicated = True

    def train(self, mode: bool) -> None:
        """Training or evaluation mode of every layer."""
        self.training = mode
        for layer in self.layers:
            layer.module.train(mode)

    def with_modes(self) -> list[Any]:
        """The stage and everything of its layers that has a training or evaluation mode of its own."""
        found: list[Any] = [self]
        for layer in self.layers:
            found += layer.module.modules()
            if self.is_cut:
                shell: Any = layer.module.shell
                found += shell.with_modes()
        return found

    def forward(self, payload: Any, ordinal: int, replay: bool = False, update: int = 0) -> Any:
        """Runs the layers on one micro-batch.

        Args:
            payload: the output of the stage before, or the model's input.
            ordinal: the micro-batch's number since training began, which seeds its random numbers.
            replay: whether this is a recompute, which must not count anything twice.
            update: that batch norms count the micro-batch for.
        """
        state = self._generator.get_state()

        def seed(layer: int) -> None:
            self._generator.manual_seed(layer_seed(self.seed, ordinal, layer))

        # Inside, so that autocast casts other weights once for each forward, and anew for the next version's.
        half: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.half is not None:
            # In training a forward that saves nothing, or only inputs of layers, frees a cast weight after its use.
            saves_all = torch.is_grad_enabled() and not self.replayed
            frees = self.training and not saves_all
            half = torch.autocast(self.device.type, self.half, cache_enabled=not frees)
        unchanged: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if replay or self._is_replicated:
            unchanged = self._unchanged()
        try:
            changed = {}
            if self.training:
                changed = self.compiled | self.replayed | self.halves.forwards
            with (
                half,
                self._norms_copied(None if replay else update),
                replaced_forwards(changed),
                self._cores,
                unchanged,
            ):
                if self.is_cut:
                    first = self.layers[0]
                    last = self.layers[-1]
                    module: Any = first.module
                    return self._run(first, lambda: module.through(last.module, payload, seed))
                for layer in self.layers:
                    seed(layer.index)
                    payload = self._run(layer, functools.partial(layer.module, payload))
                return payload
        finally:
            self._generator.set_state(state)

    @contextlib.contextmanager
    def replaying(self, version: int) -> Iterator[None]:
        """The context of a backward: forwards that it replays change no running averages.

        Args:
            version: of the weights, which are in place.

        Raises:
            ModelError: a layer that it replayed changes another buffer.
        """
        unchanged: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        halved: Forwards = {}
        if self.replayed:
            self.halves.at(version)
            unchanged = self._unchanged()
            halved = self.halves.forwards
        try:
            with self._norms_copied(None), replaced_forwards(halved), unchanged:
                yield
        except RuntimeError as problem:
            if self.replayed and self._buffers and "modified by an inplace operation" in str(problem):
                names = [name for name, _, _ in self._buffers[:3]]
                raise self._changes(f"of its layers ({', '.join(names)}, …)") from problem
            raise

    @contextlib.contextmanager
    def _norms_copied(self, update: int | None) -> Iterator[None]:
        """The context in which batch norms change copies of their averages; see `batchnorm.copied`."""
        if not (self.training and self.batchnorms):
            yield
            return
        with batchnorm.copied(self.batchnorms, update), replaced_forwards(self._norm_forwards):
            yield

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """The context of a forward that must not change buffers: a replay's, and those of one of several copies."""
        buffers = [module._buffers[key] for _, module, key in self._buffers]
        versions = list(map(_version, buffers))
        yield
        if not self.training:
            return
        for (name, module, key), buffer, version in zip(self._buffers, buffers, versions, strict=True):
            if module._buffers[key] is not buffer or _version(buffer) != version:
                raise self._changes(name)

    def _changes(self, name: str) -> ModelError:
        """The error of a forward that changes a buffer and must not."""
        if self._is_replicated:
            return ModelError(
                f"stage {self.index}: a forward changes the buffer {name}, which each of its copies would change by "
                "its own samples: give it one copy (replicas), or use torch's batch norm, whose statistics are added up"
            )
        return ModelError(
            f"stage {self.index}: a forward changes the buffer {name}, so it cannot be replayed: train without "
            'recomputation (recompute none), and a spilled stage with keep="all"'
        )

    def _run(self, layer: NamedLayer, forward: Callable[[], Any]) -> Any:
        try:
            return forward()
        except Exception as problem:
            if isinstance(problem, ModelError) or is_lost_peer(problem):
                raise
            kind = type(problem).__name__
            hint = ""
            if type(problem).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch")):
                hint = "; torch.compile cannot take it: train without compile"
            raise ModelError(
                f"stage {self.index}: layer {layer.name} ({type(layer.module).__name__}) failed in its forward: "
                f"{kind}: {problem}{hint}"
            ) from problem

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that train, each once."""
        return [parameter for _, parameter in self.named_parameters() if parameter.requires_grad]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters under the user's names, each once."""
        seen = set()
        for layer in self.layers:
            for name, parameter in layer.module.named_parameters(prefix=layer.prefix):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """All buffers under the user's names, also those that a `state_dict` leaves out."""
        for layer in self.layers:
            yield from layer.module.named_buffers(prefix=layer.prefix)

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers under the user's names that a `state_dict` has."""
        for name, module, key in _places_of_buffers(self.layers):
            buffer = module._buffers[key]
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield name, buffer

    def state_dict(self) -> Tensors:
        """Weights and buffers under the user's names."""
        result: Tensors = {}
        for layer in self.layers:
            result.update(layer.module.state_dict(prefix=layer.dotted))
        return result

    def load_state_dict(self, state: Tensors) -> None:
        """Takes weights and buffers by the user's names.

        Raises:
            ModelError: a name is missing or has another shape.
        """
        for layer in self.layers:
            prefix = layer.dotted
            if prefix:
                names = [name for name in state if name.startswith(prefix)]
            else:
                # The layers of a cut model have the model's own names, without a prefix.
                names = [name for name in layer.module.state_dict() if name in state]
            own = {name.removeprefix(prefix): state[name] for name in names}
            try:
                layer.module.load_state_dict(own)
            except RuntimeError as problem:
                raise ModelError(f"layer {layer.name}: {problem}") from None


def _version(buffer: Tensor | None) -> int | None:
    if buffer is None:
        return None
    return buffer._version


def _places_of_buffers(layers: Sequence[NamedLayer]) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, key) of the buffers of some layers."""
    for layer in layers:
        for path, module in modules_of(layer.module, layer.prefix):
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{path}.{key}".removeprefix("."), module, key
