"""The search space: one Config per candidate, and the problem that all of them solve.

Legend: d data-parallel copies, p depth, t tensor width, v chunks, b micro-batch size; n = d·p·t devices. Devices are
numbered with t innermost, then p, then d: a group of t devices is one rank of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

import msgspec

from pipefit.cost import ModelBytes, speeds_of
from pipefit.ir.instruction import Groups, Indices
from pipefit.planner.computed_profile import profile_at
from pipefit.schedules import find, placement_of
from pipefit.spec import Device, Partition, Placement, Profile, SpillSpec, Tier, Topology
from pipefit.spec.plan import COMING_AND_GOING, INSIDE, Shard

T = TypeVar("T")

NOT_FROM_DISK = (
    "a step on the host works on weights, gradients and states in its memory; from a disk they would all have to be "
    "read as for a step on the device: spill to the host's memory, or step on the device"
)


_MOST_SHARED = 10_000
"""Forwards per update of a candidate whose copies have unequal shares: it is always simulated whole."""


@dataclass(frozen=True)
class Cap:
    """Cap on the memory of each device, and the tier that stages are spilled to where they do not fit.

    Attributes:
        device_bytes: limit of each device, including slots and activations.
        tier: "host" or "disk"; None: the first one of the topology.
        host_bytes: limit of the tier of a machine; None: the tier's capacity.
        step_on: "device", "host", or "auto": all stages on the device, all on the host, or some on the host, whichever
            is fastest by the tier's rates; without a rate for steps on the host, on the device.
        keep: as many stages as fit under the cap keep their saved tensors, instead of replaying forwards.
        activations: inputs of stages wait on the tier too, from the forward to the replay: room for more
            micro-batches, and more copies; None: only where nothing fits otherwise.
        num_ranks: devices of all pipelines; those of one machine share its tiers.
        copies: of the pipeline, which add up their gradients.
        num_chunks: stages on each rank; 0: as many as are best.
        clip: gradients are clipped by their global norm, which needs another visit of the stages that could not stay.
        ties: groups of layers that share a weight; their stages need a slot each, and are visited again for their step.
        sizes: exact bytes of the layers; None: those of the profile.
        taken_bytes: that a GPU's libraries take in addition to the limit, for messages.
    """

    device_bytes: float
    tier: str | None = None
    host_bytes: float | None = None
    step_on: str = "auto"
    keep: bool = True
    activations: bool | None = None
    num_ranks: int = 1
    copies: int = 1
    num_chunks: int = 0
    clip: bool = False
    ties: Groups = ()
    sizes: ModelBytes | None = None
    taken_bytes: float = 0.0

    @property
    def depth(self) -> int:
        """Ranks of each pipeline."""
        return self.num_ranks // self.copies

    def ties_of(self, partition: Partition) -> Groups:
        """The stages that share a weight because layers of them do."""
        owner = partition.stage_of
        groups = set()
        for tie in self.ties:
            stages = {owner[layer] for layer in tie}
            if len(stages) > 1:
                groups.add(tuple(sorted(stages)))
        return tuple(sorted(groups))


@dataclass(frozen=True, order=True)
class Config:
    """One point of the search.

    Attributes:
        schedule: its name.
        data: copies of the pipeline, d.
        depth: p.
        tensor: t.
        chunks: v.
        microbatch_size: b, samples.
        num_microbatches: per weight update, over all copies.
        recompute: of all stages, a kind of `pipefit.spec.plan.RECOMPUTE`; or "some": stages where memory requires it.
        shard: what its copies share.
        partitioner: "minmax", "links" (the same with messages counted as work), "gpipe", "uniform", "weights" (the
            least maximum of their bytes).
        replicas: of each stage where they differ; then data is 1.
        layers: of each stage, where a partitioner has chosen them already.
        spill: slots and places of the steps, where stages are spilled.
        shares: micro-batches of each copy of the pipeline, where they are not equally many.
    """

    schedule: str
    data: int
    depth: int
    tensor: int
    chunks: int
    microbatch_size: int
    num_microbatches: int
    recompute: str = "none"
    shard: Shard = "none"
    partitioner: str = "minmax"
    replicas: Indices = ()
    layers: Groups = ()
    spill: SpillSpec | None = None
    shares: Indices = ()

    @property
    def shares_gradients(self) -> bool:
        """Returns whether gradients are whole only while a stage computes."""
        return self.shard in COMING_AND_GOING

    @property
    def shares_weights(self) -> bool:
        """Returns whether weights are whole only while a stage computes."""
        return self.shard == "weights"

    @property
    def inside(self) -> str:
        """The kind of replays inside backwards; "none" where there are none."""
        if self.recompute in INSIDE:
            return self.recompute
        return "none"

    @property
    def num_stages(self) -> int:
        """Stages of one pipeline."""
        return self.depth * self.chunks

    @property
    def per_pipeline(self) -> int:
        """Micro-batches of one pipeline per update, m; where copies differ, of the one with most."""
        if self.shares:
            return max(self.shares)
        return -(-self.num_microbatches // self.data)

    @property
    def family(self) -> str:
        """Candidates of one family compete first among themselves; under a cap, those that step in the same place."""
        if self.spill is not None:
            on_host = len(self.spill.on_host)
            if not on_host:
                return "device"
            if on_host == self.num_stages:
                return "host"
            return "split"
        if self.depth == 1:
            if self.chunks > 1:
                return f"data parallel, shared {self.shard}"
            if self.shares:
                return "data parallel, unequal shares"
            if self.tensor == 1:
                return "data parallel"
            return "data and tensor parallel"
        if self.replicas:
            return f"{self.schedule}, depth {self.depth}, stages replicated"
        return f"{self.schedule}, depth {self.depth}"

    @property
    def summary(self) -> str:
        """The point in a few words."""
        widths = [f"depth {self.depth}"]
        if self.replicas:
            widths.append("replicas " + "-".join(map(str, self.replicas)))
        elif self.data > 1:
            widths.append(f"data {self.data}")
        if self.shares:
            widths.append("shares " + "-".join(map(str, self.shares)))
        if self.tensor > 1:
            widths.append(f"tensor {self.tensor}")
        if self.chunks > 1:
            widths.append(f"chunks {self.chunks}")
        words = [self.schedule, " × ".join(widths), f"{self.num_microbatches} micro-batches of {self.microbatch_size}"]
        if self.recompute == "some":
            words.append("recompute where needed")
        elif self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        if self.shares_gradients:
            words.append(f"shared {self.shard}")
        elif self.shard != "none":
            words.append("sharded optimizer")
        if self.partitioner == "links":
            words.append("cut for the links")
        return ", ".join(words)


def placement_for(config: Config) -> Placement:
    """The ranks of each stage as the schedule's own layout numbers them: pipeline by pipeline."""
    copies = config.replicas or (config.data,)
    return Placement(placement_of(config.depth, config.chunks, _layout(config), copies))


