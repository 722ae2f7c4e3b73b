"""Blocks that loop over tokens, from their counts at three short lengths: a longer sample has more iterations.

A kernel is identified by its place, not by its sizes: from the beginning of its pass, from the end, or in an iteration.

    first length    front  1 iteration                 back
    second          front  1 + 13 iterations           back
    third           front  1 + 26 iterations           back
    n tokens        front  1 + n - (the first length)  back

Front and back are equally long, and have the other iterations of the first length, so that the code before and after a
loop may differ in length. Sizes of kernels, and bytes, lie on lines over the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.errors import ProfileError
from pipefit.spec.counted import Kernels, LayerCount

CountedBlock = tuple[LayerCount, Any]
"""The count of a block, and the form of its output."""

_STEP = 13
"""Tokens from one length to the next; sizes of models are seldom multiples of it."""


class LongLoopError(Exception):
    """A forward has too many kernels to run; its argument is the kernels with which it begins."""


def extrapolated(block: Callable[[int], CountedBlock], tokens: int, begun: Kernels) -> CountedBlock:
    """The count of a block for more tokens, with the form of its output.

    It follows from the two shortest lengths. The third must follow from them too, and so must the beginning of the
    forward at the length itself. What differs only after it, such as a branch at 5,000 tokens, would not be seen.

    Args:
        block: counted, by the tokens of a sample.
        tokens: of a sample.
        begun: kernels with which its forward begins.

    Raises:
        ProfileError: it does not follow.
    """
    first = _STEP + tokens % _STEP
    if tokens < 4 * _STEP:
        raise ProfileError("too short")
    (shortest, small), (middle, large), (longest, _) = (block(first + index * _STEP) for index in range(3))
    low, high, more = (
        _folded(count, shortest, middle, 1 + index * _STEP) for index, count in enumerate((shortest, middle, longest))
    )
    steps = tokens // _STEP - 1
    found = low.towards(high, steps, whole=False)
    body = tuple(replace(kernel, times=1) for kernel in found.forward if kernel.times > 1)
    front = [kernel.times > 1 for kernel in found.forward].index(True) if body else 0
    expected = found.forward[:front] + body * len(begun)
    # Attention takes many rows at a time, which short samples do not have.
    if low.towards(high, 2, whole=False) != more or expected[: len(begun)] != begun or found.cores:
        raise ProfileError("a block has no loop over tokens that is known from its beginning")

    def form(one: Any, two: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        sizes = [size + steps * (other - size) for size, other in zip(one.shape, two.shape, strict=True)]
        return one.new_empty(sizes).requires_grad_(one.requires_grad)

    return found, pytree.tree_map(form, small, large)


def _folded(count: LayerCount, low: LayerCount, high: LayerCount, times: int) -> LayerCount:
    """The count with one iteration for all those between front and back.

    Args:
        count: at one length.
        low: at the first length.
        high: at the second.
        times: iterations between front and back.
    """
    ways = {}
    for way in ("forward", "backward_input", "backward_weight"):
        kernels, fewest, more = (getattr(one, way) for one in (count, low, high))
        period = (len(more) - len(fewest)) // _STEP
        front = (len(fewest) - period) // 2
        body = kernels[front : front + period]
        back = front + period * times
        if kernels[front:back] != body * times:
            raise ProfileError("iterations of a loop differ")
        ways[way] = kernels[:front] + tuple(replace(kernel, times=times) for kernel in body) + kernels[back:]
    return replace(count, **ways)
