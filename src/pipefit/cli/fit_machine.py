"""`pipefit fit-machine`: the constants of a machine from runs that were measured on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipefit.cli.answer import Answer
from pipefit.cli.options import Json, Machine, TomlFile
from pipefit.units import columns

if TYPE_CHECKING:
    from pipefit.planner.measured_runs import FittedMachine, MeasuredRun

_BADLY = 0.1
"""Relative error from which on a run is listed as badly explained."""


def command(
    *runs: Path,
    topology: Machine,
    output: TomlFile = None,
    json: Json = False,
) -> Answer:
    """Fit the constants of a machine to measured runs, so that plans for it predict what it really does.

    Example: pipefit fit-machine runs.csv runs/gpt --machine 8xA100:8 -o mine.toml

    A file has a line for each run, with the columns model (llama:layers=40,…), devices, tensor, depth, chunks,
    microbatch, batch, recompute, sharded and seconds, and cut where stages have equal weights in place of equally many
    blocks; a folder is one run of pipefit train -o with --model gpt. Two runs allow one constant, ten allow all five.

    Args:
        runs: .csv files, and folders of runs.
        topology: The machine with figures of data sheets: a TOML file, GPUs such as 8xA100:8, or a name.
        output: Write the fitted topology to this TOML file.
    """
    from pipefit.planner.machines import load_topology
    from pipefit.planner.measured_runs import fit_machine, read_runs
    from pipefit.planner.run_folders import run_of_folder

    every = []
    for path in runs:
        if path.is_dir():
            every.append(run_of_folder(path))
        else:
            every += [run for run, _ in read_runs(path)]
    timed = [run for run in every if run.seconds is not None]
    fitted = fit_machine(timed, load_topology(topology))
    if output:
        fitted.topology.save(output)
    data = {
        "constants": fitted.constants,
        "runs": [{"run": run.place, "error": error} for run, error in zip(timed, fitted.errors, strict=True)],
    }
    return Answer(data, _text(timed, fitted, len(every) - len(timed)), output=output)


def _text(runs: Sequence[MeasuredRun], fitted: FittedMachine, left_out: int) -> str:
    rows = [["constant", "times the given", "95 % interval"]]
    rows += [[each.name, f"{each.times:.3f}", f"{each.low:.3f} to {each.high:.3f}"] for each in fitted.constants]
    sizes = sorted(map(abs, fitted.errors))
    lines = [
        *columns(rows),
        "",
        f"{len(runs)} runs, each predicted by a machine fitted to the others: median error"
        f" {sizes[len(sizes) // 2]:.1%}, largest {sizes[-1]:.1%}",
    ]
    if left_out:
        lines.append(f"{left_out} that ran out of memory say nothing about speed, and were left out")
    bad = [(run, error) for run, error in zip(runs, fitted.errors, strict=True) if abs(error) > _BADLY]
    if bad:
        lines += ["", f"predicted more than {_BADLY:.0%} off:"]
        lines += [f"  {run}: {error:+.1%}" for run, error in bad]
    return "\n".join(lines)
