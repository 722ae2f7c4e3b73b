"""Seconds of operations on a device that is not available here, each by the law of `pipefit.cost.roofline`.

Every operation counts as eager PyTorch runs it: nothing is fused, and each reads its inputs from memory and writes its
outputs there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pipefit.cost.roofline import flops_s, product_s
from pipefit.profiling.tensors import num_bytes, tensors_of
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
        if not _only_looks(func):
            products = _products(func, args)
            if products:
                if isinstance(result, Tensor):
                    size = result.element_size()
                else:
                    size = args[0].element_size()
                self.seconds += sum(product_s(self.device, m, n, k, count, size) for count, m, n, k in products)
            else:
                moved_bytes = num_bytes(tensors_of((args, kwargs, result)))
                self.seconds += flops_s(self.device, _flops(func, args, kwargs, result), moved_bytes)
        return result


def _only_looks(func: Any) -> bool:
    """Returns whether the operation moves no data: it makes a view of memory, or reads a tensor's device."""
    return func.is_view or func.namespace == "prim" or func.overloadpacket in _FREE


def _products(func: Any, args: tuple[Any, ...]) -> list[tuple[int, int, int, int]]:
    """The matrix products (count, m, n, k) of an operation; none where only its FLOP are known.

    A convolution is the product of the patches of its input with its kernel, its backward two more.
    """
    packet = func.overloadpacket
    if packet in _OPERANDS:
        left, right = (args[index] for index in _OPERANDS[packet])
        *batch, m, k = left.shape
        return [(math.prod(batch), m, right.shape[-1], k)]
    if packet is _ATEN.convolution and not args[6]:
        return [_convolution(args[0], args[1], args[8], _outputs(args))]
    if packet is _ATEN.convolution_backward and not args[7]:
        count, m, n, k = _convolution(args[1], args[2], args[9], args[0].shape[2:])
        of_input, of_kernel, _ = args[10]
        products = []
        if of_input:
            products.append((count, m, k, n))
        if of_kernel:
            products.append((count, k, n, m))
        return products
    return []


def _outputs(args: tuple[Any, ...]) -> list[int]:
    """Positions of a convolution's output, per dimension."""
    source, kernel, _, stride, padding, dilation = args[:6]
    sizes = zip(source.shape[2:], kernel.shape[2:], stride, padding, dilation, strict=True)
    return [(size + 2 * pad - dil * (width - 1) - 1) // step + 1 for size, width, step, pad, dil in sizes]


def _convolution(source: Tensor, kernel: Tensor, groups: int, places: Any) -> tuple[int, int, int, int]:
    inner = kernel.shape[1] * math.prod(kernel.shape[2:])
    return groups, source.shape[0] * math.prod(places), kernel.shape[0] // groups, inner


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    count = flop_registry.get(_ALIKE.get(func.overloadpacket, func.overloadpacket))
    if count:
        return count(*args, **kwargs, out_val=result)
    return 0.0


# Where the two matrices of a product stand among the arguments.
_OPERANDS = {_ATEN.mm: (0, 1), _ATEN.addmm: (1, 2), _ATEN.bmm: (0, 1), _ATEN.baddbmm: (1, 2)}
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
