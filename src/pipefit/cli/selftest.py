"""What `pipefit doctor` runs in the ranks that it starts: do messages arrive, whole, and how fast?"""

from __future__ import annotations

__all__ = ["exchange"]

_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)


def exchange() -> dict[str, float]:
    """Sends a known tensor around the ring of all ranks, adds up over all, and times the links.

    Returns:
        latency_s and bandwidth_bytes_per_s; nothing when the machine is too busy to tell.

    Raises:
        CommunicationError: something else arrived than was sent.
    """
    import torch
    import torch.distributed as dist

    from pipefit.errors import CommunicationError, TopologyError
    from pipefit.profiling import measure_links
    from pipefit.runtime.collectives import sum_table
    from pipefit.runtime.session import current

    rank, world = dist.get_rank(), dist.get_world_size()
    sent = torch.arange(1000, dtype=torch.float64) + rank
    got = torch.empty_like(sent)
    waits = [dist.isend(sent, (rank + 1) % world), dist.irecv(got, (rank - 1) % world)]
    for wait in waits:
        wait.wait()
    if not torch.equal(got, torch.arange(1000, dtype=torch.float64) + (rank - 1) % world):
        raise CommunicationError(f"rank {rank} received something else than rank {(rank - 1) % world} sent")
    total = sum_table(current(), torch.tensor([float(rank)])).item()
    if total != world * (world - 1) / 2:
        raise CommunicationError(f"rank {rank}: the sum over all ranks is {total}")
    try:
        level = measure_links(sizes=_SIZES, repeats=10).levels[0]
    except TopologyError:  # larger messages took no longer: every rank sees the same times
        return {}
    return {"latency_s": level.latency_s, "bandwidth_bytes_per_s": level.bandwidth_bytes_per_s}
