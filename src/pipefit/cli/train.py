"""`pipefit train`: trains a model over a pipeline of processes: profile, plan, run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pipefit.cli.answer import Answer, Text, is_first
from pipefit.cli.display import report
from pipefit.cli.models import importable
from pipefit.cli.options import Json, Starts, verb
from pipefit.errors import PipefitError
from pipefit.run.claim import check_free
from pipefit.run.config import RunConfig, checkpoints_of, choices, with_defaults
from pipefit.spec.files import JsonObject
from pipefit.spec.options import as_flat
from pipefit.units import columns


@verb()
def command(
    *,
    run: RunConfig,
    transport: Literal["distributed", "local"] = "distributed",
    starts: Starts,
    config: Path | None = None,
    quiet: bool = False,
    json: Json = False,
) -> Answer:
    """Train a model over a pipeline of processes.

    Example: pipefit train --model gpt --ranks 2 --microbatches 8 --steps 300 -o runs/first

    Profiles the model, plans, trains, and shows measured next to predicted figures. Under torchrun each process is a
    rank.

    Args:
        transport: A process for each rank, or all of them in this one.
        config: TOML file with any of these options; the command line has priority.
        quiet: Print nothing before the result.
    """
    asked = run
    run = with_defaults(replace(run, model=importable(run.model)))
    folder = Path(run.output)
    if run.output and folder.exists() and not folder.is_dir():
        raise PipefitError(f"{folder}: expected a folder for the run, got a file")
    who = ""
    if _is_launched():
        who = "torchrun starts its processes again by --max-restarts"
    elif transport == "local":
        who = "no process is started"
    if who and starts != Starts(starts.threads):
        raise PipefitError(f"--recover, --min-ranks and --grow: {who}; leave them out")
    if not (json or quiet) and is_first():
        print("\n".join(columns(choices(asked, run))), "loading torch …", sep="\n", flush=True)
    result = _run(run, transport, starts, quiet=json or quiet)
    text: Text = ""
    if is_first():
        text = partial(report, result)
    return Answer(_data(run, result), text)


def _run(settings: RunConfig, transport: str, starts: Starts, quiet: bool) -> Any:
    """Trains, and writes the report."""
    from pipefit.runtime.outcomes import LaunchError

    try:
        result = _trained(settings, transport, starts, quiet)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_how_to_resume(settings)) from None
    except SystemExit:
        cure = _how_to_resume(settings)
        if cure and is_first():
            print(f"pipefit train: stopped; {cure}", file=sys.stderr, flush=True)
        raise
    except LaunchError as problem:
        lines = [str(problem), _how_to_resume(settings)]
        raise LaunchError("\n  ".join(filter(None, lines))) from None
    if settings.output and is_first():
        from pipefit.run.report_page import write_report

        try:
            result.paths["report"] = str(write_report(settings.output))
        except PipefitError as problem:  # its log is damaged, or the disk is full: the training itself ended well
            print(f"pipefit train: no report was written: {problem}", file=sys.stderr, flush=True)
    return result


def _how_to_resume(settings: RunConfig) -> str:
    """A hint for resuming an interrupted run, with the command; "": it has committed nothing."""
    step = 0
    place = settings.spill.disk
    if place:
        from pipefit.pipeline.resume import committed_step

        # The last that every rank has committed.
        step = min(committed_step(place, rank) or 0 for rank in range(settings.num_ranks))
    if not step and settings.output:
        from pipefit.checkpoint.manifest import step_of

        # A checkpoint has its name only when it is whole. Those of an earlier run may have more steps.
        saved = sorted(checkpoints_of(settings.output).glob("step-*"), key=lambda path: path.stat().st_mtime_ns)
        if saved:
            place = saved[-1]
            step = step_of(place)
            if step == max(map(step_of, saved)):
                place = settings.output
    if not step:
        return ""
    return f"step {step} is saved; resume with:\n  {_resuming(str(place))}"


def _resuming(place: str) -> str:
    """The command of this process with --resume in place of another one."""
    words = [word for word in sys.argv[1:] if not word.startswith("--resume=")]
    while "--resume" in words:
        at = words.index("--resume")
        del words[at : at + 2]
    return shlex.join(["pipefit", *words, "--resume", place])


def _trained(settings: RunConfig, transport: str, starts: Starts, quiet: bool) -> Any:
    from pipefit.cli.ranks import train_rank

    if _is_launched() or transport == "local" or (settings.num_ranks == 1 and not starts.recover):
        return train_rank(settings, quiet)
    from pipefit.runtime.launch import launch
    from pipefit.runtime.outcomes import LaunchError

    folder = None
    is_fresh = False
    if settings.output:
        check_free(Path(settings.output))
        folder = Path(settings.output) / "logs"
        is_fresh = not folder.parent.exists()
    try:
        return launch(train_rank, settings.num_ranks, settings, quiet, folder=folder, quiet=quiet, **vars(starts))[0]
    except PipefitError as problem:
        # A refused run leaves no files; a failed one names its logs.
        if folder is not None and is_fresh and not isinstance(problem, LaunchError):
            _remove_if_only_logs(folder)
        raise


def _remove_if_only_logs(logs: Path) -> None:
    """Removes the folder of a run that contains only its logs."""
    if logs.exists() and [path.name for path in logs.parent.iterdir()] == [logs.name]:
        shutil.rmtree(logs, ignore_errors=True)
        logs.parent.rmdir()


def _data(settings: RunConfig, result: Any) -> JsonObject:
    data = {"config": as_flat(settings), **asdict(result), "final_loss": None}
    if result.losses:
        data["final_loss"] = result.losses[-1]
    return data


def _is_launched() -> bool:
    """Returns whether another program has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
