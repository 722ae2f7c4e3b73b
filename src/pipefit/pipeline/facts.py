"""Facts of a run by name, which all its ranks must have alike: versions, request, model, weights, loss, optimizer.

Each fact is small: a value, or the checksum of one. So a message names what differs, and on which rank.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipefit.parallel.alike import sampled_sum
from pipefit.pipeline.resume import optimizer_facts
from pipefit.profiling.workload import Workload
from pipefit.spec import Plan
from pipefit.spec.options import Request, Updates
from pipefit.stage.record_layout import name_of
from pipefit.stage.split import NamedLayer

CURE = (
    "every rank must make the same Pipeline: the same script, arguments, files and versions, and seeds that do not "
    "depend on the rank"
)

_SAMPLED = 4096
"""Elements of a large tensor in its checksum: other seeds, files or trainings change nearly all elements."""

_DEPTH = 4
_OF_A_PLACE = ("disk", "host_memory", "resume", "about")
"""Options of spilling that may differ: each rank has a folder, a machine and a history of its own."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def facts_of(request: Request, work: Workload, updates: Updates) -> dict[str, str]:
    """The facts of a run before its plan is decided.

    Args:
        request: of the user.
        work: the model and its training.
        updates: settings of the weight updates.
    """
    facts = {
        "version of pipefit": sys.modules["pipefit"].__version__,
        "version of torch": torch.__version__,
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
    }
    facts |= _of_request(request)
    facts |= {"precision": described(work.half), "compile": described(work.compiler), "device": work.device.type}
    facts["loss"] = described(work.loss)
    for name, value in optimizer_facts(work.optimizer).items():
        facts[f"optimizer {name}"] = str(value)
    for name, value in vars(updates).items():
        facts[name] = described(value)
    for layer in work.layers:
        facts |= _of_layer(layer)
    return facts


def structure_of(work: Workload) -> str:
    """The checksum of what a model computes, whatever the values of its weights: modules, settings, code, loss."""
    parts = [described(work.loss), described(work.half), described(work.compiler)]
    for layer in work.layers:
        parts += [f"{name}: {value}" for name, value in _of_modules(layer)]
        for name, value in _state_of(layer):
            if not is_lazy(value):
                parts.append(f"{name}: {value.dtype} {list(value.shape)} {value.requires_grad}")
    return _checksum(parts)


def facts_of_plan(plan: Plan) -> dict[str, str]:
    """The facts of the plan on which all ranks must have decided."""
    return {
        "stages": str([list(stage.layers) for stage in plan.partition.stages]),
        "ranks of the stages": str(plan.placement.ranks),
        "schedule": plan.schedule,
        "microbatches": str(plan.num_microbatches),
        "tensor": str(plan.tensor),
        "frozen stages": str(plan.frozen),
        "recompute": str([stage.replays for stage in plan.partition.stages]),
        "shard": plan.shard,
    }


def _of_request(request: Request) -> dict[str, str]:
    spread = asdict(request.parallelism)
    del spread["device"]  # of each rank its own; its type is compared
    facts: dict[str, Any] = {"schedule": request.schedule, "microbatches": request.microbatches}
    facts["plan"] = "none" if request.plan is None else "given"
    facts["stages"] = request.stages
    if isinstance(request.stages, Sequence) and not isinstance(request.stages, str):
        facts["stages"] = list(request.stages)
    facts |= spread
    if request.spill is not None:
        options = vars(request.spill)
        facts |= {f"spill {name}": options[name] for name in options if name not in _OF_A_PLACE}
    return {name: described(value) for name, value in facts.items()}


