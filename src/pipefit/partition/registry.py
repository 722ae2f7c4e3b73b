"""Partitioners by name, with the partitioners of other packages.

Another package adds one in its pyproject.toml:

    [project.entry-points."pipefit.partitioners"]
    mine = "my_package:mine"

where `mine(profile, num_stages, **options)` returns a `Partition`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from pipefit.errors import InfeasibleError, PlanError, nearest
from pipefit.partition.balance import gpipe, minmax, uniform
from pipefit.partition.capacity import hydra
from pipefit.partition.pipedream import pipedream
from pipefit.spec import Partition, Profile, Topology

_GROUP = "pipefit.partitioners"


def _pipedream(profile: Profile, num_stages: int | None, topology: Topology | None = None, **options: Any) -> Partition:
    """PipeDream's, on a topology; without one, on `num_stages` devices of this machine, none replicated."""
    if topology is None:
        if num_stages is None:
            raise PlanError("pipedream: expected a topology, or num_stages for a pipeline on this machine")
        topology = Topology.local(num_stages)
        options.setdefault("straight", True)
    result = pipedream(profile, topology, **options)
    if result.partition is None:
        raise InfeasibleError(f"pipedream: {result.why}")
    return result.partition


def _hydra(profile: Profile, num_stages: int | None, capacity_bytes: float, **options: Any) -> Partition:
    return hydra(profile, capacity_bytes, **options)


def _by_hand(profile: Profile, num_stages: int | None, counts: list[int]) -> Partition:
    return Partition.from_counts(counts, len(profile))


_BUILT_IN: dict[str, Callable[..., Partition]] = {
    "by_hand": _by_hand,
    "gpipe": gpipe,
    "hydra": _hydra,
    "minmax": minmax,
    "pipedream": _pipedream,
    "uniform": uniform,
}
_AT_MOST = {"hydra", "pipedream"}
"""For these `num_stages` is an optional upper bound."""


def partitioner_names() -> tuple[str, ...]:
    """All names that `partition` knows, from installed packages too."""
    installed = {point.name for point in entry_points(group=_GROUP)}
    return tuple(sorted(installed.union(_BUILT_IN)))


def partition(profile: Profile, num_stages: int | None = None, method: str = "minmax", **options: Any) -> Partition:
    """Splits the layers of a profile into stages.

    >>> from pipefit.spec import Layer
    >>> layers = tuple(Layer(f"layer{i}", t, t, t, 1, 1, 1) for i, t in enumerate([1.0, 1.0, 1.0, 3.0]))
    >>> [stage.layers for stage in partition(Profile("four", 1, layers), 2).stages]
    [(0, 1, 2), (3,)]

    Args:
        profile: the layers.
        num_stages: number of stages; for "hydra" and "pipedream" an optional upper bound.
        method: "uniform", "minmax", "gpipe", "pipedream", "hydra", "by_hand", or the name of an entry point.
        options: of the method; "hydra" needs `capacity_bytes`, "by_hand" needs `counts`, "pipedream" takes `topology`.

    Raises:
        PlanError: unknown method or option, or the partition is impossible.
        InfeasibleError: nothing fits the memory.
    """
    found = _BUILT_IN.get(method) or _installed(method)
    if num_stages is None and method in _BUILT_IN and method not in {"by_hand", *_AT_MOST}:
        raise PlanError(f"{method}: expected num_stages, got none")
    try:
        inspect.signature(found).bind(profile, num_stages, **options)
    except TypeError as problem:
        known = list(inspect.signature(found).parameters)[2:]
        raise PlanError(f"{method}: {problem}; its options: {', '.join(known) or 'none'}") from None
    made = found(profile, num_stages, **options)
    count = len(made.stages)
    is_bound = method in _AT_MOST
    fits = num_stages is None or count == num_stages or (is_bound and count < num_stages)
    if not fits and method in _BUILT_IN:
        most = ""
        if is_bound:
            most = "at most "
        raise PlanError(f"{method}: expected {most}{num_stages} stages, got {count}; leave num_stages out to take them")
    return made


def _installed(method: str) -> Callable[..., Partition]:
    for point in entry_points(group=_GROUP):
        if point.name == method:
            loaded: Callable[..., Partition] = point.load()
            return loaded
    raise PlanError(f"unknown partitioner {method!r}; {nearest(method, partitioner_names())}")
