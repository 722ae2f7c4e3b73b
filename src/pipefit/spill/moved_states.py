"""The optimizer's states of one stage that move with it: views of a record wherever that is, or stand-ins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.errors import TierError
from pipefit.spill.optimizer_states import StateRules, StateSpec
from pipefit.stage.record_layout import Layout, absent

__all__ = ["MovedStates"]


class MovedStates:
    """The states of some parameters, one after the other in a record.

    Args:
        stage: whose they are, for messages.
        specs: which there are, and of what parameter.
        rules: of the optimizer.
        device: of their stand-ins while they are away.

    Attributes:
        layout: of the record.
        known: places of those that the optimizer has made.
        optimizer: that keeps them; None: not known yet, or nothing is stepped.
    """

    def __init__(
        self,
        stage: int,
        specs: Sequence[tuple[nn.Parameter, StateSpec]],
        rules: StateRules,
        device: torch.device,
    ) -> None:
        self.layout = Layout(spec.like for _, spec in specs)
        self._stage, self._specs, self._device = stage, list(specs), device
        self._rules = rules
        self.known: set[int] = set()
        self.optimizer: Optimizer | None = None
        self._master_of: Mapping[int, nn.Parameter] = {}

    def belong_to(self, optimizer: Optimizer, master_of: Mapping[int, nn.Parameter]) -> None:
        """Sets the optimizer that keeps them.

        Args:
            optimizer: that keeps them.
            master_of: by the id of a parameter, what the optimizer has in its place.
        """
        self.optimizer, self._master_of = optimizer, master_of

    def tensors(self) -> list[Tensor]:
        """Those that the optimizer has now."""
        if self.optimizer is None:
            return []
        of = self.optimizer.state
        found = [of.get(self._master_of[id(parameter)], {}).get(spec.key) for parameter, spec in self._specs]
        return [value for value in found if value is not None]

    def bind(self, record: Tensor) -> None:
        """Makes them views of a record; those that the optimizer has not made yet only where zeros do the same."""
        if self.optimizer is None:
            return
        for index, view in enumerate(self.layout.views(record)):
            if self._rules.zero_at_first or index in self.known:
                parameter, spec = self._specs[index]
                state = self.optimizer.state[self._master_of[id(parameter)]]
                state[spec.key] = view
                # An optimizer that finds any state makes no others: Adam on a GPU would miss its count of steps.
                for key, zero in self._rules.numbers.items():
                    if key not in state:
                        state[key] = zero.clone()

    def unbind(self) -> None:
        """Replaces them, while they are away, by stand-ins that have their shapes and no memory."""
        if self.optimizer is None:
            return
        for (parameter, spec), field in zip(self._specs, self.layout.fields, strict=True):
            state = self.optimizer.state.get(self._master_of[id(parameter)], {})
            if spec.key in state:
                state[spec.key] = absent(field, self._device)

    def adopt(self, record: Tensor) -> None:
        """Moves those that lie elsewhere, as the optimizer has made them, into the record.

        Raises:
            TierError: one has another shape or type than room was made for.
        """
        if self.optimizer is None:
            return
        for index, view in enumerate(self.layout.views(record)):
            parameter, spec = self._specs[index]
            state = self.optimizer.state.get(self._master_of[id(parameter)], {})
            value = state.get(spec.key)
            if value is None:
                self.known.discard(index)
                continue
            self.known.add(index)
            if value.data_ptr() == view.data_ptr():
                continue
            if value.shape != view.shape or value.dtype != view.dtype:
                raise TierError(
                    f"stage {self._stage}: the optimizer keeps {spec.key} as {value.dtype}{list(value.shape)}, room "
                    f"was made for {view.dtype}{list(view.shape)}"
                )
            view.copy_(value)
            state[spec.key] = view
