"""Memory that a stage takes and frees while it works, from the same figures of its layers.

Layers work one after the other, so the most is held while one of them works: what the layers before it have saved, and
its own work. In a backward saved tensors go layer by layer, and gradients of the weights come.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.ir.op import Work
from pipefit.spec.profile import Layer

_LEAST_BYTES = 1 << 20
_MOST_BYTES = 25 << 20
"""Bytes of a full bucket of gradients; in between, half of all gradients. Small buckets let the first reductions start
early; each reduction takes Gloo some tenths of a millisecond of the core. (The maximum is DDP's.)"""


def bucket_bytes(total: float) -> float:
    """Bytes with which a bucket is full, of so many of a stage's gradients.

    >>> bucket_bytes(6 << 20) / (1 << 20)
    3.0
    """
    return min(max(total // 2, _LEAST_BYTES), _MOST_BYTES)


def work_of(
    layers: Sequence[Layer], act: float, grad: float, entering: float, received: float = 0.0, widened: float = 0.0
) -> dict[str, float]:
    """Bytes of a stage's instructions beyond the values that they need and make, by the kinds of `Work`.

    Args:
        layers: with known work, as they are replayed.
        act: bytes of the stage's output.
        grad: bytes of its gradient, which is there throughout the backward.
        entering: bytes of the gradient of the stage's input.
        received: bytes that a sum over its copies receives, for each byte of the gradients.
        widened: bytes of the stage's input where it came in a half type; 0: it is used as it came.
    """
    saved = 0.0
    # The input of a layer, and the part of it that is in the memory of the stage's input, which is among the saved.
    before = widened
    known = entering
    if widened:
        known = 0.0
    forward = bare = backward = first = 0.0
    reached = []
    trained = arrived = sum(layer.wgrad_bytes for layer in layers)
    bucket = bucket_bytes(trained)
    early = trained
    for layer in layers:
        # When a backward reaches the layer, it has filled so many buckets, each just as large as a full one must be.
        arrived -= layer.wgrad_bytes
        full = arrived // bucket * bucket
        if layer.idle_bytes:
            # Sums begin in order, so a bucket with a weight that no backward reaches holds up those that follow it.
            early = full
        forward = max(forward, saved + max(before - known, 0.0) + (layer.forward_work_bytes or 0.0))
        bare = max(bare, before + (layer.bare_work_bytes or 0.0))
        saved += layer.saved_bytes
        # The gradients of the weights of later layers are there when an earlier one works.
        first += layer.wgrad_bytes
        output = layer.output_bytes
        if layer.inner_bytes is not None:
            output = layer.inner_bytes
        inner = output
        if layer is layers[-1]:
            # The gradient that came is there throughout; a narrow one is widened.
            inner = layer.inner_bytes or 0.0
        further = saved + inner + (layer.backward_work_bytes or 0.0)
        reached.append((further, full))
        backward = max(backward, further)
        first = max(first, saved + inner + (layer.first_work_bytes or 0.0))
        before = output
    if layers[-1].inner_bytes is not None:
        # The output is there twice, as it was made and as it travels.
        forward = max(forward, saved + before + act)
        bare = max(bare, before + act)
    last = max(further + received * min(full, early) for further, full in reached)
    found = {
        Work.FORWARD: forward - saved - act,
        Work.BARE: bare - act,
        Work.REPLAY: forward - saved,
        Work.FIRST: max(first - saved - entering, trained - saved - grad),
        Work.BACKWARD: backward - saved - entering,
        Work.LAST: last - saved - entering,
        Work.EARLY: received * early,
        Work.SUM: received * (trained - early),
        Work.COPIES: sum(layer.copy_bytes for layer in layers),
    }
    return {kind.value: max(size, 0.0) for kind, size in found.items()}
