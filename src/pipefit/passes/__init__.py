"""Program → Program, one thing each. `build` chains them in the one order that makes sense."""

from pipefit.passes.build import build
from pipefit.passes.communication import with_communication
from pipefit.passes.data import with_data
from pipefit.passes.recompute import with_recompute
from pipefit.passes.reduction import with_reductions
from pipefit.passes.scatter_gather import with_scatter_gather
from pipefit.passes.spilling import with_spilling
from pipefit.passes.versions import with_drops, with_steps, with_versions

__all__ = [
    "build",
    "with_communication",
    "with_data",
    "with_drops",
    "with_recompute",
    "with_reductions",
    "with_scatter_gather",
    "with_spilling",
    "with_steps",
    "with_versions",
]
