"""The Trainer's optimizer, in parts: each stage steps its own weights with the settings of the whole one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from pipefit.errors import PipefitError
from pipefit.integrations.one_replica import from_rank
from pipefit.pipeline.pipeline import Pipeline

_GROUP = "trainer_group"
_KNOWN = ("torch.optim.", "transformers.optimization")
"""Homes of optimizers whose settings are all in their groups, and which update each weight by its own gradient."""


class StageOptimizers:
    """Makes the optimizers of stages.

    The whole optimizer stays what the Trainer, its schedule, its callbacks and its checkpoints see. Its weights become
    stand-ins without gradients, so its step does nothing; it has states only while they are saved or loaded.

    Args:
        model: before it is taken apart.
        whole: the optimizer of all its weights.
        given: class and options, where the user has given them.

    Raises:
        PipefitError: the optimizer cannot be made again for a part of the weights.
    """

    def __init__(self, model: nn.Module, whole: Optimizer, given: Any) -> None:
        self.model = model
        self.whole = whole
        kind: Any = type(whole)
        made: Any = given or (kind, {})
        self._kind, self._options = made
        is_known = kind.__module__.startswith(_KNOWN) and kind is not torch.optim.LBFGS
        if not is_known and not given:
            raise PipefitError(
                f"optimizer: a {kind.__name__} cannot be made again for each stage; give its class and options, "
                "optimizer_cls_and_kwargs=(…, {…}), if it updates each weight by its own gradient only"
            )
        # Of each weight: its place in the whole optimizer under all its names, and by this place its group.
        self._places: dict[str, int] = {}
        self._left_out: set[str] = set()
        self._groups: list[int] = []
        known = {}
        for number, group in enumerate(whole.param_groups):
            for parameter in group["params"]:
                known[id(parameter)] = len(self._groups)
                self._groups.append(number)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in known:
                self._places[name] = known[id(parameter)]
            else:
                self._left_out.add(name)
        states = whole.state_dict()["state"]
        whole.state.clear()
        self._stand_ins: list[nn.Parameter] = []
        for group in whole.param_groups:
            group["params"] = [nn.Parameter(torch.empty(0, dtype=weight.dtype)) for weight in group["params"]]
            self._stand_ins += group["params"]
        self._keep(states)

    def _keep(self, states: dict[int, Any]) -> None:
        for place, state in states.items():
            self.whole.state[self._stand_ins[place]] = state

    def of_stage(self, named: list[tuple[str, Any]]) -> Any:
        """The optimizer of some weights under their names."""
        groups = []
        for number in range(len(self.whole.param_groups)):
            groups.append({**self._settings(number), "params": []})
        for name, parameter in named:
            if name not in self._left_out:
                place = self._places.get(name, 0)
                groups[self._groups[place]]["params"].append(parameter)
        # A stage of which the optimizer has no weight has a group without any.
        return self._kind([group for group in groups if group["params"]] or groups[:1], **self._options)

    def _settings(self, number: int) -> dict[str, Any]:
        group = self.whole.param_groups[number]
        settings = {name: value for name, value in group.items() if name != "params"}
        return {**settings, _GROUP: number}

    def give_settings(self, pipe: Pipeline) -> None:
        """Gives stages the learning rates and other settings that the whole optimizer has now."""
        for optimizer, _ in self._stages(pipe):
            for group in optimizer.param_groups:
                group.update(self._settings(group[_GROUP]))

    def take_states(self, pipe: Pipeline, from_every_rank: bool) -> None:
        """Gives the whole optimizer the states of this process's stages, on the CPU.

        Args:
            pipe: between two updates.
            from_every_rank: every rank calls it, and rank 0 gets the states of all.
        """
        own = {}
        for optimizer, places in self._stages(pipe):
            for number, state in optimizer.state_dict()["state"].items():
                own[places[number]] = pytree.tree_map_only(Tensor, Tensor.cpu, state)
        self._keep(own)
        if from_every_rank:
            for rank in range(1, pipe.session.num_ranks):
                of_rank = from_rank(pipe.session, own, rank)
                if pipe.rank == 0:
                    self._keep(of_rank)

    def give_states(self, pipe: Pipeline) -> None:
        """Gives stages the states that the whole optimizer has, from a checkpoint or an earlier pipeline."""
        states = self.whole.state_dict()["state"]
        for optimizer, places in self._stages(pipe):
            found = {number: states[place] for number, place in enumerate(places) if place in states}
            # Each copy of a weight steps with states of its own.
            found = pytree.tree_map_only(Tensor, Tensor.clone, found)
            # Through its own method, which brings them to the types and the device of the weights.
            optimizer.load_state_dict({**optimizer.state_dict(), "state": found})
        self.whole.state.clear()

    def _stages(self, pipe: Pipeline) -> Iterator[tuple[Optimizer, list[int]]]:
        """The optimizer of each stage of this process, with the places of its weights in the whole one."""
        for worker in pipe.workers:
            for stage, optimizer in worker.optimizers.items():
                names = [owned.saved_name for owned in worker.owned[stage]]
                order = [place for group in worker.stores[stage].groups(optimizer) for place in group]
                yield optimizer, [self._places[names[place]] for place in order]
