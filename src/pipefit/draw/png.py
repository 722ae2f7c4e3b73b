"""A timeline as a bitmap for slides and papers, by matplotlib."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from pipefit.draw.axes import label_number, nice_ticks, time_scale
from pipefit.draw.caption import counts, measures, stages_words, title_of
from pipefit.draw.layout import Layout, layout_of
from pipefit.draw.look import FAMILIES, INKS, chunk_colour
from pipefit.draw.scene import Scene, scene_of
from pipefit.errors import PipefitError
from pipefit.spec.files import write_atomically
from pipefit.timeline import Timeline

__all__ = ["png"]


def png(
    timeline: Timeline,
    path: str | Path,
    *,
    title: str | None = None,
    seconds: bool | None = None,
    dark: bool = False,
    dots_per_inch: int = 160,
) -> Path:
    """Writes the picture of a timeline as PNG; arguments as for `svg`.

    Raises:
        PipefitError: matplotlib is not installed, or the path cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PipefitError(
            f"{path}: a PNG needs matplotlib, which is not installed; pip install 'pipefit[plot]', or save an .svg"
        ) from None
    scene = scene_of(timeline, seconds)
    plan = layout_of(scene, width=None, lanes=False, memory=True, versions=scene.shows_versions)
    ink = {name: pair[dark] for name, pair in INKS.items()}
    # One pixel of the vector picture is a hundredth of an inch here.
    figure = Figure(figsize=(plan.width / 100, (plan.height + 8) / 100), facecolor=ink["paper"])
    FigureCanvasAgg(figure)
    height = plan.height + 8
    box = (plan.left / plan.width, 1 - plan.bottom / height)
    axes = figure.add_axes((*box, plan.plot_width / plan.width, (plan.bottom - plan.top) / height))
    _cells(axes, scene, plan, ink, dark)
    _frame(axes, scene, plan, ink)
    _words(figure, scene, plan, ink, title or title_of(scene.facts.schedule), height)
    _swatches(figure, scene, plan, ink, dark, height)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=dots_per_inch, facecolor=ink["paper"])
    return write_atomically(path, picture.getvalue())


def _cells(axes: Any, scene: Scene, plan: Layout, ink: dict[str, str], dark: bool) -> None:
    factor, _ = time_scale(scene.facts.makespan_s, scene.unit)
    chunks, gap = scene.facts.num_chunks, 1 / plan.scale * factor
    for rank in range(scene.num_ranks):
        top = rank * plan.pitch
        axes.broken_barh([(0, scene.facts.makespan_s * factor)], (top, plan.cell_height), color=ink["lane"], lw=0)
        groups: dict[str, list[tuple[float, float]]] = {}
        boxes = scene.of(rank)
        # A step takes next to no time in most pictures: a line that stays visible.
        steps = [cell.end_s * factor for cell in boxes if cell.letter == "S"]
        axes.vlines(steps, top - 2, top + plan.cell_height + 2, color=chunk_colour("S", 0, 1, dark), lw=1, zorder=3)
        for cell in boxes:
            if cell.letter == "S":
                continue
            colour = chunk_colour(cell.letter, cell.chunk, chunks, dark)
            length = max(cell.duration_s * factor - gap, 0.5 * gap)
            groups.setdefault(colour, []).append((cell.start_s * factor + gap / 2, length))
        for colour, bars in groups.items():
            axes.broken_barh(bars, (top, plan.cell_height), color=colour, lw=0)
        for cell in boxes:
            label, width = str(cell.mb), cell.duration_s * plan.scale
            if cell.mb < 0 or not plan.number_size or len(label) * 0.6 * plan.number_size > width - 1.9:
                continue
            family = FAMILIES[cell.letter]
            colour = family.dark_text if dark else family.light_text
            middle, share = (cell.start_s + cell.duration_s / 2) * factor, 0.5 if not plan.versions else 0.36
            points = 0.68 * plan.number_size
            axes.text(middle, top + share * plan.cell_height, label, color=colour, fontsize=points, **_CENTRED)
            version = f"w{cell.version}"
            if plan.versions and len(version) * 0.62 * plan.version_size <= width - 1:
                small = 0.68 * plan.version_size
                axes.text(middle, top + 0.76 * plan.cell_height, version, color=colour, fontsize=small, **_CENTRED)


_CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}


def _frame(axes: Any, scene: Scene, plan: Layout, ink: dict[str, str]) -> None:
    factor, unit = time_scale(scene.facts.makespan_s, scene.unit)
    span = scene.facts.makespan_s * factor
    ticks = nice_ticks(0, span, max(int(plan.plot_width / 110), 3))
    axes.set_xlim(0, span or 1)
    axes.set_xticks(ticks)
    axes.set_xticklabels([label_number(tick) for tick in ticks])
    axes.set_ylim(plan.bottom - plan.top, 0)
    axes.set_yticks([rank * plan.pitch + plan.cell_height / 2 for rank in range(scene.num_ranks)])
    names = [f"rank {rank}" for rank in range(scene.num_ranks)]
    if not scene.is_plain:
        names = [f"{name}\n{stages_words(own)}" for name, own in zip(names, scene.stages, strict=True)]
    axes.set_yticklabels(names, color=ink["ink"], fontsize=8 if scene.is_plain else 7)
    axes.tick_params(length=0, pad=6, axis="y")
    axes.tick_params(length=3, color=ink["line"], labelcolor=ink["soft"], labelsize=7.5, axis="x")
    axes.set_xlabel(f"time in {unit}" if unit else "time", color=ink["soft"], fontsize=7.5, loc="right", labelpad=1)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_facecolor(ink["paper"])


def _words(figure: Any, scene: Scene, plan: Layout, ink: dict[str, str], name: str, height: float) -> None:
    left, facts = plan.margin / plan.width, scene.facts
    # A dollar would start a formula, and a name is no formula.
    name = name.replace("$", r"\$")
    figure.text(left, 1 - (plan.margin + 14) / height, name, color=ink["ink"], fontsize=13, weight="bold")
    line = f"{counts(facts)} · " + " · ".join(measures(scene).split(" · ")[:3]) + f" · {facts.source}"
    figure.text(left, 1 - (plan.margin + 35) / height, line, color=ink["soft"], fontsize=8.5)
    x = plan.memory_left / plan.width
    figure.text(x, 1 - (plan.top - 12) / height, "peak in flight", color=ink["soft"], fontsize=7.5)
    several = max(facts.weight_versions, default=1) > 1
    for rank, peak in enumerate(facts.peak_inflight):
        y = 1 - (plan.y(rank) + plan.cell_height / 2 + 4) / height
        held = facts.weight_versions[rank]
        words = label_number(peak) + (f"   {held} weight version{'s' if held > 1 else ''}" if several else "")
        figure.text(x, y, words, color=ink["ink"], fontsize=8)


def _swatches(figure: Any, scene: Scene, plan: Layout, ink: dict[str, str], dark: bool, height: float) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    chunks = scene.facts.num_chunks
    handles, words = [], []
    for letter in scene.letters:
        many = chunks if letter != "S" else 1
        handles.append(tuple(Patch(color=chunk_colour(letter, chunk, many, dark)) for chunk in range(many)))
        words.append(FAMILIES[letter].name + (f", chunk 0 to {many - 1}" if many > 1 else ""))
    handles.append((Patch(color=ink["lane"]),))
    words.append("idle")
    figure.legend(
        handles,
        words,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.1)},
        loc="upper left",
        bbox_to_anchor=(plan.left / plan.width, 1 - (plan.bottom + 36) / height),
        frameon=False,
        ncols=len(handles),
        fontsize=7.5,
        labelcolor=ink["soft"],
        handlelength=1.4,
        columnspacing=1.4,
        borderaxespad=0,
        borderpad=0,
    )
