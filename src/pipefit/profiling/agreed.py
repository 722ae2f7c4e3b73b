"""A profile on which all ranks agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

import msgspec
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from pipefit.errors import ProfileError
from pipefit.profiling.measure import profile_sizes
from pipefit.profiling.workload import Workload
from pipefit.runtime.collectives import from_first
from pipefit.runtime.session import Session
from pipefit.spec import Profile
from pipefit.spec.files import decode, encode
from pipefit.stage.batchnorm import DeferredBatchNorm
from pipefit.stage.split import NamedLayer

_REPEATS, _LIMIT_S = 9, 5.0


def agreed_profile(work: Workload, microbatch_sizes: Sequence[int], session: Session) -> Profile:
    """Measures the layers at the micro-batch sizes of the run; every rank gets the figures of rank 0.

    All ranks measure at the same time, so that they slow each other down as they will in the run.

    Args:
        work: whose example is of at least the largest size; as many samples as an update has, where there are batch
            norms.
        microbatch_sizes: the first is the profile's own, further ones are its `others`.
        session: the ranks of the run.
    """
    x, y = work.batch("measuring the layers")
    if session.is_distributed:
        dist.barrier()
    with _as_trained(work.layers):
        profile = profile_sizes(
            work.layers,
            x,
            work.loss,
            y,
            microbatch_sizes=microbatch_sizes,
            repeats=_REPEATS,
            limit_s=_LIMIT_S,
            threads=None,
            optimizer=work.optimizer,
            clips=work.clips,
        )
    first = from_first(session, lambda: encode("profile", profile))
    return decode("profile", first, Profile, ProfileError, "the profile of rank 0")


@contextmanager
def _as_trained(layers: Sequence[NamedLayer]) -> Iterator[None]:
    """Lets batch norms gather statistics as they do in a stage; no update follows."""
    modules = [module for layer in layers for module in layer.module.modules() if isinstance(module, _BatchNorm)]
    adopted = [module for module in modules if not isinstance(module, DeferredBatchNorm)]
    for module in adopted:
        DeferredBatchNorm.adopt(module)
    try:
        yield
    finally:
        for module in adopted:
            if isinstance(module, DeferredBatchNorm):
                module.release()


_SECONDS = ("forward_s", "backward_input_s", "backward_weight_s", "split_input_s", "step_s")


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
