"""A GPT that does not fit on one device, trained there in three ways, side by side.

    resident   everything on the device, without a cap: the baseline
    spilled    under a cap: stages are fetched from the host's memory and written back, double-buffered, by a plan
    offloaded  torch's FSDP2 in one process: weights, gradients and Adam's states on the host, which steps; each block
               is fetched when it is needed, and replayed in the backward, as the stages of a spilled run are

All compute in bfloat16 over float32 weights, and step with torch's fused Adam. Each way has its own process for each
number of tokens, so peaks are separate, and one that runs out of memory does not affect the others.

The device should be a GPU. On a CPU the same code runs, which tests it but does not measure its speed: there a peak is
the process's resident memory, and the cap applies to the tensors of the plan.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist
from cyclopts import Parameter
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from pipefit.errors import InfeasibleError, PipefitError, TierError
from pipefit.models import ModelBundle, build
from pipefit.pipeline.pipeline import Pipeline
from pipefit.profiling import measure_tier
from pipefit.spec import Tier
from pipefit.spec.options import Parallelism, Spilled
from pipefit.units import format_bytes, format_seconds, parse_quantity

GIB = 2**30
ROOT = Path(__file__).parents[1]
TOKENS = (4096, 16384, 65536)
WAYS = ("resident", "spilled", "offloaded")


@dataclass(frozen=True)
class OffloadConfig:
    """The model, and where it is trained.

    Attributes:
        device: "cuda" or "cpu".
        layers, hidden, heads, vocab, context: of the GPT.
        cap_bytes: on the device's memory, of the spilled run.
        part: tokens of a micro-batch, resident and spilled.
        fsdp_part: tokens of a micro-batch of FSDP, which moves all weights for each.
        steps: that are timed, after one that is not.
    """

    device: str = "cuda"
    layers: int = 32
    hidden: int = 2560
    heads: int = 32
    vocab: int = 32768
    context: int = 2048
    cap_bytes: float = 20 * GIB
    part: int = 4096
    fsdp_part: int = 16384
    steps: int = 3


USUAL = OffloadConfig()


@dataclass(frozen=True)
class OffloadRow:
    """One way, at one number of tokens.

    Attributes:
        way: of `WAYS`.
        tokens: per step.
        seconds: per step; None: it has failed.
        peak_bytes: the most memory of the device that tensors had since the process began.
        loss: of the last step. Resident and spilled weights begin alike, and between stages activations are bfloat16.
        predicted_s: of a step, where there is a plan.
        note: how it was done, or why it was not.
    """

    way: str
    tokens: int
    seconds: float | None = None
    peak_bytes: float | None = None
    loss: float | None = None
    predicted_s: float | None = None
    note: str = ""


def rates(config: OffloadConfig) -> Tier:
    """Measures the copies between device and host, in a process of its own.

    Raises:
        PipefitError: there is no such device, or it has failed.
    """
    _check(config)
    return Tier(**_of_child({"config": asdict(config)}))


def offload(
    config: OffloadConfig,
    tokens: Sequence[int] = TOKENS,
    ways: Sequence[str] = WAYS,
    on_row: Callable[[OffloadRow], None] | None = None,
) -> list[OffloadRow]:
    """Trains in every way at every number of tokens; one that runs out of memory is a row that says so.

    Args:
        config: what is trained.
        tokens: per step; a multiple of the context, or less than it.
        ways: which.
        on_row: called with each row as it is done.

    Raises:
        PipefitError: there is no such device, or a process has failed for another reason.
    """
    _check(config)
    rows = []
    for count in tokens:
        if count > config.context and count % config.context:
            raise PipefitError(f"tokens: expected multiples of the context, {config.context}, got {count}")
        for way in ways:
            try:
                row = OffloadRow(**_of_child({"config": asdict(config), "way": way, "tokens": count}))
            except _KilledError as problem:
                row = OffloadRow(way, count, note=str(problem))
            rows.append(row)
            if on_row is not None:
                on_row(row)
    return rows


def _check(config: OffloadConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise PipefitError(
            "this benchmark is for a GPU, and torch sees none here; to try its code, --device cpu with a small model, "
            "like --layers 4 --hidden 64 --heads 2 --vocab 64 --context 32 --part 64 --tokens 64 --cap '3 MiB'"
        )


class _KilledError(PipefitError):
    """A process was ended from outside, as one is that takes more memory than the host has."""


def _of_child(request: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.offload", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode < 0:
        raise _KilledError(f"killed by signal {-done.returncode}")
    if done.returncode:
        raise PipefitError(f"{request.get('way', 'rates')}: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- in a process of its own ---------------------------------------------------------------------------------------


def _answer(config: OffloadConfig, way: str | None = None, tokens: int = 0) -> Tier | OffloadRow:
    if way is None:
        return measure_tier(None, config.device)
    try:
        return _TRAINED[way](config, tokens)
    except (RuntimeError, PipefitError) as problem:
        if not _is_lack_of_memory(problem):
            raise
        return OffloadRow(way, tokens, note=f"out of memory: {problem}".splitlines()[0])


def _is_lack_of_memory(problem: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, is a lack of memory."""
    while problem is not None:
        if isinstance(problem, torch.OutOfMemoryError | InfeasibleError | TierError):
            return True
        problem = problem.__cause__
    return False


