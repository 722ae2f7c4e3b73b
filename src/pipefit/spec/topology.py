"""Topology: the devices at hand and the links between them, level by level from the inside."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from pipefit.errors import ABOVE_0, TopologyError, check_figures
from pipefit.spec.arguments import check_fields, checked
from pipefit.spec.files import as_mistakes, check_format, parse_toml, read_text, write_atomically
from pipefit.units import parse_quantity

MOST_DEVICES = 1_000_000
"""Most devices of a topology."""


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device.

    Attributes:
        memory_bytes: limit for a rank.
        flops: peak FLOP per second of products, of numbers of 16 bits; 0: unknown (then profiles must be measured).
        fp32_flops: the same of numbers of 32 bits, without rounding to TF32; 0: as `flops`.
        fp64_flops: the same of numbers of 64 bits; 0: as `flops`.
        fp8_flops: peak of products of numbers of 8 bits; 0: it has none.
        memory_bandwidth_bytes_per_s: of the device's own memory, as a copy reaches it; 0: unknown.
        efficiency: fraction of `flops` that a matrix product reaches while all cores compute.
        cores: parts that compute one tile of a matrix product each, such as the SMs of a GPU; 0: unknown, and products
            of any shape are equally efficient.
        tile: rows and columns of the largest tile.
        cache_bandwidth_bytes_per_s: of the cache that all cores read; 0: unknown.
        kernel_s: fixed seconds of every operation.
        flash: shares of the rate of large products that FlashAttention 2 reaches while all cores work, forward and
            backward: those of an A100 where nothing is said (Dao 2023, figures 4 to 6).
        cudnn: the same of cuDNN's attention, which torch takes where it is faster; None: as `flash`.
        random_rate: random numbers per second, of which dropout needs one for each element; 0: they are free.
        spread: standard deviation of the rate of devices of this kind, relative to `flops`: they differ by manufacture.
    """

    memory_bytes: float = math.inf
    flops: float = 0.0
    fp32_flops: float = 0.0
    fp64_flops: float = 0.0
    fp8_flops: float = 0.0
    memory_bandwidth_bytes_per_s: float = 0.0
    efficiency: float = 0.5
    cores: int = 0
    tile: tuple[int, int] = (256, 128)
    cache_bandwidth_bytes_per_s: float = 0.0
    kernel_s: float = 0.0
    flash: tuple[float, float] = (0.75, 0.66)
    cudnn: tuple[float, float] | None = None
    random_rate: float = 0.0
    spread: float = 0.0

    def for_elements(self, element_bytes: int) -> Device:
        """The device whose `flops` are those of products of numbers of so many bytes.

        >>> Device(flops=312e12, fp32_flops=19.5e12).for_elements(4).flops
        19500000000000.0
        """
        rates = {4: self.fp32_flops, 8: self.fp64_flops}
        return replace(self, flops=rates.get(element_bytes) or self.flops)


