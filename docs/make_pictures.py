"""Draws the manual's pictures: `python -m docs.make_pictures`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipefit.draw.drawing import Drawing, draw

PICTURES = Path(__file__).parent / "pictures"
WIDTH = 960.0

SHAPES: dict[str, dict[str, Any]] = {
    "naive": {"schedule": "naive", "num_stages": 4, "num_microbatches": 4},
    "data-parallel": {"schedule": "data-parallel", "num_stages": 4, "num_microbatches": 8},
    "gpipe": {"schedule": "gpipe", "num_stages": 4, "num_microbatches": 8},
    "gpipe-recompute": {"schedule": "gpipe", "num_stages": 4, "num_microbatches": 8, "recompute": True},
    "1f1b": {"schedule": "1f1b", "num_stages": 4, "num_microbatches": 8},
    "interleaved": {"schedule": "interleaved", "num_stages": 4, "num_microbatches": 8, "num_chunks": 2},
    "breadth-first": {"schedule": "breadth-first", "num_stages": 4, "num_microbatches": 8, "num_chunks": 2},
    "zb-h1": {"schedule": "zb-h1", "num_stages": 4, "num_microbatches": 8},
    "zb-h2": {"schedule": "zb-h2", "num_stages": 4, "num_microbatches": 8},
    "zb-v": {"schedule": "zb-v", "num_stages": 4, "num_microbatches": 8, "num_chunks": 2},
    "pipedream": {"schedule": "pipedream", "num_stages": 4, "num_microbatches": 10},
    "pipedream-vertical-sync": {"schedule": "pipedream-vertical-sync", "num_stages": 4, "num_microbatches": 10},
    "pipedream-2bw": {"schedule": "pipedream-2bw", "num_stages": 4, "num_microbatches": 4},
    "spilled": {"schedule": "spilled", "num_stages": 4, "num_microbatches": 4},
    "spilled-ranks": {
        **{"schedule": "breadth-first", "num_stages": 2, "num_microbatches": 4, "num_chunks": 3},
        **{"slots": 2, "recompute": True, "turn": 1},
    },
}
"""Arguments of each picture's drawing, by its name; the tables of the manual show figures of the same drawings."""


def drawing(name: str) -> Drawing:
    """Returns the drawing of a picture."""
    return draw(**SHAPES[name])


def main(folder: Path = PICTURES) -> None:
    """Writes all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHAPES:
        path = drawing(name).save(folder / f"{name}.svg", width=WIDTH)
        sys.stdout.write(f"{path.name}: {path.stat().st_size / 1000:.0f} kB\n")


if __name__ == "__main__":
    main()
