"""Machines that come with the package, and models for them, by name."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from pipefit.errors import PipefitError, TopologyError, nearest
from pipefit.planner.computed_profile import transformer_profile
from pipefit.planner.transformer import is_transformer, transformer_of
from pipefit.spec import Profile, Topology
from pipefit.spec.published import load_profile

_FOLDER = Path(__file__).resolve().parent / "machines"


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


def load_topology(name: str | Path) -> Topology:
    """A topology from a TOML file, from "local:N", or by name, also with another number of servers.

    >>> load_topology("dgx-a100-1536").num_devices, load_topology("pcie-3x4").num_devices
    (1536, 12)

    Raises:
        TopologyError: no such topology, or something in it is malformed.
    """
    text = str(name)
    if text.startswith("local:") or Path(text).suffix or len(Path(text).parts) > 1:
        return Topology.load(name)
    shipped = _FOLDER / f"{text}.toml"
    if shipped.is_file():
        return Topology.load(shipped)
    resized = _resized(text)
    if resized:
        return resized
    raise TopologyError(f"{text}: no such topology: a TOML file, local:N, or a name; {nearest(text, topology_names())}")


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
