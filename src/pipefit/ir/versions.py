"""The version of a stage's weights that each micro-batch must use: the four rules of `WeightRule`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pipefit.ir.instruction import Instructions, StageAt, StageNumbers
from pipefit.ir.op import WEIGHT_GRADIENT_OPS, Op
from pipefit.ir.program import Header, WeightRule


def required_versions(header: Header, ranks: Sequence[Instructions]) -> Mapping[StageAt, int]:
    """The version for each (stage, micro-batch) whose forward is in the program.

    The rules with "newest" depend on the order of forwards and backwards: an update is finished on a rank after the
    backward of its last micro-batch there. A frozen stage has one version; vertical sync asks the first trained stage.

    Source: PipeDream (SOSP 2019) §3.3 for stashing and vertical sync; PipeDream-2BW (ICML 2021) §3.1.
    """
    pairs = [(i.stage, i.mb) for rank in ranks for i in rank if i.op is Op.FWD]
    frozen = [pair for pair in pairs if pair[0] < header.frozen]
    return _by_rule(header, ranks, pairs) | dict.fromkeys(frozen, 0)


def _by_rule(header: Header, ranks: Sequence[Instructions], pairs: Sequence[StageAt]) -> StageNumbers:
    if header.weights is WeightRule.FLUSH:
        return {(stage, mb): header.update_of(stage, mb) for stage, mb in pairs}
    if header.weights is WeightRule.DOUBLE:
        return {(stage, mb): max(header.update_of(stage, mb) - 1, 0) for stage, mb in pairs}
    newest = {}
    for rank, instructions in enumerate(ranks):
        newest.update(_newest(header, rank, instructions))
    if header.weights is WeightRule.STASH:
        return newest
    return {(stage, mb): newest.get((header.frozen, mb), 0) for stage, mb in pairs}


def _newest(header: Header, rank: int, instructions: Instructions) -> StageNumbers:
    """Number of updates that each stage of the rank has finished when the forward of each micro-batch starts."""
    stages = header.stages_of(rank)
    pending: Counter[StageAt] = Counter()
    for stage in stages:
        for mb in header.microbatches_of(stage, rank):
            pending[stage, header.update_of(stage, mb)] += 1
    finished = dict.fromkeys(stages, 0)
    result = {}
    for i in instructions:
        stage = i.stage
        if i.op is Op.FWD:
            result[stage, i.mb] = finished.get(stage, 0)
        elif i.op in WEIGHT_GRADIENT_OPS:
            pending[stage, header.update_of(stage, i.mb)] -= 1
            while pending.get((stage, finished.get(stage, 0)), 1) == 0:
                finished[stage] += 1
    return result
