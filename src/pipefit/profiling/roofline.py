"""Seconds of an operation on a device that is not available here: max(FLOP / (peak · efficiency), bytes / bandwidth).

After Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (2009), per operation as
eager PyTorch runs it: nothing is fused, and every operation reads its inputs from memory and writes its outputs there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pipefit.spec.topology import Device

_ATEN = torch.ops.aten


class Roofline(TorchDispatchMode):
    """Adds up the seconds of every operation that runs inside it."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation and counts it."""
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        flops = _flops(func, args, kwargs, result)
        moved = 0 if _only_looks(func) else _bytes((args, kwargs, result))
        self.seconds += self._seconds(flops, moved)
        return result

    def _seconds(self, flops: float, moved: float) -> float:
        peak, bandwidth = self.device.flops * self.device.efficiency, self.device.memory_bandwidth_bytes_per_s
        return max(flops / peak, moved / bandwidth if bandwidth else 0.0)


def _only_looks(func: Any) -> bool:
    """Returns whether the operation moves no data: it makes a view of memory, or reads a tensor's device."""
    return func.is_view or func.namespace == "prim" or func.overloadpacket in _FREE


def _bytes(values: Any) -> float:
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(values) if isinstance(t, Tensor))


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    count = flop_registry.get(_ALIKE.get(func.overloadpacket, func.overloadpacket))
    return count(*args, **kwargs, out_val=result) if count else 0.0


# Operations that torch's registry does not know: attention as a CPU runs it, which is also used on fake tensors.
_ALIKE = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}
_FREE = frozenset({_ATEN.detach, _ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.reshape,
                   _ATEN._unsafe_view, _ATEN.sym_size, _ATEN.new_empty_strided})  # fmt: skip


@contextmanager
def pretended() -> Iterator[FakeTensorMode]:
    """The context of fake tensors, without memory; recurrent networks use the form whose products can be counted."""
    # torch.backends.mkldnn.flags would set three other switches too, one with a warning.
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        torch._C._set_mkldnn_enabled(before)
