"""The work of a model's layers, counted: kernels with their sizes, and bytes. No seconds, so it holds for any device.

A layer is counted at two micro-batch sizes. All sizes of its kernels lie on lines over the samples, so others follow.
"""

from __future__ import annotations

from math import ceil

import msgspec

from pipefit.errors import ProfileError

PRODUCTS = ("product", "grouped", "product8")
"""Kinds of kernels whose sizes are those of matrix products."""

EXCHANGES = ("sum", "gathered", "scattered")
"""Kinds of kernels that are collectives."""

_ROUNDING = 1e-6


class Kernel(msgspec.Struct, frozen=True, array_like=True):
    """One kernel.

    Attributes:
        kind: with its sizes:
            product: (count, m, n, k, e): so many products of (m, k) and (k, n) matrices, of elements of e bytes;
            grouped: the same, of experts that get m tokens each;
            product8: the same of numbers of 8 bits;
            attention, attention-back: (FLOP of two products, or four; FLOP that a fused kernel computes; bytes; FLOP of
                the last rows that a core takes at a time);
            pass: (FLOP, bytes moved);
            sum, gathered, scattered: (bytes): exchanged by the devices that share a layer.
        sizes: numbers in this order.
        times: number of equal kernels that it stands for, in the iterations of a loop.
    """

    kind: str
    sizes: tuple[float, ...]
    times: float = 1

    @property
    def model_flops(self) -> float:
        """FLOP that the model itself needs: attention counts whole, without the scores that its backward makes again.

        >>> Kernel("product", (2, 3, 5, 7, 2)).model_flops
        420
        """
        if self.kind in PRODUCTS:
            count, m, n, k, _ = self.sizes
            return 2 * count * m * n * k * self.times
        if self.kind in EXCHANGES:
            return 0.0
        return self.sizes[0] * self.times


Kernels = tuple[Kernel, ...]
"""The kernels of some operations."""


class LayerCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer for one micro-batch.

    Attributes:
        figures: bytes by the fields of `Layer`; without those that are not known.
        forward: its kernels.
        backward_input: kernels of the gradient of its input.
        backward_weight: those of the gradients of its weights, in addition.
        cores: of the forward's, those in the cores of attention.
    """

    figures: dict[str, float]
    forward: Kernels
    backward_input: Kernels = ()
    backward_weight: Kernels = ()
    cores: Kernels = ()

    def joined(self, after: LayerCount) -> LayerCount:
        """This layer with code that follows it: its output is that of the latter."""
        figures = dict(self.figures)
        for name in ("saved_bytes", "weight_bytes", "trained_bytes"):
            figures[name] += after.figures[name]
        for name in ("output_bytes", "grad_bytes"):
            if name in after.figures:
                figures[name] = after.figures[name]
        return LayerCount(
            figures,
            self.forward + after.forward,
            after.backward_input + self.backward_input,
            after.backward_weight + self.backward_weight,
            self.cores + after.cores,
        )

    def towards(self, other: LayerCount, share: float, *, whole: bool = True) -> LayerCount:
        """The layer at a share of the way to another micro-batch size.

        Args:
            other: counted at that size.
            share: of the way.
            whole: sizes of products are rounded up.

        Raises:
            ProfileError: it has other kernels there.
        """

        def mixed(one: float, two: float) -> float:
            return max(one + share * (two - one), 0.0)

        def kernels(ones: Kernels, twos: Kernels) -> Kernels:
            if [one.kind for one in ones] != [two.kind for two in twos]:
                raise ProfileError("a layer cannot be counted: its kernels differ from one micro-batch to another")
            found = []
            for one, two in zip(ones, twos, strict=True):
                sizes = tuple(map(mixed, one.sizes, two.sizes))
                if whole and one.kind in PRODUCTS:
                    sizes = tuple(ceil(size - _ROUNDING) for size in sizes)
                found.append(Kernel(one.kind, sizes, mixed(one.times, two.times)))
            return tuple(found)

        return LayerCount(
            {name: mixed(one, other.figures[name]) for name, one in self.figures.items()},
            kernels(self.forward, other.forward),
            kernels(self.backward_input, other.backward_input),
            kernels(self.backward_weight, other.backward_weight),
            kernels(self.cores, other.cores),
        )


class SharedWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights that two layers share, such as a table of words and the projection to them.

    Attributes:
        layers: the places of both, in order; of three that share, the first and second, and the second and third.
        weight_bytes: of these weights.
        trained_bytes: of those that train.
    """

    layers: tuple[int, int]
    weight_bytes: float
    trained_bytes: float


class Counted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model, counted.

    Attributes:
        names: of its layers.
        kinds: for each layer the place of its counts; layers that are alike share them.
        microbatch_sizes: of the counts, two.
        widths: numbers of devices that share every layer, of which the first is 1.
        counts: of each kind, on one of so many devices: for every width one at each of the two sizes.
        sequence: tokens of a sample.
        element_bytes: of a weight.
        num_parameters: each once.
        shared: for every width the weights that layers share.
    """

    names: tuple[str, ...]
    kinds: tuple[int, ...]
    microbatch_sizes: tuple[int, int]
    widths: tuple[int, ...]
    counts: tuple[tuple[LayerCount, ...], ...]
    sequence: int
    element_bytes: int
    num_parameters: int
    shared: tuple[tuple[SharedWeights, ...], ...]

    def at(self, microbatch_size: int, tensor: int = 1) -> list[LayerCount]:
        """The layers at a micro-batch size, one of so many devices that share each.

        Raises:
            ProfileError: the width was not counted.
        """
        if tensor not in self.widths:
            known = ", ".join(map(str, self.widths))
            raise ProfileError(f"tensor width {tensor}: this model was counted for {known}, as its sizes allow")
        place = 2 * self.widths.index(tensor)
        low, high = self.microbatch_sizes
        share = (microbatch_size - low) / (high - low)
        found = [each[place].towards(each[place + 1], share) for each in self.counts]
        return [found[kind] for kind in self.kinds]

    @property
    def needs_fp8(self) -> bool:
        """Whether some products take numbers of 8 bits."""
        return any(kernel.kind == "product8" for kind in self.counts for kernel in kind[0].forward)

    @property
    def flops(self) -> float:
        """FLOP of a sample forward and backward, without replays: those of its products, attention whole."""
        kernels: list[Kernel] = []
        for layer in self.at(1):
            kernels += layer.forward + layer.backward_input + layer.backward_weight
        return sum(kernel.model_flops for kernel in kernels)

    @property
    def num_active(self) -> float:
        """Parameters that a token uses: of experts those to which it is routed."""
        idle = 0.0
        for layer in self.at(1):
            for kernel in layer.forward:
                if kernel.kind == "grouped":
                    count, m, n, k, _ = kernel.sizes
                    idle += count * n * k * (1 - m / self.sequence)
        return self.num_parameters - idle
