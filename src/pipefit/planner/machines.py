"""Machines that come with the package, and models for them, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipefit.errors import PipefitError, TopologyError, nearest
from pipefit.planner.computed_profile import gpt_profile, gpt_settings
from pipefit.spec import Profile, Topology
from pipefit.spec.published import load_profile

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


def read_profile(name: str, machine: Topology | None, microbatch: int) -> Profile:
    """A profile from its file, of a published model, or computed for the machine: "gpt:layers=24,…".

    Raises:
        PipefitError: there is none, or no machine for which to compute it.
    """
    if not name.startswith("gpt:"):
        return load_profile(name)
    settings: dict[str, Any] = gpt_settings(name)
    if machine is None:
        raise PipefitError(f"{name}: seconds are computed for a device; give --topology as well")
    return gpt_profile(**settings, microbatch=microbatch, device=machine.device)
