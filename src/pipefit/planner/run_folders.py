"""Runs of pipefit itself as measured runs: the folders that `pipefit train -o` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipefit.errors import ProfileError
from pipefit.planner.measured_runs import MeasuredRun
from pipefit.spec import Plan
from pipefit.spec.files import read_json
from pipefit.spec.plan import Partition

_SCHEDULES = ("1f1b", "interleaved")
_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
_BUILT_IN = {"layers": 4, "hidden": 128, "heads": 4, "vocab": 256, "context": 128, "tied": 1}
"""Sizes of the built-in GPT where a run does not name them."""


def run_of_folder(folder: Path) -> MeasuredRun:
    """The run of a folder: its plan's widths, and the seconds between two of its steps.

    Raises:
        ProfileError: the run has not ended, or the law of measured runs does not know its model, schedule or cut.
    """
    path = folder / "run.json"
    if not path.is_file():
        raise ProfileError(f"{folder}: expected the folder of a run that has ended; there is no {path.name}")
    kept = read_json(path, ProfileError)
    config = kept["config"]
    plan = Plan.load(folder / "plan.json")
    model = f"{_model_of(folder, config)},sequence_parallel={int(plan.sequence_parallel)}"
    depth = plan.placement.num_ranks // plan.data
    if depth > 1 and plan.schedule not in _SCHEDULES:
        known = " or ".join(_SCHEDULES)
        raise ProfileError(f"{folder}: expected a run with the schedule {known}, got {plan.schedule}")
    if plan.spill is not None or not _is_even(plan.partition):
        raise ProfileError(f"{folder}: expected stages of equally many blocks that stay on their devices")
    pipelines = plan.data * plan.num_microbatches
    return MeasuredRun(
        model,
        plan.num_processes,
        plan.tensor,
        depth,
        plan.num_chunks,
        config["batch"] // pipelines,
        config["batch"],
        plan.partition.stages[0].replays,
        plan.shard,
        kept["result"]["measured_period_s"],
        place=str(folder),
    )


def _model_of(folder: Path, config: dict[str, Any]) -> str:
    """The built-in GPT of a run by its sizes."""
    if config["model"] != "gpt":
        raise ProfileError(
            f"{folder}: expected a run of --model gpt, whose costs follow from its sizes, got {config['model']}"
        )
    sizes = dict(_BUILT_IN)
    for part in filter(None, config["option"].split(",")):
        name, _, value = part.partition("=")
        sizes[name] = value
    sizes["sequence"] = sizes.pop("context")
    sizes["tied"] = int(str(sizes["tied"]) in ("1", "True", "true"))
    sizes["dropout"] = int(float(sizes.get("dropout", 0)) > 0)
    sizes["bytes"] = _BYTES[config["precision"]]
    named = ",".join(f"{name}={value}" for name, value in sizes.items())
    return f"gpt:{named},attention=flash"


def _is_even(partition: Partition) -> bool:
    """Returns whether all stages have equally many blocks: the first layer and the last are none."""
    last = partition.num_layers - 1
    counts = {sum(0 < layer < last for layer in stage.layers) for stage in partition.stages}
    return len(counts) == 1
