"""A timeline as a vector picture: one row per rank, a cell per instruction, memory at the right."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import product

from pipefit.draw.arrows import ROOM, arrows
from pipefit.draw.axes import label_number, nice_ticks, time_scale
from pipefit.draw.caption import counts, describe, measures, peak_words, percent, stages_words, title_of
from pipefit.draw.look import cell_rules
from pipefit.draw.scene import Box, Scene, scene_of
from pipefit.draw.svg_layout import BAR_HEIGHT, MARGIN, PEAK_WIDTH, WEIGHTS_OFFSET, Layout, layout_of
from pipefit.timeline import Timeline
from pipefit.units import counted, format_bytes

_FONT = "font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"


def svg(
    timeline: Timeline | Scene,
    *,
    title: str | None = None,
    width: float | None = None,
    seconds: bool | None = None,
    follow: int | None = None,
) -> str:
    """The picture of a timeline as SVG text: well-formed, with no reference to anything outside.

    It follows the reader's preference for light or dark. Cells of asynchronous schedules name their weight version.

    Args:
        timeline: simulated or measured; or its scene.
        title: instead of the schedule's name.
        width: the whole picture's width in pixels; None: as wide as its numbers need.
        seconds: whether times are real seconds; None: when the timeline was measured.
        follow: a micro-batch whose forwards and backwards get arrows to the weight versions that they use.

    Raises:
        PipefitError: there is no such micro-batch.
    """
    if isinstance(timeline, Scene):
        scene = timeline
    else:
        scene = scene_of(timeline, seconds)
    room = 0
    if follow is not None:
        room = ROOM
    plan = layout_of(scene, width, room)
    facts = scene.facts
    name = title or title_of(facts.schedule)
    chunks = facts.num_chunks
    scope = f"pipefit-auto-{chunks}"
    across = f"{plan.width:.0f}"
    down = f"{plan.height:.0f}"
    label = f"{escape(name)}: {escape(counts(scene))}, bubble {percent(facts.bubble_fraction)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{scope}" width="{across}" height="{down}" '
        f'viewBox="0 0 {across} {down}" role="img" aria-label="{label}">',
        f"<title>{escape(name)}</title>",
        f"<desc>{escape(measures(scene))}</desc>",
        f"<style>{_style(scope, chunks)}</style>",
        f'<rect class="paper" width="{across}" height="{down}"/>',
        *_header(scene, name),
        *_axis(scene, plan),
    ]
    for rank in range(scene.num_ranks):
        parts += _row(scene, plan, rank)
    if follow is not None:
        parts += arrows(scene, plan, follow)
    parts += [*_moved(scene, plan), *_launches(scene, plan), *_curves(scene, plan), *_memory(scene, plan)]
    parts += [*_legend(plan), "</svg>"]
    return "\n".join(parts) + "\n"


def _style(scope: str, num_chunks: int) -> str:
    """The style sheet of pictures whose root has class `scope`."""
    root = f".{scope}"
    base = (
        f"{root}{{{_FONT};font-size:12px;font-variant-numeric:tabular-nums;max-width:100%;height:auto}}"
        f"{root} .n{{text-anchor:middle;pointer-events:none}}{root} .v{{opacity:.78}}{root} .end{{text-anchor:end}}"
        f"{root} .mid{{text-anchor:middle}}"
        f"{root} .name{{font-size:19px;font-weight:650}}{root} .small{{font-size:11px}}"
    )
    dark = f"@media (prefers-color-scheme:dark){{{cell_rules(root, num_chunks, True)}}}"
    return base + cell_rules(root, num_chunks, False) + dark


def _pixels(length: float) -> str:
    """A length to a hundredth."""
    return f"{length:.2f}".rstrip("0").rstrip(".")


def _text(classes: str, x: float, y: float, words: str, size: float = 0) -> str:
    """A text of a class, and of a font size where that differs from the class's."""
    font = ""
    if size:
        font = f' font-size="{size}"'
    return f'<text class="{classes}"{font} x="{_pixels(x)}" y="{_pixels(y)}">{words}</text>'


