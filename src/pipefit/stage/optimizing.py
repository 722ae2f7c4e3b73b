"""Optimizers and learning-rate schedules of stages, from the functions that a user gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.weak import WeakIdKeyDictionary

from pipefit.errors import PipefitError
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import MakeOptimizer

NAMED = ("named", "named_parameters")
"""Names of the first argument of a function that takes (name, parameter) pairs; any other gets the parameters."""

_UNKNOWN = "weight"


class OptimizerMaker:
    """Makes the optimizer of each stage.

    Args:
        make: the user's function, from a list of parameters to an optimizer; from (name, parameter) pairs where its
            argument is named `named` or `named_parameters`.
        layers: of the whole model.
        no_decay: parts of names, regardless of case. Parameters with one in their name, or in the class of the module
            that holds them (`nn.LayerNorm` is a "norm"), get a weight decay of 0.

    Raises:
        PipefitError: `make` is no function, or nothing has such a name.
    """

    def __init__(self, make: Any, layers: Sequence[NamedLayer], no_decay: Sequence[str] | str = ()) -> None:
        self._make = _checked(make)
        self._takes_names = _first_argument(make) in NAMED
        if isinstance(no_decay, str):
            words: Sequence[str] = no_decay.split(",")
        else:
            words = no_decay
        self.no_decay = tuple(word.strip() for word in words if word.strip())
        holders = [(name, module, p) for layer in layers for name, module, p in _parameters(layer)]
        matched = {id(p) for name, module, p in holders if self._is_spared(name, module)}
        self._spared = frozenset(name for name, _, p in holders if id(p) in matched)
        # Stand-ins that are measured before there are stages get the names of the parameters that they stand for.
        self._names: Any = WeakIdKeyDictionary()
        for name, _, parameter in holders:
            self._names.setdefault(parameter, name)
        if self.no_decay and not matched:
            first, *_ = next(iter(holders), ("nothing",))
            raise PipefitError(
                f"no_decay={self.no_decay}: no parameter has one of these in its name, or in the class of its module; "
                f"the first is named {first}"
            )

    def _is_spared(self, name: str, module: nn.Module) -> bool:
        texts = name.lower(), type(module).__name__.lower()
        return any(word.lower() in text for word in self.no_decay for text in texts)

    def __call__(self, parameters: Sequence[Tensor]) -> Optimizer:
        """The optimizer of some of the model's parameters."""
        return self.of([(self._names.get(parameter, _UNKNOWN), parameter) for parameter in parameters])

    def like(self, parameters: Sequence[Tensor]) -> MakeOptimizer:
        """The maker for stand-ins of some parameters."""
        names = [self._names.get(parameter, _UNKNOWN) for parameter in parameters]
        return lambda stand_ins: self.of(list(zip(names, stand_ins, strict=True)))

    def of(self, named: Sequence[tuple[str, Any]]) -> Optimizer:
        """The optimizer of some parameters under their names.

        Raises:
            PipefitError: the user's function gives something else, or one that steps other weights, or `no_decay`
                meets an optimizer without decay.
        """
        given = list(named)
        if not self._takes_names:
            given = [parameter for _, parameter in named]
        made = self._make(given)
        if not isinstance(made, Optimizer):
            raise PipefitError(f"optimizer: expected a function that returns a torch optimizer, got {made!r:.60}")
        if isinstance(made, LBFGS):
            raise PipefitError(
                "optimizer: LBFGS computes the loss several times per step, a pipeline once; use another one"
            )
        known = {id(parameter) for _, parameter in named}
        others = [one for group in made.param_groups for one in group["params"] if id(one) not in known]
        if others:
            raise PipefitError(
                f"optimizer: the function's optimizer steps a weight of shape {list(others[0].shape)} that it was not "
                "given. It is called for each stage, with weights in place of the model's own: build groups from its "
                "argument, by name where that is named `named`: optimizer=lambda named: …"
            )
        for group in made.param_groups:
            # A sharded stage steps parts of weights, and none of them has a name.
            group.pop("param_names", None)
        spared = {id(parameter) for name, parameter in named if name in self._spared}
        if spared:
            for group in list(made.param_groups):
                _spare(made, group, spared)
        return made


