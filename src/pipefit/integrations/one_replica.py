"""All processes of a pipeline as one replica of the Trainer: the same batches, and one process that writes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import TrainingArguments

from pipefit.runtime.session import Session


def as_one_replica(args: TrainingArguments, session: Session) -> None:
    """Makes the Trainer and accelerate take this process for the only one, which writes only if it is rank 0.

    accelerate would otherwise give every process other data, and copy the whole model to each.

    Args:
        args: of the Trainer; from then on `world_size` is 1.
        session: the ranks of the run.
    """
    args._n_gpu = min(args.n_gpu, 1)
    state: Any = PartialState()
    state.distributed_type = DistributedType.NO
    state.num_processes = 1
    state.process_index = session.rank
    state.local_process_index = session.rank  # or the first of every machine would print
    # Otherwise only process 0 would read an `IterableDataset`, and the others wait for it.
    config: Any = args.accelerator_config
    config.dispatch_batches = False


def from_rank(session: Session, value: Any, source: int = 0) -> Any:
    """Returns the value of one rank, any object that can be pickled, on every rank."""
    if not session.is_distributed:
        return value
    values = [value]
    with session.progress.waiting():
        dist.broadcast_object_list(values, source, group=session.group)
    return values[0]
