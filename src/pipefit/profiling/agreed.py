"""A profile on which all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import msgspec
import torch
from torch.utils._pytree import tree_map

from pipefit.profiling.kinds import profile_kinds
from pipefit.profiling.machine import measure_device
from pipefit.profiling.measure import profile_sizes
from pipefit.profiling.workload import Workload
from pipefit.runtime.collectives import agree, attempt, meet
from pipefit.runtime.progress import MEASURING
from pipefit.runtime.session import Session
from pipefit.spec import Profile
from pipefit.stage.compiler import Forwards, compiled_forwards
from pipefit.stage.half_copies import HalfCopies
from pipefit.stage.materialise import is_meta
from pipefit.stage.stage import replaced_forwards

_REPEATS = 9
_LIMIT_S = 5.0


def agreed_profile(
    work: Workload, microbatch_sizes: Sequence[int], session: Session, repeats: int = _REPEATS, warmup: int = 3
) -> Profile:
    """Measures the layers at the micro-batch sizes of the run; every rank gets the figures of rank 0.

    All ranks measure at the same time, so that they slow each other down as they will in the run. Of a model without
    weights yet (meta device) one layer of each kind is measured, so that there is never more than one in memory.

    Args:
        work: with an example of at least the largest size; with batch norms, of as many samples as an update has.
        microbatch_sizes: the first is the profile's own, further ones are its `others`.
        session: the ranks of the run.
        repeats: as in `profile_layers`.
        warmup: as in `profile_layers`.
    """
    if is_meta(work.layers):
        return agreed(session, lambda: _by_kinds(work, microbatch_sizes))
    x, y = work.batch("measuring the layers")
    forwards = compiled_forwards(work.layers, work.compiler)
    halves = HalfCopies()
    if work.half is not None:
        # Compiled forwards cast their weights.
        layers = [] if forwards else [layer.module for layer in work.layers]
        halves.take(layers, work.half, work.device.type)
        forwards |= halves.forwards
        forwards |= _under_autocast(work, forwards)

    def measure() -> Profile:
        return profile_sizes(
            work.layers,
            x,
            work.loss_of,
            y,
            microbatch_sizes=microbatch_sizes,
            repeats=repeats,
            warmup=warmup,
            limit_s=_LIMIT_S,
            device=work.device,
            threads=None,
            optimizer=work.optimizer,
            clips=work.clips,
            halves=halves,
        )

    with replaced_forwards(forwards):
        return agreed(session, measure)


def _under_autocast(work: Workload, compiled: Forwards) -> Forwards:
    """The forwards of all layers under autocast, as a stage runs them."""
    assert work.half is not None
    autocast = torch.autocast(work.device.type, work.half)
    modules = [layer.module for layer in work.layers]
    return {module: autocast(compiled.get(module, module.forward)) for module in modules}


def _by_kinds(work: Workload, microbatch_sizes: Sequence[int]) -> Profile:
    dtype = work.half or torch.float32
    device = measure_device(work.device, threads=None, repeats=3, dtype=dtype)
    first, *others = (profile_kinds(work, size, device) for size in microbatch_sizes)
    return first.with_others(others)


def median_profile(profiles: Sequence[Profile]) -> Profile:
    """Combines measurements of the same layers: each figure is the median of theirs."""
    trees = [msgspec.to_builtins(profile) for profile in profiles]

    def middle(*figures: Any) -> Any:
        if isinstance(figures[0], float):
            return median(figures)
        return figures[0]

    merged = tree_map(middle, *trees)
    return msgspec.convert(merged, Profile)


def agreed(session: Session, measure: Callable[[], Profile]) -> Profile:
    """The profile of rank 0; all measure at the same time, to slow each other down as they will in the run."""
    if not session.is_distributed:
        return measure()
    with session.at(MEASURING):
        meet(session)
        found = agree(session, attempt(lambda: msgspec.to_builtins(measure())))
    return msgspec.convert(found[0], Profile)