def optimizer_like(make: MakeOptimizer, parameters: Sequence[Tensor]) -> Callable[..., Optimizer]:
    """The maker for stand-ins of some parameters, which get their names where the user's function takes names."""
    if isinstance(make, OptimizerMaker):
        return make.like(parameters)
    return make


def optimizer_of(make: MakeOptimizer, named: Sequence[tuple[str, Any]]) -> Optimizer:
    """The optimizer of some parameters under their names."""
    if isinstance(make, OptimizerMaker):
        return make.of(named)
    return make([parameter for _, parameter in named])


def scheduler_of(make: Callable[[Optimizer], Any], optimizer: Optimizer) -> LRScheduler:
    """The learning-rate schedule of a stage's optimizer.

    Raises:
        PipefitError: the user's function gives something else, or a schedule that needs a metric.
    """
    made = make(optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise PipefitError(
            "scheduler: ReduceLROnPlateau follows a metric, so it cannot step with every update; step it in a "
            "callback's method `evaluation`, for the optimizers of pipe.workers"
        )
    if not isinstance(made, LRScheduler):
        raise PipefitError(
            f"scheduler: expected a function from an optimizer to a torch learning-rate schedule, got {made!r:.60}"
        )
    return made


def check_scheduler(make: Any) -> None:
    """Refuses what is no function from an optimizer to its schedule.

    Raises:
        PipefitError: it is a schedule itself, or something else.
    """
    if make is None or (callable(make) and not isinstance(make, LRScheduler)):
        return
    kind = type(make).__name__
    what = repr(make)
    if isinstance(make, LRScheduler):
        what = "object"
    raise PipefitError(
        f"scheduler: expected a function, got the {kind} {what}; "
        f"each stage has its own optimizer: write scheduler=lambda optimizer: {kind}(optimizer, …)"
    )


def _first_argument(make: Any) -> str:
    try:
        return next(iter(inspect.signature(make).parameters), "")
    except ValueError:  # a function of C may have none
        return ""


def _checked(make: Any) -> Any:
    if isinstance(make, Optimizer):
        kind = type(make).__name__
        rate = make.defaults.get("lr", "…")
        raise PipefitError(
            f"optimizer: got an {kind} object, which belongs to the parameters of one process; each stage makes its "
            f"own, so give a function: optimizer=lambda params: torch.optim.{kind}(params, lr={rate})"
        )
    if not callable(make):
        raise PipefitError(f"optimizer: expected a function from parameters to an optimizer, got {make!r:.60}")
    return make


def _parameters(layer: NamedLayer) -> Iterable[tuple[str, nn.Module, nn.Parameter]]:
    """Every parameter of a layer with its name and the module that holds it; a shared one under each name."""
    for path, module in layer.module.named_modules(prefix=layer.prefix, remove_duplicate=False):
        for name, parameter in module.named_parameters(prefix=path, recurse=False, remove_duplicate=False):
            yield name, module, parameter


def _spare(optimizer: Optimizer, group: dict[str, Any], spared: set[int]) -> None:
    """Moves some parameters of a group to one of their own, without decay.

    Raises:
        PipefitError: the optimizer has no weight decay.
    """
    if "weight_decay" not in group:
        raise PipefitError(f"no_decay: {type(optimizer).__name__} has no weight decay")
    others = [parameter for parameter in group["params"] if id(parameter) not in spared]
    own = [parameter for parameter in group["params"] if id(parameter) in spared]
    if not others:
        group["weight_decay"] = 0.0
    elif own:
        group["params"] = others
        optimizer.add_param_group({**group, "params": own, "weight_decay": 0.0})
