"""`pipefit links`: the links and devices of this machine, measured, as a topology."""

from __future__ import annotations

from functools import partial

from pipefit.cli.answer import Answer
from pipefit.cli.nodes import link_text
from pipefit.cli.options import Count, Json, Ranks, TomlFile


def command(
    *,
    ranks: Ranks = 2,
    repeats: Count = 20,
    output: TomlFile = None,
    json: Json = False,
) -> Answer:
    """Measure the links and devices of this machine.

    Example: pipefit links --ranks 2 -o here.toml

    Args:
        ranks: Processes on this machine.
        repeats: Round trips for each size.
        output: Write the topology to this TOML file.
    """
    from pipefit.profiling import measure_device, measure_links
    from pipefit.runtime.launch import launch
    from pipefit.units import format_bytes

    device = measure_device(ranks=ranks)
    measure = partial(measure_links, repeats=repeats, each=device, name=f"this machine, {ranks} ranks")
    topology = launch(measure, ranks, threads=1, quiet=True)[0]
    level = topology.levels[0]
    lines = [
        f"{ranks} ranks: {link_text(level.bandwidth_bytes_per_s, level.latency_s)}",
        f"each: {device.flops / 1e9:.4g} GFLOP/s, {format_bytes(device.memory_bandwidth_bytes_per_s)}/s to memory, "
        f"{format_bytes(device.memory_bytes)} of memory",
    ]
    if topology.devices:
        speeds = [f"rank {rank} {own.flops / 1e9:.4g}" for rank, own in enumerate(topology.devices)]
        lines.append(f"GFLOP/s of each, for they differ: {', '.join(speeds)}")
    if output:
        topology.save(output)
    data = {"device": device, "devices": topology.devices, "levels": topology.levels}
    return Answer(data, "\n".join(lines), output=output)
