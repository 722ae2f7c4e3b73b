"""A timeline as a vector picture: one row per rank, a cell per instruction, memory at the right."""

from __future__ import annotations

from html import escape
from itertools import product

from pipefit.draw.arrows import ROOM, arrows
from pipefit.draw.axes import label_number, nice_ticks, time_scale
from pipefit.draw.caption import counts, describe, measures, peak_words, percent, stages_words, title_of
from pipefit.draw.look import cell_rules
from pipefit.draw.scene import Box, Scene, scene_of
from pipefit.draw.svg_layout import BAR_HEIGHT, MARGIN, PEAK_WIDTH, WEIGHTS_OFFSET, Layout, layout_of
from pipefit.timeline import Timeline
from pipefit.units import format_bytes

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
        width: of the whole picture in pixels; None: as wide as its numbers need.
        seconds: whether times are real seconds; None: when the timeline was measured.
        follow: a micro-batch whose forwards and backwards get arrows to the weight versions that they use.

    Raises:
        PipefitError: there is no such micro-batch.
    """
    if isinstance(timeline, Scene):
        scene = timeline
    else:
        scene = scene_of(timeline, seconds)
    plan = layout_of(scene, width, ROOM if follow is not None else 0)
    name = title or title_of(scene.facts.schedule)
    chunks = scene.facts.num_chunks
    scope = f"pipefit-auto-{chunks}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{scope}" width="{plan.width:.0f}" height="{plan.height:.0f}" '
        f'viewBox="0 0 {plan.width:.0f} {plan.height:.0f}" role="img" '
        f'aria-label="{escape(name)}: {escape(counts(scene))}, bubble {percent(scene.facts.bubble_fraction)}">',
        f"<title>{escape(name)}</title>",
        f"<desc>{escape(measures(scene))}</desc>",
        f"<style>{_style(scope, chunks)}</style>",
        f'<rect class="paper" width="{plan.width:.0f}" height="{plan.height:.0f}"/>',
        *_header(scene, name),
        *_axis(scene, plan),
    ]
    for rank in range(scene.num_ranks):
        parts += _row(scene, plan, rank)
    if follow is not None:
        parts += arrows(scene, plan, follow)
    parts += [*_spilled(scene, plan), *_memory(scene, plan), *_legend(plan), "</svg>"]
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


def _header(scene: Scene, name: str) -> list[str]:
    facts = scene.facts
    factor, unit = time_scale(scene.scale_s, scene.unit)
    times = f"makespan {label_number(facts.makespan_s * factor)} {unit}".strip()
    line = f"{counts(scene)} · bubble {percent(facts.bubble_fraction)} · {times} · {scene.timeline.source}"
    return [
        f'<text class="ink name" x="{MARGIN}" y="{MARGIN + 14}">{escape(name)}</text>',
        f'<text class="soft" x="{MARGIN}" y="{MARGIN + 35}">{escape(line)}</text>',
    ]


def _axis(scene: Scene, plan: Layout) -> list[str]:
    factor, unit = time_scale(scene.scale_s, scene.unit)
    span = scene.facts.makespan_s * factor
    parts = []
    top = plan.top - 4
    bottom = plan.bottom + 4
    for tick in nice_ticks(span, max(int(plan.plot_width / 110), 3)):
        x = plan.x(tick / factor)
        parts.append(f'<path class="hair" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>')
        parts.append(f'<text class="soft small mid" x="{x:.1f}" y="{bottom + 14:.1f}">{label_number(tick)}</text>')
    if unit:
        words = f"time in {unit}"
    else:
        words = "time"
    parts.append(f'<text class="soft small end" x="{plan.left - 14}" y="{bottom + 14:.1f}">{words}</text>')
    return parts


def _row(scene: Scene, plan: Layout, rank: int) -> list[str]:
    y = plan.y(rank)
    height = plan.cell_height
    middle = y + height / 2
    parts = [
        f'<g class="rank" data-rank="{rank}">',
        f'<rect class="lane" x="{plan.left}" y="{y:.1f}" width="{plan.plot_width:.1f}" height="{height}" rx="3"/>',
    ]
    if scene.is_plain:
        above = 4
    else:
        above = -2
    parts.append(f'<text class="ink end" x="{plan.left - 14}" y="{middle + above:.1f}">rank {rank}</text>')
    if not scene.is_plain:
        words = stages_words(scene.stages[rank])
        parts.append(f'<text class="soft end" font-size="10" x="{plan.left - 14}" y="{middle + 10:.1f}">{words}</text>')
    for box in scene.of(rank):
        parts.append(_cell(box, scene, plan, y))
    parts.append("</g>")
    return parts


def _radius(width: float) -> int:
    """Radius of a cell's corners in pixels."""
    if width > 7:
        return 2
    return 1 if width > 4 else 0


