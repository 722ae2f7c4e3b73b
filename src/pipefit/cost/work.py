"""Memory that a stage takes and frees while it works, from the same figures of its layers.

Layers work one after the other, so the most is held while one of them works: what the layers before it have saved, and
its own work. In a backward saved tensors go layer by layer, and gradients of the weights come.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.ir.op import Work
from pipefit.spec.profile import Layer


def work_of(layers: Sequence[Layer], act: float, grad: float, entering: float) -> dict[str, float]:
    """Bytes of a stage's instructions beyond the values that they need and make, by the kinds of `Work`.

    Args:
        layers: with known work, as they are replayed.
        act: bytes of the stage's output.
        grad: bytes of its gradient, which is there throughout the backward.
        entering: bytes of the gradient of the stage's input.
    """
    saved = before = 0.0
    forward = bare = backward = first = 0.0
    for layer in layers:
        forward = max(forward, saved + (layer.forward_work_bytes or 0.0))
        bare = max(bare, before + (layer.bare_work_bytes or 0.0))
        saved += layer.saved_bytes
        # The gradients of the weights of later layers are there when an earlier one works.
        first += layer.wgrad_bytes
        inner = layer.output_bytes
        if layer is layers[-1]:
            inner = 0.0
        backward = max(backward, saved + inner + (layer.backward_work_bytes or 0.0))
        first = max(first, saved + inner + (layer.first_work_bytes or 0.0))
        before = layer.output_bytes
    trained = sum(layer.wgrad_bytes for layer in layers)
    found = {
        Work.FORWARD: forward - saved - act,
        Work.BARE: bare - act,
        Work.REPLAY: forward - saved,
        Work.FIRST: max(first - saved - entering, trained - saved - grad),
        Work.BACKWARD: backward - saved - entering,
    }
    return {kind.value: max(size, 0.0) for kind, size in found.items()}
