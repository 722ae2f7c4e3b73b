"""The layers of a cut as a picture: parameters of each layer, and bytes that cross each border."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipefit.cutting.anatomy import num_weights
from pipefit.cutting.cut_model import Cut
from pipefit.draw.chart import hue, plotted
from pipefit.stage.split import named_layers
from pipefit.units import counted, format_bytes, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def picture(model: Any, title: str = "") -> str:
    """Draws the layers from top to bottom, as SVG text: parameters on the left, bytes across borders on the right.

    Args:
        model: a `Cut`, or a sequence of layers, for which the bytes across borders are not known.
        title: above it.

    Raises:
        PipefitError: matplotlib is not installed.
    """
    layers = named_layers(model)
    sizes = [num_weights(layer.module) for layer in layers]
    if isinstance(model, Cut):
        crossing = model.crossing
    else:
        crossing = ()

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        _bars(left, "parameters", list(range(len(layers))), sizes, [format_count(size) for size in sizes], 0)
        left.set_yticks(range(len(layers)), [layer.name for layer in layers])
        left.invert_yaxis()
        words = [f"{format_bytes(size)} in {counted(num, 'tensor')}" for size, num in crossing]
        # A border is between two layers.
        places = [index + 0.5 for index in range(len(crossing))]
        _bars(right, "crosses the border, for the example", places, [size for size, _ in crossing], words, 1)

    return plotted(draw, 900, 110 + 26 * len(layers), title)


def _bars(
    axes: Axes, title: str, places: Sequence[float], values: Sequence[float], words: Sequence[str], colour: int
) -> None:
    bars = axes.barh(places, values, 0.6 if colour == 0 else 0.4, color=hue(colour))
    axes.bar_label(bars, list(words), padding=4)
    axes.set_title(title, loc="left")
    axes.margins(x=0.35)
    axes.tick_params(left=False, labelleft=colour == 0)
    axes.xaxis.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
