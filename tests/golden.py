"""The golden programs, and the drawings made ahead: `python -m tests.golden` writes them anew after a change."""

import gzip
from itertools import product
from pathlib import Path

import pipefit.draw.shelf
from pipefit.draw.choices import Wish, drawn, over_ranks
from pipefit.draw.draw_options import DrawOptions
from pipefit.draw.drawing import draw
from pipefit.draw.encode import to_text
from pipefit.draw.scene import scene_of
from pipefit.draw.shelf import CHUNKS, FILE, MICROBATCHES, STAGES
from pipefit.ir import Spill
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
    "1f1b-frozen": ("1f1b", Shape(depth=3, num_microbatches=3, frozen=1, clip=True, recompute=None)),
    "1f1b-tensor": ("1f1b", Shape(depth=2, num_microbatches=2, tensor=2, pieces=True, clip=True)),
    "interleaved": ("interleaved", Shape(depth=2, num_microbatches=4, num_chunks=2)),
    "interleaved-ragged": ("interleaved", Shape(depth=2, num_microbatches=3, num_chunks=2)),
    "breadth-first": ("breadth-first", Shape(depth=2, num_microbatches=3, num_chunks=2)),
    "pipedream": ("pipedream", Shape(depth=3, num_microbatches=1, num_steps=4)),
    "pipedream-2-1": ("pipedream", Shape(depth=2, num_microbatches=1, num_steps=4, replicas=(2, 1))),
    "pipedream-vertical-sync": ("pipedream-vertical-sync", Shape(depth=2, num_microbatches=1, num_steps=4)),
    "pipedream-2bw": ("pipedream-2bw", Shape(depth=2, num_microbatches=2, num_steps=3)),
    "zb-h1": ("zb-h1", Shape(depth=3, num_microbatches=4)),
    "zb-h1-recompute": ("zb-h1", Shape(depth=2, num_microbatches=3, recompute=None, clip=True)),
    "zb-h2": ("zb-h2", Shape(depth=2, num_microbatches=4, num_steps=2)),
    "zb-v": ("zb-v", Shape(depth=2, num_microbatches=3, num_chunks=2)),
    "zb-v-replicated": ("zb-v", Shape(depth=2, num_microbatches=4, num_chunks=2, replicas=(2,))),
    "spilled": ("spilled", Shape(depth=3, num_microbatches=2)),
    "spilled-tied-clipped": ("spilled", Shape(depth=3, num_microbatches=1, num_steps=2, ties=((0, 2),), clip=True)),
    "breadth-first-spilled": (
        "breadth-first",
        Shape(depth=2, num_microbatches=2, num_chunks=2, spill=Spill("disk", 1, 0, (0, 1, 2, 3), True)),
    ),
}

SHELF = Path(pipefit.draw.shelf.__file__).parent / FILE


def shelf_now() -> bytes:
    """The drawings made ahead, as they would be made today."""
    pricing = draw("1f1b", 1, 1).pricing
    wishes = [Wish(name, *shape) for name in over_ranks() for shape in product(STAGES, MICROBATCHES, CHUNKS)]
    found = filter(None, (drawn(wish, pricing, DrawOptions()) for wish in wishes))
    text = "".join(to_text(name, scene_of(timeline)) + "\n" for name, timeline in found)
    return gzip.compress(text.encode(), mtime=0)


if __name__ == "__main__":
    SHELF.write_bytes(shelf_now())
    FOLDER.mkdir(exist_ok=True)
    for name, (schedule, shape) in SHAPES.items():
        save(generate(schedule, shape), FOLDER / f"{name}.pipe")