class Level(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One level of the network: `width` units of the level below, joined by links of this bandwidth and latency.

    Attributes:
        name: for people.
        width: units of the level below; of the innermost, devices.
        bandwidth_bytes_per_s: of its links.
        latency_s: of its links.
        cores: processor cores that all devices of one unit of this level share, where a device is a process; None: each
            device has its own.
        one_port: whether all links of a unit of the level below leave it through one port of this bandwidth, and enter
            it through another, as the processes of a server share its network card; else links share nothing.
    """

    name: str
    width: int
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    cores: float | None = None
    one_port: bool = False


class Tier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory beyond the device: "host" or "disk", with its capacity and the rates of its link to the tier above.

    Capacity and rates are those of a machine and shared by its ranks: see `Topology.tiers_among`.

    Attributes:
        name: "host" or "disk".
        capacity_bytes: its size.
        read_bytes_per_s: towards the device.
        write_bytes_per_s: away from it.
        latency_s: of each copy.
        step_bytes_per_s: bytes of weights that an optimizer steps in the host's memory; 0: not known.
        one_channel: whether reads and writes alternate, as on most disks; else both keep their rates.
        check_bytes_per_s: rate at which the computing processor computes the checksum of copied bytes; 0: no checksums.
        commit_s: seconds of committing a step once everything is written; the ranks of a pipeline wait for it between
            two steps; 0: nothing is committed.
    """

    name: str
    capacity_bytes: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 0.0
    step_bytes_per_s: float = 0.0
    one_channel: bool = False
    check_bytes_per_s: float = 0.0
    commit_s: float = 0.0


_UNITS = {
    name: kind
    for end, kind in (("_s", "s"), ("_bytes", "bytes"), ("_bytes_per_s", "bytes/s"), ("flops", "flops"))
    for noun in (Device, Level, Tier)
    for name in noun.__struct_fields__
    if name.endswith(end)
}
"""The kind of quantity of a field, by the suffix of its name; the longest suffix counts."""


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Devices in levels: rank r's place at each level follows from the widths, innermost first.

    Attributes:
        levels: from the innermost (devices in a server) to the outermost.
        device: every device; where `devices` differ, the one that profiles are for, by default the first of them.
        devices: one entry per rank, when they differ.
        tiers: host and disk, for spilling.
        name: for people.
    """

    levels: tuple[Level, ...]
    device: Device = Device()
    devices: tuple[Device, ...] = ()
    tiers: tuple[Tier, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self, TopologyError)
        if self.devices and self.device == Device():
            msgspec.structs.force_setattr(self, "device", self.devices[0])
        if not self.levels:
            raise TopologyError("levels: expected at least one level with its width, got none: there is no device")
        for index, level in enumerate(self.levels):
            check_figures(
                level,
                TopologyError,
                f"levels[{index}].",
                width=1,
                bandwidth_bytes_per_s=ABOVE_0,
                latency_s=0,
                cores=ABOVE_0,
            )
        if self.num_devices > MOST_DEVICES:
            raise TopologyError(f"levels: {self.num_devices:,} devices are too many: expected at most {MOST_DEVICES:,}")
        if self.devices and len(self.devices) != self.num_devices:
            raise TopologyError(
                f"devices: expected {self.num_devices} (the product of the widths), got {len(self.devices)}"
            )
        for place, device in [("device", self.device), *((f"devices[{i}]", d) for i, d in enumerate(self.devices))]:
            check_figures(
                device,
                TopologyError,
                f"{place}.",
                memory_bytes=ABOVE_0,
                flops=0,
                fp32_flops=0,
                fp64_flops=0,
                fp8_flops=0,
                memory_bandwidth_bytes_per_s=0,
                efficiency=ABOVE_0,
                cores=0,
                cache_bandwidth_bytes_per_s=0,
                kernel_s=0,
                random_rate=0,
                spread=0,
            )
            if min(device.tile) < 1:
                raise TopologyError(f"{place}.tile: expected two sizes of at least 1, got {device.tile}")
            if device.efficiency > 1:
                raise TopologyError(f"{place}.efficiency: expected at most 1, got {device.efficiency}")

    @property
    def num_devices(self) -> int:
        """Number of devices: the product of the widths."""
        return math.prod(level.width for level in self.levels)

    def for_elements(self, element_bytes: int) -> Topology:
        """The topology whose devices have the `flops` of products of numbers of so many bytes."""
        device = self.device.for_elements(element_bytes)
        devices = tuple(own.for_elements(element_bytes) for own in self.devices)
        if (device, devices) == (self.device, self.devices):
            return self
        return replace(self, device=device, devices=devices)

    def device_of(self, rank: int) -> Device:
        """The device of a rank."""
        if self.devices:
            return self.devices[rank]
        return self.device

    def level_between(self, a: int, b: int) -> Level:
        """The innermost level that joins two ranks: the one whose links their messages cross.

        >>> two = Topology((Level("server", 4, 12e9), Level("rack", 2, 1e9)))
        >>> two.level_between(0, 3).name, two.level_between(3, 4).name
        ('server', 'rack')
        """
        return self._joining(a, b)[2]

    def _joining(self, a: int, b: int) -> tuple[int, int, Level]:
        """The index of the level between two ranks, the devices of one of its units, and the level."""
        unit = 1
        for index, level in enumerate(self.levels):
            span = unit * level.width
            if a // span == b // span:
                return index, unit, level
            unit = span
        raise TopologyError(f"ranks {a} and {b} are not both among the {self.num_devices} devices of this topology")

    def ports(self, a: int, b: int) -> tuple[tuple[object, ...], ...]:
        """The shared ports of a message from one rank to another: out of a unit, and into a unit.

        >>> Topology((Level("server", 4, 12e9), Level("rack", 2, 1e9, one_port=True))).ports(1, 6)
        (('out', 1, 0), ('in', 1, 1))
        """
        index, unit, level = self._joining(a, b)
        if level.one_port:
            return (("out", index, a // unit), ("in", index, b // unit))
        return ()

    @property
    def machine(self) -> tuple[int, float]:
        """Devices of a machine, and the cores that they share: those of the innermost level with a number of cores.

        >>> Topology.local(3, cores=2).machine
        (3, 2)
        """
        span = 1
        for level in self.levels:
            span *= level.width
            if level.cores is not None:
                return span, level.cores
        return 1, math.inf

    def tier_shares(self, num_ranks: int) -> int:
        """Number of ranks, of `num_ranks`, that are on one machine and share its tiers.

        A machine is the level that has cores, or else the innermost.

        >>> Topology((Level("server", 4, 12e9), Level("rack", 2, 1e9))).tier_shares(6)
        4
        """
        span, cores = self.machine
        return max(min(num_ranks, self.levels[0].width if math.isinf(cores) else span), 1)

    def tiers_among(self, num_ranks: int) -> tuple[Tier, ...]:
        """The tiers, at the rate of each of `num_ranks` ranks when all ranks of a machine copy at the same time."""
        count = self.tier_shares(num_ranks)
        rates = ("read_bytes_per_s", "write_bytes_per_s", "step_bytes_per_s")
        return tuple(replace(tier, **{rate: getattr(tier, rate) / count for rate in rates}) for tier in self.tiers)

    @classmethod
    @checked()
    def local(
        cls,
        num_devices: int,
        bandwidth_bytes_per_s: float = 2e9,
        latency_s: float = 100e-6,
        cores: float | None = None,
    ) -> Topology:
        """Processes of this machine: one level. The defaults are Gloo's usual figures over loopback."""
        level = Level("machine", num_devices, bandwidth_bytes_per_s, latency_s, cores)
        return cls((level,), name=f"local:{num_devices}")

    @classmethod
    def parse(cls, text: str, where: str = "topology") -> Topology:
        """Reads TOML text.

        Raises:
            TopologyError: with `where` and the path inside the text.
        """
        data = parse_toml(text, TopologyError, where)
        check_format("topology", data.pop("format", None), TopologyError, where)
        with as_mistakes(TopologyError, where):
            return msgspec.convert(_with_units(data, ""), cls)

    @classmethod
    @checked()
    def load(cls, path: str | Path) -> Topology:
        """Reads a TOML file, or the short form "local:N"."""
        if str(path).startswith("local:"):
            count = str(path).removeprefix("local:")
            if not count.isdigit() or int(count) < 1:
                raise TopologyError(f"expected local:N with N ranks of this machine, got {str(path)!r}")
            return cls.local(int(count))
        return cls.parse(read_text(path, TopologyError), str(path))

    def save(self, path: str | Path) -> Path:
        """Writes TOML, atomically."""
        return write_atomically(path, _as_toml(self))


def _with_units(data: Any, where: str) -> Any:
    """Numbers for quantities with units, at every depth."""
    if isinstance(data, list):
        return [_with_units(item, f"{where}[{index}]") for index, item in enumerate(data)]
    if isinstance(data, dict):
        places = {key: f"{where}.{key}" if where else key for key in data}
        return {key: _quantity(key, _with_units(item, places[key]), places[key]) for key, item in data.items()}
    return data


def _quantity(key: str, item: Any, place: str) -> Any:
    if key in _UNITS and not isinstance(item, list | dict):
        return parse_quantity(item, _UNITS[key], place)
    return item


def _as_toml(topology: Topology) -> str:
    """The topology in TOML, whose values look as in JSON; numbers in base units, infinities left out: the defaults."""
    data = msgspec.to_builtins(topology)
    lines = ['format = "pipefit.topology/1"']
    if topology.name:
        lines.append(f"name = {json.dumps(topology.name, ensure_ascii=False)}")
    tables = [("[device]", data["device"])]
    tables += [(f"[[{noun}]]", each) for noun in ("levels", "devices", "tiers") for each in data[noun]]
    for title, table in tables:
        lines += ["", title]
        for key, value in table.items():
            if value is not None and value is not False and value != math.inf:
                lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"
