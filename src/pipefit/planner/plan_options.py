"""The options of the search for a plan: for `pipefit plan`, `pipefit.plan` and `pipefit.planner.plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from msgspec.structs import replace

from pipefit.errors import PlanError, nearest
from pipefit.planner.space import Cap
from pipefit.spec import Topology
from pipefit.spec.arguments import NotNegative, Number
from pipefit.spec.options import AUTO, Checked, setting
from pipefit.spec.plan import Recompute, Shard, recompute_kind
from pipefit.units import in_bytes

Method = Literal["auto", "pipedream", "gpipe", "2bw", "ptdp", "uniform"]
METHODS: Final[tuple[str, ...]] = get_args(Method)

ANY: Final = "any"
"""Copies share whatever is fastest."""

CAPPED: Final = "spilled"
"""Planning under a cap on the devices' memory, which no method does."""

_SEARCH: Final = ("auto", "gpipe", "2bw", "ptdp", "uniform")
"""Methods that search over configurations; "pipedream" has a recurrence of its own."""

_WIDE: Final = ("auto", "ptdp")
"""Methods with tensor parallelism; a width of 1 is what all others have."""

_BATCHED: Final = (*_SEARCH, CAPPED)


@dataclass(frozen=True)
class PlanOptions(Checked):
    """The options of a search for a plan, each with the methods that use it.

    "auto" searches all of depth, data width, tensor width (GPTs), chunks, micro-batch size, synchronous schedule,
    recompute, partition, replicas and what copies share. "2bw", "ptdp", "gpipe" and "pipedream" follow these papers;
    "uniform" gives every stage the same number of layers. None leaves a choice to the method:

    - `global_batch`: a micro-batch per device, and at least 8 micro-batches. The mini-batch of "pipedream" is the first
      of `microbatch_sizes`, else the profile's.
    - `microbatch_sizes`: those of the profile and, between the smallest and the largest of them, the powers of two; of
      a profile by arithmetic the powers of two up to 16. Of `num_microbatches` the sizes follow.
    - `state_per_weight`: 6 for 2-byte weights with Adam and a master copy (a profile by GPT arithmetic), else 2.
    - `tensors`, which the model's layers must allow (`pipefit.parallel.widths_of`): powers of two for a GPT, but 1 on
      "local:N", where plans run. `chunks`: 2, 3 and 4.

    Under a cap one micro-batch size and one schedule may be given, and the devices are the cap's.
    """

    method: Method = setting("auto", "Planning method.", only=METHODS)
    cost: Literal["ring", "paper", "pipedream-code"] = setting(
        "ring", "Convention of communication costs of --method pipedream.", only=["pipedream"]
    )
    straight: bool = setting(False, "No replicas (--method pipedream).", only=["pipedream"])
    global_batch: Number | None = setting(None, "Samples per weight update.", only=_BATCHED)
    microbatch_sizes: Sequence[Number] | None = setting(
        None, "Micro-batch sizes to choose from, like 1,2,4.", "--microbatch-size", "-b", typed="numbers"
    )
    num_microbatches: Number | None = setting(
        None, "Number of micro-batches per update.", "--microbatches", "-m", only=_BATCHED
    )
    schedules: Sequence[str] | None = setting(
        None, "Schedules to choose from, like 1f1b,gpipe.", "--schedule", typed="names", only=_BATCHED
    )
    depths: Sequence[int] | None = setting(
        None, "Depths to choose from, like 2,4.", "--depth", typed="numbers", only=_SEARCH
    )
    chunks: Sequence[int] | None = setting(
        None,
        "Numbers of stages on each rank to choose from, like 2,3, for schedules that have several.",
        "-v",
        typed="numbers",
        only=_SEARCH,
    )
    recompute: Recompute | Literal["auto"] | bool | None = setting(
        AUTO,
        "What backwards replay to save memory: nothing, whole stages, layer by layer, or only attention.",
        typed=Literal["auto", "none", "stage", "layer", "selective"],
        only=_SEARCH,
    )
    memory: float | str | None = setting(
        None, 'Memory of every device, like "8 GiB", in place of the topology\'s.', typed="bytes"
    )
    state_per_weight: NotNegative | None = setting(
        None, "Optimizer bytes per weight byte: 0 SGD, 1 momentum, 2 Adam.", "--state"
    )
    tensors: Sequence[int] | None = setting(
        None, "Tensor widths to choose from, such as 1,2.", "--tensor", "-t", typed="numbers", only=_WIDE
    )
    shard: Shard | Literal["auto", "any"] = setting(
        AUTO,
        "What the copies of a stage share; auto: gradients and weights only where nothing else fits, any: also where "
        "that is faster.",
        only=["auto"],
    )
    whole_messages: bool = setting(
        False, "Send whole messages between tensor-parallel stages, without scatter/gather.", only=_SEARCH
    )
    blocking: bool = setting(
        False,
        "Ranks wait for each message, as in Megatron-LM of 2021; without it they compute meanwhile.",
        only=_SEARCH,
    )
    cap: Cap | None = setting(
        None, "On the devices' memory: what does not fit is spilled to a tier of the machine.", hidden=True
    )

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise PlanError(f"unknown method {self.method!r}; {nearest(str(self.method), METHODS)}")
        if self.recompute is None:
            object.__setattr__(self, "recompute", AUTO)
        if self.recompute != AUTO:
            object.__setattr__(self, "recompute", recompute_kind(self.recompute))
        super().__post_init__()
        if self.method not in _WIDE and set(self.tensors or ()) == {1}:
            object.__setattr__(self, "tensors", None)

    @property
    def way(self) -> str:
        """The method, or `CAPPED`: `setting(only=…)` names the options that have an effect in it."""
        if self.cap is not None:
            return CAPPED
        return self.method

    def machine(self, topology: Topology) -> Topology:
        """The topology, whose devices have `memory` if that is given."""
        size = in_bytes(self.memory, "memory")
        if size is None:
            return topology
        device = replace(topology.device, memory_bytes=size)
        each = tuple(replace(one, memory_bytes=size) for one in topology.devices)
        return replace(topology, device=device, devices=each)
