"""Tensor parallelism of models of transformers: the plan that a model brings (`tp_plan`), as rules for its modules."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

from pipefit.cutting.own import is_transformers, without_adapters
from pipefit.errors import ModelError
from pipefit.parallel import ShardSpec, TensorRule
from pipefit.parallel import shared_modules as ways

Rules = dict[nn.Module, TensorRule]

Kinds = Mapping[str, str]
"""The plan of a model: kinds of sharding by paths."""

_LINEAR = {
    "colwise": ways.Columns,
    "colwise_gather_output": ways.JoinedColumns,
    "colwise_rep": ways.JoinedColumns,
    "rowwise": ways.Rows,
    "rowwise_split_input": ways.SplitRows,
    "rowwise_rep": ways.SplitRows,
}
_PARAMETERS = {"colwise": (2, 1), "packed_colwise": (2, 2), "rowwise": (1, 1)}
"""The dimension of a parameter, counted from its last, that is split by a kind, and how many weights it joins."""
_COLUMNS = (ways.Columns, ways.JoinedColumns)
_WHOLE_OUTSIDE = (ways.JoinedColumns, ways.SplitRows, ways.Tokens)


def tensor_rules(model: nn.Module) -> Rules:
    """The rules of a model's modules.

    Raises:
        ModelError: the model has no plan, or one that cannot be followed; it names the module and the kind.
    """
    base = without_adapters(model)
    if is_transformers(model):
        plan: Kinds = getattr(base, "tp_plan", None) or {}
    else:
        plan = {}
    modules = dict(base.named_modules())
    rules: Rules = {}
    for path, module in modules.items():
        kind = plan.get(_general(path), "replicate")
        if kind != "replicate":
            parent = modules[path.rpartition(".")[0]]
            rules |= _rules_of(path, module, kind, parent, plan)
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


def _rule(way: type[nn.Module], module: nn.Module, shards: Mapping[str, ShardSpec] = {}, **sizes: int) -> TensorRule:
    for name, spec in shards.items():
        parameter = getattr(module, name, None)
        if parameter is not None:
            key = f"{name}.shape[{spec.dim}]"
            if spec.parts > 1:
                key += f"/{spec.parts}"
            sizes[key] = parameter.shape[spec.dim] // spec.parts
    kind = ways.mixed(way, type(module))
    return TensorRule(kind, shards, lambda _: sizes, may_stay_whole=way in _WHOLE_OUTSIDE)


def _rules_of(path: str, module: nn.Module, kind: str, parent: nn.Module, plan: Kinds) -> Rules:
    """The rules that a kind means for a module, and for the modules of an adapter around it.

    Raises:
        ModelError: the kind is unknown, or not for such a module.
    """
    linear = getattr(module, "base_layer", module)
    if kind in _LINEAR and type(linear).forward is nn.Linear.forward:
        heads = {}
        width = getattr(parent, "head_dim", None) or getattr(parent, "head_size", None)
        if kind == "colwise" and width and not linear.out_features % width:
            heads = {"heads": linear.out_features // width}
        rules = {linear: _linear(_LINEAR[kind], linear, **heads)}
        if linear is module:
            return rules
        if _is_lora(module):
            return rules | _adapter(module, _LINEAR[kind])
    elif kind == "embedding_rowwise" and isinstance(module, nn.Embedding):
        return {module: _rule(ways.Tokens, module, {"weight": ShardSpec(0)})}
    elif kind == "replicated_with_grad_allreduce" and linear is module:
        return {module: _rule(ways.OnShards, module)}
    elif kind == "moe_tp_experts":
        parameters = dict(module.named_parameters())
        shards = _shards_of(path, parameters, plan)
        if shards and len(shards) == len(parameters):
            return {module: _rule(ways.Experts, module, shards)}
    elif kind == "local_params":
        parameters = dict(module.named_parameters(recurse=False))
        return {module: _rule(ways.Divided, module, _shards_of(path, parameters, plan))}
    raise ModelError(
        f"{path} ({type(module).__name__}): the model's plan for tensor parallelism shards it by {kind!r}, which "
        "pipefit does not know for such a module; use tensor=1"
    )


def _shards_of(path: str, parameters: Mapping[str, nn.Parameter], plan: Kinds) -> dict[str, ShardSpec]:
    """The splits of the parameters for which a plan has a known kind."""
    shards = {}
    for name, parameter in parameters.items():
        kind = plan.get(_general(f"{path}.{name}"))
        if kind == "colwise" and parameter.dim() == 1:
            shards[name] = ShardSpec(0)
        elif kind in _PARAMETERS and parameter.dim() > 1:
            back, parts = _PARAMETERS[kind]
            shards[name] = ShardSpec(parameter.dim() - back, parts)
    return shards


def _linear(way: type[nn.Module], linear: nn.Module, **sizes: int) -> TensorRule:
    shards = {"weight": ShardSpec(1)}
    if way in _COLUMNS:
        shards = {"weight": ShardSpec(0), "bias": ShardSpec(0)}
    return _rule(way, linear, shards, **sizes)


def _is_lora(module: Any) -> bool:
    """Whether a module with a base layer has two low-rank factors next to it, and nothing else."""
    inside: list[nn.Parameter] = []
    for name in ("base_layer", "lora_A", "lora_B"):
        inside += getattr(module, name, nn.Module()).parameters()
    return len(inside) == len(list(module.parameters()))


def _adapter(module: Any, way: type[nn.Module]) -> Rules:
    """The rules of a LoRA adapter around a linear layer, one of whose factors is sharded as the layer is."""
    factors = module.lora_A
    if way in _COLUMNS:
        factors = module.lora_B
    rules = {factor: _linear(way, factor) for factor in factors.values()}
    dropouts = {ways.Columns: ways.WholeDropout, ways.Rows: ways.DividedDropout}
    if way in dropouts:
        for dropout in module.lora_dropout.values():
            rules[dropout] = _rule(dropouts[way], dropout)
    return rules


def _without_half_tied(base: nn.Module, rules: Rules) -> Rules:
    """The rules without modules that may stay whole and share a weight with a module that does."""
    users: dict[nn.Parameter, list[tuple[str, nn.Module, ShardSpec | None]]] = defaultdict(list)
    for path, module in base.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            spec = None
            if module in rules:
                spec = rules[module].shards.get(name)
            users[parameter].append((f"{path}.{name}", module, spec))
    for found in users.values():
        if len({spec for _, _, spec in found}) > 1:
            for name, module, spec in found:
                if spec is not None and not rules.pop(module).may_stay_whole:
                    raise ModelError(f"{name} is tied to a weight that the model's plan does not shard; use tensor=1")
    return rules
