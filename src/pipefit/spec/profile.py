"""Profile: what each layer of a model costs at one micro-batch size, and which layer feeds which."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

import msgspec

from pipefit.errors import ProfileError
from pipefit.spec.files import decode, encode, read_json, write_json

__all__ = ["Layer", "Profile"]


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One unit of the profile: the smallest piece a stage can hold. All figures are for one micro-batch.

    Attributes:
        name: unique in its profile.
        forward_s: seconds of the forward pass.
        backward_input_s: seconds of the gradient with respect to the input.
        backward_weight_s: seconds of the gradient with respect to the weights.
        output_bytes: bytes of the output, as they would travel to another stage.
        saved_bytes: bytes autograd keeps from forward to backward.
        weight_bytes: bytes of the parameters.
        grad_bytes: bytes of the gradient of the output; None: as many as the output.
        spread_s: half the distance between the quartiles of the measured forward + backward time.
    """

    name: str
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    output_bytes: float
    saved_bytes: float
    weight_bytes: float
    grad_bytes: float | None = None
    spread_s: float = 0.0

    @property
    def backward_s(self) -> float:
        """Seconds of the full backward pass."""
        return self.backward_input_s + self.backward_weight_s

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward: T_l of the PipeDream paper."""
        return self.forward_s + self.backward_s


_FIGURES = (
    "forward_s",
    "backward_input_s",
    "backward_weight_s",
    "output_bytes",
    "saved_bytes",
    "weight_bytes",
    "spread_s",
)


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The layers of a model in an order in which data flows forward, and the edges between them.

    Attributes:
        model: what was profiled.
        microbatch_size: samples per micro-batch that all figures are for.
        layers: in a topological order of the edges.
        edges: pairs (i, j): layer j takes the output of layer i; None: the layers are a chain.
        device: what it was measured on, or how it was computed.
        source: where the figures come from.
        step_s: measured seconds of forward + backward of the whole model; None: not measured.
    """

    model: str
    microbatch_size: int
    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...] | None = None
    device: str = ""
    source: str = ""
    step_s: float | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ProfileError("layers: expected at least one layer, got none")
        if self.microbatch_size < 1:
            raise ProfileError(f"microbatch_size: expected at least 1, got {self.microbatch_size}")
        seen: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            if layer.name in seen:
                raise ProfileError(
                    f"layers[{index}].name: {layer.name!r} is also the name of layers[{seen[layer.name]}]"
                )
            seen[layer.name] = index
            for field in _FIGURES:
                value = getattr(layer, field)
                if not (math.isfinite(value) and value >= 0):
                    raise ProfileError(f"layers[{index}].{field}: expected a finite number ≥ 0, got {value}")
        for index, (tail, head) in enumerate(self.edges or ()):
            if not (0 <= tail < len(self.layers) and 0 <= head < len(self.layers)):
                raise ProfileError(f"edges[{index}]: layers {tail} → {head}, but there are {len(self.layers)} layers")
            if tail >= head:
                raise ProfileError(
                    f"edges[{index}]: {self.layers[tail].name} → {self.layers[head].name} goes backward; "
                    "list the layers in an order in which data flows forward (the graph must have no cycle)"
                )

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The edges, those of a chain included."""
        return tuple((i, i + 1) for i in range(len(self.layers) - 1)) if self.edges is None else self.edges

    @cached_property
    def cut_bytes(self) -> tuple[float, ...]:
        """Bytes that cross the cut after each layer but the last: every output used beyond it, counted once.

        >>> a = Layer("a", 1, 1, 1, 10, 0, 0)
        >>> b = Layer("b", 1, 1, 1, 20, 0, 0)
        >>> c = Layer("c", 1, 1, 1, 30, 0, 0)
        >>> Profile("skip", 1, (a, b, c), edges=((0, 1), (1, 2), (0, 2))).cut_bytes
        (10.0, 30.0)
        """
        last_use = list(range(len(self.layers)))
        for tail, head in self.links:
            last_use[tail] = max(last_use[tail], head)
        crossing = [0.0] * max(len(self.layers) - 1, 0)
        for index, layer in enumerate(self.layers):
            for cut in range(index, last_use[index]):
                crossing[cut] += layer.output_bytes
        return tuple(crossing)

    def save(self, path: str | Path) -> Path:
        """Writes the profile as JSON, atomically."""
        return write_json(path, encode("profile", self))

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a profile.

        Raises:
            ProfileError: with the file and the path inside it.
        """
        return decode("profile", read_json(path, ProfileError), cls, ProfileError, str(path))
