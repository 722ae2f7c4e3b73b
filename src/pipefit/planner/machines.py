"""Machines that come with the package, by name; other packages add theirs by the entry points `pipefit.topologies`."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from pipefit.errors import TopologyError, nearest
from pipefit.spec import Topology

_FOLDER = Path(__file__).resolve().parent / "machines"


def topology_names() -> tuple[str, ...]:
    """Names that `load_topology` knows, in addition to files and "local:N".

    >>> "dgx-a100-1024" in topology_names()
    True
    """
    own = (path.stem for path in _FOLDER.glob("*.toml"))
    return tuple(sorted({*own, *(point.name for point in entry_points(group="pipefit.topologies"))}))


def load_topology(name: str | Path) -> Topology:
    """A topology from a TOML file, from "local:N", or by name.

    Raises:
        TopologyError: there is none, or something in it is malformed.
    """
    text = str(name)
    if text.startswith("local:") or Path(text).suffix or len(Path(text).parts) > 1:
        return Topology.load(name)
    shipped = _FOLDER / f"{text}.toml"
    if shipped.is_file():
        return Topology.load(shipped)
    for point in entry_points(group="pipefit.topologies"):
        if point.name == text:
            made = point.load()
            found = made() if callable(made) else made
            if not isinstance(found, Topology):
                raise TopologyError(f"entry point {text} of pipefit.topologies: expected a Topology, got {type(found)}")
            return found
    raise TopologyError(f"{text}: no such topology: a TOML file, local:N, or a name; {nearest(text, topology_names())}")