def _resident(config: OffloadConfig, tokens: int) -> OffloadRow:
    pipe = _pipeline(config, tokens, stages=1)
    seconds, loss = _timed(config, tokens, pipe.step)
    return OffloadRow("resident", tokens, seconds, _peak_bytes(config), loss)


def _spilled(config: OffloadConfig, tokens: int) -> OffloadRow:
    bundle = _gpt(config, "meta")
    # Memory in use only inside an instruction: a weight's new gradient, and both in bfloat16.
    moment = 3 * max(p.nbytes for p in bundle.layers.parameters())
    if config.cap_bytes <= moment:
        raise InfeasibleError(
            f"{format_bytes(moment)} come and go inside an instruction, the cap is {format_bytes(config.cap_bytes)}"
        )
    example = next(_batches(config, tokens))
    pipe = _pipeline(config, tokens, bundle, spill=Spilled(config.cap_bytes - moment), example=example)
    plan = pipe.plan
    if plan.spill is None or plan.prediction is None:
        raise PipefitError("the model fits the cap: there is nothing to spill")
    seconds, loss = _timed(config, tokens, pipe.step, pipe.settle)
    header = pipe.program.header
    on_host = sum(header.steps_on_host(stage) for stage in range(header.num_stages))
    cut = f"{header.num_stages} stages, {plan.spill.weights_slots} slots, {on_host} step on the host"
    note = f"{cut}; {plan.spill.binds} binds"
    row = OffloadRow("spilled", tokens, seconds, _peak_bytes(config), loss, plan.prediction.period_s, note)
    pipe.close()
    return row


