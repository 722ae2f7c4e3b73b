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
    state = args.device and PartialState()
    state.distributed_type = DistributedType.NO
    state.num_processes = 1
    state.process_index = session.rank
    args.distributed_state = state
    args._n_gpu = min(args.n_gpu, 1)
    # Otherwise only process 0 would read an `IterableDataset`, and the others wait for it.
    args.accelerator_config.dispatch_batches = False


def from_first(session: Session, value: Any) -> Any:
    """Returns the value of rank 0, any object that can be pickled, on every rank."""
    if not session.is_distributed:
        return value
    values = [value]
    with session.progress.waiting():
        dist.broadcast_object_list(values, 0, group=session.group)
    return values[0]


def from_all(session: Session, value: Any) -> list[Any]:
    """Returns the values of all ranks, by number."""
    if not session.is_distributed:
        return [value]
    values = [None] * session.num_ranks
    with session.progress.waiting():
        dist.all_gather_object(values, value, group=session.group)
    return values
