"""The states that an optimizer keeps for each parameter.

They are found by a trial step before anything is allocated. Those that move with their stage are views of a record, or
stand-ins while it is away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.errors import ModelError, TierError
from pipefit.stage.accelerator import CPU
from pipefit.stage.optimizing import optimizer_like
from pipefit.stage.record_layout import Layout, absent
from pipefit.stage.training import MakeOptimizer


class StateSpec(NamedTuple):
    """One tensor that an optimizer keeps.

    Attributes:
        parameter: index of the parameter it is for.
        key: its name in the optimizer's state.
        like: its shape and type, on the meta device.
    """

    parameter: int
    key: str
    like: Tensor


class StateRules(NamedTuple):
    """Properties of an optimizer's states.

    Attributes:
        zero_at_first: whether zeros are equivalent to no states yet; see `is_zero_at_first`.
        numbers: numbers that it keeps for each parameter outside of the records, as zeros by name; see
            `numbers_outside`.
    """

    zero_at_first: bool = False
    numbers: Mapping[str, Tensor] = MappingProxyType({})


def probe_states(make: MakeOptimizer, parameters: Sequence[Tensor], device: torch.device) -> list[StateSpec]:
    """The tensors that an optimizer will keep on the parameters' device, found by one step of stand-ins.

    Numbers that it keeps on another device (on the host, step counters of parameters on a GPU) are not among them; see
    `numbers_outside`.

    Raises:
        ModelError: its step cannot be taken stage by stage, so it cannot be spilled.
    """
    try:
        found = _stepped(make, parameters, torch.device("meta"))
    except Exception:
        try:
            found = _stepped(make, parameters, CPU)
        except Exception as problem:
            raise ModelError(
                f"this optimizer cannot be spilled: {type(problem).__name__}: {problem}; its step must need nothing "
                "but the gradients of the parameters it was given, as torch.optim's SGD, Adam, AdamW and Adagrad do"
            ) from None
    specs = []
    for index, state in enumerate(found):
        for key, value in state.items():
            if isinstance(value, Tensor) and _moves(value, device):
                specs.append(StateSpec(index, key, torch.empty_like(value, device="meta")))
    return specs


def _moves(value: Tensor, device: torch.device) -> bool:
    """Returns whether a state belongs to a record: with a GPU, single numbers stay where the optimizer put them."""
    return device.type == "cpu" or value.dim() > 0


def numbers_outside(make: MakeOptimizer, device: torch.device) -> dict[str, Tensor]:
    """The single numbers that an optimizer keeps for each parameter outside of the records, as zeros, by name.

    They are found by a real step of a tiny parameter, because the optimizer chooses their device: Adam counts its
    steps on the host, a fused Adam on the GPU. On a CPU they are in the records, and the result is empty.
    """
    if _moves(torch.zeros(()), device):
        return {}
    (state,) = _stepped(make, [torch.zeros(2)], device)
    return {k: torch.zeros_like(v) for k, v in state.items() if isinstance(v, Tensor) and not _moves(v, device)}


def _stepped(make: MakeOptimizer, parameters: Sequence[Tensor], device: torch.device) -> list[dict[str, object]]:
    if not parameters:
        return []
    stand_ins = [nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device)) for p in parameters]
    for parameter in stand_ins:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = optimizer_like(make, parameters)(stand_ins)
    optimizer.step()
    return [dict(optimizer.state.get(parameter, {})) for parameter in stand_ins]


def is_zero_at_first(make: MakeOptimizer) -> bool:
    """Returns whether an optimizer treats zeros as its states in the same way as no states yet.

    Then states can be in their slot from the first step. Else (SGD with dampening, which starts from the first
    gradient) the first step makes them, and they are moved to the slot after it.
    """
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((3, 2), (4,))]
    gradients = [[torch.randn(s.shape, generator=generator) for s in start] for _ in range(2)]

    def trained(from_zeros: bool) -> list[Tensor]:
        """Weights and states after two steps."""
        parameters = [nn.Parameter(tensor.clone()) for tensor in start]
        optimizer = make(parameters)
        if from_zeros:
            for index, key, like in probe_states(make, start, CPU):
                optimizer.state[parameters[index]][key] = torch.zeros_like(like, device="cpu")
        for of_step in gradients:
            for parameter, gradient in zip(parameters, of_step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        states = [value for parameter in parameters for _, value in sorted(optimizer.state[parameter].items())]
        return [*parameters, *states]

    try:
        return all(map(torch.equal, trained(False), trained(True)))
    except Exception:  # it keeps more than tensors, or cannot be spilled
        return False


class MovedStates:
    """The states of some parameters, one after the other in a record.

    Args:
        stage: of the parameters, for messages.
        specs: the states, with their parameters.
        rules: of the optimizer.
        device: of their stand-ins while they are away.

    Attributes:
        layout: of the record.
        known: places of the states that the optimizer has made.
        optimizer: of the states; None: not known yet, or nothing is stepped.
    """

    def __init__(
        self,
        stage: int,
        specs: Sequence[tuple[nn.Parameter, StateSpec]],
        rules: StateRules,
        device: torch.device,
    ) -> None:
        self.layout = Layout(spec.like for _, spec in specs)
        self._stage = stage
        self._specs = list(specs)
        self._masters: list[nn.Parameter] = []
        self._device = device
        self._rules = rules
        self.known: set[int] = set()
        self.optimizer: Optimizer | None = None

    def belong_to(self, optimizer: Optimizer, master_of: Mapping[int, nn.Parameter]) -> None:
        """Sets the optimizer that keeps them.

        Args:
            optimizer: of the states.
            master_of: the optimizer's parameter by the id of the stage's parameter.
        """
        self.optimizer = optimizer
        self._masters = [master_of[id(parameter)] for parameter, _ in self._specs]

    def _kept(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Place and key of each, with all states of its parameter; none without an optimizer."""
        if self.optimizer is not None:
            for index, master in enumerate(self._masters):
                yield index, self._specs[index][1].key, self.optimizer.state.get(master, {})

    def tensors(self) -> list[Tensor]:
        """The states that the optimizer has now."""
        return [state[key] for _, key, state in self._kept() if state.get(key) is not None]

    def bind(self, record: Tensor) -> None:
        """Makes them views of a record; those not made yet only where zeros are equivalent."""
        for index, key, state in self._kept():
            if self._rules.zero_at_first or index in self.known:
                assert self.optimizer is not None
                self.optimizer.state[self._masters[index]] = state
                state[key] = self.layout.fields[index].of(record)
                # An optimizer that finds any state makes no others: Adam on a GPU would miss its count of steps.
                for number, zero in self._rules.numbers.items():
                    if number not in state:
                        state[number] = zero.clone()

    def unbind(self) -> None:
        """Replaces them, while they are away, by stand-ins with their shapes and without memory."""
        for index, key, state in self._kept():
            if key in state:
                state[key] = absent(self.layout.fields[index], self._device)

    def adopt(self, record: Tensor) -> None:
        """Moves states that the optimizer has made elsewhere into the record.

        Raises:
            TierError: one has another shape or type than its place in the record.
        """
        for index, key, state in self._kept():
            value = state.get(key)
            view = self.layout.fields[index].of(record)
            if value is None:
                self.known.discard(index)
                continue
            self.known.add(index)
            if value.data_ptr() == view.data_ptr():
                continue
            if value.shape != view.shape or value.dtype != view.dtype:
                raise TierError(
                    f"stage {self._stage}: the optimizer keeps {key} as {value.dtype}{list(value.shape)}, its record "
                    f"has room for {view.dtype}{list(view.shape)}"
                )
            view.copy_(value)
            state[key] = view
