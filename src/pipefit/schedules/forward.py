"""Forwards only: evaluation over the same stages."""

from __future__ import annotations

import functools

from msgspec.structs import replace

from pipefit.ir.instruction import fwd
from pipefit.ir.program import Header, Program, WeightRule
from pipefit.passes.build import build


@functools.lru_cache(maxsize=32)
def forward_only(header: Header, num_microbatches: int) -> Program:
    """A program of every micro-batch through every stage once, with the newest weights and without training."""
    header = replace(
        header,
        schedule="forward",
        num_microbatches=num_microbatches,
        num_steps=1,
        weights=WeightRule.FLUSH,
        updates=(num_microbatches,) * header.num_stages,
        clip=False,
        commit=False,
        shares=(),
    )
    order = []
    for rank in range(header.num_ranks):
        # Stage by stage where stages are fetched or gathered, so that each is so once; else micro-batch by micro-batch.
        size = header.num_ranks
        if (header.spill and header.num_ranks == 1) or header.shard == "weights":
            size = header.total_microbatches
        placed = []
        for stage in header.stages_of(rank):
            for mb in header.microbatches_of(stage, rank):
                placed.append((mb // size, stage, mb))
        order.append([fwd(stage, mb) for _, stage, mb in sorted(placed)])
    return build(header, order)
