"""A page of one picture that does not move: for programs whose lanes of copies the interactive page does not know."""

from __future__ import annotations

from html import escape

from pipefit.draw.caption import measures, title_of
from pipefit.draw.scene import scene_of
from pipefit.draw.svg import draw_scene
from pipefit.timeline import Timeline

__all__ = ["still"]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
</head>
<body style="margin:1rem;font-family:system-ui,sans-serif">
<div style="overflow-x:auto">
{picture}</div>
<p>{words}</p>
</body>
</html>
"""


def still(timeline: Timeline, *, title: str | None = None, seconds: bool | None = None) -> str:
    """The page: the vector picture, whose cells say on hovering what they are, and the figures below it.

    Args:
        timeline: simulated or measured.
        title: of the page; None: the schedule's.
        seconds: whether times are real seconds; None: when the timeline was measured.
    """
    scene = scene_of(timeline, seconds)
    name = title or title_of(scene.facts.schedule)
    return _PAGE.format(title=escape(name), picture=draw_scene(scene, title=name), words=escape(measures(scene)))
