"""Predicted and counted memory of ten models of transformers: `python -m tests.pipeline.memory_table`."""

import sys
from itertools import product

from tests.pipeline import memory_jobs as jobs

from pipefit.runtime.launch import launch

PRECISIONS = ("fp32", "bf16")


def rows(name: str, plans: dict[str, dict[str, object]], width: int, precision: str) -> list[float]:
    """Prints a line for each plan of two ranks of so many processes; returns the errors in percent."""
    found = []
    shapes = list(plans.values())
    processes = launch(jobs.both, 2 * width, name, shapes, precision, threads=1, quiet=True, deadline_s=900)
    for number, plan in enumerate(plans):
        pairs = [(processes[0][0][number][rank], processes[rank * width][1][number]) for rank in range(2)]
        found += line(name, f"{precision} {plan}", pairs)
    return found


def line(name: str, plan: str, pairs: list[tuple[float, float]]) -> list[float]:
    text = f"{name:28} {plan:37}"
    errors = []
    for rank, (predicted, counted) in enumerate(pairs):
        errors.append(100 * (predicted / counted - 1))
        text += f"  rank {rank}: {predicted / 1e3:7.0f} {counted / 1e3:7.0f} kB {errors[-1]:+5.1f} %"
    print(text, flush=True)
    return errors


def main(names: list[str]) -> None:
    errors = []
    for name, precision in product(names, PRECISIONS):
        errors += rows(name, jobs.PLANS, 1, precision)
        if name in jobs.SHARED:
            errors += rows(name, jobs.TENSOR, 2, precision)
        for plan, shape in jobs.SPILLED.items():
            (pair,) = launch(jobs.spilled, 1, name, precision, *shape, threads=1, quiet=True, deadline_s=300)
            errors += line(name, f"{precision} {plan}", [pair])
    print(f"at most {max(map(abs, errors)):.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:] or list(jobs.MODELS))
