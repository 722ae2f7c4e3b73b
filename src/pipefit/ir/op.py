"""What an instruction can be: one enum, and one table of facts about it.

Validation, text form, dependency graph, lanes, costs, drawings and the runtime's handlers all read `OP_SPEC`;
nothing about an operation is written anywhere else.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

__all__ = ["COMPUTE_OPS", "OP_SPEC", "STEP_OPS", "Kind", "Lane", "Op", "OpSpec"]


class Op(enum.StrEnum):
    """An operation."""

    LOAD = "load"
    FWD = "fwd"
    LOSS = "loss"
    RECOMPUTE = "recompute"
    BWD = "bwd"
    BWD_INPUT = "bwd_input"
    BWD_WEIGHT = "bwd_weight"
    SEND = "send"
    RECV = "recv"
    GATHER = "gather"
    REDUCE = "reduce"
    STEP = "step"
    HOST_STEP = "host_step"
    DROP = "drop"
    FETCH = "fetch"
    EVICT = "evict"
    BARRIER = "barrier"


class Lane(enum.StrEnum):
    """What carries an instruction out. A rank issues its list in order; only the compute lane makes it wait."""

    COMPUTE = "compute"
    COMM = "comm"
    COPY = "copy"


class Kind(enum.StrEnum):
    """What a value is, or what a reduction reduces."""

    INPUT = "input"
    ACT = "act"
    PIECE = "act-piece"
    GRAD = "grad"
    GRAD_PIECE = "grad-piece"
    SAVED = "saved"
    HALF = "half"
    WGRAD = "wgrad"
    WEIGHTS = "weights"
    OPTIM = "optim"
    REPLICAS = "replicas"
    SCATTER = "scatter"
    SHARDS = "shards"
    TIED = "tied"
    NORM = "norm"


class OpSpec(NamedTuple):
    """Facts about one operation.

    Attributes:
        fields: operands, in the order of the text form.
        lane: what carries it out.
        letter: how drawings name it; "" where they leave it out.
        roughly: pseudo-code.
        caution: the one thing to keep in mind.
    """

    fields: tuple[str, ...]
    lane: Lane
    letter: str
    roughly: str
    caution: str = ""


_STAGE_MB = ("stage", "mb")
_VERSIONED = ("stage", "mb", "version")

OP_SPEC: Final[dict[Op, OpSpec]] = {
    Op.LOAD: OpSpec(
        _STAGE_MB, Lane.COMPUTE, "", "input[s,m] = the stage's slice of the batch", "targets are the last stage's input"
    ),
    Op.FWD: OpSpec(
        _VERSIONED,
        Lane.COMPUTE,
        "F",
        "act[s,m], saved[s,m] = stage(act[s-1,m], weights[s,w])",
        "saves nothing when a recompute follows",
    ),
    Op.LOSS: OpSpec(
        ("mb",),
        Lane.COMPUTE,
        "",
        "grad[last,m] = ∂loss(act[last,m], input[last,m])/∂act",
        "weighted by the micro-batch's share of its update",
    ),
    Op.RECOMPUTE: OpSpec(
        _VERSIONED, Lane.COMPUTE, "R", "saved[s,m] = replay of fwd", "same weights and same random numbers as its fwd"
    ),
    Op.BWD: OpSpec(_VERSIONED, Lane.COMPUTE, "B", "grad[s-1,m]; wgrad[s,u] += …", "same weights as its fwd"),
    Op.BWD_INPUT: OpSpec(_VERSIONED, Lane.COMPUTE, "I", "grad[s-1,m]", "keeps saved[s,m] until bwd_weight"),
    Op.BWD_WEIGHT: OpSpec(_VERSIONED, Lane.COMPUTE, "W", "wgrad[s,u] += …", "after its bwd_input"),
    Op.SEND: OpSpec(
        ("stage", "mb", "kind", "peer"), Lane.COMM, "", "kind[s,m] → peer", "may block until its receive is posted"
    ),
    Op.RECV: OpSpec(
        ("stage", "mb", "kind", "peer"),
        Lane.COMM,
        "",
        "kind[s,m] ← peer",
        "posts a buffer; whoever needs the value waits",
    ),
    Op.GATHER: OpSpec(
        ("stage", "mb", "kind"),
        Lane.COMM,
        "",
        "kind[s,m] = join of the 1/t pieces",
        "over the tensor-parallel ranks of the stage",
    ),
    Op.REDUCE: OpSpec(
        ("stage", "version", "kind"),
        Lane.COMM,
        "",
        "wgrad[s,w] summed over replicas (scatter: to each its part), or over the stages that share a weight; the norm "
        "of all; or (shards) weights[s,w+1] from the parts that replicas have stepped",
        "a collective: same order on all members",
    ),
    Op.STEP: OpSpec(
        ("stage", "version"),
        Lane.COMPUTE,
        "S",
        "weights[s,w+1] = optimizer(weights[s,w], wgrad[s,w])",
        "in place when weights[s,w] is dropped next",
    ),
    Op.HOST_STEP: OpSpec(
        ("stage", "version"),
        Lane.COPY,
        "",
        "on the host: weights[s,w+1] = optimizer(weights[s,w], wgrad[s,w])",
        "only after the gradients are written back; a fetch of weights[s,w+1] waits for it",
    ),
    Op.DROP: OpSpec(("stage", "version"), Lane.COMPUTE, "", "forget weights[s,w]"),
    Op.FETCH: OpSpec(
        ("stage", "kind", "version", "tier", "slot"),
        Lane.COPY,
        "",
        "slot: kind[s,w] ← tier",
        "only after the tier holds that version and the slot is free",
    ),
    Op.EVICT: OpSpec(
        ("stage", "kind", "version", "tier"),
        Lane.COPY,
        "",
        "kind[s,w] → tier; its slot is free",
        "written back once it is committed",
    ),
    Op.BARRIER: OpSpec((), Lane.COMM, "", "all ranks", "a collective of every rank"),
}

COMPUTE_OPS: Final = frozenset({Op.FWD, Op.RECOMPUTE, Op.BWD, Op.BWD_INPUT, Op.BWD_WEIGHT})
"""The operations whose time is the model's: what schedules order."""

STEP_OPS: Final = (Op.STEP, Op.HOST_STEP)
"""The operations that make an update, on the device or on the host."""