def _rect(
    name: str, x: float, y: float, width: float, height: int, radius: int = 2, words: str = "", data: str = ""
) -> str:
    """A rectangle of a class, with words for its tooltip, and data for scripts."""
    place = f'x="{_pixels(x)}" y="{_pixels(y)}" width="{_pixels(width)}" height="{height}" rx="{radius}"'
    if not words:
        return f'<rect class="{name}" {place}/>'
    return f'<rect class="{name}"{data} {place}><title>{words}</title></rect>'


def _lane(plan: Layout, y: float, name: str) -> Iterator[str]:
    """A lane below a rank."""
    yield _rect("lane", plan.left, y, plan.plot_width, BAR_HEIGHT)
    yield _text("soft end", plan.left - 14, y + 9, name, 9)


def _header(scene: Scene, name: str) -> list[str]:
    facts = scene.facts
    factor, unit = time_scale(scene.scale_s, scene.unit)
    times = f"makespan {label_number(facts.makespan_s * factor)} {unit}".strip()
    line = f"{counts(scene)} · bubble {percent(facts.bubble_fraction)} · {times} · {scene.timeline.source}"
    title = _text("ink name", MARGIN, MARGIN + 14, escape(name))
    return [title, _text("soft", MARGIN, MARGIN + 35, escape(line))]


def _axis(scene: Scene, plan: Layout) -> list[str]:
    factor, unit = time_scale(scene.scale_s, scene.unit)
    span = scene.facts.makespan_s * factor
    parts = []
    top = plan.top - 4
    bottom = plan.bottom + 4
    below = bottom + 14
    count = max(int(plan.plot_width / 110), 3)
    for tick in nice_ticks(span, count):
        x = plan.x(tick / factor)
        parts.append(f'<path class="hair" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>')
        parts.append(_text("soft small mid", x, below, label_number(tick)))
    words = "time"
    if unit:
        words = f"time in {unit}"
    parts.append(_text("soft small end", plan.left - 14, below, words))
    return parts


def _row(scene: Scene, plan: Layout, rank: int) -> list[str]:
    y = plan.y(rank)
    height = plan.cell_height
    middle = y + height / 2
    edge = plan.left - 14
    parts = [f'<g class="rank" data-rank="{rank}">', _rect("lane", plan.left, y, plan.plot_width, height, 3)]
    if scene.is_plain:
        parts.append(_text("ink end", edge, middle + 4, f"rank {rank}"))
    else:
        parts.append(_text("ink end", edge, middle - 2, f"rank {rank}"))
        parts.append(_text("soft end", edge, middle + 10, stages_words(scene.stages[rank]), 10))
    for box in scene.of(rank):
        parts += _cell(box, scene, plan, y)
    parts.append("</g>")
    return parts


def _cell(box: Box, scene: Scene, plan: Layout, y: float) -> Iterator[str]:
    x = plan.x(box.start_s)
    height = plan.cell_height
    width = plan.x(box.end_s) - x
    data = f' data-i="{box.short}"'
    words = describe(box, scene)
    if box.letter == "S":
        # A step takes almost no time in most pictures: it is drawn as a tick that stays visible.
        begin = x + 0.5
        if width < 2.6:
            begin = x - 0.8
        yield _rect("S0", begin, y - 2, max(width - 1, 1.6), height + 4, 0, words, data)
        return
    inset = min(0.12 * width, 0.5)
    inner = max(width - 2 * inset, 0.3)
    radius = min(int(width / 4), 2)
    yield _rect(f"{box.letter}{box.chunk}", x + inset, y, inner, height, radius, words, data)
    middle = x + width / 2
    name = f"n t{box.letter}"
    label = str(box.mb)
    size = plan.number_size
    if not size or len(label) * 0.6 * size > width - 1.9:
        return
    if not plan.versions:
        yield _text(name, middle, y + height / 2 + 0.36 * size, label, size)
        return
    yield _text(name, middle, y + 0.46 * height, label, size)
    version = f"w{box.version}"
    small = plan.version_size
    if len(version) * 0.62 * small <= width - 1:
        yield _text(f"{name} v", middle, y + 0.83 * height, version, small)


