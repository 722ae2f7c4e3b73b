"""Runs a benchmark by its name: `python -m benchmarks ddp --repeats 3`."""

import sys
from importlib import import_module

from cyclopts import App

from pipefit.errors import PipefitError

MODULES = {
    "convergence": "benchmarks.convergence",
    "cut-cost": "benchmarks.cut_cost",
    "ddp": "benchmarks.ddp",
    "fully-shard": "benchmarks.fully_shard",
    "gpu": "benchmarks.gpu",
    "gpu-law": "benchmarks.gpu_law",
    "hub-folder": "benchmarks.hub_folder",
    "hybrid": "benchmarks.hybrid",
    "lean": "benchmarks.lean",
    "network": "benchmarks.network.command",
    "offload": "benchmarks.offload",
    "partition": "benchmarks.partition",
    "planning-time": "benchmarks.planning_time",
    "prediction": "benchmarks.prediction",
    "rebalance": "benchmarks.rebalance",
    "recovery": "benchmarks.recovery",
    "spill": "benchmarks.spill",
    "start": "benchmarks.start",
    "study": "benchmarks.study",
    "unequal": "benchmarks.unequal",
}


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    app = App(name="python -m benchmarks", help_format="plaintext")
    # Only the module that is run is loaded.
    wanted = arguments[:1] if arguments and arguments[0] in MODULES else MODULES
    for name in wanted:
        module = import_module(MODULES[name])
        app.command(module.main, name=name, help=(module.__doc__ or "").splitlines()[0])
    try:
        return int(app(arguments, result_action="return_value") or 0)
    except PipefitError as problem:
        print(f"{arguments[0]}: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
