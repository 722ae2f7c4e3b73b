"""A profile on which all ranks agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from pipefit.errors import PlanError, ProfileError
from pipefit.profiling import profile_sizes
from pipefit.profiling.clock import Clock
from pipefit.profiling.passes import Step
from pipefit.profiling.payload import batch_of, placed, take
from pipefit.profiling.untouched import untouched
from pipefit.runtime.collectives import from_first
from pipefit.runtime.microbatches import largest_part
from pipefit.runtime.session import Session
from pipefit.spec import Profile
from pipefit.spec.files import decode, encode
from pipefit.stage.batchnorm import DeferredBatchNorm, commit, deferred
from pipefit.stage.split import NamedLayer

__all__ = ["agreed_profile", "as_trained", "merged", "profile_of"]

_FEWEST, _MOST, _LIMIT_S = 3, 15, 0.5


def profile_of(
    layers: Sequence[NamedLayer],
    example: tuple[Any, Any] | None,
    num_microbatches: int,
    session: Session,
    loss: Callable[[Any, Any], Tensor],
) -> Profile:
    """The profile by which a pipeline cuts itself into stages, measured now.

    Raises:
        PlanError: there is no example to measure with.
    """
    if example is None:
        raise PlanError('stages="auto" measures the layers first and needs example=(input, target), one batch of data')
    return agreed_profile(layers, example, [largest_part(example[0], num_microbatches)], session, loss=loss)


def agreed_profile(
    layers: Sequence[NamedLayer],
    example: tuple[Any, Any],
    microbatch_sizes: Sequence[int],
    session: Session,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    clips: bool = False,
    repeats: int = 9,
    limit_s: float = 5.0,
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
        repeats: measured turns for each size.
        limit_s: seconds after which a size is measured no longer.
    """
    x, y = example
    if session.is_distributed:
        dist.barrier()
    with as_trained(layers):
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
            clips=clips,
        )
        profile = _with_commits(profile, layers, example, loss)
    return _from_rank_0(session, profile)


def merged(profiles: Sequence[Profile], middle: Callable[[Iterable[float]], float] = fmean) -> Profile:
    """The same model as several ranks, or one at several times, have measured it.

    Args:
        profiles: at one micro-batch size.
        middle: of the seconds: their mean, or median. Of bytes it is the most.
    """
    first = profiles[0]
    layers = []
    for same in zip(*(profile.layers for profile in profiles), strict=True):
        seconds = {name: middle(getattr(layer, name) for layer in same) for name in _SECONDS}
        splits = [layer.split_s for layer in same if layer.split_s is not None]
        layers.append(
            msgspec.structs.replace(
                same[0],
                saved_bytes=max(layer.saved_bytes for layer in same),
                split_s=middle(splits) if splits else None,
                **seconds,
            )
        )
    whole = {name: middle(getattr(profile, name) for profile in profiles) for name in ("loss_s", "optimizer_s")}
    return msgspec.structs.replace(first, layers=tuple(layers), **whole)


_SECONDS = ("forward_s", "backward_input_s", "backward_weight_s", "split_input_s", "step_s")


def _with_commits(
    profile: Profile,
    layers: Sequence[NamedLayer],
    example: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor] | None,
) -> Profile:
    """A step also moves the running averages of batch norms by all micro-batches, those of a stage together.

    Two go together as many do, and one does not.
    """
    sizes = [[m.num_features for m in layer.module.modules() if isinstance(m, _BatchNorm)] for layer in layers]
    features = [num for own in sizes for num in own]
    if not features:
        return profile
    chain, batch = [(layer.prefix, layer.module) for layer in layers], batch_of(example[0])
    place = next(p.device for layer in layers for p in (*layer.module.parameters(), *layer.module.buffers()))

    def slower(one: Profile) -> Profile:
        x, y = (placed(take(part, one.microbatch_size, batch), place, None) for part in example)
        training = Step(chain, x, loss, y, Clock(place))
        num_microbatches = -(-batch // one.microbatch_size)
        with untouched(chain, place, None):
            few_s, all_s = (_commit_s(some, num_microbatches, training.plain) for some in (features[:2], features))
        each_s = max(all_s - few_s, 0.0) / max(len(features) - 2, 1)
        slow = [
            msgspec.structs.replace(layer, step_s=layer.step_s + len(own) * each_s)
            for layer, own in zip(one.layers, sizes, strict=True)
        ]
        total_s = one.optimizer_s + all_s
        others = tuple(map(slower, one.others))
        return msgspec.structs.replace(one, layers=tuple(slow), optimizer_s=total_s, others=others)

    return slower(profile)


def _commit_s(features: Sequence[int], num_microbatches: int, before: Callable[[], object]) -> float:
    """Seconds to move the running averages of batch norms by a mini-batch, the median of several.

    `before` does what else a training does, so that of all this nothing is in the processor's caches.
    """
    norms = [nn.BatchNorm1d(num) for num in features]
    for norm in norms:
        DeferredBatchNorm.adopt(norm)
    found = list(deferred(norms))
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < _FEWEST or (len(samples) < _MOST and time.perf_counter() - started < _LIMIT_S):
        for norm in norms * num_microbatches:
            norm(torch.ones(2, norm.num_features))
        before()
        began = time.perf_counter()
        commit(found, 0)
        samples.append(time.perf_counter() - began)
    return median(samples)


@contextmanager
def as_trained(layers: Sequence[NamedLayer]) -> Iterator[None]:
    """Batch norms gather their statistics as they do in a stage, for no update that there is."""
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


def _from_rank_0(session: Session, profile: Profile) -> Profile:
    first = from_first(session, lambda: encode("profile", profile))
    return decode("profile", first, Profile, ProfileError, "the profile of rank 0")
