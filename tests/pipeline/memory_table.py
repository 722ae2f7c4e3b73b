"""Predicted and counted memory of ten models of transformers: `python -m tests.pipeline.memory_table`."""

from tests.pipeline import memory_jobs as jobs

from pipefit.runtime.launch import launch


def main() -> None:
    shapes = list(jobs.PLANS.values())
    worst = 0.0
    for name in jobs.MODELS:
        ranks = launch(jobs.both, 2, [name], shapes, threads=1, quiet=True, deadline_s=600)
        for number, plan in enumerate(jobs.PLANS):
            line = f"{name:28} {plan:24}"
            for rank in range(2):
                predicted = ranks[0][0][0][number][rank]
                counted = ranks[rank][0][1][number]
                error = 100 * (predicted / counted - 1)
                worst = max(worst, abs(error))
                line += f"  rank {rank}: {predicted / 1e3:7.0f} {counted / 1e3:7.0f} kB {error:+5.1f} %"
            print(line, flush=True)
    print(f"at most {worst:.1f} %")


if __name__ == "__main__":
    main()
