"""Timelines as one self-contained interactive page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipefit.draw.caption import title_of
from pipefit.draw.encode import to_text
from pipefit.draw.look import FAMILIES, INKS, cell_rules
from pipefit.draw.scene import Scene, scene_of
from pipefit.draw.shelf import Stored
from pipefit.draw.svg import svg
from pipefit.errors import PipefitError
from pipefit.spec.assets import asset, rendered
from pipefit.timeline import Timeline

Timelines = Timeline | Mapping[str, Timeline] | Sequence[tuple[str, Timeline]]


def html(
    timelines: Timelines,
    *,
    title: str | None = None,
    seconds: bool = False,
    compare: bool | None = None,
    more: Sequence[Stored] = (),
) -> str:
    """A self-contained page that shows timelines, one or two at a time; in seconds where one of them was measured.

    Args:
        timelines: one or several; a mapping or pairs also name them. Several of one name are distinguished by their
            shape: the page has a choice for each of p, m, v and, where programs spill, of the slots.
        title: the page's title.
        seconds: whether times are real seconds; they also are where one timeline was measured.
        compare: whether it opens with two drawings; None: with exactly two timelines it does.
        more: drawings encoded before, as further choices; of one name and shape the first counts.

    Raises:
        PipefitError: there is no timeline.
    """
    named = _named(timelines)
    # A timeline next to a measured one predicts it.
    real = seconds or any(timeline.source == "measured" for _, timeline in named)
    entries = [(name, scene_of(timeline, real)) for name, timeline in named]
    if not entries:
        raise PipefitError("a page needs at least one timeline, got none")
    first, scene = entries[0]
    drawn = {_key(*entry) for entry in entries}
    stored = [item for item in more if item.key not in drawn]
    chunks = {one.facts.num_chunks for _, one in entries} | {item.v for item in stored}
    if title is None and all(name == first for name, _ in entries):
        title = first
    if compare is None:
        compare = len(entries) == 2
    texts = [*(to_text(*entry) for entry in entries), *(item.text for item in stored)]
    return rendered(
        "pipefit.draw",
        "page.html.j2",
        title=title or "Pipeline schedules",
        style=asset("pipefit.draw", "page.css") + _colours(sorted(chunks)),
        script="".join(asset("pipefit.draw", name) for name in _SCRIPTS),
        data="[" + ",\n".join(texts) + "]",
        families={letter: family.name for letter, family in FAMILIES.items()},
        # Readers without scripts still see the first one.
        picture=svg(scene, title=first),
        compare=compare,
    )


_SCRIPTS = ("words.js", "replay.js", "panel.js", "export.js", "page.js")


def _key(name: str, scene: Scene) -> tuple[str, int, int, int, int]:
    facts = scene.facts
    return name, scene.num_ranks, facts.num_microbatches, facts.num_chunks, facts.slots


def _named(timelines: Timelines) -> list[tuple[str, Timeline]]:
    if isinstance(timelines, Timeline):
        return [(title_of(timelines.program.header.schedule), timelines)]
    if isinstance(timelines, Mapping):
        return list(timelines.items())
    return list(timelines)


def _colours(chunks: list[int]) -> str:
    """The palette: variables for the page, rules for cells of pictures with 1, 2, … chunks."""
    day = _palette(chunks, is_dark=False)
    night = _palette(chunks, is_dark=True)
    return f"{day}@media (prefers-color-scheme:dark){{{night}}}"


def _palette(chunks: list[int], is_dark: bool) -> str:
    variables = ";".join(f"--{name}:{colours[is_dark]}" for name, colours in INKS.items())
    rules = [cell_rules(f".chunks-{count}", count, is_dark) for count in chunks]
    return "".join([f":root{{{variables}}}", *rules])
