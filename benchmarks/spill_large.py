"""A GPT of about a billion parameters, trained with Adam in less memory than its weights and states take.

It trains in a process of its own, whose highest resident memory is read from the kernel and compared with a cap.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.spilled_gpt import CONTEXT, batches_of, folder_in, gpt_of, pipeline_of, state_bytes
from pipefit.errors import PipefitError
from pipefit.spec.options import Spilled
from pipefit.units import format_bytes

GIB = 2**30
ROOT = Path(__file__).parents[1]
_KEPT_BYTES, _NUM_KEPT = 32 << 20, 11
"""malloc keeps blocks of up to 32 MiB that were let go; about so many of them."""


@dataclass(frozen=True)
class LargeResult:
    """A model that does not fit, trained.

    Attributes:
        num_parameters: of the model.
        state_bytes: its weights, gradients and optimizer states.
        cap_bytes: the most memory that the process may have resident.
        peak_bytes: what it had.
        base_bytes: of that, what it had before there was a model.
        predicted_bytes: of the plan, with the base.
        arena_bytes: all slots.
        tier_bytes: of the file.
        shards: of the model.
        tokens: per step.
        losses, seconds: of each step; the last has no step after it to hide its write-back.
        setup_s: until the first step: weights drawn, and written to the disk.
        predicted_s: of a step.
        binds: the lane that the planner names.
    """

    num_parameters: int
    state_bytes: float
    cap_bytes: float
    peak_bytes: float
    base_bytes: float
    predicted_bytes: float
    arena_bytes: float
    tier_bytes: float
    shards: int
    tokens: int
    losses: list[float]
    seconds: list[float]
    setup_s: float
    predicted_s: float
    binds: str

    @property
    def is_under_cap(self) -> bool:
        """Whether the cap was kept."""
        return self.peak_bytes <= self.cap_bytes


def large(
    folder: Path | None = None,
    *,
    layers: int = 20,
    hidden: int = 2048,
    tokens: int = 512,
    steps: int = 3,
    cap_bytes: float = 2.5 * GIB,
) -> LargeResult:
    """Trains the large model in a process of its own.

    Args:
        folder: on the disk to use; None: a temporary one.
        layers: blocks of the GPT.
        hidden: its width, a multiple of 64.
        tokens: per step, a multiple of 128.
        steps: to train.
        cap_bytes: on the process's resident memory.

    Raises:
        PipefitError: the process has failed; the message is its own.
    """
    with folder_in(folder) as place:
        request = {"folder": str(place), "layers": layers, "hidden": hidden, "tokens": tokens, "steps": steps}
        command = [sys.executable, "-m", "benchmarks.spill_large", json.dumps(request | {"cap_bytes": cap_bytes})]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            raise PipefitError(f"the large model was not trained: {done.stderr.strip()[-2000:]}")
        return LargeResult(**json.loads(done.stdout.splitlines()[-1]))


def _train_large(folder: str, layers: int, hidden: int, tokens: int, steps: int, cap_bytes: float) -> LargeResult:
    began = time.perf_counter()
    _rehearse(folder)
    base = _resident_bytes("VmRSS")
    bundle, batches = gpt_of(layers, hidden), batches_of(tokens)
    # Memory that torch takes only for a moment: a weight's new gradient, and two temporaries of the optimizer's step.
    largest = max(p.nbytes for p in bundle.layers.parameters())
    moment = 3 * largest + _NUM_KEPT * min(largest, _KEPT_BYTES)
    spill = Spilled(cap_bytes - base - moment, disk=folder)
    pipe = pipeline_of(bundle, tokens, spill, example=next(batches))
    if pipe.plan.spill is None:
        raise PipefitError(f"a model of {bundle.num_parameters:,} parameters fits the cap: there is nothing to show")
    spilling = pipe.workers[0].spilling
    assert spilling is not None and pipe.plan.prediction is not None
    setup_s = time.perf_counter() - began
    losses, seconds = [], []
    for _ in range(steps):
        began = time.perf_counter()
        losses.append(pipe.step(*next(batches)))
        seconds.append(time.perf_counter() - began)
    pipe.settle()
    spilled_as = pipe.plan.spill
    result = LargeResult(
        bundle.num_parameters,
        state_bytes(bundle),
        cap_bytes,
        _resident_bytes(),
        base,
        base + moment + spilled_as.peak_bytes,
        spilling.arena.num_bytes,
        spilling.tier.disk_bytes,
        len(pipe.plan.partition.stages),
        tokens,
        losses,
        seconds,
        setup_s,
        pipe.plan.prediction.period_s,
        spilled_as.binds,
    )
    pipe.close()
    return result


def _rehearse(folder: str) -> None:
    """A tiny model is planned, spilled and trained: all that Python and torch ever load and start is then there."""
    batches, place = batches_of(CONTEXT), Path(folder) / "rehearsal"
    for spill, more in (
        (Spilled("1 GiB", disk=place), {"example": next(batches)}),
        (Spilled(disk=place), {"stages": 4, "chunks": 4}),
    ):
        pipe = pipeline_of(gpt_of(2, 64), CONTEXT, spill, **more)
        pipe.step(*next(batches))
        pipe.close()


def _resident_bytes(what: str = "VmHWM") -> float:
    """The memory that this process has resident (VmRSS), or the most that it has had, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return float(line.split()[1]) * 1024
    raise PipefitError(f"this system does not tell the resident memory of a process (no {what} in /proc/self/status)")


def print_large(found: LargeResult) -> None:
    """Prints the result, and whether the cap was kept."""
    verdict = "kept" if found.is_under_cap else "EXCEEDED"
    each = zip(found.seconds, found.losses, strict=True)
    steps = ", ".join(f"{seconds:.1f} s (loss {loss:.3f})" for seconds, loss in each)
    print(
        f"GPT of {found.num_parameters / 1e6:,.0f} M parameters, Adam, float32: {format_bytes(found.state_bytes)} of "
        f"weights, gradients and states; {found.shards} shards, {found.tokens} tokens per step\n"
        f"cap {format_bytes(found.cap_bytes)} {verdict}: the process had {format_bytes(found.peak_bytes)} resident at "
        f"most (VmHWM), predicted {format_bytes(found.predicted_bytes)}; {format_bytes(found.base_bytes)} of it is "
        f"Python and torch, {format_bytes(found.arena_bytes)} slots; {format_bytes(found.tier_bytes)} on disk\n"
        f"weights drawn and written in {found.setup_s:.1f} s; steps: {steps}; predicted {found.predicted_s:.1f} s, "
        f"{found.binds} binds\n"
    )


if __name__ == "__main__":
    try:
        found = _train_large(**json.loads(sys.argv[1]))
    except PipefitError as problem:
        sys.exit(str(problem))
    sys.stdout.write(json.dumps(asdict(found)) + "\n")
