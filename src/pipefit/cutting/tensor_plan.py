"""Tensor parallelism of models of transformers: the plan that a model brings (`tp_plan`), as rules for its modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from pipefit.cutting.own import is_transformers, without_adapters
from pipefit.errors import ModelError
from pipefit.parallel import ShardSpec, TensorRule
from pipefit.parallel import shared_modules as ways
from pipefit.parallel.shared_modules import mixed


class _Kind(NamedTuple):
    """A kind of a plan for linear layers and embeddings.

    Attributes:
        way: how they run.
        shards: of their parameters.
        adapter: which of the two factors of a LoRA adapter runs like the layer; the other stays whole.
        may_stay_whole: see `TensorRule`.
    """

    way: type[nn.Module]
    shards: Mapping[str, ShardSpec]
    adapter: str = ""
    may_stay_whole: bool = False


_COLUMNS = {"weight": ShardSpec(0), "bias": ShardSpec(0)}
_ROWS = {"weight": ShardSpec(1)}
_JOINED = _Kind(ways.JoinedColumns, _COLUMNS, "lora_B", True)
_SPLIT = _Kind(ways.SplitRows, _ROWS, "lora_A", True)
_LINEAR = {
    "colwise": _Kind(ways.Columns, _COLUMNS, "lora_B"),
    "colwise_gather_output": _JOINED,
    "colwise_rep": _JOINED,
    "rowwise": _Kind(ways.Rows, _ROWS, "lora_A"),
    "rowwise_split_input": _SPLIT,
    "rowwise_rep": _SPLIT,
}
_TOKENS = _Kind(ways.Tokens, {"weight": ShardSpec(0)}, may_stay_whole=True)
_MODULES = {"moe_tp_experts": ways.Experts, "local_params": ways.Divided}
_PARAMETERS = {"colwise": (2, 1), "packed_colwise": (2, 2), "rowwise": (1, 1)}
"""The dimension of a parameter, counted from its last, that is split by a kind, and how many weights it joins."""


def tensor_rules(model: nn.Module) -> dict[nn.Module, TensorRule]:
    """The rules of a model's modules.

    Raises:
        ModelError: the model has no plan, or one that cannot be followed; it names the module and the kind.
    """
    base = without_adapters(model)
    plan: Mapping[str, str] = getattr(base, "tp_plan", None) or {} if is_transformers(model) else {}
    modules = dict(base.named_modules())
    rules: dict[nn.Module, TensorRule] = {}
    for path, module in modules.items():
        kind = plan.get(_general(path))
        if kind is not None:
            parent = modules[path.rpartition(".")[0]]
            rules |= dict(_rules(path, module, kind, parent, plan))
            if kind == "colwise" and parent not in rules:
                rules[parent] = _rule(ways.Divided, parent)
    if not any("*" in _general(path) for path, module in modules.items() if module in rules):
        raise ModelError(
            f"{type(base).__name__} has no plan for tensor parallelism (`base_model_tp_plan` of its configuration), so "
            "it cannot be sharded; use tensor=1, or a model that has one, such as LlamaForCausalLM"
        )
    return _without_half_tied(base, rules)


def _general(path: str) -> str:
    """A path as plans write it: numbers are *."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _rule(way: type[nn.Module], module: nn.Module, shards: Mapping[str, ShardSpec] = {}, may_stay_whole: bool = False,
          **sizes: int) -> TensorRule:  # fmt: skip
    for name, spec in shards.items():
        if getattr(module, name, None) is not None:
            sizes[f"{name}, dimension {spec.dim}"] = getattr(module, name).shape[spec.dim] // spec.parts
    return TensorRule(mixed(way, type(module)), shards, lambda _: sizes, may_stay_whole=may_stay_whole)


def _rules(
    path: str, module: nn.Module, kind: str, parent: nn.Module, plan: Mapping[str, str]
) -> Iterator[tuple[nn.Module, TensorRule]]:
    """The rules that a kind means for a module, and for the modules of an adapter around it.

    Raises:
        ModelError: the kind is unknown, or not for such a module.
    """
    problem = ModelError(f"{path} ({type(module).__name__}): the model's plan for tensor parallelism shards it by "
                         f"{kind!r}, which pipefit does not know for such a module; use tensor=1")  # fmt: skip
    if kind in _LINEAR:
        found = _LINEAR[kind]
        linear = getattr(module, "base_layer", module)
        if type(linear).forward is not nn.Linear.forward:
            raise problem
        heads = {}
        width = getattr(parent, "head_dim", None) or getattr(parent, "head_size", None)
        if kind == "colwise" and width and not linear.out_features % width:
            heads = {"heads": linear.out_features // width}
        yield linear, _rule(found.way, linear, found.shards, found.may_stay_whole, **heads)
        if linear is not module:
            yield from _adapter(module, found, problem)
    elif kind == "embedding_rowwise" and isinstance(module, nn.Embedding):
        yield module, _rule(_TOKENS.way, module, _TOKENS.shards, True)
    elif kind == "replicated_with_grad_allreduce" and not hasattr(module, "base_layer"):
        yield module, _rule(ways.OnShards, module)
    elif kind in _MODULES:
        shards = {}
        for name, parameter in module.named_parameters(recurse=False):
            of_weight = plan.get(_general(f"{path}.{name}"))
            if of_weight in _PARAMETERS:
                back, parts = _PARAMETERS[of_weight]
                shards[name] = ShardSpec(max(parameter.dim() - back, 0), parts if parameter.dim() > 1 else 1)
            elif kind == "moe_tp_experts" or of_weight is not None:
                raise problem
        yield module, _rule(_MODULES[kind], module, shards)
    elif kind != "replicate":
        raise problem


def _adapter(module: Any, kind: _Kind, problem: ModelError) -> Iterator[tuple[nn.Module, TensorRule]]:
    """The rules of a LoRA adapter around a linear layer: one of its factors is sharded as the layer is."""
    factors = (getattr(module, name, nn.Module()) for name in ("base_layer", "lora_A", "lora_B"))
    known = {id(p) for factor in factors for p in factor.parameters()}
    if any(id(p) not in known for p in module.parameters()):
        raise problem
    for factor in getattr(module, kind.adapter).values():
        yield factor, _rule(kind.way, factor, kind.shards, kind.may_stay_whole)
    for dropout in module.lora_dropout.values():
        if kind.way is ways.Rows or kind.way is ways.Columns:
            way = ways.DividedDropout if kind.way is ways.Rows else ways.WholeDropout
            yield dropout, _rule(way, dropout)


def _without_half_tied(base: nn.Module, rules: dict[nn.Module, TensorRule]) -> dict[nn.Module, TensorRule]:
    """The rules, but those of modules that may stay whole and share a weight with one that does."""
    users: dict[int, list[tuple[str, nn.Module, ShardSpec | None]]] = {}
    for path, module in base.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            spec = rules[module].shards.get(name) if module in rules else None
            users.setdefault(id(parameter), []).append((f"{path}.{name}", module, spec))
    for found in users.values():
        if len({spec for _, _, spec in found}) > 1:
            for name, module, spec in found:
                if spec is not None and not rules.pop(module).may_stay_whole:
                    raise ModelError(f"{name} is tied to a weight that the model's plan does not shard; use tensor=1")
    return rules
