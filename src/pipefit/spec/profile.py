"""Profile: seconds and bytes of each layer of a model at one micro-batch size, and the edges between layers."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from pipefit.errors import PlanError, ProfileError, check_figures
from pipefit.spec.arguments import check_fields, checked
from pipefit.spec.counted import Counted, SharedWeights
from pipefit.spec.files import decode, encode, read_json, write_json
from pipefit.spec.plan import INSIDE, Figures, Partition, StageSpec
from pipefit.spec.topology import Device

ARITHMETIC = "GPT arithmetic"
"""The first words of a computed profile's source (`pipefit.planner.computed_profile`)."""


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
        step_s: seconds of the optimizer's step on its weights, a part of the profile's `optimizer_s`.
        split_s: seconds that the second half of a backward takes beyond `backward_weight_s`; None: not measured.
        split_input_s: seconds that the first half takes beyond `backward_input_s`.
        half_bytes: bytes that a backward in two halves keeps from the first to the second, in addition to those saved;
            None: not known.
        trained_bytes: bytes of the parameters that train; None: of all.
        input_bytes: bytes that it keeps where it is replayed from its input; None: it is never replayed in isolation.
        again_bytes: bytes that its replay saves in addition; None: `saved_bytes` without `input_bytes`.
        selective_bytes: bytes that it keeps where the cores of its attention are replayed; None: it has none.
        attention_s: seconds of these cores, a part of `forward_s`.
        forward_work_bytes: the most by which memory grows during its forward; None: not known, as the next three.
        bare_work_bytes: the same of a forward that saves nothing.
        backward_work_bytes: the same of its backward, where its weights have gradients that it adds to.
        first_work_bytes: the same where they have none yet.
        step_work_bytes: the same of the optimizer's step on its weights; 0: not known.
        idle_bytes: of the parameters that train, bytes of those that its backward does not reach.
        inner_bytes: bytes of the output inside a stage; None: as many as travel.
        copy_bytes: of the half copies of its weights that a stage makes once for each version of them.
        replay_s: seconds of its replay from its input; None: those of its forward.
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
    step_s: float = 0.0
    split_s: float | None = None
    split_input_s: float = 0.0
    half_bytes: float | None = None
    trained_bytes: float | None = None
    input_bytes: float | None = None
    again_bytes: float | None = None
    selective_bytes: float | None = None
    attention_s: float = 0.0
    forward_work_bytes: float | None = None
    bare_work_bytes: float | None = None
    backward_work_bytes: float | None = None
    first_work_bytes: float | None = None
    step_work_bytes: float = 0.0
    idle_bytes: float = 0.0
    inner_bytes: float | None = None
    copy_bytes: float = 0.0
    replay_s: float | None = None

    def replaying(self, recompute: str) -> Layer:
        """The layer with the seconds and saved bytes that it has where its backward replays it, or its attention.

        Its backward takes as much longer as the replay takes, before either of the two gradients.

        >>> Layer("block", 3, 4, 2, 10, 90, 0, input_bytes=10).replaying("layer").backward_input_s
        7
        """
        kept = {"layer": self.input_bytes, "selective": self.selective_bytes}.get(recompute)
        if kept is None or not self.backward_s:
            return self
        if recompute != "layer":
            again_s = self.attention_s
        elif self.replay_s is None:
            again_s = self.forward_s
        else:
            again_s = self.replay_s
        made = replace(self, backward_input_s=self.backward_input_s + again_s, saved_bytes=kept)
        if self.first_work_bytes is None or self.backward_work_bytes is None:
            return made
        again_bytes = max(self.saved_bytes - kept, 0.0)
        if recompute == "layer":
            made = replace(made, forward_work_bytes=self.bare_work_bytes)
            if self.again_bytes is not None:
                again_bytes = self.again_bytes
        return replace(
            made,
            backward_work_bytes=again_bytes + self.backward_work_bytes,
            first_work_bytes=again_bytes + self.first_work_bytes,
        )

    def replay_bytes(self, recompute: str) -> float:
        """Bytes that its replay inside a backward makes, and that are freed with it; 0 where its work counts them."""
        if self.backward_work_bytes is not None:
            return 0.0
        return max(self.saved_bytes - self.replaying(recompute).saved_bytes, 0.0)

    @property
    def wgrad_bytes(self) -> float:
        """Bytes of the gradients of the weights: of those that train."""
        if self.trained_bytes is None:
            return self.weight_bytes
        return self.trained_bytes

    @property
    def frozen_bytes(self) -> float:
        """Bytes of the parameters that do not train: they have no gradients, no optimizer states and one version."""
        return self.weight_bytes - self.wgrad_bytes

    @property
    def kept_bytes(self) -> float:
        """`half_bytes`, or where they are not known the larger of output and saved values."""
        if self.half_bytes is None:
            return max(self.output_bytes, self.saved_bytes)
        return self.half_bytes

    @property
    def backward_s(self) -> float:
        """Seconds of the full backward pass."""
        return self.backward_input_s + self.backward_weight_s

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward: T_l of the PipeDream paper."""
        return self.forward_s + self.backward_s


_FIXED = ("weight_bytes", "step_s", "step_work_bytes", "idle_bytes", "copy_bytes")
_KEPT = ("input_bytes", "again_bytes", "selective_bytes")
WORK = ("forward_work_bytes", "bare_work_bytes", "backward_work_bytes", "first_work_bytes")
_UNKNOWN = ("grad_bytes", "split_s", "half_bytes", "inner_bytes", "replay_s", *_KEPT, *WORK)
"""Figures that may be None; where they are given they scale as the others do."""

_SCALED = tuple(name for name in Layer.__struct_fields__ if name not in ("name", "trained_bytes", *_FIXED, *_UNKNOWN))


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The layers of a model in an order in which data flows forward, and the edges between them.

    Attributes:
        model: name of the profiled model.
        microbatch_size: samples per micro-batch that all figures are for.
        layers: in a topological order of the edges.
        edges: pairs (i, j): layer j takes the output of layer i; None: the layers are a chain.
        device: of the measurement, or a description of the computation.
        source: where the figures come from.
        step_s: measured seconds of forward + loss + backward of the whole model; None: not measured.
        loss_s: seconds of the loss, forward and backward: of the last stage, in addition to its layers.
        loss_work_bytes: the most by which memory grows meanwhile; 0: not known.
        step_work_bytes: the most by which memory grows in one optimizer step of the whole model; 0: not known.
        optimizer_s: seconds of one optimizer step of the whole model; 0: not measured.
        summed_per_byte: bytes of a gradient while copies sum it, for each byte of its weight.
        overlapped: whether copies sum gradients during the last backward, and join weights during the next forward.
        added_per_byte: bytes of the sum of micro-batches' gradients, kept next to gradients, for each byte of a weight.
        others: the same model at other micro-batch sizes; see `at`.
        computed_for: the device of a profile by GPT arithmetic, or of counted layers, which can be computed again for
            another micro-batch size or tensor width; None: the figures were measured.
        element_bytes: of the numbers in products, which set the rate of a device; 0: the figures were measured.
        counted: what the layers do, where that was counted.
        shared: weights that several layers share, of which a stage with these layers has one.
        made_bytes: of what each stage makes for its layers, such as masks, and keeps where they are replayed.
    """

    model: str
    microbatch_size: int
    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...] | None = None
    device: str = ""
    source: str = ""
    step_s: float | None = None
    loss_s: float = 0.0
    optimizer_s: float = 0.0
    summed_per_byte: float = 1.0
    added_per_byte: float = 0.0
    overlapped: bool = False
    others: tuple[Profile, ...] = ()
    computed_for: Device | None = None
    element_bytes: int = 0
    counted: Counted | None = None
    loss_work_bytes: float = 0.0
    step_work_bytes: float = 0.0
    shared: tuple[SharedWeights, ...] = ()
    made_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, ProfileError)
        if not self.layers:
            raise ProfileError("layers: expected at least one layer, got none")
        check_figures(self, ProfileError, microbatch_size=1)
        seen: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            if layer.name in seen:
                raise ProfileError(
                    f"layers[{index}].name: {layer.name!r} is also the name of layers[{seen[layer.name]}]"
                )
            seen[layer.name] = index
            check_finite(layer, (*_SCALED, *_FIXED), f"layers[{index}].")
            if not 0 <= layer.wgrad_bytes <= layer.weight_bytes:
                raise ProfileError(
                    f"layers[{index}].trained_bytes: expected 0 to {layer.weight_bytes} (weight_bytes), "
                    f"got {layer.trained_bytes}"
                )
        check_finite(self, ("loss_s", "optimizer_s", "loss_work_bytes", "step_work_bytes", "made_bytes"), "")
        for index, (tail, head) in enumerate(self.edges or ()):
            if not (0 <= tail < len(self.layers) and 0 <= head < len(self.layers)):
                raise ProfileError(f"edges[{index}]: layers {tail} → {head}, but there are {len(self.layers)} layers")
            if tail >= head:
                raise ProfileError(
                    f"edges[{index}]: {self.layers[tail].name} → {self.layers[head].name} goes backward; "
                    "list the layers in an order in which data flows forward (the graph must have no cycle)"
                )
        for index, one in enumerate(self.shared):
            first, second = one.layers
            if not 0 <= first < second < len(self.layers):
                raise ProfileError(
                    f"shared[{index}].layers: expected two of {len(self.layers)} layers, got {one.layers}"
                )
        for index, other in enumerate(self.others):
            if [layer.name for layer in other.layers] != [layer.name for layer in self.layers] or other.others:
                raise ProfileError(f"others[{index}]: expected the same layers at another micro-batch size")
        sizes = [self.microbatch_size, *(other.microbatch_size for other in self.others)]
        if len(set(sizes)) != len(sizes):
            raise ProfileError(f"others: micro-batch sizes {sizes} are not all different")

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The edges, those of a chain included."""
        if self.edges is None:
            return tuple((i, i + 1) for i in range(len(self.layers) - 1))
        return self.edges

    @cached_property
    def cut_bytes(self) -> tuple[float, ...]:
        """Bytes that cross the cut after each layer but the last: every output used beyond it, counted once.

        >>> a = Layer("a", 1, 1, 1, 10, 0, 0)
        >>> b = Layer("b", 1, 1, 1, 20, 0, 0)
        >>> c = Layer("c", 1, 1, 1, 30, 0, 0)
        >>> Profile("skip", 1, (a, b, c), edges=((0, 1), (1, 2), (0, 2))).cut_bytes
        (10.0, 30.0)
        """
        every = Partition.from_counts([1] * len(self))
        return self.crossing(every, attrgetter("output_bytes"))[:-1]

    def crossing(self, partition: Partition, figure: Callable[[Layer], float]) -> Figures:
        """For each stage, the bytes that cross the cut after it: every output used beyond it, counted once.

        After the last stage: its outputs that nothing uses, which the loss reads.

        Args:
            partition: into stages.
            figure: bytes of a layer's output, or of its gradient.

        Raises:
            PlanError: a stage needs an output of a later one.
        """
        owner = partition.stage_of
        reach = dict(owner)
        used = set()
        for tail, head in self.links:
            if owner[head] < owner[tail]:
                needed = self.layers[tail].name
                user = self.layers[head].name
                raise PlanError(f"stage {owner[head]} needs {needed} of the later stage {owner[tail]} for {user}")
            reach[tail] = max(reach[tail], owner[head])
            used.add(tail)
        num_stages = len(partition.stages)
        sizes = [0.0] * num_stages
        for layer, stage in owner.items():
            end = reach[layer]
            if layer not in used and stage == num_stages - 1:
                end = num_stages  # the loss reads it
            for cut in range(stage, end):
                sizes[cut] += figure(self.layers[layer])
        return tuple(sizes)

    def can_replay(self, recompute: str) -> bool:
        """Returns whether some layer has the figures of a kind of recomputation."""
        return recompute not in INSIDE or any(layer.replaying(recompute) is not layer for layer in self.layers)

    def replaying(self, recompute: str) -> Profile:
        """The profile with `Layer.replaying` of every layer; for "none" and "stage" it stays as it is."""
        if recompute not in INSIDE:
            return self
        return replace(self, layers=tuple(layer.replaying(recompute) for layer in self.layers))

    @cached_property
    def knows_work(self) -> bool:
        """Returns whether the memory that each layer needs while it works is known."""
        return all(getattr(layer, name) is not None for layer in self.layers for name in WORK)

    def weights_of(self, layers: Iterable[int]) -> tuple[float, float]:
        """Bytes of the weights of some layers in one stage, and of those that train; shared ones count once.

        >>> layers = (Layer("a", 1, 1, 1, 8, 0, 30), Layer("b", 1, 1, 1, 8, 0, 40))
        >>> Profile("m", 1, layers, shared=(SharedWeights((0, 1), 25, 25),)).weights_of([0, 1])
        (45, 45)
        """
        present = list(layers)
        weights = sum(self.layers[index].weight_bytes for index in present)
        trained = sum(self.layers[index].wgrad_bytes for index in present)
        for one in self.shared:
            if all(layer in present for layer in one.layers):
                weights -= one.weight_bytes
                trained -= one.trained_bytes
        return weights, trained

    def layers_of(self, stage: StageSpec) -> list[Layer]:
        """The layers of a stage with the figures that they have there; what the stage makes for them is the first's.

        >>> layers = tuple(Layer(name, 1, 1, 1, 8, 90, 0, input_bytes=10) for name in "ab")
        >>> stage = StageSpec((0, 1), recompute="layer")
        >>> [layer.saved_bytes for layer in Profile("m", 1, layers, made_bytes=2).layers_of(stage)]
        [12, 10]
        """
        plain = [self.layers[index] for index in stage.layers]
        found = [layer.replaying(stage.replays) for layer in plain]
        if stage.replays == "layer" and any(layer.input_bytes for layer in plain):
            found[0] = replace(found[0], saved_bytes=found[0].saved_bytes + self.made_bytes)
        return found

    def num_frozen(self, partition: Partition) -> int:
        """How many stages of a partition, from the first on, have no layer that trains."""
        return partition.num_frozen(lambda index: self.layers[index].trained_bytes != 0)

    def optimizer_of(self, layers: Iterable[int]) -> float:
        """Seconds of one optimizer step on some of the layers.

        The fixed cost of every step and the share of the layers' weights; by bytes where no layer was measured.

        >>> layers = (Layer("a", 1, 1, 1, 8, 0, 30, step_s=1), Layer("b", 1, 1, 1, 8, 0, 10, step_s=3))
        >>> Profile("m", 1, layers, optimizer_s=6).optimizer_of([1])
        5
        """
        layers = list(layers)
        _, trained = self.weights_of(layers)
        if not trained:
            return 0.0
        own, every = self._optimized
        if own:
            return max(self.optimizer_s - own, 0) + sum(self.layers[index].step_s for index in layers)
        return self.optimizer_s * trained / every

    def step_work_of(self, layers: Iterable[int]) -> float:
        """The most by which memory grows in one optimizer step on some of the layers.

        The optimizer works on all of its weights at once, or on one after the other.

        >>> a, b = Layer("a", 1, 1, 1, 8, 0, 30, step_work_bytes=4), Layer("b", 1, 1, 1, 8, 0, 10, step_work_bytes=2)
        >>> Profile("m", 1, (a, b), step_work_bytes=4).step_work_of([0, 1])
        4
        """
        every = [layer.step_work_bytes for layer in self.layers]
        own = [every[index] for index in layers]
        if 2 * self.step_work_bytes > max(every) + sum(every):
            return sum(own)
        return max(own)

    @cached_property
    def _optimized(self) -> tuple[float, float]:
        """Seconds of all layers' own steps, and bytes of the weights that train, each once."""
        return sum(layer.step_s for layer in self.layers), self.weights_of(range(len(self)))[1]

    def with_others(self, others: Iterable[Profile]) -> Profile:
        """This profile with those of other micro-batch sizes attached, by size."""
        return replace(self, others=tuple(sorted(others, key=lambda other: other.microbatch_size)))

    def at(self, microbatch_size: int) -> Profile:
        """The profile at a micro-batch size: as measured, else on the line through the two nearest sizes.

        With one size only, seconds and bytes are proportional to the samples; weights and the optimizer's step are not.

        >>> small, large = (Profile("m", b, (Layer("a", 1 + b, 0, 0, 8 * b, 0, 4),)) for b in (2, 4))
        >>> both = small.with_others([large])
        >>> both.at(3).layers[0].forward_s, both.at(8).layers[0].output_bytes, small.at(4).layers[0].forward_s
        (4.0, 64.0, 6.0)

        Raises:
            ProfileError: the size is below 1.
        """
        if microbatch_size < 1:
            raise ProfileError(f"microbatch_size: expected at least 1, got {microbatch_size}")
        known = {profile.microbatch_size: profile for profile in (self, *self.others)}
        if microbatch_size in known:
            return replace(known[microbatch_size], others=())
        sizes = sorted(known)
        if len(sizes) == 1:
            return _blend(self, None, microbatch_size / self.microbatch_size, microbatch_size)
        above = min(max(bisect(sizes, microbatch_size), 1), len(sizes) - 1)
        low = known[sizes[above - 1]]
        high = known[sizes[above]]
        share = (microbatch_size - low.microbatch_size) / (high.microbatch_size - low.microbatch_size)
        return _blend(high, low, share, microbatch_size)

    def save(self, path: str | Path) -> Path:
        """Writes the profile as JSON, atomically."""
        return write_json(path, encode("profile", self))

    @classmethod
    @checked()
    def load(cls, path: str | Path) -> Profile:
        """Reads a profile.

        Raises:
            ProfileError: with the file and the path inside it.
        """
        return decode("profile", read_json(path, ProfileError), cls, ProfileError, str(path))


