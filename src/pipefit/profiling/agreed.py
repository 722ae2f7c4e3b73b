"""A profile on which all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import msgspec
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from pipefit.errors import ProfileError
from pipefit.profiling import profile_sizes
from pipefit.runtime.collectives import from_first
from pipefit.runtime.session import Session
from pipefit.spec import Profile
from pipefit.spec.files import decode, encode
from pipefit.stage.batchnorm import DeferredBatchNorm
from pipefit.stage.split import NamedLayer

_REPEATS, _LIMIT_S = 9, 5.0


def agreed_profile(
    layers: Sequence[NamedLayer],
    example: tuple[Any, Any],
    microbatch_sizes: Sequence[int],
    session: Session,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    clips: bool = False,
) -> Profile:
    """Measures the layers at the micro-batch sizes of the run; every rank gets the figures of rank 0.

    All ranks measure at the same time, so that they slow each other down as they will in the run.

    Args:
        layers: of the whole model.
        example: (input, target) of at least the largest size; as many samples as an update has, where there are batch
            norms.
        microbatch_sizes: the first is the profile's own, further ones are its `others`.
        session: the ranks of the run.
        loss: as in `profile_layers`.
        optimizer: as in `profile_layers`.
        clips: as in `profile_layers`.
    """
    x, y = example
    if session.is_distributed:
        dist.barrier()
    with as_trained(layers):
        profile = profile_sizes(
            [(layer.name, layer.module) for layer in layers],
            x,
            loss,
            y,
            microbatch_sizes=microbatch_sizes,
            repeats=_REPEATS,
            limit_s=_LIMIT_S,
            threads=None,
            optimizer=optimizer,
            clips=clips,
        )
    first = from_first(session, lambda: encode("profile", profile))
    return decode("profile", first, Profile, ProfileError, "the profile of rank 0")


def merged(profiles: Sequence[Profile]) -> Profile:
    """The profiles that several ranks measured of one model, as one: the mean of seconds, the most of bytes."""
    first = profiles[0]
    layers = []
    for same in zip(*(profile.layers for profile in profiles), strict=True):
        seconds = {name: fmean(getattr(layer, name) for layer in same) for name in _SECONDS}
        splits = [layer.split_s for layer in same if layer.split_s is not None]
        layers.append(
            msgspec.structs.replace(
                same[0],
                saved_bytes=max(layer.saved_bytes for layer in same),
                split_s=fmean(splits) if splits else None,
                **seconds,
            )
        )
    whole = {name: fmean(getattr(profile, name) for profile in profiles) for name in ("loss_s", "optimizer_s")}
    return msgspec.structs.replace(first, layers=tuple(layers), **whole)


_SECONDS = ("forward_s", "backward_input_s", "backward_weight_s", "split_input_s", "step_s")


@contextmanager
def as_trained(layers: Sequence[NamedLayer]) -> Iterator[None]:
    """Lets batch norms gather statistics as they do in a stage; no update follows."""
    kept = []
    for layer in layers:
        for module in layer.module.modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, DeferredBatchNorm):
                DeferredBatchNorm.adopt(module)
                kept.append(module)
    try:
        yield
    finally:
        for module in kept:
            if isinstance(module, DeferredBatchNorm):
                module.release()
