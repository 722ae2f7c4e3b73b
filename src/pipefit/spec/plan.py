"""Partition, Placement and Plan: the layers of each stage, the ranks that run it, and the settings of the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal, get_args

import msgspec

from pipefit.errors import ABOVE_0, PlanError, check_figures
from pipefit.spec.arguments import Number, check_fields, checked
from pipefit.spec.files import decode, encode, read_json, write_json

Figures = tuple[float, ...]
"""Seconds, bytes or another figure of each stage, rank or layer."""

Shard = Literal["none", "optimizer", "gradients", "weights"]

SHARDS: tuple[Shard, ...] = get_args(Shard)
"""What the copies of a stage share between them; each includes those before it.

Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory optimizations toward training trillion parameter models",
SC 2020, whose stages 1, 2 and 3 they are.
"""

SHARD_SLOTS = 2
"""Stages of a rank whose shared gradients or weights are whole at once, where nothing else is asked for."""

COMING_AND_GOING: tuple[Shard, ...] = ("gradients", "weights")
"""Those under which whole gradients, or also whole weights, are there only while they are used."""

Recompute = Literal["none", "stage", "layer", "selective"]

RECOMPUTE: tuple[Recompute, ...] = ("none", "stage", "layer", "selective")
"""Kinds of recomputation: the backward of a stage replays nothing; the whole stage (an instruction before it, as GPipe
does); one layer after the other inside it, each from its own input (as PTD-P does); or only the cores of attention,
softmax(q·kᵀ)·v."""

INSIDE = ("layer", "selective")
"""Those that replay inside the backward, without an instruction of their own."""


def recompute_kind(value: object) -> Recompute:
    """A kind of `RECOMPUTE`; true and false, of plans from before there were kinds, are "stage" and "none".

    Raises:
        PlanError: it is none of them.
    """
    if value is True:
        return "stage"
    if value is False:
        return "none"
    for kind in RECOMPUTE:
        if value == kind:
            return kind
    raise PlanError(f"recompute: expected one of {', '.join(RECOMPUTE)}, got {value!r}")


class StageSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage: its layers (indices of the profile), replicas, and tensor width.

    Attributes:
        layers: indices, increasing.
        replicas: copies on other ranks; micro-batches alternate among them.
        tensor: ranks that share each copy by tensor parallelism.
        recompute: a kind of `RECOMPUTE`.
    """

    layers: tuple[int, ...]
    replicas: int = 1
    tensor: int = 1
    recompute: str | bool = "none"

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "recompute", recompute_kind(self.recompute))

    @property
    def replays(self) -> Recompute:
        """The kind of recomputation in its backward."""
        return recompute_kind(self.recompute)

    @property
    def is_replayed(self) -> bool:
        """Returns whether an instruction replays the whole stage before its backward."""
        return self.recompute == "stage"


