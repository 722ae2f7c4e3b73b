"""Arrows from a micro-batch's forwards and backwards to the weight versions that they use, below each row."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.draw.scene import Box, Scene
from pipefit.draw.svg_layout import Layout
from pipefit.errors import PipefitError

ROOM = 34
"""Pixels between rows, for the versions and the arrows to them."""


def arrows(scene: Scene, plan: Layout, microbatch: int) -> Iterator[str]:
    """A mark at the birth of every weight version, and the arrows of one micro-batch.

    Source of the picture: Narayanan et al., "PipeDream" (SOSP 2019), figure 9.

    Raises:
        PipefitError: there is no such micro-batch.
    """
    followed = [box for box in scene.boxes if box.mb == microbatch]
    if not followed:
        last = max((box.mb for box in scene.boxes), default=0)
        raise PipefitError(f"follow: expected a micro-batch of the picture, 0 to {last}; got {microbatch}")
    for rank in range(scene.num_ranks):
        y = plan.y(rank) + plan.cell_height
        births = {(stage, 0): 0.0 for stage in scene.stages[rank]}
        for box in scene.of(rank):
            if box.letter == "S":
                births[box.stage, box.version + 1] = box.end_s
        used = {(box.stage, box.version) for box in followed if box.rank == rank}
        for (stage, version), time_s in births.items():
            kind = "soft"
            if (stage, version) in used:
                kind = "mark"
            x = plan.x(time_s)
            below = y + ROOM - 5
            place = f'x="{x:.1f}" y="{below:.1f}"'
            yield f'<text class="{kind}" font-size="9" text-anchor="middle" {place}>w{version}</text>'
        for box in followed:
            if box.rank == rank:
                birth_s = births[box.stage, box.version]
                yield from _arrow(box, birth_s, plan, y)


def _arrow(box: Box, birth_s: float, plan: Layout, y: float) -> Iterator[str]:
    """From the middle of a cell's lower edge back to the birth of the version that it uses."""
    start = plan.x((box.start_s + box.end_s) / 2)
    end = plan.x(birth_s)
    curve = f"M{start:.1f} {y:.1f}C{start:.1f} {y + 18:.1f} {end:.1f} {y + 2:.1f} {end:.1f} {y + 16:.1f}"
    yield f'<path class="halo" style="fill:none" d="{curve}"/>'
    yield f'<path class="mark" d="M{end - 4:.1f} {y + 14:.1f}h8l-4 7z"/>'
