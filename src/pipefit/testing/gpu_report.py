"""The examination of a machine with GPUs: every part in a process of its own with a deadline, a report, and a page."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import pipefit
from pipefit.errors import PipefitError
from pipefit.spec.files import write_atomically
from pipefit.stage import accelerator
from pipefit.testing.gpu_parts import PARTS, Figures, devices_of, num_ranks

REPORT = "gpu-report.json"
PAGE = "gpu-report.md"
_SHOWN_OUTPUT = 2000
_TOPOLOGY_S = 10
_COLOURS = re.compile(r"\x1b\[\d*m")


def examine(folder: Path, device: str = "", on_part: Callable[[str, Figures], None] | None = None) -> Figures:
    """Runs all parts and writes their figures to a folder, after each of them, as JSON and as a page.

    Args:
        folder: for `gpu-report.json` and `gpu-report.md`.
        device: kind of the accelerators; "": that of this machine; "cpu" tries the parts themselves.
        on_part: called with the name and the figures of each part that has ended.

    Raises:
        PipefitError: torch sees no GPU, or the folder cannot be written.
    """
    device = device or accelerator.kind()
    if device == "":
        raise PipefitError("--gpu: expected a GPU that torch can use, and it sees none here; pipefit doctor says why")
    report = {"facts": facts(device), "parts": {}}
    for name, part in PARTS.items():
        start = time.monotonic()
        if num_ranks(device) < part.least_gpus:
            figures: Figures = {"left_out": f"needs {part.least_gpus} GPUs"}
        else:
            figures = _alone(name, device, part.deadline_s)
        figures["took_s"] = time.monotonic() - start
        report["parts"][name] = figures
        write_atomically(folder / REPORT, json.dumps(report, indent=1))
        write_atomically(folder / PAGE, page(report))
        if on_part is not None:
            on_part(name, figures)
    return report


def facts(device: str) -> Figures:
    """Versions, GPUs and limits of this machine."""
    found: Figures = {
        "pipefit": pipefit.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "device": device,
    }
    if device == "cpu":
        return found
    found |= accelerator.facts_of_cuda()
    found["gpus"] = accelerator.names()
    found["free_bytes"] = [accelerator.free_bytes(place) for place in devices_of(device)]
    found["topology"] = _topology()
    return found


def _topology() -> str:
    """How GPUs are connected, in NVIDIA's words; "" where its program is not there."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=_TOPOLOGY_S, check=False)
        return _COLOURS.sub("", done.stdout)
    return ""


def _alone(name: str, device: str, deadline_s: float) -> Figures:
    """The figures of a part from a process of its own, which is ended at its deadline with all that it has started."""
    command = [sys.executable, "-m", "pipefit.testing.gpu_parts", name, device]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, errors = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        _, errors = child.communicate()
        return _failed(f"not done after {deadline_s:g} s", errors)
    lines = output.splitlines()
    if child.returncode or not lines:
        return _failed(f"ended with exit code {child.returncode}", errors)
    figures: Figures = json.loads(lines[-1])
    return figures


def _failed(what: str, output: str) -> Figures:
    return {"failed": what, "output": output[-_SHOWN_OUTPUT:]}


def problems_of(report: Figures) -> list[str]:
    """The problems in words: parts that failed, and findings of the others."""
    found = []
    for name, figures in report["parts"].items():
        if "failed" in figures:
            found.append(f"{name} ({PARTS[name].tries}): {figures['failed']}")
        found += figures.get("problems", [])
    return found


def result_of(figures: Figures) -> str:
    """The result of a part in a few words."""
    if "failed" in figures:
        return str(figures["failed"])
    if "left_out" in figures:
        return f"left out: {figures['left_out']}"
    problems = figures.get("problems", ())
    if problems:
        return f"{len(problems)} to look at"
    return "well"


def page(report: Figures) -> str:
    """The report as a page of Markdown."""
    known = report["facts"]
    gpus = ", ".join(known.get("gpus", [])) or known["device"]
    lines = [f"# {gpus}", "", f"pipefit {known['pipefit']}, torch {known['torch']}, {known['platform']}", ""]
    lines += ["| part | tries | result | seconds |", "|---|---|---|---|"]
    for name, figures in report["parts"].items():
        lines.append(f"| {name} | {PARTS[name].tries} | {result_of(figures)} | {figures['took_s']:.1f} |")
    problems = problems_of(report)
    if problems:
        lines += ["", "## To look at", ""]
        lines += [f"- {problem}" for problem in problems]
    for name, figures in report["parts"].items():
        shown = {key: value for key, value in figures.items() if key not in ("problems", "took_s")}
        lines += ["", f"## {name}", "", "```json", json.dumps(shown, indent=1), "```"]
    if known.get("topology"):
        lines += ["", "## How the GPUs are connected", "", "```", known["topology"].rstrip(), "```"]
    lines += ["", f"Please send this page and `{REPORT}` with a report to the project: every figure helps.", ""]
    return "\n".join(lines)