def check_finite(of: object, names: Iterable[str], place: str) -> None:
    """Refuses figures that are negative or not finite; `place` is that of the object in the file."""
    for name in names:
        value = getattr(of, name)
        if not (math.isfinite(value) and value >= 0):
            raise ProfileError(f"{place}{name}: expected a finite number ≥ 0, got {value}")


def _blend(high: Profile, low: Profile | None, share: float, microbatch_size: int) -> Profile:
    """Every figure at `share` of the way from `low` (None: from zero) to `high`; never below zero."""

    def mixed(above: Layer | Profile, below: Layer | Profile | None, names: Iterable[str]) -> dict[str, Any]:
        """Some figures of a layer or a profile; those that are not known stay so."""
        found = {}
        for name in names:
            figure = getattr(above, name)
            if figure is not None:
                start = getattr(below, name, None) or 0.0
                found[name] = max(start + share * (figure - start), 0.0)
        return found

    layers = []
    for index, layer in enumerate(high.layers):
        other = None
        if low:
            other = low.layers[index]
            if other.grad_bytes is None:
                other = replace(other, grad_bytes=other.output_bytes)
            other = replace(other, half_bytes=other.kept_bytes)
        layers.append(replace(layer, **mixed(layer, other, (*_SCALED, *_UNKNOWN))))
    names = ["loss_s", "loss_work_bytes", "made_bytes"]
    if low is None or low.step_s is not None:
        names.append("step_s")
    figures = {"step_s": None} | mixed(high, low, names)
    return replace(
        high,
        microbatch_size=microbatch_size,
        layers=tuple(layers),
        source=f"{high.source}; estimated for this micro-batch size",
        others=(),
        **figures,
    )
