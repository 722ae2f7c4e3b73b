"""Trainings with copies of stages that lose ranks and go on in the same processes; importable by name."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.parallel import tensor_jobs
from tests.runtime import jobs
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pipefit import Checkpoints
from pipefit.cutting import cut
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Op
from pipefit.models.examples import mean_cross_entropy
from pipefit.pipeline import callbacks
from pipefit.pipeline import pipeline as module
from pipefit.pipeline.loggers import csv_log
from pipefit.pipeline.programs import Programs
from pipefit.planner import plan_without
from pipefit.runtime import notes
from pipefit.runtime.distributed import DistributedTransport
from pipefit.runtime.progress import TOGETHER
from pipefit.runtime.repairs import InterruptedUnitError
from pipefit.runtime.session import Session, current
from pipefit.runtime.transport import Message

COPIES: dict[str, Any] = {"replicas": 2, "microbatches": 4}
CLIPPED = 0.05
"""The norm of gradients where processes share layers."""


class Counting(nn.Module):
    """Scales its input by the number of its forwards, which it keeps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return x * self.count


class Fault(NamedTuple):
    """A signal that a rank gets in the first start of a run.

    Attributes:
        rank: its number at the start.
        at: an operation, whose first instruction it comes to, or a place outside of programs.
        passes: at least as many passes have begun.
        number: of the signal; 0: its code raises an error.
    """

    rank: int
    at: str | int
    passes: int
    number: int = signal.SIGKILL


class Trained(NamedTuple):
    """The results of a rank.

    Attributes:
        figures: losses of the steps, and of evaluations.
        weights: of the whole model, with its buffers.
        pid: of the process.
    """

    figures: list[float]
    weights: dict[str, Tensor]
    pid: int


def train(place: str, options: dict[str, Any], faults: list[Fault]) -> Trained:
    """Trains in double precision, with all that a run does besides."""
    Path(place, str(os.getpid())).touch()
    number = current().rank
    pipe = jobs.pipeline(model=jobs.model().double(), **options)
    suffer(pipe, [fault for fault in faults if fault.rank == number and not current().start.restart])
    data = [(x.double(), y) for x, y in jobs.batches(5)]
    loader = DataLoader([(x, y) for batch in data for x, y in zip(*batch, strict=True)], batch_size=8, shuffle=True)
    callbacks = [Checkpoints(pipe, f"{place}/checkpoints", every=2), csv_log(f"{place}/log.csv")]
    figures = pipe.fit(loader, 3, callbacks=callbacks, held_out=data[:1], evaluate_every=2)
    figures += pipe.fit(loader, 2)
    figures.append(pipe.evaluate(data[:2]))
    figures += [pipe.step(*batch) for batch in data[:2]]
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in pipe.state_dict().items()}
    pipe.report()
    pipe.close()
    return Trained(figures, weights, os.getpid())


def train_over_late_connections(place: str, options: dict[str, Any], faults: list[Fault]) -> Trained:
    """Trains as `train` does; connections are there only after a loss was reported, and all were shut down."""
    shut_down = notes.shut_down
    calls: list[set[int]] = []

    def late(before: set[int]) -> None:
        calls.append(before)
        if len(calls) > 1:
            shut_down(before)

    notes.shut_down = late
    return train(place, options, faults)


def generate(faults: list[Fault]) -> tuple[list[float], list[list[int]]]:
    """Losses before and after a generation in which ranks get signals, and its tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM  # other jobs need not load it

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = torch.randint(0, 64, (8, 12))
    batch = {"input_ids": ids, "labels": ids}
    model = cut(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), batch)
    pipe = jobs.pipeline(model=model, loss=None, **COPIES)
    losses = pipe.fit([batch] * 2)
    if not current().start.restart:
        suffer(pipe, [fault for fault in faults if fault.rank == pipe.rank])
    tokens = pipe.generate(ids[:2, :4], max_new_tokens=6)
    return losses + pipe.fit([batch] * 2), tokens.tolist()


def shared_layers() -> nn.Sequential:
    """Layers in double precision, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.05, weight_decay=0.1)


def train_shared(shard: str, options: dict[str, Any], faults: list[Fault]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of six steps and an evaluation, and the weights, where copies of stages share something."""
    pipe = jobs.pipeline(model=shared_layers(), optimizer=adam, shard=shard, microbatches=4, **options)
    if not current().start.restart:
        suffer(pipe, [fault for fault in faults if fault.rank == pipe.rank])
    data = [(x.double(), y) for x, y in jobs.batches(6)]
    losses = pipe.fit(data[:4]) + pipe.fit(data[4:])
    losses.append(pipe.evaluate(data[:1]))
    return losses, pipe.state_dict()


def train_in_pairs(options: dict[str, Any], faults: list[Fault]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of five steps and an evaluation, and the weights, of a GPT whose layers two processes share."""
    settings = {"model": tensor_jobs.model(), "loss": mean_cross_entropy, "optimizer": adam, "clip_norm": CLIPPED}
    pipe = jobs.pipeline(tensor=2, microbatches=4, **settings, **options)
    if not current().start.restart:
        suffer(pipe, [fault for fault in faults if fault.rank == current().rank])
    data = [tensor_jobs.batch(8, step) for step in range(5)]
    losses = [*pipe.fit(data), pipe.evaluate(data[:1])]
    return losses, pipe.state_dict()


class Widened(nn.Module):
    """Repeats its input, so that a message has more bytes than connections hold."""

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, 1_000_000)