def _offloaded(config: OffloadConfig, tokens: int) -> OffloadRow:
    device = torch.device(config.device)
    is_cuda = device.type == "cuda"
    dist.init_process_group("nccl" if is_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    bundle = _gpt(config, "cpu")
    model = _Replayed(bundle.layers)
    how = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=is_cuda),
    }
    for layer in model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    optimizer = _adam(list(model.parameters()))
    parts = max(tokens // config.fsdp_part, 1)

    def step(x: Tensor, y: Tensor) -> float:
        total = torch.zeros((), device=device)
        for ids, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = bundle.loss(model(ids.to(device)).float(), target.to(device)) / parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    seconds, loss = _timed(config, tokens, step)
    row = OffloadRow("offloaded", tokens, seconds, _peak_bytes(config), loss, note=f"{parts} micro-batches")
    dist.destroy_process_group()
    return row


_TRAINED: dict[str, Callable[[OffloadConfig, int], OffloadRow]] = {
    "resident": _resident,
    "spilled": _spilled,
    "offloaded": _offloaded,
}


class _Replayed(nn.Module):
    """Layers that keep their inputs only and are replayed in the backward."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def _timed(
    config: OffloadConfig,
    tokens: int,
    step: Callable[[Tensor, Tensor], float],
    settle: Callable[[], None] | None = None,
) -> tuple[float, float]:
    """Seconds of a step, with all that it has begun, and the loss of the last."""
    batches = _batches(config, tokens)

    def steps(count: int) -> tuple[float, float]:
        began, loss = time.perf_counter(), float("nan")
        for _ in range(count):
            loss = step(*next(batches))
        if settle is not None:
            settle()
        if config.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / count, loss

    steps(1)
    return steps(config.steps)


def _peak_bytes(config: OffloadConfig) -> float:
    if config.device == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def _gpt(config: OffloadConfig, device: str) -> ModelBundle:
    sizes = {"layers": config.layers, "hidden": config.hidden, "heads": config.heads, "vocab": config.vocab}
    torch.manual_seed(0)
    with torch.device(device):
        return build("gpt", context=config.context, tied=False, **sizes)


def _batches(config: OffloadConfig, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens without end, and those that follow them."""
    generator = torch.Generator().manual_seed(0)
    length = min(tokens, config.context)
    while True:
        ids = torch.randint(config.vocab, (tokens // length, length + 1), generator=generator)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused: torch's other ways of Adam take more memory for a moment, as much as all weights that step together."""
    return torch.optim.Adam(parameters, 1e-4, fused=True)


def _pipeline(config: OffloadConfig, tokens: int, bundle: ModelBundle | None = None, **more: Any) -> Pipeline:
    bundle = bundle or _gpt(config, "meta")
    return Pipeline(
        bundle.layers,
        loss=bundle.loss,
        optimizer=_adam,
        microbatches=max(tokens // max(config.part, config.context), 1),
        precision="bf16",
        parallelism=Parallelism(device=config.device),
        **more,
    )


# ---- printed -------------------------------------------------------------------------------------------------------


def main(
    *,
    cap: str = "20 GiB",
    tokens: tuple[int, ...] = TOKENS,
    config: Annotated[OffloadConfig, Parameter(name="*")] = USUAL,
) -> int:
    """Prints a row for every way; exit code 1: the spilled run had more of the GPU's memory than the cap."""
    config = replace(config, cap_bytes=parse_quantity(cap, "bytes", "--cap"))
    tier = rates(config)
    together = ", which share one channel" * tier.one_channel
    to_device, to_host = (f"{rate / 1e9:.2f} GB/s" for rate in (tier.read_bytes_per_s, tier.write_bytes_per_s))
    print(
        f"GPT of {config.layers} x {config.hidden}, {config.heads} heads, on {config.device}; spilled under "
        f"{format_bytes(config.cap_bytes)}\n"
        f"copies alone: {to_device} to the device, {to_host} to the host{together}\n"
        f"{'tokens':>7} {'way':<10} {'step':>10} {'of resident':>11} {'peak':>11} {'predicted':>10} {'loss':>8}"
    )
    resident: dict[int, float] = {}

    def show(row: OffloadRow) -> None:
        if row.way == "resident" and row.seconds is not None:
            resident[row.tokens] = row.seconds
        print(_line(row, resident.get(row.tokens)), flush=True)

    rows = offload(config, tokens, on_row=show)
    peaks = [row.peak_bytes or 0.0 for row in rows if row.way == "spilled"]
    if config.device == "cuda" and max(peaks) > config.cap_bytes:
        print(f"the cap of {format_bytes(config.cap_bytes)} was EXCEEDED")
        return 1
    return 0


def _line(row: OffloadRow, resident_s: float | None) -> str:
    if row.seconds is None or row.peak_bytes is None or row.loss is None:
        return f"{row.tokens:>7} {row.way:<10} {row.note}"
    of_resident = "" if resident_s is None else f"{resident_s / row.seconds:.0%}"
    predicted = "" if row.predicted_s is None else format_seconds(row.predicted_s)
    return (
        f"{row.tokens:>7} {row.way:<10} {format_seconds(row.seconds):>10} {of_resident:>11} "
        f"{format_bytes(row.peak_bytes):>11} {predicted:>10} {row.loss:>8.3f}  {row.note}"
    )


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    try:
        found = _answer(OffloadConfig(**request.pop("config")), **request)
    except PipefitError as problem:
        sys.exit(str(problem))
    sys.stdout.write(json.dumps(msgspec.structs.asdict(found) if isinstance(found, Tier) else asdict(found)) + "\n")
