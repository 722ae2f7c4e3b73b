"""Weights that a rank does not hold: while a layer is proved, those of other layers have no memory, as in training.

So what would fail on a rank fails in the proof:

    layer 2 is proved     weights of layer 2     buffers of the code between     all others on the meta device
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from pipefit.cutting.shell import Shell


def own_modules(shell: Shell, number: int) -> list[nn.Module]:
    """The modules that a layer has with all their tensors: its block and units, and what is between all layers."""
    block = shell.block(number)
    roots = [unit for unit, owners in shell.units if number in owners] + ([] if block is None else [block])
    inside = [inner for root in (*roots, *shell.shared) for inner in root.modules()]
    return [*inside, *(shell.spine if number == 0 else ())]


class Absent:
    """The stand-ins of a model's weights and saved buffers on the meta device, each made once.

    Args:
        shell: of the model.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    @contextlib.contextmanager
    def without_others(self, numbers: Iterable[int]) -> Iterator[None]:
        """The context in which only some layers have memory for their tensors.

        Args:
            numbers: of these layers.
        """
        own = {id(one) for number in numbers for module in own_modules(self._shell, number) for one in _saved(module)}
        own |= {id(buffer) for module in self._shell.spine for buffer in module._buffers.values()}
        replaced: list[tuple[dict[str, Any], str, Tensor]] = []
        for module in self._shell.model.modules():
            tables: list[dict[str, Any]] = [module._parameters, module._buffers]
            for table in tables:
                for name, tensor in table.items():
                    if tensor is None or name in module._non_persistent_buffers_set:
                        continue
                    if id(tensor) not in own:
                        replaced.append((table, name, tensor))
        for table, name, tensor in replaced:
            table[name] = self._stand_in(tensor)
        try:
            yield
        finally:
            for table, name, tensor in replaced:
                # A forward may have replaced a buffer.
                if table.get(name) is self._stand_in(tensor):
                    table[name] = tensor

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._made:
            made = tensor.detach().to("meta")
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            self._made[id(tensor)] = tensor, made
        return self._made[id(tensor)][1]


def _saved(module: nn.Module) -> list[Tensor | None]:
    return [*module._parameters.values(), *module._buffers.values()]
