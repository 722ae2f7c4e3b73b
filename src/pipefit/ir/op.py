"""The operations of instructions: one enum, and one table of facts about each.

Validation, text form, dependency graph, liveness, lanes, costs, drawings and the runtime all read `OP_SPEC`; a fact
about an operation is written nowhere else.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple


class Op(enum.StrEnum):
    """An operation."""

    # Enum's own hash is a function of Python, called millions of times for the tables of a large program.
    __hash__ = str.__hash__

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
    UNSHARD = "unshard"
    REDUCE = "reduce"
    STEP = "step"
    HOST_STEP = "host_step"
    DROP = "drop"
    FREE = "free"
    FETCH = "fetch"
    EVICT = "evict"
    BARRIER = "barrier"


class Lane(enum.StrEnum):
    """The resource that executes an instruction. A rank issues its list in order; only COMPUTE makes it wait."""

    COMPUTE = "compute"
    COMM = "comm"
    COPY = "copy"


class Kind(enum.StrEnum):
    """A kind of value.

    INPUT, ACT, GRAD: of a micro-batch; the input of the model (or the targets), a stage's output, its gradient.
    PIECE, GRAD_PIECE: 1/t of an ACT or GRAD, as it travels between ranks of t tensor-parallel processes.
    SAVED: saved by a forward for its backward.
    HALF: gradients that bwd_input leaves for bwd_weight.
    WGRAD, WEIGHTS, OPTIM: of a stage; gradients of its weights, a version of them, the states of its optimizer.
    SHARDS: the shards of new weights, as replicas have stepped them.
    SUMS: a replica's shard of the gradients, summed over the replicas.
    NORM: the norm of all gradients of an update, or a stage's part of it.
    COMMIT: the knowledge that every rank has whole gradients.
    """

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
    SHARDS = "shards"
    SUMS = "sums"
    NORM = "norm"
    COMMIT = "commit"


class Work(enum.StrEnum):
    """Memory that an instruction takes and frees while it runs, beyond the values that it needs and makes.

    FORWARD: of a forward.
    BARE: of a forward that saves nothing.
    REPLAY: of a recompute.
    FIRST: of the first backward of an update, which makes the gradients of the weights.
    BACKWARD: of a further one, which adds to them.
    LAST: of one that begins a sum, of each bucket of gradients as soon as it is full.
    LOSS: of the loss.
    STEP: of the optimizer.
    EARLY: of a sum of which each replica keeps its part: what it receives of the others for the buckets that the
        last backward fills.
    SUM: the same for other buckets.
    COPIES: of the half copies of a version of a stage's weights, from the first forward that makes them on.
    """

    FORWARD = "forward work"
    BARE = "bare work"
    REPLAY = "replay work"
    FIRST = "first work"
    BACKWARD = "backward work"
    LAST = "last work"
    LOSS = "loss work"
    STEP = "step work"
    EARLY = "early sum work"
    SUM = "sum work"
    COPIES = "half copies"


class Reduction(enum.StrEnum):
    """The kind of a `reduce`.

    REPLICAS: sums gradients over the replicas of a stage.
    SCATTER: the same, and each replica gets the sum of its shard.
    SHARDS: joins the new weights from the shards that replicas have stepped, where each keeps them whole.
    TIED: sums gradients over the stages that share a weight.
    NORM: the norm of all gradients; of a spilled stage, its part of it.
    """

    REPLICAS = "replicas"
    SCATTER = "scatter"
    SHARDS = "shards"
    TIED = "tied"
    NORM = "norm"


WHOLE_OF = {Kind.PIECE.value: Kind.ACT.value, Kind.GRAD_PIECE.value: Kind.GRAD.value}
"""The kind of value that pieces make."""

PIECE_OF = {whole: piece for piece, whole in WHOLE_OF.items()}
"""The kind of its pieces."""


class OpSpec(NamedTuple):
    """Facts about one operation.

    `needs`, `makes` and `consumes` name values by their kind and operands: s a stage, m a micro-batch, w a version or
    update, u the update that micro-batch m belongs to. `pipefit.ir.values` maps these names to values of a program.

    Attributes:
        fields: operands, in the order of the text form.
        lane: the resource that executes it.
        roughly: pseudo-code.
        caution: the one thing to keep in mind.
        letter: its name in drawings; "" where they leave it out.
        needs: values that must be on the rank before it can run.
        makes: values that are on the rank once it is done.
        consumes: values that are gone once it is done.
        kinds: possible values of its operand `kind`.
        seconds: the figures of a `CostModel` whose sum is its time.
        is_awaited: whether it completes asynchronously and the first instruction that needs its value waits for it.
        is_collective: whether several ranks take part in it, each with its own instruction.
    """

    fields: tuple[str, ...]
    lane: Lane
    roughly: str
    caution: str = ""
    letter: str = ""
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    consumes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    seconds: tuple[str, ...] = ()
    is_awaited: bool = False
    is_collective: bool = False


_STAGE_MB = ("stage", "mb")
_VERSIONED = ("stage", "mb", "version")
_FORWARD_NEEDS = ("act[s-1,m]", "weights[s,w]")
_BACKWARD_NEEDS = ("saved[s,m]", "grad[s,m]", "weights[s,w]")
_WHOLES = (Kind.ACT.value, Kind.GRAD.value)
_MESSAGES = (*_WHOLES, *WHOLE_OF)
_MOVED = tuple(k.value for k in (Kind.WEIGHTS, Kind.WGRAD, Kind.OPTIM, Kind.ACT, Kind.INPUT, Kind.GRAD))

OP_SPEC = {
    Op.LOAD: OpSpec(
        _STAGE_MB,
        Lane.COMPUTE,
        "input[s,m] = the stage's slice of the batch",
        "targets are the last stage's input",
        makes=("input[s,m]",),
        seconds=("load_s",),
    ),
    Op.FWD: OpSpec(
        _VERSIONED,
        Lane.COMPUTE,
        "act[s,m], saved[s,m] = stage(act[s-1,m], weights[s,w])",
        "saves nothing when a recompute follows, or where stages are frozen",
        letter="F",
        needs=_FORWARD_NEEDS,
        makes=("act[s,m]", "saved[s,m] unless replayed"),
        seconds=("forward_s",),
    ),
    Op.LOSS: OpSpec(
        ("mb",),
        Lane.COMPUTE,
        "grad[last,m] = ∂loss(act[last,m], input[last,m])/∂act",
        "weighted by the micro-batch's share of its update",
        needs=("act[last,m]", "input[last,m]"),
        makes=("grad[last,m]",),
        seconds=("loss_s",),
    ),
    Op.RECOMPUTE: OpSpec(
        _VERSIONED,
        Lane.COMPUTE,
        "saved[s,m] = replay of fwd",
        "same weights and same random numbers as its fwd",
        letter="R",
        needs=_FORWARD_NEEDS,
        makes=("saved[s,m]",),
        seconds=("recompute_s",),
    ),
    Op.BWD: OpSpec(
        _VERSIONED,
        Lane.COMPUTE,
        "grad[s-1,m]; wgrad[s,u] += …",
        "same weights as its fwd",
        letter="B",
        needs=_BACKWARD_NEEDS,
        makes=("grad[s-1,m]", "wgrad[s,u]"),
        consumes=("saved[s,m]", "grad[s,m]"),
        seconds=("backward_input_s", "backward_weight_s"),
    ),
    Op.BWD_INPUT: OpSpec(
        _VERSIONED,
        Lane.COMPUTE,
        "grad[s-1,m]",
        "keeps saved[s,m] until bwd_weight",
        letter="I",
        needs=_BACKWARD_NEEDS,
        makes=("grad[s-1,m]", "half[s,m]"),
        consumes=("grad[s,m]",),
        seconds=("backward_input_s", "split_input_s"),
    ),
    Op.BWD_WEIGHT: OpSpec(
        _VERSIONED,
        Lane.COMPUTE,
        "wgrad[s,u] += …",
        "after its bwd_input",
        letter="W",
        needs=("saved[s,m]", "half[s,m]", "weights[s,w]"),
        makes=("wgrad[s,u]",),
        consumes=("saved[s,m]", "half[s,m]"),
        seconds=("backward_weight_s", "split_s"),
    ),
    Op.SEND: OpSpec(
        ("stage", "mb", "kind", "peer"),
        Lane.COMM,
        "kind[s,m] → peer",
        "may block until its receive is posted",
        needs=("whole kind[s,m]",),
        kinds=_MESSAGES,
    ),
    Op.RECV: OpSpec(
        ("stage", "mb", "kind", "peer"),
        Lane.COMM,
        "kind[s,m] ← peer",
        "posts a buffer; an instruction that needs the value waits",
        makes=("kind[s,m]",),
        kinds=_MESSAGES,
        is_awaited=True,
    ),
    Op.GATHER: OpSpec(
        ("stage", "mb", "kind"),
        Lane.COMM,
        "kind[s,m] = join of the 1/t pieces",
        "over the tensor-parallel ranks of the stage",
        needs=("piece of kind[s,m]",),
        makes=("kind[s,m]",),
        kinds=_WHOLES,
    ),
    Op.REDUCE: OpSpec(
        ("stage", "version", "kind"),
        Lane.COMM,
        "wgrad[s,w] summed over replicas (scatter: to each its part), or over the stages that share a weight; the norm "
        "of all; or (shards) weights[s,w+1] from the parts that replicas have stepped",
        "a collective: same order on all members",
        needs=("terms[s,w]",),
        makes=("result[s,w]",),
        kinds=tuple(kind.value for kind in Reduction),
        is_awaited=True,
        is_collective=True,
    ),
    Op.UNSHARD: OpSpec(
        ("stage", "version"),
        Lane.COMM,
        "weights[s,w] = join of the shards that the replicas keep",
        "a collective: same order on all members; after the step that made version w",
        needs=("shards of weights[s,w]",),
        makes=("weights[s,w]",),
        is_awaited=True,
        is_collective=True,
    ),
    Op.STEP: OpSpec(
        ("stage", "version"),
        Lane.COMPUTE,
        "weights[s,w+1] = optimizer(weights[s,w], wgrad[s,w])",
        "in place when weights[s,w] is dropped next",
        letter="S",
        needs=("stepped weights[s,w]", "summed[s,w]", "optim[s,w]", "norm[w]", "commit"),
        makes=("stepped[s,w+1]", "optim[s,w+1]"),
        consumes=("in slots[s,w]",),
        seconds=("step_s",),
    ),
    Op.HOST_STEP: OpSpec(
        ("stage", "version"),
        Lane.COPY,
        "on the host: weights[s,w+1] = optimizer(weights[s,w], wgrad[s,w])",
        "only after the gradients are written back; a fetch of weights[s,w+1] waits for it",
        needs=("norm[w]",),
        seconds=("host_step_s",),
    ),
    Op.DROP: OpSpec(
        ("stage", "version"),
        Lane.COMPUTE,
        "free weights[s,w]",
        needs=("weights[s,w]",),
        consumes=("weights[s,w]",),
    ),
    Op.FREE: OpSpec(
        ("stage", "version"),
        Lane.COMPUTE,
        "free wgrad[s,w], of which this replica keeps the summed shard",
        needs=("wgrad[s,w]", "summed[s,w]"),
        consumes=("wgrad[s,w]",),
    ),
    Op.FETCH: OpSpec(
        ("stage", "kind", "version", "tier", "slot"),
        Lane.COPY,
        "slot: kind[s,w] ← tier",
        "only after the tier holds that version and the slot is free",
        makes=("kind[s,w]",),
        kinds=_MOVED,
        is_awaited=True,
    ),
    Op.EVICT: OpSpec(
        ("stage", "kind", "version", "tier"),
        Lane.COPY,
        "kind[s,w] → tier; its slot is free",
        "written back once it is committed",
        needs=("kind[s,w]",),
        consumes=("kind[s,w]",),
        kinds=_MOVED,
    ),
    Op.BARRIER: OpSpec(
        (),
        Lane.COMM,
        "all ranks",
        "a collective of every rank; where steps are committed, between all gradients and the first step",
        needs=("whole gradients",),
        makes=("commit",),
        is_awaited=True,
        is_collective=True,
    ),
}


def _ops(fact: Callable[[OpSpec], bool]) -> frozenset[Op]:
    return frozenset(op for op, spec in OP_SPEC.items() if fact(spec))


COMPUTE_OPS = _ops(lambda spec: spec.fields == _VERSIONED)
"""The operations of the model's computation, which schedules order. They use a version of a stage's weights."""

FORWARD_OPS = _ops(lambda spec: spec.needs == _FORWARD_NEEDS)
"""Forwards and their replays."""

BACKWARD_OPS = _ops(lambda spec: "saved[s,m]" in spec.needs)
"""Backwards and their halves."""

GRADIENT_OPS = _ops(lambda spec: "grad[s-1,m]" in spec.makes)
"""The backwards that make the gradient of a stage's input."""

WEIGHT_GRADIENT_OPS = _ops(lambda spec: "wgrad[s,u]" in spec.makes)
"""The backwards that add to the gradients of a stage's weights."""

MESSAGE_OPS = _ops(lambda spec: "peer" in spec.fields)
"""Sends and receives."""

WORK_OPS = _ops(lambda spec: spec.lane is Lane.COMPUTE)
"""The operations of the compute lane, for which their rank waits."""

COPY_OPS = _ops(lambda spec: spec.lane is Lane.COPY)
"""Copies between a device and its tier, and steps on the host: operations that queue on their lane."""

STEP_OPS = (Op.STEP, Op.HOST_STEP)
"""The operations that make an update, on the device or on the host."""