def _moved(scene: Scene, plan: Layout) -> Iterator[str]:
    """The lanes of copies and of steps on the host."""
    for rank, (number, lane) in product(range(scene.num_ranks), enumerate(scene.lanes)):
        yield from _lane(plan, plan.lane_y(rank, number), lane)
    size = 8.5
    for bar in scene.bars:
        own = scene.timeline.program.ranks[bar.rank]
        words = escape(str(own[bar.position]))
        x = plan.x(bar.start_s)
        y = plan.lane_y(bar.rank, scene.lanes.index(bar.lane))
        width = max(plan.x(bar.end_s) - x, 1.5)
        yield _rect(bar.lane, x + 0.4, y, width - 0.8, BAR_HEIGHT, words=words)
        if len(bar.short) * 0.6 * size <= width - 2:
            yield _text("n paper", x + width / 2, y + 8.6, bar.short, size)


def _launches(scene: Scene, plan: Layout) -> Iterator[str]:
    """The lane of the host's launches, where a device computes."""
    timeline = scene.timeline
    number = plan.num_lanes - 1
    for rank in sorted({event.rank for event in timeline.launches}):
        yield from _lane(plan, plan.lane_y(rank, number), "launches")
    for event in timeline.launches:
        x = plan.x(max(event.start_s - timeline.start_s, 0.0))
        width = plan.x(max(event.end_s - timeline.start_s, 0.0)) - x
        words = f"launch {escape(str(timeline.instruction(event)))}"
        yield _rect("host", x, plan.lane_y(event.rank, number), max(width, 0.5), BAR_HEIGHT, words=words)


def _curves(scene: Scene, plan: Layout) -> Iterator[str]:
    """The memory of each rank over time, below its row; all on the scale of the fullest."""
    if not plan.curve:
        return
    highest = max(scene.facts.peak_bytes)
    begin_s = scene.timeline.start_s
    end_s = scene.facts.makespan_s
    for rank, samples in enumerate(scene.timeline.memory):
        base = plan.curve_y(rank)
        line = f"M{plan.left:.1f} {base:.1f}"
        for time_s, size in samples:
            x = plan.x(min(max(time_s - begin_s, 0), end_s))
            y = base - (plan.curve - 3) * size / highest
            line += f"H{x:.1f}V{y:.1f}"
        line += f"H{plan.x(end_s):.1f}V{base:.1f}Z"
        words = f"memory of rank {rank}: at most {format_bytes(scene.facts.peak_bytes[rank])}"
        yield f'<path class="bar" d="{line}"><title>{words}</title></path>'


def _memory(scene: Scene, plan: Layout) -> Iterator[str]:
    """The peak of each rank as a bar, then its figures, each kind below its head."""
    facts = scene.facts
    x = plan.memory_left
    peaks = facts.peak_inflight
    head = "peak in flight"
    if any(facts.kept_inputs):
        head = "in flight + inputs"
    heads = {x: head}
    figures = {x + PEAK_WIDTH + 8: [peak_words(scene, rank) for rank in range(scene.num_ranks)]}
    if max(facts.weight_versions, default=1) > 1:
        place = x + WEIGHTS_OFFSET
        heads[place] = "weights"
        figures[place] = [counted(held, "version") for held in facts.weight_versions]
    if facts.peak_bytes:
        place = x + plan.bytes_offset
        heads[place] = "memory"
        figures[place] = [format_bytes(float(f"{size:.3g}")) for size in facts.peak_bytes]
    for place, words in heads.items():
        yield _text("soft small", place, plan.top - 12, words)
    highest = max(peaks, default=0) or 1
    for rank, peak in enumerate(peaks):
        middle = plan.y(rank) + plan.cell_height / 2
        yield _rect("lane", x, middle - 5, PEAK_WIDTH, 10)
        yield _rect("bar", x, middle - 5, PEAK_WIDTH * peak / highest, 10)
        for place, each in figures.items():
            yield _text("ink", place, middle + 4, each[rank])


def _legend(plan: Layout) -> Iterator[str]:
    """Swatches and words, in as many lines as the layout counted for them."""
    for item in plan.legend:
        x = plan.left + item.x
        top = plan.bottom + 40 + item.line * 20
        height = 12
        if item.thin:
            height = 4
        for name in item.classes:
            yield _rect(name, x, top + (12 - height) / 2, item.swatch, height)
            x += item.swatch + 1
        if item.classes:
            x += 5
        yield _text("soft", x, top + 10, escape(item.words))
