"""The vector picture."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from pipefit.cost import unit
from pipefit.draw.svg import svg
from pipefit.schedules import Shape, generate
from pipefit.simulate import simulate
from pipefit.timeline import Timeline

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str, shape: Shape, **cost: float) -> Timeline:
    program = generate(name, shape)
    return simulate(program, unit(program.header, 1, 2, **cost))


def cells_of(picture: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(picture)
    return [item for group in root.iter(f"{SVG}g") for item in group.iter(f"{SVG}rect") if "data-i" in item.attrib]


CASES = [
    ("gpipe", Shape(4, 8)),
    ("1f1b", Shape(8, 32)),
    ("interleaved", Shape(4, 8, 2)),
    ("pipedream", Shape(4, 1, num_steps=8)),
    ("1f1b", Shape(2, 4, recompute=None)),
]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_every_compute_instruction_has_one_cell_on_its_rank(name, shape):
    timeline = timeline_of(name, shape)
    root = ElementTree.fromstring(svg(timeline))
    for rank, group in enumerate(root.iter(f"{SVG}g")):
        drawn = [item.get("data-i") for item in group.iter(f"{SVG}rect") if not item.get("data-i", "S").startswith("S")]
        assert drawn == list(timeline.program.order[rank])


def test_places_and_widths_are_proportional_to_times():
    timeline = timeline_of("1f1b", Shape(4, 8))
    at = {cell.get("data-i"): (float(cell.get("x")), float(cell.get("width"))) for cell in cells_of(svg(timeline))}
    events = {i.short: e for e, i in timeline.compute()}
    (x0, _), (x1, _) = at["F0.0"], at["B0.7"]
    scale = (x1 - x0) / (events["B0.7"].start_s - events["F0.0"].start_s)
    for name, event in events.items():
        x, width = at[name]
        assert x - x0 == pytest.approx(scale * event.start_s, abs=0.02)
        assert width + 1 == pytest.approx(scale * (event.end_s - event.start_s), abs=0.02)


def test_shared_weights_are_gathered_and_gradients_summed_in_lanes_below_their_rank():
    shape = Shape(2, 4, 2, replicas=(2,), shard="weights")
    picture = svg(timeline_of("breadth-first", shape, latency=0.25))
    root = ElementTree.fromstring(picture)
    for lane in ("gather", "sum"):
        drawn = [
            item
            for item in root.iter(f"{SVG}rect")
            if item.get("class") == lane and item.find(f"{SVG}title") is not None
        ]
        assert len(drawn) == 8
        assert len({item.get("y") for item in drawn}) == 4
    assert "unshard s0 w0" in picture and "reduce s0 w0 scatter" in picture
    assert 'class="gather"' not in svg(timeline_of("1f1b", Shape(2, 4, replicas=(2,))))


def test_a_title_is_escaped_and_the_text_stays_well_formed():
    picture = svg(timeline_of("gpipe", Shape(2, 2)), title='<script>alert("x")</script> & more')
    root = ElementTree.fromstring(picture)
    assert root.find(f"{SVG}title").text == '<script>alert("x")</script> & more'
    assert "<script" not in picture


def test_nothing_refers_outside():
    picture = svg(timeline_of("interleaved", Shape(2, 4, 2), latency=0.1))
    assert not re.search(r"href|url\(|@import|src=", picture)
    assert re.findall(r"https?://[^\"']+", picture) == ["http://www.w3.org/2000/svg"]


def test_asynchronous_schedules_label_their_weight_versions_and_synchronous_ones_do_not():
    assert ">w3</text>" in svg(timeline_of("pipedream", Shape(2, 1, num_steps=6)))
    assert ">w0</text>" not in svg(timeline_of("1f1b", Shape(2, 6)))


def test_the_strip_at_the_right_says_the_peak_of_each_rank():
    picture = svg(timeline_of("1f1b", Shape(4, 8)))
    rest = picture[picture.index("peak in flight</text>") :]
    assert re.findall(r'class="ink"[^>]*>(\d+)</text>', rest) == ["4", "3", "2", "1"]


def test_the_memory_of_each_rank_is_a_curve_below_its_row():
    timeline = timeline_of("gpipe", Shape(2, 3))
    root = ElementTree.fromstring(svg(timeline, seconds=True))
    curves = [path for path in root.iter(f"{SVG}path") if path.get("class") == "bar"]
    rows = [float(group[0].get("y")) for group in root.iter(f"{SVG}g")]
    tops = []
    for rank, curve in enumerate(curves):
        heights = [float(number) for number in re.findall(r"V([\d.]+)", curve.get("d"))]
        assert rows[rank] + 28 < min(heights) < max(heights) < [*rows, 1e6][rank + 1]
        tops.append(max(heights) - min(heights))
    peaks = [timeline.peak_bytes(rank) for rank in range(2)]
    assert tops[0] / tops[1] == pytest.approx(peaks[0] / peaks[1], rel=0.05)
    assert 'class="bar" d=' not in svg(timeline), "units of work have no bytes"
