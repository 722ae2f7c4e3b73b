"""Removes each wait, each order and each device of pipefit in a copy, and looks whether a case finds it.

    python -m tests.sham.mutations [PART OF A NAME…]

prints a row for each; `make gpu-sham` must pass first. One that no case finds is a survivor, which needs a reason here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.sham.build import build

ROOT = Path(__file__).parents[2]
STEPS, RANKS = "tests/sham/test_steps.py", "tests/sham/test_ranks.py"
PROCESSES = 4
FOUND, PASSED = 1, 0
"""Exit codes of pytest: a case has failed, or none."""


class Mutation(NamedTuple):
    """A change of one place of the package.

    Attributes:
        path: of the module.
        old, new: its text, of which the first is there once.
        cases: file of the cases that run, and which of them.
        reason: why no case can find it; "": one must.
    """

    path: str
    old: str
    new: str
    cases: tuple[str, str]
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.path}: {self.old.strip()}"


SPILLED, PLAIN, TWO = (STEPS, "spilled or host"), (STEPS, "1f1b or bf16 or clipped"), (RANKS, "own and two")
AHEAD, META = ("tests/sham/test_copies.py", "ahead"), (STEPS, "meta")
CURRENT = "the rank's GPU is the current one of its process"
COPIES, LEFT_OUT = ("tests/sham/test_copies.py", "pinned"), (STEPS, "left_out")
NORMS = ("tests/gpu/test_one_process.py", "norm")
REPAIRED = ("tests/sham/test_repaired_ranks.py", "barrier")
ON_HOST = "where the host has decided about the step, it knows the factor"
CLOCKS = "only the comparison of the clocks becomes less exact"

MUTATIONS = [
    # orders of lanes
    Mutation("spill/lanes.py", "                stream.wait_event(computed)\n", "", SPILLED),
    Mutation("spill/lanes.py", "                    earlier.join()\n", "                    pass\n", SPILLED),
    Mutation("spill/lanes.py", "                earlier.wait()\n", "                pass\n", SPILLED),
    Mutation(
        "spill/lanes.py",
        "            accelerator.current_stream(self._device).wait_event(self._moments[1].reached)\n",
        "            pass\n",
        SPILLED,
    ),
    Mutation("spill/lanes.py", "            self._moments[1].reached.synchronize()\n", "", SPILLED),
    Mutation("spill/lanes.py", "        self._launched.result()\n", "        self._launched.done()\n", SPILLED),
    Mutation(
        "spill/lanes.py", "accelerator.event_on(current))", "accelerator.event_on(self._stream or current))", SPILLED
    ),
    Mutation("spill/lanes.py", "with accelerator.on_stream(stream):", "if True:", SPILLED),
    Mutation(
        "spill/lanes.py",
        "                end = accelerator.event_on(stream, is_timed=True)\n",
        "                end = accelerator.event_on(torch.cuda.default_stream(stream.device), is_timed=True)\n",
        SPILLED,
    ),
    Mutation("spill/lanes.py", "            self._stream.synchronize()\n", "            pass\n", SPILLED),
    Mutation("runtime/spill_handlers.py", "        copy.join()\n", "", SPILLED),
    Mutation("spill/parked.py", "        copy.join()\n", "", SPILLED),
    Mutation(
        "spill/rank.py",
        "        self.parked.end_pass()\n",
        "",
        SPILLED,
        "it frees memory between passes; the next write would do so",
    ),
    Mutation(
        "spill/tier_store.py",
        "            lane.submit(lambda: None).wait()\n",
        "",
        (STEPS, "disk"),
        "the buffers grow before the first step only, while no copy is under way",
    ),
    Mutation(
        "spill/tier_store.py",
        "            waits.append(record.written)\n        copy =",
        "            pass\n        copy =",
        SPILLED,
    ),
    Mutation(
        "spill/tier_store.py",
        "                waits.append(record.written)\n\n        def step",
        "                pass\n\n        def step",
        SPILLED,
    ),
    Mutation("spill/tier_store.py", "target.copy_(source, non_blocking=True)", "target.copy_(source)", SPILLED),
    Mutation("spill/tier_store.py", "through.copy_(source)", "through.copy_(source, non_blocking=True)", SPILLED),
    Mutation("spill/tier_store.py", "into.copy_(through)", "into.copy_(through, non_blocking=True)", SPILLED),
    Mutation("spill/tier_store.py", "                pin(buffer)\n", "                pass\n", SPILLED),
    Mutation("spill/stage_store.py", "            copy.join()\n", "            pass\n", SPILLED),
    Mutation("spill/rank.py", "            step.wait()\n", "            pass\n", SPILLED),
    Mutation(
        "spill/rank.py",
        "                copy.launched()\n",
        "                pass\n",
        SPILLED,
        "it raises what a write has failed with, and orders nothing",
    ),
    # waits for messages
    Mutation("runtime/distributed.py", "        finish(*receive.works)\n", "", TWO),
    Mutation("runtime/distributed.py", "        finish(*self.works)\n", "        pass\n", TWO),
    Mutation("runtime/distributed.py", "        finish_collectives(*works)\n", "", TWO),
    Mutation(
        "runtime/distributed.py",
        "settle(self.device)  # the sends",
        "(self.device)  # the sends",
        TWO,
        "the end of a run reads weights, and so waits for the GPU",
    ),
    Mutation(
        "runtime/distributed.py",
        "            dist.all_reduce(token, group=group)\n        settle(self.device)\n",
        "            dist.all_reduce(token, group=group)\n",
        TWO,
        "the first use of each link and group has blocked the host already",
    ),
    Mutation(
        "runtime/collectives.py",
        "    _together(session, dist.all_reduce, table)\n",
        "    start_sum(session, table)\n",
        TWO,
    ),
    # copies that the host need not wait for
    Mutation("stage/accelerator.py", "return tensor.pin_memory()", "return tensor", PLAIN),
    Mutation(
        "stage/accelerator.py",
        "        return tensor.to(device, non_blocking=True)\n    current",
        "        return tensor.to(device)\n    current",
        PLAIN,
    ),
    Mutation("stage/accelerator.py", "    current.wait_event(event_on(stream))\n", "", AHEAD),
    Mutation("stage/accelerator.py", "    there.record_stream(current)\n", "", AHEAD),
    Mutation(
        "stage/accelerator.py", "    with on_stream(stream):\n        there", "    if True:\n        there", AHEAD
    ),
    Mutation("pipeline/training_loop.py", "in_pinned_memory((x, y), self._engine.device)", "(x, y)", COPIES),
    Mutation("stage/batchnorm.py", "to_device(counts, mean.device)", "counts.to(mean.device)", NORMS),
    # what the host reads of a step
    Mutation("runtime/finite.py", "found_inf = 1 - run", "found_inf = 0 * run", LEFT_OUT),
    Mutation("runtime/engine.py", "            check_unread(run)\n", "            pass\n", LEFT_OUT),
    Mutation("stage/moments.py", "        mark.reached.synchronize()\n", "", (STEPS, "pipedream")),
    Mutation("stage/moments.py", "            self._start.synchronize()\n", "", PLAIN, CLOCKS),
    Mutation("stage/moments.py", "            accelerator.settle(self._device)\n", "", PLAIN, CLOCKS),
    # the repair of a run
    Mutation("pipeline/training_loop.py", "        settle(self._engine.device)\n", "", REPAIRED),
    Mutation("runtime/notes.py", "        abort_groups()\n", "        pass\n", REPAIRED),
    # devices
    Mutation("stage/device.py", "    index = first_local_rank\n", "    index = None\n", REPAIRED),
    Mutation("stage/device.py", 'int(os.environ.get("LOCAL_RANK", 0))', "0", TWO),
    Mutation("stage/device.py", "        accelerator.make_current(device)\n", "        pass\n", TWO),
    Mutation("stage/accelerator.py", "max_memory_allocated(device)", "max_memory_allocated()", TWO, CURRENT),
    Mutation("stage/accelerator.py", "reset_peak_memory_stats(device)", "reset_peak_memory_stats()", TWO, CURRENT),
    Mutation(
        "stage/accelerator.py", "torch.cuda.current_stream(device)", "torch.cuda.current_stream()", PLAIN, CURRENT
    ),
    Mutation(
        "stage/accelerator.py",
        "torch.accelerator.synchronize(device)",
        "torch.accelerator.synchronize()",
        PLAIN,
        CURRENT,
    ),
    Mutation("stage/stage.py", "            layer.module.to(device)\n", "            pass\n", PLAIN),
    Mutation("stage/accelerator.py", "generators[device.index or 0]", "generators[0]", (STEPS, "dropout")),
    Mutation(
        "runtime/updating.py",
        "dtype=torch.float64, device=worker.device)\n    squares[",
        "dtype=torch.float64)\n    squares[",
        PLAIN,
    ),
    Mutation("runtime/updating.py", "factor = factor.to(parameters[0].device)", "pass", (STEPS, "host"), ON_HOST),
    Mutation("runtime/distributed.py", "dtype=d, device=self.device)", 'dtype=d, device="cuda:0")', TWO),
    Mutation("runtime/distributed.py", "torch.zeros(1, device=self.device)", 'torch.zeros(1, device="cuda:0")', TWO),
    Mutation(
        "parallel/buckets.py", "dtype=torch.float64, device=device)", 'dtype=torch.float64, device="cuda:0")', TWO
    ),
    Mutation("parallel/buckets.py", "dtype=dtype, device=device)", 'dtype=dtype, device="cuda:0")', TWO),
    Mutation(
        "spill/arena.py", "dtype=torch.uint8, device=device)", 'dtype=torch.uint8, device=device and "cuda:0")', SPILLED
    ),
    Mutation(
        "spill/rank.py",
        "return torch.zeros((), dtype=tensor.dtype, device=device)",
        'return torch.zeros((), dtype=tensor.dtype, device="cuda:0")',
        META,
    ),
    Mutation(
        "spill/rank.py",
        "return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)",
        'return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda:0")',
        META,
    ),
]


def tried(mutation: Mutation, folder: Path) -> int:
    """Runs the cases with the mutation, in a copy of the package and a fork of this process; returns pytest's code."""
    package = folder / "src" / "pipefit"
    shutil.copytree(ROOT / "src" / "pipefit", package, ignore=shutil.ignore_patterns("__pycache__"))
    module = package / mutation.path
    text = module.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.name}: {text.count(mutation.old)} times"
    module.write_text(text.replace(mutation.old, mutation.new))
    file, which = mutation.cases
    paths = [str(package.parent), str(ROOT)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests/sham/site"), *paths])
    with (folder / "log").open("w") as log, contextlib.redirect_stdout(log):
        options = [
            "-qx",
            "--tb=short",
            "-p",
            "tests.sham.plugin",
            "-p",
            "no:cacheprovider",
            "-o",
            f"pythonpath={package.parent} .",
        ]
        return pytest.main([*options, "--timeout", "600", "-m", "gpu", str(ROOT / file), "-k", which])


def start(mutation: Mutation, folder: Path) -> int:
    """Starts a fork, which has loaded torch already; returns its number."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = tried(mutation, folder)
        finally:
            os._exit(code)
    return child


def verdict(mutation: Mutation, folder: Path, code: int) -> str:
    """The row of a mutation: the case that finds it, or why none does."""
    log = (folder / "log").read_text() if (folder / "log").exists() else ""
    if code == FOUND:
        summary = [line for line in log.splitlines() if line.startswith(("FAILED", "ERROR"))]
        errors = [line for line in log.splitlines() if line.startswith("E  ")]
        found = f"found by {summary[0].partition('[')[2]} {errors[0] if errors else ''}"
        end = " BUT EXPECTED TO SURVIVE" if mutation.reason else ""
    elif code == PASSED:
        found, end = "survives: ", mutation.reason or "NO REASON"
    elif code < 0:
        found, end = f"found: signal {-code} ends the process", ""
    else:
        found, end = "did not run: ", log[-2000:]
    return f"{mutation.name} → {mutation.new.strip()} | {found}{end}"


def main(parts: list[str]) -> None:
    """Prints a row for each mutation, as its cases end."""
    if "PIPEFIT_SHAM" not in os.environ:
        library = build()
        assert library is not None, "there is no C++ compiler"
        path = os.pathsep.join(map(str, [ROOT / "tests/sham/site", ROOT]))
        os.environ.update({"PIPEFIT_SHAM": str(library), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
        os.execv(sys.executable, [sys.executable, "-m", "tests.sham.mutations", *parts])
    import torch  # noqa: F401

    waiting = [m for m in MUTATIONS if not parts or any(part in m.name for part in parts)]
    running: dict[int, tuple[Mutation, Path]] = {}
    with tempfile.TemporaryDirectory(prefix="pipefit-mutations-") as place:
        while waiting or running:
            while waiting and len(running) < PROCESSES:
                mutation, folder = waiting.pop(0), Path(tempfile.mkdtemp(dir=place))
                running[start(mutation, folder)] = mutation, folder
            child, status = os.wait()
            if child in running:
                print(verdict(*running.pop(child), os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
