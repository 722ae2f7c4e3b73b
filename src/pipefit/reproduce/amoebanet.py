"""AmoebaNet-D by its published architecture: parameters, and the activations that training keeps.

AmoebaNet-D (L, D) has a stem of D/4 channels, two reductions, and three times L/3 normal cells with a reduction between
them. A reduction halves the image and doubles the channels. A cell has five sums of two operations each; their inputs
are the cell's last input (0), the one before (1), and the earlier sums (2 to 6). Of every operation the output of its
rectifier and of its convolution, or of its pooling, is kept for the backward, 4 bytes each.

Source: tensorflow/tpu, models/official/amoeba_net, as kakaobrain/torchgpipe, benchmarks/models/amoebanet, has it for
PyTorch: its normal cells join 0, 3, 4 and 6, where the paper of AmoebaNet joins 4, 5 and 6.
"""

from __future__ import annotations

from typing import NamedTuple

from pipefit.partition.balance import divide, spans
from pipefit.reproduce.entry import Bench

_IMAGE = 224
_CLASSES = 1000
_SAMPLES = 128
"""Images of a mini-batch."""
_STATE = 12
"""Bytes of a parameter with its gradient and the state of RMSProp."""

_NORMAL = "1 1x1, 1 max, 1 none, 0 1x7, 0 1x1, 0 1x7, 2 max, 2 none, 1 average, 5 1x1"
_REDUCTION = "0 max, 0 max, 2 none, 1 3x3, 2 1x7, 2 max, 3 none, 1 max, 2 average, 3 1x1"
"""The operations of a cell, each with the number of its input."""
_CONVOLUTIONS = {
    "1x1": ((1, 4),),
    "3x3": ((1, 1), (9, 1), (1, 4)),
    "1x7": ((1, 1), (7, 1), (7, 1), (1, 4)),
}
"""The convolutions of an operation: weights of a kernel, and quarters of the channels that go out."""


class _Part(NamedTuple):
    """An operation, or a cell: its parameters, and the numbers that it keeps and passes on for one image."""

    parameters: int
    kept: int
    sent: int = 0


class _State(NamedTuple):
    """The shape of a cell's output: its channels, and the height and width of its square image in pixels."""

    channels: int
    image: int

    @property
    def size(self) -> int:
        return self.channels * self.image**2


def _convolution(kernel: int, before: _State, after: _State) -> _Part:
    """Rectifier, convolution without bias, batch norm."""
    weights = kernel * before.channels * after.channels
    return _Part(weights + 2 * after.channels, before.size + after.size)


def _operation(kind: str, before: _State, image: int) -> list[_Part]:
    """The convolutions or the pooling of an operation; its output is `image` pixels high and wide."""
    if kind == "max":
        return [_Part(0, before._replace(image=image).size)]
    parts = []
    quarter = before.channels // 4
    for kernel, quarters in _CONVOLUTIONS.get(kind, ()):
        after = _State(quarters * quarter, before.image)
        if kernel > 1:
            after = after._replace(image=image)
        parts.append(_convolution(kernel, before, after))
        before = after
    return parts


def _cell(operations: str, skip: _State, last: _State, out: _State) -> _Part:
    """A cell, from its two inputs; each of its operations has as many channels as `out`."""
    inner = _State(out.channels, last.image)
    parts = [_convolution(1, last, inner)]
    if skip != inner:
        parts.append(_convolution(1, skip, inner))
    for operation in operations.split(", "):
        source, kind = operation.split()
        before = out
        if source in "01":
            before = inner
        parts += _operation(kind, before, out.image)
    return _Part(sum(part.parameters for part in parts), sum(part.kept for part in parts))


def _parts(layers: int, filters: int) -> list[_Part]:
    """Stem, cells and classifier of AmoebaNet-D (layers, filters)."""
    normal = [_NORMAL] * (layers // 3)
    pixels = _State(3, _IMAGE)
    skip = last = inner = _State(filters // 4, _IMAGE // 2)
    stem = _convolution(9, pixels, inner)
    found = [stem._replace(sent=inner.size)]
    for operations in (_REDUCTION, _REDUCTION, *normal, _REDUCTION, *normal, _REDUCTION, *normal):
        joined = 4
        if operations is _REDUCTION:
            inner = _State(2 * inner.channels, inner.image // 2)
            joined = 3
        cell = _cell(operations, skip, last, inner)
        skip = last
        last = inner._replace(channels=joined * inner.channels)
        found.append(cell._replace(sent=skip.size + last.size))
    classifier = _Part((last.channels + 1) * _CLASSES, last.channels)
    return [*found, classifier]


def amoebanet_parameters(run: Bench, layers: int, filters: int) -> float:
    """Millions of parameters."""
    return sum(part.parameters for part in _parts(layers, filters)) / 1e6


def amoebanet_states_gb(run: Bench, layers: int, filters: int) -> float:
    """GB of parameters, gradients and states of the optimizer."""
    return amoebanet_parameters(run, layers, filters) * _STATE / 1e3


def amoebanet_activations_gb(
    run: Bench, layers: int, filters: int, partitions: int = 0, microbatches: int = 1
) -> float:
    """GB of activations of all accelerators at their peaks.

    Each of GPipe's partitions keeps its inputs, and replays one micro-batch; cells are divided by what they keep.

    Args:
        run: runs steps.
        layers: L.
        filters: D.
        partitions: of GPipe; 0: one accelerator without replays.
        microbatches: that share the mini-batch of 128 images.
    """
    parts = _parts(layers, filters)
    kept = [part.kept for part in parts]
    total = sum(kept) * _SAMPLES / microbatches
    if partitions:
        start = 0
        total += 3 * _IMAGE**2 * _SAMPLES
        counts = divide([spans(kept)] * partitions) or []
        for count in counts[:-1]:
            start += count
            total += parts[start - 1].sent * _SAMPLES
    return 4 * total / 1e9
