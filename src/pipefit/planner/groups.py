"""Groups of devices that share every layer by tensor parallelism: each group is one rank of the program."""

from __future__ import annotations

import msgspec

from pipefit.spec import Device, Level, Topology


def groups_fit(topology: Topology, tensor: int) -> bool:
    """Whether the levels of a topology can be split into groups of so many neighbours."""
    rest = tensor
    for level in topology.levels:
        if rest % level.width and level.width % rest:
            return False
        rest = max(rest // level.width, 1)
    return True


def grouped(topology: Topology, tensor: int) -> Topology:
    """The topology of such groups of `tensor` neighbours."""
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
