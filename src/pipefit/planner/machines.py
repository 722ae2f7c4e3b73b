"""Machines that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

from pipefit.errors import TopologyError, nearest
from pipefit.spec import Topology

_FOLDER = Path(__file__).resolve().parent / "machines"


def topology_names() -> tuple[str, ...]:
    """Names that `load_topology` knows, in addition to files and "local:N".

    >>> "dgx-a100-1024" in topology_names()
    True
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_topology(name: str | Path) -> Topology:
    """A topology from a TOML file, from "local:N", or by name.

    Raises:
        TopologyError: no such topology, or something in it is malformed.
    """
    text = str(name)
    if text.startswith("local:") or Path(text).suffix or len(Path(text).parts) > 1:
        return Topology.load(name)
    shipped = _FOLDER / f"{text}.toml"
    if shipped.is_file():
        return Topology.load(shipped)
    raise TopologyError(f"{text}: no such topology: a TOML file, local:N, or a name; {nearest(text, topology_names())}")
