"""The kernels of operations on a device that is not available here; `pipefit.cost.kernels` knows their seconds.

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

from pipefit.cost.kernels import ROWS
from pipefit.parallel.region import Exchange
from pipefit.profiling.loops import LongLoopError
from pipefit.profiling.survey import storage_key
from pipefit.profiling.tensors import num_bytes, tensors_of
from pipefit.spec.counted import Kernel, Kernels

_ATEN = torch.ops.aten

Args = tuple[Any, ...]
"""Arguments of an operation."""

Product = tuple[Any, ...]
"""A matrix product: kind, count, m, n, k."""


class KernelCount(TorchDispatchMode):
    """Notes every operation that runs inside it as a kernel.

    Args:
        exchanges: the list in which a region in isolation notes what its processes would exchange.

    Attributes:
        kernels: those since the last `take`.
        in_8_bits: storages of weights whose products, and those of their gradients, take numbers of 8 bits.
        most: kernels between two calls of `take`.
    """

    def __init__(self, exchanges: list[Exchange]) -> None:
        super().__init__()
        self._exchanges = exchanges
        self.kernels: list[Kernel] = []
        self.in_8_bits: set[int] = set()
        self.most = math.inf

    def take(self) -> Kernels:
        """The kernels since the last call, the exchanges at the end."""
        found = self.kernels
        for one in self._exchanges:
            found.append(Kernel(one.name, (float(math.prod(one.shape) * one.dtype.itemsize),)))
        self._exchanges.clear()
        self.kernels = []
        return tuple(found)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation and notes it.

        Raises:
            LongLoopError: there are too many kernels.
        """
        kwargs = dict(kwargs or {})
        result = _result(func, args, kwargs)
        packet = func.overloadpacket
        if _only_looks(func):
            return result
        if len(self.kernels) > self.most:
            raise LongLoopError(self.take())
        products = _products(func, args, result)
        if products:
            size = args[0].element_size()
            made = [Kernel(kind, (*sizes, size)) for kind, *sizes in products]
            if self.in_8_bits and packet in _LINEAR:
                operands = [args[index] for index in _OPERANDS[packet]]
                made = _in_8_bits(made[0], operands, self.in_8_bits)
            self.kernels += made
            return result
        moved_bytes = num_bytes(tensors_of((args, kwargs, result)))
        if packet in _ATTENTION:
            self.kernels.append(_attention(_ATTENTION[packet], args, moved_bytes))
        else:
            flops = _flops(func, args, kwargs, result)
            self.kernels.append(Kernel("pass", (flops, moved_bytes)))
        return result


def _in_8_bits(product: Kernel, operands: list[Tensor], weights: set[int]) -> list[Kernel]:
    """A linear layer's product with numbers of 8 bits, as torchao's float8 training runs it.

    Its input, or the gradient of its output, is read, and written in 8 bits twice: also transposed, for the product
    that makes the gradient of the weights. Sizes that are no multiples of 16 stay as they are.
    """
    count, m, n, k, element_bytes = product.sizes
    if any(size % _FP8_ALIGNED for size in (m, n, k)):
        return [product]
    made = [Kernel("product8", (count, m, n, k, 1))]
    if any(storage_key(operand) in weights for operand in operands):
        made.append(Kernel("pass", (0.0, (element_bytes + 2) * m * k)))
    return made


def _attention(kind: str, args: Args, moved_bytes: float) -> Kernel:
    """A core of attention; a causal one computes half, a backward makes the scores again: five products, not four.

    Queries may have more heads than keys and values, which torch's own count refuses before 2.13.
    """
    first = 0
    if kind == "attention-back":
        first = 1  # after the gradient of the output
    queries, keys, values = args[first : first + 3]
    *_, rows, width = queries.shape
    columns = keys.shape[-2]
    scores = math.prod(queries.shape[:-2]) * rows * columns
    used = values.shape[-1]
    each = 2.0 * (width + used)
    model_flops = each * scores
    if kind == "attention-back":
        model_flops *= 2
        each = 2.0 * (3 * width + 2 * used)
    flops = each * scores
    is_causal = any(one is True for one in args)
    if is_causal:
        flops /= 2
    last = each * min(ROWS, rows) * columns
    return Kernel(kind, (model_flops, flops, moved_bytes, last))


def _only_looks(func: Any) -> bool:
    """Returns whether the operation moves no data: it makes a view of memory, or reads a tensor's device."""
    return func.is_view or func.namespace == "prim" or func.overloadpacket in _FREE


def _result(func: Any, args: Args, kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation; of grouped products torch finds the form for bfloat16 only, others have the same."""
    if func.overloadpacket is not _ATEN._grouped_mm:
        return func(*args, **kwargs)
    left, right, *others = args
    return func(left.bfloat16(), right.bfloat16(), *others, **kwargs).to(left.dtype)


def _products(func: Any, args: Args, result: Any) -> list[Product]:
    """The matrix products (kind, count, m, n, k) of an operation; none where only its FLOP are known.

    A convolution is the product of the patches of its input with its kernel, its backward two more.
    """
    packet = func.overloadpacket
    if packet in _OPERANDS:
        left, right = (args[index] for index in _OPERANDS[packet])
        *batch, m, k = left.shape
        return [("product", math.prod(batch), m, right.shape[-1], k)]
    if packet is _ATEN._grouped_mm:
        return [_grouped(*args[:3])]
    if packet is _ATEN.convolution and not args[6]:
        return [("product", *_convolution(args[0], args[1], args[8], result.shape[2:]))]
    if packet is _ATEN.convolution_backward and not args[7]:
        count, m, n, k = _convolution(args[1], args[2], args[9], args[0].shape[2:])
        of_input, of_kernel, _ = args[10]
        products: list[Product] = []
        if of_input:
            products.append(("product", count, m, k, n))
        if of_kernel:
            products.append(("product", count, k, n, m))
        return products
    return []


def _grouped(left: Tensor, right: Tensor, ends: Tensor) -> Product:
    """A product for each group; their sizes depend on the data, and count as equal."""
    count = len(ends)
    m, k = left.shape
    if right.dim() == 3:
        return "grouped", count, m / count, right.shape[-1], k
    return "grouped", count, m, right.shape[-1], k / count


def _convolution(source: Tensor, kernel: Tensor, groups: int, places: Any) -> tuple[int, int, int, int]:
    inner = kernel.shape[1] * math.prod(kernel.shape[2:])
    return groups, source.shape[0] * math.prod(places), kernel.shape[0] // groups, inner


def _flops(func: Any, args: Args, kwargs: dict[str, Any], result: Any) -> float:
    count = flop_registry.get(func.overloadpacket)
    if count:
        return count(*args, **kwargs, out_val=result)
    return 0.0


# Where the two matrices of a product stand among the arguments.
_OPERANDS = {_ATEN.mm: (0, 1), _ATEN.addmm: (1, 2), _ATEN.bmm: (0, 1), _ATEN.baddbmm: (1, 2)}
_LINEAR = {_ATEN.mm, _ATEN.addmm}
_FP8_ALIGNED = 16
# Attention as a CPU runs it, which is also used on fake tensors.
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: "attention",
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: "attention-back",
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
