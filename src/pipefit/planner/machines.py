"""Machines that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from pipefit.errors import TopologyError, nearest
from pipefit.spec import Topology

_FOLDER = Path(__file__).resolve().parent / "machines"


def topology_names() -> tuple[str, ...]:
    """Names that `load_topology` knows, in addition to files and "local:N".

    >>> "dgx-a100-1024" in topology_names()
    True
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def _resized(name: str) -> Topology | None:
    """One of the machines with another number of servers, such as "dgx-a100-1536"; None: there is none such."""
    kind, _, count = name.rpartition("-")
    alike = [known for known in topology_names() if known.rpartition("-")[0] == kind] if count.isdecimal() else []
    if not alike:
        return None
    found = Topology.load(_FOLDER / f"{max(alike, key=lambda known: int(known.rpartition('-')[2]))}.toml")
    *inner, outer = found.levels
    width, rest = divmod(int(count), found.num_devices // outer.width)
    if rest or width < 1:
        return None
    return replace(found, name=name, levels=(*inner, replace(outer, width=width)))


def load_topology(name: str | Path) -> Topology:
    """A topology from a TOML file, from "local:N", or by name, also with another number of servers.

    >>> load_topology("dgx-a100-1536").num_devices
    1536

    Raises:
        TopologyError: no such topology, or something in it is malformed.
    """
    text = str(name)
    if text.startswith("local:") or Path(text).suffix or len(Path(text).parts) > 1:
        return Topology.load(name)
    shipped = _FOLDER / f"{text}.toml"
    if shipped.is_file():
        return Topology.load(shipped)
    if resized := _resized(text):
        return resized
    raise TopologyError(f"{text}: no such topology: a TOML file, local:N, or a name; {nearest(text, topology_names())}")