class Partition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stages in the order in which data flows through them; every layer belongs to exactly one."""

    stages: tuple[StageSpec, ...]

    def __post_init__(self) -> None:
        check_fields(self, PlanError)
        if not self.stages:
            raise PlanError("partition: expected at least one stage, got none")
        owner: dict[int, int] = {}
        for index, stage in enumerate(self.stages):
            if not stage.layers:
                raise PlanError(f"stages[{index}].layers: expected at least one layer, got none")
            check_figures(stage, PlanError, f"stages[{index}].", replicas=1, tensor=1)
            for layer in stage.layers:
                if layer in owner:
                    raise PlanError(f"layer {layer} is given twice: to stage {owner[layer]} and to stage {index}")
                owner[layer] = index
        lost = sorted(set(range(len(owner))) - set(owner))
        if lost:
            raise PlanError(f"layers {lost} belong to no stage: every layer from 0 to {max(owner)} needs one")

    @property
    def stage_of(self) -> dict[int, int]:
        """The stage of each layer."""
        found: dict[int, int] = {}
        for index, stage in enumerate(self.stages):
            found |= dict.fromkeys(stage.layers, index)
        return found

    @classmethod
    @checked()
    def even(cls, num_layers: Number, num_stages: Number) -> Partition:
        """Equal numbers of layers; the first stages have one more where they do not divide evenly."""
        count, more = divmod(num_layers, num_stages)
        return cls.from_counts([count + (stage < more) for stage in range(num_stages)])

    @classmethod
    @checked()
    def from_counts(cls, counts: Sequence[int], num_layers: int | None = None) -> Partition:
        """Consecutive layers by their count per stage.

        >>> [stage.layers for stage in Partition.from_counts([1, 2]).stages]
        [(0,), (1, 2)]

        Raises:
            PlanError: a stage would be empty, or the counts do not add up to `num_layers`.
        """
        if any(count < 1 for count in counts):
            raise PlanError(f"layer counts {list(counts)}: every stage needs at least one layer")
        if num_layers is not None and sum(counts) != num_layers:
            raise PlanError(
                f"layer counts {list(counts)} add up to {sum(counts)}, but the model has {num_layers} layers: "
                "a layer would be lost or given twice"
            )
        borders = accumulate(counts, initial=0)
        return cls(tuple(StageSpec(tuple(range(start, end))) for start, end in pairwise(borders)))

    def num_frozen(self, trains: Callable[[int], bool]) -> int:
        """How many stages at the beginning have no layer that trains; the last, which has the loss, never counts.

        >>> Partition.from_counts([1, 2, 1]).num_frozen(lambda layer: layer == 2)
        1
        """
        found = (index for index, stage in enumerate(self.stages) if any(map(trains, stage.layers)))
        return min(next(found, len(self.stages)), len(self.stages) - 1)

    @property
    def num_layers(self) -> int:
        """Number of layers in all stages together."""
        return sum(len(stage.layers) for stage in self.stages)


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ranks of each stage: `ranks[s][i]` runs replica i of stage s. A rank may hold several stages (chunks)."""

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_fields(self, PlanError)
        used: set[int] = set()
        for stage, ranks in enumerate(self.ranks):
            if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
                raise PlanError(f"placement.ranks[{stage}]: expected distinct ranks ≥ 0, got {list(ranks)}")
            used.update(ranks)
        if len(used) < self.num_ranks:
            idle = next(rank for rank in range(self.num_ranks) if rank not in used)
            raise PlanError(
                f"placement: {len(used)} of ranks 0 to {self.num_ranks - 1} have a stage, rank {idle} has none; "
                "number the ranks from 0 without gaps"
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return 1 + max((rank for ranks in self.ranks for rank in ranks), default=-1)


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times and memory of a plan by the simulator.

    Attributes:
        step_s: seconds of one step with its flush (the makespan).
        period_s: seconds between steps in the steady state.
        minibatch_s: seconds per mini-batch in the steady state.
        throughput: samples per second in the steady state.
        peak_bytes: highest memory of each rank.
        speedup_over_data_parallel: None where data parallelism does not fit or makes no sense.
    """

    step_s: float
    period_s: float
    minibatch_s: float
    throughput: float
    peak_bytes: Figures
    speedup_over_data_parallel: float | None = None


class SpillSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stages on another tier, the slots for them, and the predicted limit.

    Attributes:
        tier: "host" or "disk". The folder of a disk belongs to the run, not to the plan.
        device_bytes: limit on each rank's use of its device, including slots and activations.
        host_bytes: limit on the tier's size, for all ranks together; None: no limit.
        weights_slots: on each rank, for the weights and gradients of its spilled stages.
        optim_slots: for the states of their optimizers; 0: these stay on the device.
        stages: that are spilled; (): all.
        prefetch: stages ahead that are loaded; None: as soon as a slot is free.
        activations: whether the input of a stage waits on the tier too, from its forward to its replay.
        on_host: the stages that step on the host.
        keeps: the stages that keep the tensors saved for their backward on the device while their weights are away.
        peak_bytes: predicted for the fullest device; 0: not predicted.
        limit_s: seconds per update that no order of work and copies can beat; 0: not known.
        binds: the lane that sets this limit.
        resident_s: seconds per update of a device that holds the whole model; 0: not known.
    """

    tier: str
    device_bytes: float
    host_bytes: float | None = None
    weights_slots: int = 2
    optim_slots: int = 1
    stages: tuple[int, ...] = ()
    prefetch: int | None = None
    activations: bool = False
    on_host: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    peak_bytes: float = 0.0
    limit_s: float = 0.0
    binds: str = ""
    resident_s: float = 0.0

    def __post_init__(self) -> None:
        if self.tier not in ("host", "disk"):
            raise PlanError(f"spill.tier: expected host or disk, got {self.tier!r}")
        check_figures(self, PlanError, "spill.", device_bytes=ABOVE_0, weights_slots=1, optim_slots=0)


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A short form of a plan that was considered, and the reason why it lost ("" for the winner).

    Attributes:
        summary: the plan in words.
        family: of candidates that compete first with each other.
        step_s: seconds per update; None: it does not fit.
        throughput: samples per second; None: it does not fit.
        peak_bytes: of its fullest device; None: not counted.
        why_lost: in words and numbers.
        basis: "simulated", "estimated" (by a partitioner's own formula), "at best" (a bound of its speed), or "": it
            does not fit.
        slower: share of the winner's throughput that it lacks; None: it does not fit, or is not compared.
        idle: share of the devices' time without work; None: not known.
        sent_bytes: per sample, by all devices together; None: not known.
    """

    summary: str
    family: str
    step_s: float | None
    throughput: float | None
    peak_bytes: float | None
    why_lost: str = ""
    basis: str = ""
    slower: float | None = None
    idle: float | None = None
    sent_bytes: float | None = None


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a run needs in addition to model and data; ranks derive their programs from it.

    Attributes:
        method: how it was found ("auto", "pipedream", "gpipe", "2bw", "ptdp", "by hand").
        schedule: name of the schedule.
        num_microbatches: per weight update.
        microbatch_size: samples; 0: determined by the batch.
        num_chunks: stages per rank.
        options: further arguments of the schedule (integers).
        data: copies of the whole pipeline.
        shard: what the copies of a stage share.
        shard_slots: stages of a rank whose shared gradients or weights are whole at once.
        spill: stages that are kept on the host or on disk; None: none.
        sequence_parallel: tensor-parallel processes also split the sequence between them where every one of them
            would compute the same.
        scatter_gather: otherwise each of them sends its part of a message, and the receiver gathers.
        frozen: number of stages at the beginning in which nothing trains; a run takes it from its model.
        shares: micro-batches of each copy of the pipeline per weight update, where devices differ; (): equally many.
    """

    partition: Partition
    placement: Placement
    schedule: str
    num_microbatches: int
    microbatch_size: int = 0
    num_chunks: int = 1
    options: dict[str, int] = {}
    data: int = 1
    shard: Shard = "none"
    shard_slots: int = SHARD_SLOTS
    sequence_parallel: bool = False
    scatter_gather: bool = True
    spill: SpillSpec | None = None
    frozen: int = 0
    shares: tuple[int, ...] = ()
    model: str = ""
    method: str = "by hand"
    prediction: Prediction | None = None
    candidates: tuple[Candidate, ...] = ()
    plan_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, PlanError)
        check_figures(self, PlanError, num_microbatches=1, num_chunks=1, shard_slots=1)
        if len(self.placement.ranks) != len(self.partition.stages):
            raise PlanError(
                f"placement has ranks for {len(self.placement.ranks)} stages, "
                f"the partition has {len(self.partition.stages)}"
            )
        for index, (stage, ranks) in enumerate(zip(self.partition.stages, self.placement.ranks, strict=True)):
            if len(ranks) != stage.replicas * self.data:
                raise PlanError(
                    f"placement.ranks[{index}]: stage {index} has {stage.replicas} replicas × {self.data} "
                    f"data-parallel copies, so it needs {stage.replicas * self.data} ranks, got {len(ranks)}"
                )

        if not 0 <= self.frozen < len(self.partition.stages):
            raise PlanError(f"frozen: expected fewer than the {len(self.partition.stages)} stages, got {self.frozen}")
        widths = {stage.tensor for stage in self.partition.stages}
        if len(widths) > 1:
            raise PlanError(f"tensor: expected one width for all stages, got {sorted(widths)}")
        if self.sequence_parallel and widths == {1}:
            raise PlanError("sequence_parallel: expected a tensor width of at least 2, got 1")
        if self.spill is not None and widths != {1}:
            raise PlanError("spill: stages on another tier cannot be sharded by tensor parallelism too")

    @property
    def tensor(self) -> int:
        """Processes that share each rank by tensor parallelism."""
        return self.partition.stages[0].tensor

    @property
    def pieces(self) -> bool:
        """Returns whether messages are split into pieces."""
        return self.tensor > 1 and self.scatter_gather and not self.sequence_parallel

    @property
    def num_processes(self) -> int:
        """Devices that the plan needs."""
        return self.placement.num_ranks * self.tensor

    def save(self, path: str | Path) -> Path:
        """Writes the plan as JSON, atomically."""
        return write_json(path, encode("plan", self))

    @classmethod
    @checked()
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan.

        Raises:
            PlanError: with the file and the path inside it.
        """
        data = read_json(path, PlanError)
        if isinstance(data, dict) and "sharded_optimizer" in data:
            # A plan of before there were levels.
            data["shard"] = "optimizer" if data.pop("sharded_optimizer") else "none"
        return decode("plan", data, cls, PlanError, str(path))
