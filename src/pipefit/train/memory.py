"""How much memory each rank has used at most."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist

from pipefit.runtime.session import Session

__all__ = ["peak_memory_bytes"]


def peak_memory_bytes(session: Session) -> list[float]:
    """The most memory each process has held: of its GPU when it has one, else its resident set. Every rank must ask."""
    if torch.cuda.is_available():
        own = float(torch.cuda.max_memory_allocated())
    else:
        own = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
    if not session.is_distributed:
        return [own]
    table = torch.zeros(session.num_ranks, dtype=torch.float64)
    table[session.rank] = own
    dist.all_reduce(table)
    return table.tolist()
