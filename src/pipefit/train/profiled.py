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
from pipefit.profiling import profile_sizes
from pipefit.runtime.session import Session
from pipefit.spec import Profile
from pipefit.spec.files import decode, encode
from pipefit.stage.split import NamedLayer

__all__ = ["agreed_profile"]


def agreed_profile(
    layers: Sequence[NamedLayer],
    example: tuple[Any, Any],
    microbatch_sizes: Sequence[int],
    session: Session,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    repeats: int = 9,
    limit_s: float = 5.0,
) -> Profile:
    """Measures the layers at the micro-batch sizes of the run; every rank gets the figures of rank 0.

    All ranks measure at the same time, so that they slow each other down as they will in the run.

    Args:
        layers: of the whole model.
        example: (input, target) of at least the largest size.
        microbatch_sizes: the first is the profile's own, further ones are its `others`.
        session: the ranks of the run.
        loss: as in `profile_layers`.
        optimizer: as in `profile_layers`.
        repeats: measured turns for each size.
        limit_s: seconds after which a size is measured no longer.
    """
    x, y = example
    if session.is_distributed:
        dist.barrier()
    profile = profile_sizes(
        [(layer.prefix, layer.module) for layer in layers],
        x,
        loss,
        y,
        microbatch_sizes=microbatch_sizes,
        repeats=repeats,
        limit_s=limit_s,
        threads=None,
        optimizer=optimizer,
    )
    return _from_rank_0(profile) if session.is_distributed else profile


def _from_rank_0(profile: Profile) -> Profile:
    text = json.dumps(encode("profile", profile)).encode()
    size = torch.tensor([len(text)])
    dist.broadcast(size, 0)
    data = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if dist.get_rank() == 0
        else torch.empty(int(size), dtype=torch.uint8)
    )
    dist.broadcast(data, 0)
    return decode("profile", json.loads(data.numpy().tobytes()), Profile, ProfileError, "the profile of rank 0")
