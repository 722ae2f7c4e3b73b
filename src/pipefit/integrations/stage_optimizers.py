"""The Trainer's optimizer, in parts: each stage steps its own weights with the settings of the whole one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.errors import PipefitError
from pipefit.integrations.one_replica import from_all
from pipefit.pipeline.pipeline import Pipeline
from pipefit.runtime.session import Session

_GROUP = "trainer_group"
_KNOWN = ("torch.optim.", "transformers.optimization")
"""Homes of optimizers whose settings are all in their groups, and which update each weight by its own gradient."""


class StageOptimizers:
    """Makes the optimizers of stages, and gathers their states.

    The whole optimizer stays what the Trainer, its schedule and callbacks see; without weights its step does nothing.

    Args:
        model: before it is taken apart.
        whole: the optimizer of all its weights.
        given: class and options, where the user has given them.

    Attributes:
        model: whose weights the optimizers step.

    Raises:
        PipefitError: the optimizer cannot be made again for a part of the weights.
    """

    def __init__(self, model: nn.Module, whole: Any, given: tuple[type[Optimizer], dict[str, Any]] | None) -> None:
        self.model = model
        inner = getattr(whole, "optimizer", whole)
        self._whole: Optimizer = inner
        self._kind: Any = type(inner)
        self._options: dict[str, Any] = {}
        if given is not None:
            self._options = given[1]
        elif not self._kind.__module__.startswith(_KNOWN) or self._kind is torch.optim.LBFGS:
            raise PipefitError(
                f"optimizer: a {self._kind.__name__} cannot be made again for each stage; give its class and options, "
                "optimizer_cls_and_kwargs=(…, {…}), if it updates each weight by its own gradient only"
            )
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        # All names of each weight, in the order in which the whole optimizer has them.
        self._order: list[list[str]] = []
        self._group_of: dict[str, int] = {}
        self._sizes: list[int] = []
        for number, group in enumerate(inner.param_groups):
            own = [names[id(parameter)] for parameter in group["params"]]
            self._order += own
            self._sizes.append(len(own))
            for aliases in own:
                self._group_of.update(dict.fromkeys(aliases, number))
            group["params"] = [nn.Parameter(torch.empty(0))]

    def of_stage(self, named: list[tuple[str, Any]]) -> Optimizer:
        """The optimizer of some weights under their names."""
        groups: dict[int, dict[str, Any]] = {}
        for name, parameter in named:
            number = self._group_of.get(name, 0)
            if number not in groups:
                groups[number] = {**self._settings(number), "params": [], _GROUP: number}
            groups[number]["params"].append(parameter)
        return self._kind(list(groups.values()), **self._options)

    def _settings(self, number: int) -> dict[str, Any]:
        group = self._whole.param_groups[number]
        return {name: value for name, value in group.items() if name != "params"}

    def take_settings(self, pipe: Pipeline) -> None:
        """Gives stages the learning rates and other settings that the whole optimizer has now."""
        for worker in pipe.workers:
            for optimizer in worker.optimizers.values():
                for group in optimizer.param_groups:
                    group.update(self._settings(group[_GROUP]))

    # ---- states -----------------------------------------------------------------------------------------------------

    def own_states(self, pipe: Pipeline) -> dict[int, Any]:
        """The states of this process's weights, by their places in the whole optimizer, on the CPU."""
        found = {}
        for number, optimizer, parameter in self._places(pipe):
            state = optimizer.state.get(parameter)
            if state:
                found[number] = {name: _on_cpu(value) for name, value in state.items()}
        return found

    def whole_state(self, pipe: Pipeline | None, session: Session) -> dict[str, Any]:
        """The state of the whole optimizer as its own `state_dict` would give it; every rank must call it."""
        assert pipe is not None
        states: dict[int, Any] = {}
        for of_rank in from_all(session, self.own_states(pipe)):
            states |= of_rank
        groups = []
        first = 0
        for number, size in enumerate(self._sizes):
            groups.append({**self._settings(number), "params": list(range(first, first + size))})
            first += size
        return {"state": dict(sorted(states.items())), "param_groups": groups}

    def load(self, pipe: Pipeline, states: Mapping[int, Any] | None) -> None:
        """Gives stages the states of their weights; None: they have none yet."""
        if not states:
            return
        own: dict[int, tuple[Optimizer, dict[int, Any]]] = {}
        for number, optimizer, parameter in self._places(pipe):
            if number in states:
                _, of_optimizer = own.setdefault(id(optimizer), (optimizer, {}))
                of_optimizer[_place_in(optimizer, parameter)] = states[number]
        for optimizer, found in own.values():
            # Through its own method, which brings them to the types and the device of the weights.
            optimizer.load_state_dict({**optimizer.state_dict(), "state": found})

    def _places(self, pipe: Pipeline) -> Iterator[tuple[int, Optimizer, Any]]:
        numbers = {name: number for number, aliases in enumerate(self._order) for name in aliases}
        for worker in pipe.workers:
            for stage, optimizer in worker.optimizers.items():
                for owned, master in zip(worker.owned[stage], worker.stores[stage].masters, strict=True):
                    yield numbers[owned.saved_name], optimizer, master


def _place_in(optimizer: Optimizer, parameter: Any) -> int:
    """The number of a weight in the state of its optimizer."""
    every = [one for group in optimizer.param_groups for one in group["params"]]
    return next(number for number, one in enumerate(every) if one is parameter)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return value
