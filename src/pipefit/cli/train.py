"""`pipefit train`: a model over a pipeline of processes, from profile to plan to run."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pipefit.cli.answer import Answer
from pipefit.cli.models import DataNames, ModelName, ModelOptions, importable
from pipefit.cli.options import Json, count, flag, help_of, whole_numbers
from pipefit.errors import PipefitError

__all__ = ["command"]


def command(
    *,
    model: ModelName = "gpt",
    option: ModelOptions = None,
    data: DataNames = None,
    ranks: Annotated[
        int | None, help_of("Processes; default: the plan's, 1 under a cap, or 2.", "--ranks", "-n")
    ] = None,
    transport: Annotated[
        Literal["distributed", "local"], help_of("A process for each rank, or all of them in this one.")
    ] = "distributed",
    schedule: Annotated[
        str | None,
        help_of("Its name, or auto; `pipefit schedules` lists them. Default: 1f1b, or auto under --device-memory."),
    ] = None,
    microbatches: Annotated[int, help_of("Per weight update.", "--microbatches", "-m")] = 4,
    chunks: Annotated[int, help_of("Stages on each rank.", "--chunks", "-v")] = 1,
    replicas: Annotated[str | None, help_of("Copies of each stage, such as 2,1; one number stands for all.")] = None,
    stages: Annotated[str | None, help_of("Layers of each stage, like 3,3; default: balanced by a profile.")] = None,
    recompute: Annotated[bool, flag("Replay each forward before its backward.")] = False,
    data_parallel: Annotated[int, help_of("Copies of the whole pipeline.", "--data-parallel", "-d")] = 1,
    tensor: Annotated[int, help_of("Processes that share each rank by tensor parallelism.", "--tensor", "-t")] = 1,
    sequence_parallel: Annotated[bool, flag("They also divide the sequence between them.")] = False,
    whole_messages: Annotated[bool, flag("Without that: each of them sends all of a message, not its part.")] = False,
    shard_optimizer: Annotated[bool, flag("Divide the optimizer's states over the replicas of each stage.")] = False,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"], help_of("What layers compute in; weights stay as they are.")
    ] = "fp32",
    loss_scale: Annotated[float, help_of("First scale of the loss; 0: 65536 for fp16, else none.")] = 0.0,
    device_memory: Annotated[
        str | None, help_of("Cap on the device, like 1.5GiB: the rest of the model waits on the host or on disk.")
    ] = None,
    host_memory: Annotated[str | None, help_of("Most that what waits may take of the host's memory.")] = None,
    disk: Annotated[Path | None, help_of("Folder in which it waits instead.")] = None,
    commit_every: Annotated[
        int | None,
        help_of("Steps between commits to --disk, to go on from; 0: none; default: 1 if all is there, else 10."),
    ] = None,
    activations: Annotated[
        bool, flag("What enters a stage waits there too; under a cap it does where nothing fits without.")
    ] = False,
    step_on: Annotated[
        Literal["auto", "device", "host"], help_of("Where what waits in the host's memory steps; auto: as planned.")
    ] = "auto",
    keep: Annotated[
        Literal["auto", "all", "none"],
        help_of("Spilled stages that keep their activations and replay nothing; auto: what a cap has room for."),
    ] = "auto",
    plan: Annotated[
        Path | None, help_of("Follow this plan: schedule, stages and micro-batches are then its own.")
    ] = None,
    batch: Annotated[int, help_of("Samples per step.")] = 16,
    steps: Annotated[int, help_of("Weight updates.")] = 100,
    optimizer: Annotated[Literal["adamw", "adam", "sgd"], help_of("Of every stage.")] = "adamw",
    lr: Annotated[float, help_of("Peak learning rate.")] = 2e-3,
    warmup: Annotated[int, help_of("Steps of linear warm-up; then a cosine down to 5 %.")] = 20,
    clip: Annotated[float, help_of("Largest global norm of the gradients; 0: any.")] = 1.0,
    seed: Annotated[int, help_of("Of weights, the order of the data, and dropout.")] = 0,
    output: Annotated[
        Path | None, help_of("Folder for checkpoints, pictures, trace and metrics.", "--output", "-o")
    ] = None,
    resume: Annotated[Path | None, help_of("Go on from a checkpoint's folder, or from that of --disk.")] = None,
    checkpoint_every: Annotated[int, help_of("Steps between checkpoints; 0: only at the end.")] = 0,
    sample: Annotated[int, help_of("Bytes to generate at the end, for language models.")] = 200,
    device: Annotated[str | None, help_of("Where ranks compute, like cpu or cuda; default: what there is.")] = None,
    threads: Annotated[int | None, help_of("CPU threads of each rank; default: the cores divided among them.")] = None,
    config: Annotated[Path | None, help_of("TOML file with any of these options; what is typed wins.")] = None,
    json: Json = False,
) -> Answer:
    """Train a model over a pipeline of processes.

    Example: pipefit train --model gpt --ranks 2 --microbatches 8 --steps 300 -o runs/first

    Profiles the model, plans, trains, and shows what was measured beside what was predicted. Under torchrun each
    process is a rank.
    """
    from pipefit.run.config import RunConfig

    ranks = _ranks(plan, device_memory) if ranks is None else ranks
    for name, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks), ("batch", batch)):
        count(f"--{name}", value)
    count("--tensor", tensor)
    count("--data-parallel", data_parallel)
    count("--steps", steps)
    if output is not None and output.exists() and not output.is_dir():
        raise PipefitError(f"{output}: expected a folder for the run, got a file")
    settings = RunConfig(
        model=importable(model),
        options=",".join(option or []),
        data=tuple(data or ()),
        ranks=ranks,
        schedule=schedule or ("auto" if device_memory else "1f1b"),
        microbatches=microbatches,
        chunks=chunks,
        replicas=whole_numbers("--replicas", replicas),
        stages=whole_numbers("--stages", stages),
        recompute=recompute,
        data_parallel=data_parallel,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        whole_messages=whole_messages,
        shard_optimizer=shard_optimizer,
        precision=precision,
        loss_scale=loss_scale,
        device_memory=device_memory or "",
        host_memory=host_memory or "",
        disk=_text(disk),
        commit_every=commit_every,
        activations=activations,
        step_on=step_on,
        keep=keep,
        plan=_text(plan),
        batch=batch,
        steps=steps,
        optimizer=optimizer,
        lr=lr,
        warmup=warmup,
        clip=clip,
        seed=seed,
        output=_text(output),
        resume=_text(resume),
        checkpoint_every=checkpoint_every,
        sample=sample,
        device=device or "",
    )
    result = _run(settings, transport, threads, quiet=json)
    return Answer(_data(settings, result), lambda: _told(result))


def _ranks(plan: Path | None, device_memory: str | None) -> int:
    """Where nobody says how many processes there are."""
    from pipefit.spec import Plan

    if plan is not None:
        return Plan.load(plan).num_processes
    return 1 if device_memory else 2


def _run(settings: Any, transport: str, threads: int | None, quiet: bool) -> Any:
    from pipefit.runtime.launch import LaunchError

    try:
        result = _trained(settings, transport, threads, quiet)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_how_to_go_on(settings)) from None
    except LaunchError as problem:
        told = _how_to_go_on(settings)
        raise LaunchError(f"{problem}\n  {told}" if told else str(problem)) from None
    if settings.output and _is_first():
        from pipefit.run.report_page import write_report

        result.paths["report"] = str(write_report(settings.output))
    return result


def _how_to_go_on(settings: Any) -> str:
    """With what a run that is cut off has committed, in words; nothing where that is nothing."""
    from pipefit.pipeline.resumed import committed_step

    disk = settings.disk
    # The last that every rank has committed.
    steps = [committed_step(disk, rank) or 0 for rank in range(settings.ranks)] if disk else [0]
    told = f"step {min(steps)} is committed: go on with the same command and --resume {disk}"
    return told if min(steps) else ""


def _trained(settings: Any, transport: str, threads: int | None, quiet: bool) -> Any:
    from pipefit.cli.ranks import train_rank

    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched or transport == "local" or settings.ranks == 1:
        return train_rank(settings, quiet)
    from pipefit.runtime.launch import LaunchError, launch

    folder = Path(settings.output) / "logs" if settings.output else None
    fresh = None if folder is None or folder.parent.exists() else folder
    try:
        return launch(train_rank, settings.ranks, settings, quiet, threads=threads, folder=folder, quiet=quiet)[0]
    except PipefitError as problem:
        # What was refused before it began leaves nothing; what broke names its logs.
        if fresh is not None and not isinstance(problem, LaunchError):
            _remove_if_alone(fresh)
        raise


def _remove_if_alone(logs: Path) -> None:
    """Removes the folder of a run that has left nothing but its logs."""
    if logs.exists() and [path.name for path in logs.parent.iterdir()] == [logs.name]:
        shutil.rmtree(logs, ignore_errors=True)
        logs.parent.rmdir()


def _text(path: Path | None) -> str:
    return "" if path is None else str(path)


def _data(settings: Any, result: Any) -> dict[str, Any]:
    return {"config": asdict(settings), **asdict(result), "final_loss": result.losses[-1] if result.losses else None}


def _told(result: Any) -> str:
    from pipefit.cli.watch import report

    return report(result) if _is_first() else ""


def _is_first() -> bool:
    """Under a launcher of its own every rank comes here, and one tells."""
    return int(os.environ.get("RANK", 0)) == 0