def positions(config: Config) -> Indices:
    """The rank, within one pipeline, of each stage."""
    return tuple(ranks[0] for ranks in placement_of(config.depth, config.chunks, _layout(config)))


def _layout(config: Config) -> str:
    if config.depth == 1:
        return "loop"
    return find(config.schedule).layout


@dataclass(frozen=True)
class Space:
    """The values to choose from.

    Attributes:
        schedules, depths, tensors, microbatch_sizes, recompute, partitioner, num_microbatches: of every candidate.
        shards: what copies share in the candidates that are listed.
        links: also cuts that avoid slow messages.
        chunks: stages on each rank, where there are several.
        next_shard: the level to try where a candidate of a level does not fit.
        shares_last: such levels are tried only where no listed candidate fits.
        more_chunks: where shared weights do not fit, twice as many chunks are tried.
    """

    schedules: tuple[str, ...]
    depths: Indices | None
    tensors: Indices
    microbatch_sizes: Indices
    recompute: tuple[str, ...]
    shards: tuple[Shard, ...]
    partitioner: str
    num_microbatches: int | None
    links: bool
    chunks: Indices = (2, 3, 4)
    next_shard: dict[Shard, Shard] = field(default_factory=dict)
    shares_last: bool = False
    more_chunks: bool = True

    def batches(self, global_batch: int) -> Iterator[tuple[int, int]]:
        """Every micro-batch size, with the number of micro-batches in the batch."""
        if self.num_microbatches is not None:
            yield -(-global_batch // self.num_microbatches), self.num_microbatches
            return
        for size in self.microbatch_sizes:
            if global_batch % size == 0:
                yield size, global_batch // size


@dataclass
class Problem:
    """The model, the machine and the batch of all candidates; and values that are computed once.

    Attributes:
        profile: at one or several micro-batch sizes.
        topology: links and devices.
        global_batch: samples per weight update.
        state: optimizer bytes per weight byte.
        cap: on the devices' memory, in addition to the topology's limits; None: none, and nothing is spilled.
        whole_messages: each of the t devices that share a layer sends the whole message to its peer of the next
            stage, and not 1/t of it (scatter/gather).
        blocking: a rank waits for each message before it computes on, as in Megatron-LM of 2021; else messages overlap.
    """

    profile: Profile
    topology: Topology
    global_batch: int
    state: float
    cap: Cap | None = None
    whole_messages: bool = False
    blocking: bool = False
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """The value of a key, made at its first use."""
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

    def at(self, microbatch_size: int, tensor: int, inside: str = "none") -> Profile:
        """The profile of one of `tensor` devices that share every layer, with the replays inside its backwards."""
        key = ("profile", microbatch_size, tensor, inside)
        if inside != "none":
            return self.once(key, lambda: self.at(microbatch_size, tensor).replaying(inside))
        return self.once(key, lambda: profile_at(self.profile, microbatch_size, tensor, self.topology))

    def of(self, config: Config) -> Profile:
        """The profile as the stages of a candidate run it."""
        return self.at(config.microbatch_size, config.tensor, config.inside)

    @property
    def capped(self) -> Cap:
        """The cap, where there is one."""
        assert self.cap is not None
        return self.cap

    @property
    def tier(self) -> Tier:
        """The tier that stages are spilled to, at the rates that each rank has of it."""
        name = self.capped.tier
        tiers = self.topology.tiers_among(self.capped.num_ranks)
        return next(tier for tier in tiers if tier.name == name)

    def pieces(self, tensor: int) -> int:
        """The number of pieces in which the devices that share a layer send a message."""
        if self.whole_messages:
            return 1
        return tensor

    def ranks(self, tensor: int) -> Topology:
        """The topology of groups of `tensor` devices, each group one rank."""
        return self.once(("ranks", tensor), lambda: grouped(self.topology, tensor))

    def speeds(self, tensor: int) -> tuple[float, ...]:
        """The speed of each rank of so many devices, relative to the profile's device; (): they do not differ."""
        return self.once(("speeds", tensor), lambda: speeds_of(self.ranks(tensor)))

    def state_of(self, config: Config) -> float:
        """Optimizer bytes per weight byte on each copy, which keeps its part where they are sharded; whole sums too."""
        state = self.state
        if config.shard != "none":
            state /= config.data
        return state + self.profile.added_per_byte

    def memory_of(self, config: Config) -> list[float]:
        """Bytes of each rank of one pipeline: the least among its copies."""
        topology = self.ranks(config.tensor)
        devices = topology.devices or (topology.device,) * topology.num_devices
        memory = [device.memory_bytes for device in devices]
        if config.replicas:
            return [min(memory)] * config.depth
        return least_of_copies(config, memory)

    def slowness_of(self, config: Config) -> list[float]:
        """Slowness of each rank of one pipeline, relative to the profile's device: that of its slowest copy.

        Where copies have shares of their own: that of the copy with most micro-batches.
        """
        speeds = self.speeds(config.tensor)
        if not speeds or config.replicas:
            return [1.0] * config.depth
        if config.shares:
            return [1 / speeds[rank] for rank in busiest_copy(config)]
        return [1 / speed for speed in least_of_copies(config, speeds)]


def busiest_copy(config: Config) -> range:
    """The ranks of the copy of the pipeline that has most micro-batches."""
    first = config.shares.index(max(config.shares)) * config.depth
    return range(first, first + config.depth)


def shares_of(paces: Sequence[float], count: int) -> Indices:
    """Micro-batches of each of some copies, so that the last of them is done as early as possible; (): equally many.

    Every copy has at least one, for it takes part in the sum of the gradients.

    Args:
        paces: micro-batches per unit of time.
        count: of all micro-batches.

    >>> shares_of([3.0, 1.0], 8), shares_of([1.0, 1.0], 8), shares_of([8.0, 1.0, 1.0], 4)
    ((6, 2), (), (2, 1, 1))
    """
    if count < len(paces) or len(set(paces)) == 1:
        return ()
    shares = [1] * len(paces)
    for _ in range(count - len(paces)):
        done = [(share + 1) / pace for share, pace in zip(shares, paces, strict=True)]
        shares[done.index(min(done))] += 1
    if len(set(shares)) == 1:
        return ()
    return tuple(shares)


def least_of_copies(config: Config, figures: Sequence[float]) -> list[float]:
    """Of each rank of one pipeline the least figure of its copies."""
    found = []
    for rank in range(config.depth):
        copies = figures[rank :: config.depth]
        found.append(min(copies[: config.data]))
    return found


def num_frozen_layers(profile: Profile) -> int:
    """How many layers at the beginning do not train, and so have no backward."""
    found = 0
    for layer in profile.layers:
        if layer.trained_bytes != 0:
            break
        found += 1
    return found


def configs(problem: Problem, space: Space) -> Iterator[Config]:
    """Every combination that uses all devices, and splits the batch evenly or by the speeds of the copies."""
    num_devices = problem.topology.num_devices
    num_layers = len(problem.profile)
    for tensor in space.tensors:
        if num_devices % tensor or not groups_fit(problem.topology, tensor):
            continue
        ranks = num_devices // tensor
        for depth in range(1, min(ranks, num_layers) + 1):
            if ranks % depth or (space.depths is not None and depth not in space.depths):
                continue
            for size, count in space.batches(problem.global_batch):
                copies = ranks // depth
                if count % copies == 0:
                    yield from _at_shape(space, copies, depth, tensor, size, count, num_layers)
                shares = shares_of(_paces(problem, depth, tensor), count)
                if not shares:
                    continue
                for made in _at_shape(space, copies, depth, tensor, size, count, num_layers):
                    if made.num_microbatches * made.num_stages <= _MOST_SHARED and find(made.schedule).is_synchronous:
                        yield replace(made, shares=shares)


def _paces(problem: Problem, depth: int, tensor: int) -> list[float]:
    """The speed of each copy of a pipeline, that of its slowest rank; one where devices do not differ."""
    speeds = problem.speeds(tensor) or (1.0,)
    return [min(speeds[first : first + depth]) for first in range(0, len(speeds), depth)]


def _at_shape(
    space: Space, data: int, depth: int, tensor: int, size: int, count: int, num_layers: int
) -> Iterator[Config]:
    # With one stage every schedule is data parallelism, and with several none is.
    names = ["data-parallel"]
    if depth > 1:
        names = [name for name in dict.fromkeys(space.schedules) if find(name).layout != "replicas"]
    shards: Sequence[Shard] = ("none",)
    if data > 1:
        shards = space.shards
    for name in names:
        least = 1
        if name == "pipedream-2bw":
            least = depth - 1
        if depth > 1 and count // data < least:
            continue
        several: Indices = (1,)
        if find(name).chunks and depth > 1:
            several = space.chunks
        for chunks in several:
            if depth * chunks > num_layers:
                continue
            # Where every stage is alike in memory, "some" is "stage" or "none".
            alike = chunks > 1 or depth == 1
            for recompute, shard in product(space.recompute, shards):
                if recompute == "some" and alike:
                    continue
                made = Config(name, data, depth, tensor, chunks, size, count, recompute, shard, space.partitioner)
                yield made
                if space.links and depth > 1 and recompute != "some":
                    yield replace(made, partitioner="links")


# ------------------------------------------------------------- groups of devices that share every layer: one rank each


def groups_fit(topology: Topology, tensor: int) -> bool:
    """Returns whether the levels of a topology can be split into groups of so many neighbours."""
    rest = tensor
    for level in topology.levels:
        if rest % level.width and level.width % rest:
            return False
        rest = max(rest // level.width, 1)
    return True


def grouped(topology: Topology, tensor: int) -> Topology:
    """The topology of groups of `tensor` neighbours, each of which is one rank."""
    levels = []
    rest = tensor
    for level in topology.levels:
        cores = level.cores and level.cores / tensor
        width = max(level.width // rest, 1)
        levels.append(msgspec.structs.replace(level, width=width, cores=cores))
        rest = max(rest // level.width, 1)
    kept = [level for level in levels if level.width > 1 or level.cores]
    if not kept:
        kept = levels[-1:]
    starts = range(0, len(topology.devices), tensor)
    devices = tuple(_weakest(topology.devices[first : first + tensor]) for first in starts)
    return Topology(tuple(kept), topology.device, devices, topology.tiers, topology.name)


def _weakest(group: Sequence[Device]) -> Device:
    """A device as fast as the slowest of a group, with the memory of the smallest."""
    slowest = min(group, key=lambda device: device.flops * device.efficiency)
    memory = min(device.memory_bytes for device in group)
    return msgspec.structs.replace(slowest, memory_bytes=memory)