def _cell(box: Box, scene: Scene, plan: Layout, y: float) -> str:
    x = plan.x(box.start_s)
    height = plan.cell_height
    width = plan.x(box.end_s) - x
    data = f'data-i="{box.short}"'
    if box.letter == "S":
        # A step takes almost no time in most pictures: it is drawn as a tick that stays visible.
        w = max(width - 1, 1.6)
        rect = f'<rect class="S0" {data} x="{x - 0.8 if width < 2.6 else x + 0.5:.2f}" y="{y - 2:.1f}" '
        return f'{rect}width="{w:.2f}" height="{height + 4}"><title>{describe(box, scene)}</title></rect>'
    if width > 3:
        inset = 0.5
    else:
        inset = min(0.12 * width, 0.5)
    rect = (
        f'<rect class="{box.letter}{box.chunk}" {data} x="{x + inset:.2f}" y="{y:.1f}" '
        f'width="{max(width - 2 * inset, 0.3):.2f}" height="{height}" rx="{_radius(width)}">'
        f"<title>{describe(box, scene)}</title></rect>"
    )
    middle = x + width / 2
    label = str(box.mb)
    size = plan.number_size
    if not size or len(label) * 0.6 * size > width - 1.9:
        return rect
    if not plan.versions:
        return (
            f'{rect}<text class="n t{box.letter}" font-size="{size}" x="{middle:.2f}" '
            f'y="{y + height / 2 + 0.36 * size:.1f}">{label}</text>'
        )
    version = f"w{box.version}"
    small = plan.version_size
    above = f'font-size="{size}" x="{middle:.2f}" y="{y + 0.46 * height:.1f}"'
    text = f'{rect}<text class="n t{box.letter}" {above}>{label}</text>'
    if len(version) * 0.62 * small > width - 1:
        return text
    below = f'font-size="{small}" x="{middle:.2f}" y="{y + 0.83 * height:.1f}"'
    return f'{text}<text class="n v t{box.letter}" {below}>{version}</text>'


def _spilled(scene: Scene, plan: Layout) -> list[str]:
    """The lanes of copies and of steps on the host."""
    parts: list[str] = []
    for rank, lane in product(range(scene.num_ranks), scene.lanes):
        y = plan.lane_y(rank, lane)
        parts.append(
            f'<rect class="lane" x="{plan.left}" y="{y:.1f}" width="{plan.plot_width:.1f}" '
            f'height="{BAR_HEIGHT}" rx="2"/>'
            f'<text class="soft end" font-size="9" x="{plan.left - 14}" y="{y + 9:.1f}">{lane}</text>'
        )
    for bar in sorted(scene.bars, key=lambda bar: bar.lane == "host"):
        instruction = scene.timeline.program.ranks[bar.rank][bar.position]
        x = plan.x(bar.start_s)
        y = plan.lane_y(bar.rank, bar.lane)
        size = 8.5
        width = max(plan.x(bar.end_s) - x, 1.5)
        parts.append(
            f'<rect class="{bar.lane}" x="{x + 0.4:.2f}" y="{y:.1f}" width="{width - 0.8:.2f}" '
            f'height="{BAR_HEIGHT}" rx="2"><title>{escape(str(instruction))}</title></rect>'
        )
        if len(bar.short) * 0.6 * size <= width - 2:
            parts.append(
                f'<text class="n paper" font-size="{size}" x="{x + width / 2:.2f}" y="{y + 8.6:.1f}">{bar.short}</text>'
            )
    return parts


def _memory(scene: Scene, plan: Layout) -> list[str]:
    peaks = scene.facts.peak_inflight
    versions = scene.facts.weight_versions
    x = plan.memory_left
    highest = max(scene.facts.peak_inflight, default=0) or 1
    if any(scene.facts.kept_inputs):
        head = "in flight + inputs"
    else:
        head = "peak in flight"
    parts = [f'<text class="soft small" x="{x:.1f}" y="{plan.top - 12:.1f}">{head}</text>']
    several = max(versions, default=1) > 1
    if several:
        parts.append(f'<text class="soft small" x="{x + WEIGHTS_OFFSET:.1f}" y="{plan.top - 12:.1f}">weights</text>')
    sizes = [format_bytes(float(f"{size:.3g}")) for size in scene.facts.peak_bytes]
    if sizes:
        parts.append(f'<text class="soft small" x="{x + plan.bytes_offset:.1f}" y="{plan.top - 12:.1f}">memory</text>')
    for rank, peak in enumerate(peaks):
        y = plan.y(rank) + plan.cell_height / 2 - 5
        middle = plan.y(rank) + plan.cell_height / 2 + 4
        length = PEAK_WIDTH * peak / highest
        parts.append(f'<rect class="lane" x="{x:.1f}" y="{y:.1f}" width="{PEAK_WIDTH}" height="10" rx="2"/>')
        parts.append(f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{length:.1f}" height="10" rx="2"/>')
        parts.append(
            f'<text class="ink" x="{x + PEAK_WIDTH + 8:.1f}" y="{middle:.1f}">{peak_words(scene, rank)}</text>'
        )
        if several:
            words = f"{versions[rank]} version{'s' if versions[rank] > 1 else ''}"
            parts.append(f'<text class="ink" x="{x + WEIGHTS_OFFSET:.1f}" y="{middle:.1f}">{words}</text>')
        if sizes:
            parts.append(f'<text class="ink" x="{x + plan.bytes_offset:.1f}" y="{middle:.1f}">{sizes[rank]}</text>')
    return parts


def _legend(plan: Layout) -> list[str]:
    """Swatches and words, in as many lines as the layout counted for them."""
    parts = []
    y = plan.bottom + 40
    for item in plan.legend:
        x = plan.left + item.x
        top = y + item.line * 20
        if item.thin:
            shapes = [(item.classes[0], 4, 4)]
        else:
            shapes = [(name, 0, 12) for name in item.classes]
        for name, shift, height in shapes:
            parts.append(
                f'<rect class="{name}" x="{x:.1f}" y="{top + shift:.1f}" '
                f'width="{item.swatch}" height="{height}" rx="2"/>'
            )
            x += item.swatch + 1
        parts.append(
            f'<text class="soft" x="{x + 5 * bool(shapes):.1f}" y="{top + 10:.1f}">{escape(item.words)}</text>'
        )
    return parts
