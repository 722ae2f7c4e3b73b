"""The lecture on training large networks with limited hardware: GPipe, Hydra, PipeDream, PipeDream-2BW."""

from __future__ import annotations

from pipefit.reproduce.entry import Bench, Entry, Value, drawn, figure
from pipefit.reproduce.pipedream_gpipe import GPIPE, PIPEDREAM, same_version, versions_used
from pipefit.reproduce.steps import Draw

DECK = "Training with limited hardware"
HYDRA = "Nagrecha and Kumar, Hydra (PVLDB 2022)"
DOUBLE = "Narayanan et al., PipeDream-2BW (ICML 2021)"

_SPILLED = {slots: Draw("spilled", 4, 2, slots=slots) for slots in (1, 2)}
_DOUBLE = Draw("pipedream-2bw", 4, 4, num_steps=6)
_VERTICAL = Draw("pipedream-vertical-sync", 4, 12)


def _version_rule(run: Bench) -> bool:
    """Whether micro-batch k, from 1, uses version max(⌊(k − 1)/m⌋ − 1, 0) at every stage."""
    return all(
        versions_used(run, _DOUBLE, stage, k - 1)["fwd"] == max((k - 1) // 4 - 1, 0)
        for stage in range(4)
        for k in range(1, 25)
    )


ENTRIES = (
    Entry(
        "spilled-execution",
        "Hydra: spilled execution",
        "A model of four shards on one device: each shard is fetched twice per step",
        "drawn",
        HYDRA + ", section 4",
        (
            Value(
                "fetches of weights by shards 1 to 3",
                lambda run: sum(
                    i.op.value == "fetch" and i.kind == "weights" for _, _, i in run(_SPILLED[1]).program
                ),
                7,
                why="The last shard's forward and backward follow each other, so it is fetched once: 2·4 − 1 = 7.",
            ),
        ),
        (drawn(_SPILLED[1], "Spilled execution, one slot"),),
    ),
)
