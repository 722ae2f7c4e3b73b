"""A timeline as a bitmap for slides and papers, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipefit.draw.axes import label_number, time_scale
from pipefit.draw.caption import counts, measures, stages_words, title_of
from pipefit.draw.layout import Layout, layout_of
from pipefit.draw.look import FAMILIES, INKS, chunk_colour
from pipefit.draw.scene import Scene, scene_of
from pipefit.errors import PipefitError
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
    _swatches(axes, scene, ink, dark)
    target = Path(path)
    try:
        figure.savefig(target, dpi=dots_per_inch, facecolor=ink["paper"])
    except OSError as problem:
        raise PipefitError(f"{path}: cannot be written: {problem}") from None
    return target


def _cells(axes: Any, scene: Scene, plan: Layout, ink: dict[str, str], dark: bool) -> None:
    factor, _ = time_scale(scene.facts.makespan_s, scene.unit)
    chunks, gap = scene.facts.num_chunks, 1 / plan.scale * factor
    for rank in range(scene.num_ranks):
        top = rank * plan.pitch
        axes.broken_barh([(0, scene.facts.makespan_s * factor)], (top, plan.cell_height), color=ink["lane"], lw=0)
        groups: dict[str, list[tuple[float, float]]] = {}
        for cell in scene.of(rank):
            colour = chunk_colour(cell.letter, cell.chunk if cell.letter != "S" else 0, chunks, dark)
            length = max(cell.duration_s * factor - gap, 0.5 * gap)
            groups.setdefault(colour, []).append((cell.start_s * factor + gap / 2, length))
        for colour, bars in groups.items():
            axes.broken_barh(bars, (top, plan.cell_height), color=colour, lw=0)
        for cell in scene.of(rank):
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
    axes.set_xlim(0, scene.facts.makespan_s * factor or 1)
    axes.set_ylim(plan.bottom - plan.top, 0)
    axes.set_yticks([rank * plan.pitch + plan.cell_height / 2 for rank in range(scene.num_ranks)])
    names = [f"rank {rank}" for rank in range(scene.num_ranks)]
    if not scene.is_plain:
        names = [f"{name}\n{stages_words(own)}" for name, own in zip(names, scene.stages, strict=True)]
    axes.set_yticklabels(names, color=ink["ink"], fontsize=8 if scene.is_plain else 7)
    axes.tick_params(length=0, pad=6, axis="y")
    axes.tick_params(length=3, color=ink["line"], labelcolor=ink["soft"], labelsize=7.5, axis="x")
    axes.set_xlabel(f"time in {unit}" if unit else "time", color=ink["soft"], fontsize=8, loc="left")
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
        words = label_number(peak) + (f"   {facts.weight_versions[rank]} weight versions" if several else "")
        figure.text(x, y, words, color=ink["ink"], fontsize=8)


def _swatches(axes: Any, scene: Scene, ink: dict[str, str], dark: bool) -> None:
    from matplotlib.patches import Patch

    chunks = scene.facts.num_chunks
    handles = []
    for letter in scene.letters:
        for chunk in range(chunks if letter != "S" else 1):
            many = chunks > 1 and letter != "S"
            words = FAMILIES[letter].name + (f", chunk {chunk}" if many else "")
            handles.append(Patch(color=chunk_colour(letter, chunk, chunks, dark), label=words))
    handles.append(Patch(color=ink["lane"], label="idle"))
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.08, -18 / 28 / max(scene.num_ranks, 1)),
        frameon=False,
        ncols=len(handles),
        fontsize=8,
        labelcolor=ink["soft"],
        handlelength=1.2,
        handleheight=1.0,
        columnspacing=1.6,
        borderaxespad=0,
    )
