"""Pictures of timelines, simulated or measured."""

from pipefit.draw.grid import grid
from pipefit.draw.svg import svg

__all__ = ["grid", "svg"]
