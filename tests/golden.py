"""The golden programs: `python -m tests.golden` writes them anew, after a change that is meant."""

from pathlib import Path

from pipefit.ir.text import save
from pipefit.schedules import Shape, generate

FOLDER = Path(__file__).parent / "golden"

SHAPES = {
    "naive": ("naive", Shape(depth=2, num_microbatches=2)),
    "data-parallel": ("data-parallel", Shape(depth=2, num_microbatches=4)),
    "gpipe": ("gpipe", Shape(depth=2, num_microbatches=3)),
    "gpipe-recompute": ("gpipe", Shape(depth=2, num_microbatches=3, recompute=None)),
    "1f1b": ("1f1b", Shape(depth=3, num_microbatches=4)),
    "1f1b-tied-clipped": ("1f1b", Shape(depth=2, num_microbatches=2, num_steps=2, ties=((0, 1),), clip=True)),
    "1f1b-replicated": ("1f1b", Shape(depth=2, num_microbatches=4, replicas=(2, 2))),
    "interleaved": ("interleaved", Shape(depth=2, num_microbatches=4, num_chunks=2)),
    "interleaved-ragged": ("interleaved", Shape(depth=2, num_microbatches=3, num_chunks=2)),
    "breadth-first": ("breadth-first", Shape(depth=2, num_microbatches=3, num_chunks=2)),
    "pipedream": ("pipedream", Shape(depth=3, num_microbatches=1, num_steps=4)),
    "pipedream-2-1": ("pipedream", Shape(depth=2, num_microbatches=1, num_steps=4, replicas=(2, 1))),
    "pipedream-vertical-sync": ("pipedream-vertical-sync", Shape(depth=2, num_microbatches=1, num_steps=4)),
    "pipedream-2bw": ("pipedream-2bw", Shape(depth=2, num_microbatches=2, num_steps=3)),
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, (schedule, shape) in SHAPES.items():
        save(generate(schedule, shape), FOLDER / f"{name}.pipe")