def _of_layer(layer: NamedLayer, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Types and settings of the modules of a layer, the code of their forwards, and their tensors."""
    yield from _of_modules(layer, depth)
    yield from _of_tensors(layer)


def _of_modules(layer: NamedLayer, depth: int = 0) -> Iterator[tuple[str, str]]:
    for path, module in layer.module.named_modules(prefix=layer.prefix):
        kind: Any = type(module)
        yield f"module {path}", f"{kind.__module__}.{kind.__qualname__}({module.extra_repr()})"
        yield f"forward of {kind.__qualname__}", _forward_of(kind)
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training" and "rank" not in name and _is_setting(value):
                yield f"{path}.{name}", described(value, depth)


@functools.lru_cache
def _forward_of(kind: Any) -> str:
    return described(kind.forward)


def _of_tensors(layer: NamedLayer) -> Iterator[tuple[str, str]]:
    trained = {id(p) for p in layer.module.parameters() if p.requires_grad}
    for name, value in _state_of(layer):
        if id(value) in trained:
            yield name, f"trained {_of_tensor(value)}"
        else:
            yield name, _of_tensor(value)


def _state_of(layer: NamedLayer) -> Iterator[tuple[str, Tensor]]:
    """The weights and buffers of a layer, with their names."""
    for name, value in layer.module.state_dict(prefix=layer.dotted, keep_vars=True).items():
        if isinstance(value, Tensor):
            yield name, value


def _of_tensor(value: Tensor) -> str:
    """Type, shape and checksum of a tensor; of a large one, of evenly spread elements."""
    if is_lazy(value):
        return "not initialised"
    form = f"{name_of(value.dtype)}{list(value.shape)}"
    if value.is_meta or value.layout != torch.strided or not value.numel():
        return form
    return f"{form} with checksum {sampled_sum(value, _SAMPLED):08x}"


def _is_setting(value: Any) -> bool:
    """Returns whether an attribute of a module says how it computes; a path may differ among machines."""
    if isinstance(value, str):
        return "/" not in value
    if isinstance(value, tuple | list):
        return all(map(_is_setting, value))
    return isinstance(value, _PLAIN) or isinstance(value, types.FunctionType | types.BuiltinFunctionType)


def described(value: Any, depth: int = 0) -> str:
    """A value in words that are the same in every process: no addresses, no order of a set; of functions their code."""
    if isinstance(value, _PLAIN):
        if value is None:
            return "none"
        return str(value)
    if depth == _DEPTH:
        return type(value).__qualname__
    deeper = partial(described, depth=depth + 1)
    if isinstance(value, Mapping):
        return str({str(key): deeper(one) for key, one in value.items()})
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(deeper, value))}]"
    if isinstance(value, frozenset | set):
        return f"[{', '.join(sorted(map(deeper, value)))}]"
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, partial):
        return f"{deeper(value.func)} with {deeper(value.args)}, {deeper(value.keywords)}"
    if isinstance(value, types.MethodType):
        return f"{deeper(value.__func__)} of {deeper(value.__self__)}"
    if isinstance(value, types.FunctionType):
        return _of_function(value, depth)
    return _of_object(value, depth)


def _of_function(function: types.FunctionType, depth: int) -> str:
    """The name of a function, and the checksum of its code, its defaults, and the values that it takes from around.

    A whole number from around may be the rank, and a truth value whether it is the first: they are left out.
    """
    parts = [*_of_code(function.__code__), described(function.__defaults__ or (), depth + 1)]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # one that is still empty
            value = cell.cell_contents
            if not isinstance(value, int):
                parts.append(described(value, depth + 1))
    return f"{function.__module__}.{function.__qualname__} with checksum {_checksum(parts)}"


def _of_code(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield str(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _of_code(constant)
        else:
            yield described(constant)


def _of_object(value: Any, depth: int) -> str:
    """The type of an object; of a module also everything in it, of another one its plain attributes."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, nn.Module):
        # A function that a module holds may take the module itself from around.
        return f"{kind} with checksum {_checksum(_of_layer(NamedLayer(0, '', value), depth + 1))}"
    if isinstance(value, type | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    attributes = getattr(value, "__dict__", {})
    settings = {name: attributes[name] for name in attributes if _is_setting(attributes[name])}
    if settings:
        return f"{kind} of {described(settings, depth + 1)}"
    return kind


def _checksum(parts: Any) -> str:
    text = "\n".join(map(str, parts))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
