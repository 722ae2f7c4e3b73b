"""Weights that a rank does not hold: while a layer is proved, other layers' weights have no memory.

So what would fail on a rank fails in the proof:

    layer 2 is proved     weights of layer 2     buffers of the code between     all others on the meta device
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from pipefit.cutting.shell import Shell
from pipefit.stage.split import own_tensors


def own_modules(shell: Shell, number: int) -> list[nn.Module]:
    """The modules that a layer has with all their tensors: its block and units, and what is between all layers."""
    roots = [unit for unit, owners in shell.units if number in owners]
    roots += shell.shared
    block = shell.block(number)
    if block is not None:
        roots.append(block)
    inside = [inner for root in roots for inner in root.modules()]
    if number == 0:
        inside += shell.spine
    return inside


class Absent:
    """The stand-ins of a model's weights and saved buffers on the meta device, each made once.

    Args:
        shell: the model with its borders.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    @contextlib.contextmanager
    def without_others(self, numbers: Iterable[int]) -> Iterator[None]:
        """The context in which only some layers have memory for their tensors.

        Args:
            numbers: the numbers of the layers with memory.
        """
        own: set[int] = set()
        for number in numbers:
            for module in own_modules(self._shell, number):
                own.update(map(id, own_tensors(module)))
        for module in self._shell.spine:
            own.update(map(id, module._buffers.values()))
        replaced: list[tuple[dict[str, Any], str, Tensor]] = []
        for module in self._shell.model.modules():
            tables: Any = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    is_saved = tensor is not None and name not in module._non_persistent_buffers_set
                    if is_saved and id(tensor) not in own:
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