class Narrowed(nn.Module):
    """The mean of what was repeated."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, 4).mean(1)


def train_wide() -> list[float]:
    """Losses of three steps; a rank dies as its first message of the second one leaves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Widened(), Narrowed(), nn.Linear(4, 3)).double()
    pipe = jobs.pipeline(model=model, stages=[2, 2], replicas=2, microbatches=2)
    begun = DistributedTransport.send
    with pytest.MonkeyPatch.context() as patch:

        def send(transport: DistributedTransport, instruction: Instruction, message: Message) -> None:
            begun(transport, instruction, message)
            if current().rank == 0 and current().progress.passes == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        if not current().start.restart and current().num_ranks == 4:
            patch.setattr(DistributedTransport, "send", send)
        return pipe.fit([(x[:2].double(), y[:2]) for x, y in jobs.batches(3)])


def count_forwards(fault: Fault) -> tuple[list[float], int]:
    """Losses of a training, and the forwards of its last stage, which has no copy."""
    model = jobs.model().double().append(Counting())
    pipe = jobs.pipeline(model=model, stages=2, replicas=(2, 1), microbatches=4)
    if current().rank == fault.rank and not current().start.restart:
        suffer(pipe, [fault])
    losses = pipe.fit([(x.double(), y) for x, y in jobs.batches(3)])
    return losses, int(pipe.state_dict()["6.count"])


def suffer(pipe: Any, faults: list[Fault]) -> None:
    """Lets this rank get signals at some places."""
    progress = current().progress
    original: Callable[..., None] = progress.at
    left = list(faults)

    def at(here: int, waits: bool = False) -> None:
        original(here, waits)
        for fault in list(left):
            if progress.passes >= fault.passes and is_at(pipe, here, fault.at):
                left.remove(fault)
                if not fault.number:
                    raise ValueError("a fault of the user's code")
                os.kill(os.getpid(), fault.number)

    progress.at = at  # type: ignore[method-assign]


def is_at(pipe: Any, here: int, wanted: str | int) -> bool:
    """Returns whether a position is the wanted place, or an instruction of the wanted operation."""
    if isinstance(wanted, int):
        return here == wanted
    own = pipe.program.ranks[pipe.rank // pipe.plan.tensor]
    return 0 <= here < len(own) and own[here].op is Op(wanted)


class Prepared(NamedTuple):
    """The losses for which a training of six steps was prepared.

    Attributes:
        numbers: of them, after each step.
        planned: whether plan and program of each are those that are made after the loss.
        taken: after each step, the loss whose prepared programs the training has; −1: none.
        losses: of the steps.
    """

    numbers: list[int]
    planned: list[bool]
    taken: list[int]
    losses: list[float]


def go_on_as_prepared(faults: list[Fault]) -> Prepared:
    """Trains in double precision, and looks at the programs that are prepared for losses of ranks."""
    pipe = jobs.pipeline(model=jobs.model().double(), **COPIES)
    suffer(pipe, [fault for fault in faults if fault.rank == current().rank])
    found = Prepared([], [], [], [])
    known: list[Programs] = []
    for x, y in jobs.batches(6):
        found.losses.append(pipe.step(x.double(), y))
        found.numbers.append(len(pipe.programs.without))
        found.taken.append(-1)
        if pipe.programs in known:
            found.taken[-1] = known.index(pipe.programs)
        for lost, programs in pipe.programs.without.items():
            assert programs is not None
            if programs not in known:
                known.append(programs)
            plan = plan_without(pipe.plan, *lost)
            after = Programs(plan, pipe.training, pipe.layers, None).shortest()
            found.planned.append(programs.plan == plan and programs.shortest().digest == after.digest)
    return found


def steps_in(log: Path) -> list[str]:
    """The steps in a log, in the order of its lines."""
    return [line.partition(",")[0] for line in log.read_text().splitlines()[1:]]


def go_on_after_an_interruption(what: str, place: str) -> list[bool]:
    """Two ranks are interrupted once in a unit: the first one after a function, the other when it has done all.

    Args:
        what: "close" or "checkpoint".
        place: a folder.

    Returns:
        Whether each weight of the model lacks memory at the end.
    """
    owner, name = {"close": (module, "whole_state"), "checkpoint": (callbacks, "from_first")}[what]
    function = getattr(owner, name)
    call = Session._call
    interruptions = iter([InterruptedUnitError()])
    done = []
    pipe = jobs.pipeline(stages=2)

    def function_once_in_vain(*args: Any) -> Any:
        result = function(*args)
        done.append(result)
        for one in interruptions if pipe.rank == 0 else ():
            raise one
        return result

    def call_once_in_vain(session: Session, name: str) -> None:
        for one in interruptions if done and name == TOGETHER else ():
            raise one
        call(session, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, function_once_in_vain)
        patch.setattr(Session, "_call", call_once_in_vain)
        pipe.fit(jobs.batches(2), callbacks=[Checkpoints(pipe, place, every=1)])
        pipe.close()
    assert next(interruptions, None) is None
    return [parameter.is_meta for parameter in pipe.model.parameters()]
