"""When instructions ran."""

from pipefit.timeline.timeline import Event, Timeline

__all__ = ["Event", "Timeline"]
