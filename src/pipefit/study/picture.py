"""The timeline of a study, as a picture and as a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from pipefit.draw.axes import label_number, nice_ticks
from pipefit.draw.look import INKS
from pipefit.study.simulation import StudyTimeline, TimedTurn

_LEFT, _TOP, _ROW, _GAP, _BAR, _ENTRY = 84, 64, 34, 12, 28, 190
_MOST_BOXES = 3000
"""Beyond these, consecutive turns of one trial on a device are drawn as one box."""


def picture(outcome: StudyTimeline, names: Sequence[str], num_devices: int, title: str = "", width: int = 1080) -> str:
    """A study as SVG: a row per device, a hue per trial, a box per turn, and the lower bound as a line.

    Args:
        outcome: measured or simulated.
        names: of the trials.
        num_devices: rows.
        title: above it.
        width: of the picture, in pixels.
    """
    span = max(outcome.makespan_s, outcome.bound_s, 1e-9)
    plot = width - _LEFT - 24
    bottom = _TOP + num_devices * (_ROW + _GAP)
    columns = max(1, plot // _ENTRY)
    height = bottom + 62 + 18 * (-(-len(names) // columns))

    def x(seconds: float) -> float:
        return _LEFT + plot * seconds / span

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pipefit-study" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>',
        f"<style>{_style(len(names))}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text class="ink name" x="24" y="32">{escape(title)}</text>',
    ]
    for device in range(num_devices):
        y = _top(device)
        parts.append(f'<text class="soft" x="24" y="{y + _ROW / 2 + 4:.0f}">device {device}</text>')
        parts.append(f'<rect class="lane" x="{_LEFT}" y="{y}" width="{plot}" height="{_ROW}" rx="3"/>')
    parts += [_box(turn, names[turn.trial], x) for turn in _boxes(outcome.turns)]
    parts += _axis(x, span, bottom)
    if outcome.bound_s > 0:
        at = x(outcome.bound_s)
        parts.append(f'<path class="mark" d="M{at:.1f} {_TOP - 8}V{bottom}"/>')
        parts.append(f'<text class="soft end" x="{at - 5:.1f}" y="{_TOP - 12}">lower bound</text>')
    return "\n".join([*parts, *_legend(names, columns, bottom + 56), "</svg>"]) + "\n"


def _top(device: int) -> int:
    return _TOP + device * (_ROW + _GAP)


def _box(turn: TimedTurn, name: str, x: Callable[[float], float]) -> str:
    """A turn, and the tooltip of it."""
    y = _top(turn.device) + (_ROW - _BAR) // 2
    wide = max(x(turn.end_s) - x(turn.start_s) - 0.4, 0.3)
    words = f"{name}, {_label(turn)}: {label_number(turn.start_s)} s to {label_number(turn.end_s)} s"
    return (
        f'<rect class="t{turn.trial}{" admit" if turn.step < 0 else ""}" x="{x(turn.start_s):.2f}" y="{y}" '
        f'width="{wide:.2f}" height="{_BAR}"><title>{escape(words)}</title></rect>'
    )


def _legend(names: Sequence[str], columns: int, top: int) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        row, column = divmod(index, columns)
        place, line = _LEFT + _ENTRY * column, top + 18 * row
        parts.append(f'<rect class="t{index}" x="{place}" y="{line - 9}" width="10" height="10" rx="2"/>')
        parts.append(f'<text class="ink" x="{place + 16}" y="{line}">{escape(name[:26])}</text>')
    return parts


def _label(turn: TimedTurn) -> str:
    return "admission" if turn.step < 0 else f"step {turn.step + 1}, turn {turn.turn}"


def _boxes(turns: Sequence[TimedTurn]) -> list[TimedTurn]:
    if len(turns) <= _MOST_BOXES:
        return list(turns)
    boxes: list[TimedTurn] = []
    for turn in sorted(turns, key=lambda turn: (turn.device, turn.start_s)):
        kind = turn.device, turn.trial, turn.step < 0
        if boxes and (boxes[-1].device, boxes[-1].trial, boxes[-1].step < 0) == kind:
            boxes[-1] = boxes[-1]._replace(end_s=turn.end_s)
        else:
            boxes.append(turn)
    return boxes


def _axis(x: Callable[[float], float], span: float, bottom: int) -> list[str]:
    parts = []
    for tick in nice_ticks(0, span, 8):
        if tick <= span:
            parts.append(f'<path class="hair" d="M{x(tick):.1f} {_TOP}V{bottom + 4}"/>')
            parts.append(f'<text class="soft mid" x="{x(tick):.1f}" y="{bottom + 20}">{label_number(tick)} s</text>')
    return parts


def _hue(index: int, dark: bool) -> str:
    """Hues a golden angle apart, in two lightnesses, so that consecutive trials differ in both."""
    light = (62, 46)[index % 2] + (8 if dark else 0)
    return f"hsl({(index * 137.508 + 205) % 360:.0f},58%,{light}%)"


def _style(count: int) -> str:
    root = ".pipefit-study"
    base = (
        f"{root}{{font:12px system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif;"
        f"font-variant-numeric:tabular-nums}}"
        f"{root} .name{{font-size:17px;font-weight:650}}{root} .end{{text-anchor:end}}{root} .mid{{text-anchor:middle}}"
        f"{root} .admit{{opacity:.45}}{root} .mark{{stroke-width:2;stroke-dasharray:5 3}}"
    )
    sheets = []
    for night in (0, 1):
        rules = [f"{root} .{name}{{fill:{INKS[name][night]}}}" for name in ("paper", "ink", "soft", "lane")]
        rules.append(f"{root} .hair{{stroke:{INKS['line'][night]}}}{root} .mark{{stroke:{INKS['mark'][night]}}}")
        rules += [f"{root} .t{index}{{fill:{_hue(index, bool(night))}}}" for index in range(count)]
        sheets.append("".join(rules))
    return f"{base}{sheets[0]}@media (prefers-color-scheme:dark){{{sheets[1]}}}"


def trace(outcome: StudyTimeline, names: Sequence[str]) -> dict[str, Any]:
    """The timeline as a Chrome trace, which Perfetto opens: a process per device."""
    items: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": device, "tid": 0, "args": {"name": f"device {device}"}}
        for device in sorted({turn.device for turn in outcome.turns})
    ]
    items += [
        {
            "ph": "X",
            "name": f"{names[turn.trial]}: {_label(turn)}",
            "cat": names[turn.trial],
            "pid": turn.device,
            "tid": 0,
            "ts": turn.start_s * 1e6,
            "dur": (turn.end_s - turn.start_s) * 1e6,
            "args": {"trial": turn.trial, "step": turn.step, "turn": turn.turn},
        }
        for turn in outcome.turns
    ]
    return {"format": "pipefit.study-timeline/1", "displayTimeUnit": "ms", "traceEvents": items}
