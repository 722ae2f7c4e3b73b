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
CURRENT = "the rank's GPU is the current one of its process"

MUTATIONS = [
    # waits of lanes
    Mutation("spill/lanes.py", "after, computed.synchronize)", "after, None)", SPILLED),
    Mutation("spill/lanes.py", "                ended.synchronize()\n", "", SPILLED),
    Mutation(
        "spill/lanes.py",
        "computed.record(torch.cuda.current_stream(stream.device))",
        "computed.record(stream)",
        SPILLED,
    ),
    Mutation("spill/lanes.py", "with torch.cuda.stream(stream):", "if True:", SPILLED),
    Mutation(
        "spill/lanes.py", "ended.record(stream)", "ended.record(torch.cuda.default_stream(stream.device))", SPILLED
    ),
    Mutation("spill/lanes.py", "                earlier.wait()\n", "                pass\n", SPILLED),
    Mutation(
        "spill/lanes.py",
        "        torch.cuda.current_stream(device).synchronize()\n",
        "        pass\n",
        ("tests/gpu/test_studies.py", "two_trials"),
    ),
    Mutation("spill/lanes.py", "        self._future.result()\n", "        self._future.done()\n", SPILLED),
    Mutation("runtime/spill_handlers.py", "        copy.wait()\n", "", SPILLED),
    Mutation(
        "spill/parked.py",
        "self._under_way.popleft().wait()",
        "self._under_way.popleft()",
        SPILLED,
        "it bounds memory; the order is that of the lane",
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
        "waits = (*after, *([record.written] if record.written else []))",
        "waits = after",
        SPILLED,
    ),
    Mutation("spill/tier_store.py", "(*after, *writes))", "after)", SPILLED),
    Mutation("spill/tier_store.py", "target.copy_(source, non_blocking=True)", "target.copy_(source)", SPILLED),
    Mutation("spill/tier_store.py", "through.copy_(source)", "through.copy_(source, non_blocking=True)", SPILLED),
    Mutation(
        "spill/tier_store.py",
        "into.copy_(through)",
        "into.copy_(through, non_blocking=True)",
        SPILLED,
        "the lane waits for the end of its work anyway; the list of waits gets shorter",
    ),
    Mutation("spill/tier_store.py", "                pin(buffer)\n", "                pass\n", SPILLED),
    Mutation("spill/stage_store.py", "            copy.wait()\n", "            pass\n", SPILLED),
    Mutation("spill/rank.py", "            step.wait()\n", "            pass\n", SPILLED),
    Mutation("spill/rank.py", "            copy.wait()\n", "            pass\n", SPILLED),
    # waits for messages
    Mutation("runtime/distributed.py", "        for work in receive.works:\n            work.wait()\n", "", TWO),
    Mutation(
        "runtime/distributed.py", "        for work in self.works:\n            work.wait()\n", "        pass\n", TWO
    ),
    Mutation("runtime/distributed.py", "        for work in works:\n            work.wait()\n", "", TWO),
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
    ),
    Mutation("runtime/collectives.py", "            work.wait()\n", "            pass\n", TWO),
    # copies that the host need not wait for
    Mutation("stage/device.py", "tensor = tensor.pin_memory()", "pass", PLAIN),
    Mutation("stage/device.py", "tensor.to(device, non_blocking=True)", "tensor.to(device)", PLAIN),
    Mutation("stage/moments.py", "        mark.synchronize()\n", "", (STEPS, "pipedream")),
    Mutation(
        "stage/moments.py",
        "            self._start.synchronize()\n",
        "",
        PLAIN,
        "only the comparison of the clocks becomes less exact",
    ),
    Mutation(
        "stage/moments.py",
        "            torch.cuda.synchronize(self._device)\n",
        "",
        PLAIN,
        "only the comparison of the clocks becomes less exact",
    ),
    # devices
    Mutation("stage/device.py", 'int(os.environ.get("LOCAL_RANK", 0))', "0", TWO),
    Mutation("stage/device.py", "        torch.cuda.set_device(device)\n", "        pass\n", TWO),
    Mutation("stage/device.py", "max_memory_allocated(device)", "max_memory_allocated()", TWO, CURRENT),
    Mutation("stage/device.py", "reset_peak_memory_stats(device)", "reset_peak_memory_stats()", TWO, CURRENT),
    Mutation(
        "stage/moments.py", "torch.cuda.current_stream(self._device)", "torch.cuda.current_stream()", PLAIN, CURRENT
    ),
    Mutation("stage/moments.py", "torch.cuda.synchronize(self._device)", "torch.cuda.synchronize()", PLAIN, CURRENT),
    Mutation("stage/stage.py", "            layer.module.to(device)\n", "            pass\n", PLAIN),
    Mutation("stage/stage.py", "default_generators[device.index or 0]", "default_generators[0]", (STEPS, "dropout")),
    Mutation(
        "runtime/handlers.py",
        "dtype=torch.float64, device=worker.device)\n        squares[",
        "dtype=torch.float64)\n        squares[",
        PLAIN,
    ),
    Mutation(
        "runtime/handlers.py", "clamp(max=1.0).to(next(places, worker.device))", "clamp(max=1.0)", (STEPS, "host")
    ),
    Mutation("runtime/distributed.py", "dtype=d, device=self.device)", 'dtype=d, device="cuda:0")', TWO),
    Mutation("runtime/distributed.py", "torch.zeros(1, device=self.device)", 'torch.zeros(1, device="cuda:0")', TWO),
    Mutation(
        "parallel/buckets.py", "dtype=torch.float64, device=device)", 'dtype=torch.float64, device="cuda:0")', TWO
    ),
    Mutation("parallel/buckets.py", "dtype=b.dtype, device=device)", 'dtype=b.dtype, device="cuda:0")', TWO),
    Mutation(
        "spill/arena.py", "dtype=torch.uint8, device=device)", 'dtype=torch.uint8, device=device and "cuda:0")', SPILLED
    ),
    Mutation(
        "spill/rank.py",
        "return torch.zeros((), dtype=tensor.dtype, device=device)",
        'return torch.zeros((), dtype=tensor.dtype, device="cuda:0")',
        SPILLED,
    ),
    Mutation(
        "spill/rank.py",
        "return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)",
        'return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda:0")',
        SPILLED,
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
