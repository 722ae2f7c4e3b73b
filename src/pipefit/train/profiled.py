"""A profile on which all ranks agree."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.errors import ProfileError
from pipefit.profiling import profile_layers
from pipefit.runtime.session import Session
from pipefit.spec import Profile
from pipefit.spec.files import decode, encode
from pipefit.stage.split import NamedLayer
from pipefit.train.batch import cut

__all__ = ["agreed_profile"]


def agreed_profile(
    layers: Sequence[NamedLayer],
    example: tuple[Any, Any],
    num_microbatches: int,
    session: Session,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    repeats: int = 9,
) -> Profile:
    """Measures the layers at the micro-batch size of the run; every rank gets the figures of rank 0.

    All ranks measure at the same time, so that they slow each other down as they will in the run.
    """
    x, y = example
    first, target = cut(x, num_microbatches)[0], cut(y, num_microbatches, "the target")[0]
    if session.is_distributed:
        dist.barrier()
    profile = profile_layers(
        [(layer.prefix, layer.module) for layer in layers],
        first,
        loss,
        target,
        repeats=repeats,
        threads=None,
        optimizer=optimizer,
    )
    if not session.is_distributed:
        return profile
    text = json.dumps(encode("profile", profile)).encode()
    size = torch.tensor([len(text)])
    dist.broadcast(size, 0)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if session.rank == 0:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(data, 0)
    return decode("profile", json.loads(data.numpy().tobytes()), Profile, ProfileError, "the profile of rank 0")
