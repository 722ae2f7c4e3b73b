"""Machines that come with the package, and models for them, by name."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec.structs import replace

from pipefit.errors import PipefitError, TopologyError, nearest
from pipefit.planner.computed_profile import transformer_profile
from pipefit.planner.transformer import is_transformer, transformer_of
from pipefit.spec import Profile, Topology
from pipefit.spec.published import load_profile

_FOLDER = Path(__file__).resolve().parent / "machines"

_GPUS = {
    "A100": "dgx-a100-64",
    "A100-40GB": "dgx-a100-40gb-64",
    "A100-80GB": "dgx-a100-64",
    "B200": "dgx-b200-64",
    "H100": "dgx-h100-64",
    "H200": "dgx-h200-64",
    "L40S": "l40s-64",
    "MI300X": "mi300x-64",
    "RTX3090": "rtx3090-64",
    "RTX4090": "rtx4090-64",
    "V100": "dgx-v100-64",
}
"""The machine that has the servers and links of a kind of GPU, by the name in its short form."""


def topology_names() -> tuple[str, ...]:
    """Names that `load_topology` knows, in addition to files and "local:N".

    >>> "dgx-a100-1024" in topology_names()
    True
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def _resized(name: str) -> Topology | None:
    """A machine with another number of servers: "dgx-a100-1536", or "pcie-3x4" (servers × devices); None: none such."""
    kind, _, size = name.rpartition("-")
    servers, cross, each = size.partition("x")
    if not (servers + each).isdecimal():
        return None
    for known in reversed(topology_names()):
        stem, _, own = known.rpartition("-")
        if stem != kind or ("x" in own) != bool(cross):
            continue
        found = Topology.load(_FOLDER / f"{known}.toml")
        first = found.levels[0]
        outer = found.levels[-1]
        width = int(each or first.width)
        count = int(servers) * int(each or 1)
        if 0 < count <= first.width and not each:
            return replace(found, name=name, levels=(replace(first, width=count),))
        if len(found.levels) == 2 and 0 < width <= first.width and not count % width and count:
            levels = replace(first, width=width), replace(outer, width=count // width)
            return replace(found, name=name, levels=levels)
    return None


def _of_gpus(text: str) -> Topology | None:
    """A machine by its GPUs: "8xH100:16" is 16 servers of 8; None: the text has another form."""
    found = re.fullmatch(r"(\d+)x([^:]*)(?::(\d+))?", text)
    if not found:
        return None
    each, kind, servers = found.groups()
    form = "expected GPUS of a server, x, KIND and :SERVERS, such as 8xH100:16"
    known = _GPUS.get(kind.upper())
    if known is None:
        raise TopologyError(f"{text}: {form}; no GPU {kind!r}; {nearest(kind.upper(), _GPUS)}")
    machine = Topology.load(_FOLDER / f"{known}.toml")
    inner = machine.levels[0]
    count = int(servers or 1)
    if not (1 <= int(each) <= inner.width and count):
        raise TopologyError(f"{text}: {form}; servers have 1 to {inner.width} {kind}, and there is at least one server")
    return replace(of_servers(machine, int(each), count), name=text)


def of_servers(machine: Topology, each: int, count: int) -> Topology:
    """A machine with so many servers of so many devices."""
    levels = [replace(machine.levels[0], width=each)]
    if count > 1:
        levels.append(replace(machine.levels[-1], width=count))
    return replace(machine, levels=tuple(levels))


def load_topology(name: str | Path) -> Topology:
    """A topology from a TOML file, from "local:N", by its GPUs, or by name, also with another number of servers.

    >>> load_topology("dgx-a100-1536").num_devices, load_topology("pcie-3x4").num_devices
    (1536, 12)
    >>> load_topology("8xH100:16").num_devices, load_topology("4xA100-40GB").num_devices
    (128, 4)

    Raises:
        TopologyError: no such topology, or something in it is malformed.
    """
    text = str(name)
    if text.startswith("local:") or Path(text).suffix or len(Path(text).parts) > 1:
        return Topology.load(name)
    shipped = _FOLDER / f"{text}.toml"
    if shipped.is_file():
        return Topology.load(shipped)
    found = _of_gpus(text) or _resized(text)
    if found:
        return found
    forms = "a TOML file, local:N, GPUs such as 8xH100:16, or a name"
    raise TopologyError(f"{text}: no such topology: {forms}; {nearest(text, topology_names())}")


def read_profile(name: str, machine: Topology | None, microbatch: int) -> Profile:
    """A profile from its file, of a published model, or computed for the machine: "gpt:layers=24,…", "llama:layers=…".

    Raises:
        PipefitError: there is none, or no machine for which to compute it.
    """
    if not is_transformer(name):
        return load_profile(name)
    model = transformer_of(name)
    if machine is None:
        raise PipefitError(f"{name}: seconds are computed for a device; give --topology as well")
    return transformer_profile(model, microbatch, machine.device, topology=machine)
