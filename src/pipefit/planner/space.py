"""What the planner chooses from: one Config per combination, and the ground on which all of them are judged.

Legend: d data-parallel copies, p depth, t tensor width, v chunks, b micro-batch size; n = d·p·t devices. Devices are
numbered with t innermost, then p, then d: a group of t devices is one rank of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from pipefit.cost.tensor import tensor_shard
from pipefit.spec import Device, Level, Profile, Topology

__all__ = ["Config", "Ground", "Space", "configs", "data_parallel_name"]

T = TypeVar("T")


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
        recompute: "none", "all", or "some": only where memory asks for it.
        sharded: optimizer states divided over the copies.
        partitioner: "minmax", "links" (the same with messages counted as work), "gpipe", "uniform".
        replicas: of each stage where they differ; then data is 1.
        layers: of each stage, where a partitioner has chosen them already.
    """

    schedule: str
    data: int
    depth: int
    tensor: int
    chunks: int
    microbatch_size: int
    num_microbatches: int
    recompute: str = "none"
    sharded: bool = False
    partitioner: str = "minmax"
    replicas: tuple[int, ...] = ()
    layers: tuple[tuple[int, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        """Stages of one pipeline."""
        return self.depth * self.chunks

    @property
    def per_pipeline(self) -> int:
        """Micro-batches of one pipeline per update, m."""
        return -(-self.num_microbatches // self.data)

    @property
    def family(self) -> str:
        """Candidates of one family compete first among themselves."""
        if self.depth == 1:
            return "data parallel" if self.tensor == 1 else "data and tensor parallel"
        return f"{self.schedule}, depth {self.depth}" + (", stages replicated" if self.replicas else "")

    @property
    def summary(self) -> str:
        """The point in a few words."""
        widths = [f"depth {self.depth}"]
        if self.replicas:
            widths.append("replicas " + "-".join(map(str, self.replicas)))
        elif self.data > 1:
            widths.append(f"data {self.data}")
        widths += [f"tensor {self.tensor}"] * (self.tensor > 1) + [f"chunks {self.chunks}"] * (self.chunks > 1)
        words = [self.schedule, " × ".join(widths), f"{self.num_microbatches} micro-batches of {self.microbatch_size}"]
        words += ["recompute" if self.recompute == "all" else "recompute where needed"] * (self.recompute != "none")
        words += ["sharded optimizer"] * self.sharded + ["cut for the links"] * (self.partitioner == "links")
        return ", ".join(words)


def data_parallel_name(depth: int, schedule: str) -> str:
    """With one stage every schedule is data parallelism."""
    return "data-parallel" if depth == 1 else schedule


@dataclass(frozen=True)
class Space:
    """The choices; `links`: also cuts that avoid slow messages."""

    schedules: tuple[str, ...]
    depths: tuple[int, ...] | None = None
    tensors: tuple[int, ...] = (1,)
    chunks: tuple[int, ...] = (1, 2, 3, 4)
    microbatch_sizes: tuple[int, ...] = (1,)
    recompute: tuple[str, ...] = ("none", "some", "all")
    sharded: tuple[bool, ...] = (False,)
    partitioner: str = "minmax"
    num_microbatches: int | None = None
    links: bool = False


@dataclass
class Ground:
    """What every candidate is judged on: the model, the machine, the batch; and what was worked out once.

    Attributes:
        profile: at one or several micro-batch sizes.
        topology: links and devices.
        global_batch: samples per weight update.
        state: optimizer bytes per weight byte.
    """

    profile: Profile
    topology: Topology
    global_batch: int
    state: float
    _known: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """The value of a key, made when first asked for."""
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

    def at(self, microbatch_size: int, tensor: int) -> Profile:
        """The profile of one of `tensor` devices that share every layer."""
        key = ("profile", microbatch_size, tensor)
        return self.once(key, lambda: tensor_shard(self.profile.at(microbatch_size), tensor, self.topology))

    def ranks(self, tensor: int) -> Topology:
        """The topology of groups of `tensor` devices, each group one rank."""
        return self.once(("ranks", tensor), lambda: _grouped(self.topology, tensor))


def configs(ground: Ground, space: Space) -> Iterator[Config]:
    """Every combination that uses all devices and cuts the batch evenly."""
    num_devices, num_layers = ground.topology.num_devices, len(ground.profile)
    for tensor in space.tensors:
        if num_devices % tensor or not _groups_fit(ground.topology, tensor):
            continue
        ranks = num_devices // tensor
        for depth in _divisors(ranks):
            if depth > num_layers or (space.depths is not None and depth not in space.depths):
                continue
            for data, size, count in _cuts(ground, space, ranks // depth):
                yield from _at_shape(space, data, depth, tensor, size, count, num_layers)


def _cuts(ground: Ground, space: Space, data: int) -> Iterator[tuple[int, int, int]]:
    if space.num_microbatches is not None:
        if space.num_microbatches % data == 0:
            yield data, -(-ground.global_batch // space.num_microbatches), space.num_microbatches
        return
    for size in space.microbatch_sizes:
        if ground.global_batch % (size * data) == 0:
            yield data, size, ground.global_batch // size


def _at_shape(
    space: Space, data: int, depth: int, tensor: int, size: int, count: int, num_layers: int
) -> Iterator[Config]:
    from pipefit.schedules import find

    names = dict.fromkeys(data_parallel_name(depth, name) for name in space.schedules)
    shards = [sharded for sharded in space.sharded if data > 1 or not sharded] or [False]
    for name in names:
        chunked = find(name).chunks
        if depth > 1 and count // data < (depth - 1 if name == "pipedream-2bw" else 1):
            continue
        for chunks in space.chunks if chunked and depth > 1 else (1,):
            if depth * chunks > num_layers or (chunked and depth > 1 and chunks == 1):
                continue
            for recompute in space.recompute:
                # Where every stage is alike in memory, "some" is "all" or "none".
                if recompute == "some" and (chunks > 1 or depth == 1):
                    continue
                for sharded in shards:
                    made = Config(name, data, depth, tensor, chunks, size, count, recompute, sharded, space.partitioner)
                    yield made
                    if space.links and depth > 1 and recompute != "some":
                        yield replace(made, partitioner="links")


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]


def _groups_fit(topology: Topology, tensor: int) -> bool:
    """Whether the levels of a topology can be divided into groups of so many neighbours."""
    rest = tensor
    for level in topology.levels:
        if rest % level.width and level.width % rest:
            return False
        rest = max(rest // level.width, 1)
    return True


def _grouped(topology: Topology, tensor: int) -> Topology:
    levels: list[Level] = []
    rest = tensor
    for level in topology.levels:
        cores = level.cores and level.cores / tensor
        width = max(level.width // rest, 1)
        levels.append(msgspec.structs.replace(level, width=width, cores=cores))
        rest = max(rest // level.width, 1)
    kept = [level for level in levels if level.width > 1 or level.cores] or levels[-1:]
    devices: tuple[Device, ...] = ()
    if topology.devices:
        groups = (topology.devices[k : k + tensor] for k in range(0, len(topology.devices), tensor))
        # A group is as fast, and holds as much, as the weakest in it.
        devices = tuple(
            msgspec.structs.replace(
                min(group, key=lambda device: device.flops * device.efficiency),
                memory_bytes=min(device.memory_bytes for device in group),
            )
            for group in groups
        )
    return Topology(tuple(kept), topology.device, devices, topology.tiers, topology.name)
