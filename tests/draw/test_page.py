"""The page of schedules: its data, its slots and what a browser makes of them."""

import dataclasses
import json
import re
from html import unescape
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from urllib.parse import parse_qsl
from xml.etree import ElementTree

import msgspec
import pytest
from tests.draw.browser import needs_browser, shown
from tests.draw.page_data import bars_in, boxes_in, critical_path
from tests.draw.timelines import timeline_of

from pipefit.cost import unit
from pipefit.draw import html
from pipefit.draw.drawing import draw
from pipefit.draw.encode import COPIED_KINDS, encode_scene, to_text
from pipefit.draw.reasons import Why, reasons
from pipefit.draw.scene import scene_of
from pipefit.draw.slots import stays_of
from pipefit.errors import PipefitError
from pipefit.ir import Op
from pipefit.ir.op import OP_SPEC, Reduction
from pipefit.schedules import Shape, generate
from pipefit.simulate import simulate


class Collector(HTMLParser):
    """The texts of elements by id, and every attribute that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.links: list[tuple[str, str | None]] = []
        self.current = ""

    def handle_starttag(self, tag, attributes):
        self.current = dict(attributes).get("id") or tag
        self.links += [
            (name, value) for name, value in attributes if name in ("src", "href", "srcset", "data", "action")
        ]

    def handle_data(self, data):
        self.texts[self.current] = self.texts.get(self.current, "") + data


def collect(page: str) -> Collector:
    parser = Collector()
    parser.feed(page)
    return parser


@pytest.mark.parametrize(
    ("name", "shape"),
    [("gpipe", Shape(4, 8)), ("interleaved", Shape(2, 4, 2)), ("pipedream", Shape(3, 1, num_steps=5))],
)
def test_the_data_in_the_page_comes_back_as_the_boxes_it_was_made_from(name, shape):
    timeline = timeline_of(name, shape, latency=0.25)
    (data,) = json.loads(collect(html(timeline)).texts["data"])
    scene = scene_of(timeline)
    decoded = boxes_in(data)
    assert [reason for _, reason in decoded] == reasons(scene)
    for (box, _), own in zip(decoded, scene.boxes, strict=True):
        assert box._replace(position=own.position, start_s=0, end_s=0) == own._replace(start_s=0, end_s=0)
        assert (box.start_s, box.end_s) == pytest.approx((own.start_s, own.end_s))


SPILLED = [
    ("spilled", (5, 3), {}),
    ("spilled", (4, 2), {"slots": 1, "activations": True}),
    ("interleaved", (2, 4, 3), {"slots": 2}),
    ("spilled", (4, 3), {"on_host": (1, 3)}),
    ("1f1b", (3, 4), {"slots": 1, "copy": 0.7}),
]


SHARED = [
    ("breadth-first", (2, 4, 2), {"replicas": (2,), "shard": "weights", "latency": 0.25}),
    ("interleaved", (2, 4, 4), {"replicas": (2,), "shard": "gradients", "latency": 0.1}),
    ("1f1b", (2, 6), {"replicas": (2, 1), "shard": "optimizer", "latency": 0.5}),
]


def spilled_timeline(name, shape, options):
    timeline = draw(name, *shape, **{key: value for key, value in options.items() if key != "on_host"}).timeline
    if "on_host" not in options:
        return timeline
    spill = msgspec.structs.replace(timeline.program.header.spill, on_host=options["on_host"])
    program = generate(name, Shape(*shape, spill=spill))
    return simulate(program, unit(program.header, 1, 2), rendezvous=False)


@pytest.mark.parametrize(("name", "shape", "options"), SPILLED + SHARED)
def test_the_copies_in_the_page_come_back_as_the_bars_they_were_made_from(name, shape, options):
    scene = scene_of(spilled_timeline(name, shape, options))
    data = json.loads(to_text("x", scene))
    found = reasons(scene)
    assert [reason for _, reason in boxes_in(data)] == found[: len(scene.boxes)]
    copies = bars_in(data)
    in_lanes = (Op.FETCH, Op.EVICT, Op.HOST_STEP, Op.UNSHARD)
    joining = (Reduction.SCATTER, Reduction.SHARDS)
    moved = sum(i.op in in_lanes or i.kind in joining for _, _, i in scene.timeline.program)
    assert len(copies) == len(scene.bars) == moved
    for (bar, reason), drawn, why in zip(copies, scene.bars, found[len(scene.boxes) :], strict=True):
        assert (bar.rank, bar.lane, bar.short, bar.mb) == (drawn.rank, drawn.lane, drawn.short, drawn.mb)
        assert (bar.start_s, bar.end_s) == pytest.approx((drawn.start_s, drawn.end_s), abs=1e-5)
        assert (reason.why, reason.item) == (why.why, why.item)
        assert reason.waited_s == pytest.approx(why.waited_s, abs=1e-5)


@pytest.mark.parametrize(("name", "shape", "options"), SPILLED + SHARED)
def test_what_something_waited_for_was_over_when_it_began(name, shape, options):
    scene = scene_of(spilled_timeline(name, shape, options))
    for item, reason in zip(scene.items, reasons(scene), strict=True):
        assert reason.item < 0 or scene.items[reason.item].end_s <= item.start_s + 1e-9
    path = [scene.items[number] for number in critical_path(scene, reasons(scene))]
    assert path[-1].end_s == scene.facts.makespan_s


def test_a_forward_waits_for_its_weights_and_a_fetch_for_its_slot():
    scene = scene_of(draw("spilled", 4, 4).timeline)
    found: dict[tuple[str, str], tuple[Why, str]] = {}
    for item, why in zip(scene.items, reasons(scene), strict=True):
        first = item.lane or item.letter, item.short  # w1 comes a second time for its backward
        found.setdefault(first, (why.why, scene.items[why.item].short))
    assert found["F", "F0.0"] == (Why.COPY, "w0")
    assert found["fetch", "w1"] == (Why.LANE, "w0")  # the second copy of the lane
    assert found["fetch", "w2"] == (Why.RANK, "F0.3")  # the last use of what was in its slot
    assert found["fetch", "o2"] == (Why.COPY, "o3")
    assert found["evict", "w3"] == (Why.LANE, "o3")


def test_a_forward_waits_for_the_parts_of_its_weights_and_a_step_for_the_sum_of_its_gradients():
    name, shape, options = SHARED[0]
    scene = scene_of(draw(name, *shape, **options).timeline)
    found: dict[tuple[str, str], tuple[Why, str]] = {}
    for item, why in zip(scene.items, reasons(scene), strict=True):
        found.setdefault((item.lane or item.letter, item.short), (why.why, scene.items[why.item].short))
    assert found["F", "F0.0"] == (Why.COPY, "w0")
    assert found["sum", "g2"] == (Why.RANK, "B2.2")
    assert found["S", "S0"] == (Why.REDUCTION, "g0")


@pytest.mark.parametrize(("name", "shape", "options"), SPILLED)
def test_a_slot_holds_one_stage_at_a_time_and_whatever_a_rank_computes_lies_in_one(name, shape, options):
    scene = scene_of(spilled_timeline(name, shape, options))
    stays = [stay for stay in stays_of(scene) if stay.kind == "weights"]
    assert len(stays) == sum(bar.lane == "fetch" and bar.what == "weights" for bar in scene.bars)
    assert {stay.slot for stay in stays} == set(range(options.get("slots", 2)))
    for before, after in pairwise(stays):
        assert (before.rank, before.slot) != (after.rank, after.slot) or before.end_s <= after.start_s + 1e-9
    for box in scene.boxes:
        assert any(
            (stay.rank, stay.stage) == (box.rank, box.stage)
            and stay.start_s <= box.start_s
            and box.end_s <= stay.end_s + 1e-9
            for stay in stays
        )


def test_every_kind_of_copy_has_a_number_in_the_data_and_a_name_in_the_script():
    # A kind was added to fetches, and the page had no name for steps on the host.
    assert {*OP_SPEC[Op.FETCH].kinds, ""} == set(COPIED_KINDS)
    script = (files("pipefit.draw") / "words.js").read_text(encoding="utf-8")
    named = json.loads(re.search(r"const MOVED = (.*?);", script, re.DOTALL).group(1))
    assert len(named) == len(COPIED_KINDS) and named[COPIED_KINDS.index("")] == ["S", "optimizer step"]


def test_times_that_are_no_simple_fractions_come_back_to_a_millionth_of_the_makespan():
    program = generate("1f1b", Shape(3, 5))
    timeline = simulate(program, unit(program.header, 0.00123457, 0.00271828), rendezvous=False)
    scene = scene_of(timeline, seconds=True)
    for (box, _), own in zip(boxes_in(encode_scene("x", scene)), scene.boxes, strict=True):
        assert abs(box.start_s - own.start_s) <= 1e-6 * scene.facts.makespan_s


def test_names_in_a_page_are_escaped_everywhere():
    timeline = timeline_of("gpipe", Shape(2, 2))
    evil = "</script><img src=x onerror=alert(1)>"
    page = html({evil: timeline, "other": timeline}, title=evil)
    assert "<img" not in page
    assert page.count("</script>") == 3
    assert json.loads(collect(page).texts["data"])[0]["name"] == evil


def test_a_page_refers_to_nothing_outside():
    parser = collect(html(timeline_of("1f1b", Shape(2, 4))))
    assert parser.links == []
    page = html(timeline_of("1f1b", Shape(2, 4)))
    assert set(re.findall(r"https?://[^\"' ;)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page


def test_a_prediction_beside_what_was_measured_has_the_same_unit():
    predicted = timeline_of("1f1b", Shape(2, 4))
    measured = dataclasses.replace(predicted, source="measured")
    for named, word in (({"measured": measured, "predicted": predicted}, "s"), ({"a": predicted, "b": predicted}, "")):
        assert {entry["unit"] for entry in json.loads(collect(html(named)).texts["data"])} == {word}


def test_a_page_of_a_drawing_with_replays_offers_none_without_them():
    # Another m led to a drawing of the shelf, in which nothing was replayed.
    (data,) = json.loads(collect(draw("gpipe", 4, 8, recompute=True).html()).texts["data"])
    assert data["kept"] == [7, 7, 7, 7]


def test_a_page_without_timelines_is_refused():
    with pytest.raises(PipefitError, match="at least one timeline"):
        html([])


@pytest.mark.slow
@needs_browser
def test_the_address_restores_a_page_and_the_saved_picture_needs_no_style_sheet(tmp_path):
    script = """
        location.hash = "#a=1f1b,2,4,1,0&b=GPipe,2,4,1,0&message=0.5&work=1,2&critical=1&memory=1";
        recall();
        const made = [location.hash, state.panels.map(panel => panel.entry.name), heldOver(state.panels[1].entry, 0),
          state.critical, document.querySelectorAll(".scroll path.held").length];
        document.body.append(tag("pre", "made", JSON.stringify(made)), tag("pre", "picture", svgText()));
        bitmap().then(blob => document.body.append(tag("pre", "size", String(blob.size))));
    """
    page = shown(draw("1f1b", 2, 4).html(), script, tmp_path, 1280, "virtual-time-budget=8000")
    collected = {name: unescape(text) for name, text in re.findall(r'<pre class="(\w+)">(.*?)</pre>', page, re.DOTALL)}
    address, names, held, critical, lanes = json.loads(collected["made"])
    settings = dict(parse_qsl(address[1:]))
    assert settings == {
        "a": "1F1B,2,4,1,0", "b": "GPipe,2,4,1,0", "message": "0.5", "work": "1,2", "critical": "1", "memory": "1"
    }  # fmt: skip
    assert names == ["1F1B", "GPipe"] and critical and lanes == 4
    assert [count for _, count in held] == [1, 2, 3, 4, 3, 2, 1, 0]
    root = ElementTree.fromstring(collected["picture"])
    rects = [part for part in root.iter("{http://www.w3.org/2000/svg}rect") if part.get("fill", "").startswith("rgb")]
    assert len(rects) >= 1 + 2 * 2 * (1 + 2 * 4) and "class=" not in collected["picture"].replace('class=""', "")
    assert int(collected["size"]) > 10_000


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    ("drawing", "keys", "told"),
    [
        (("1f1b", 4, 8), ["Right", "Down"], "it waited for the message of F0.0 on rank 0"),
        (("spilled", 4, 4), ["Right"], "it waited for the weights of stage 0 to arrive"),
        (("spilled", 4, 4), ["Right", "Down"], "fetch w1</b> brings the weights of stage 1 from the host"),
        (("spilled", 4, 4), ["Right", "Down"], "its lane was busy with fetch w0"),
        (SHARED[0], ["Right"], "it waited for the weights of stage 0 to be joined"),
        (SHARED[0], ["Right", "Down"], "gather w0</b> joins the weights of stage 0 from the parts of its copies"),
    ],
)
def test_a_browser_draws_every_item_of_the_page_and_tells_why_one_waited(drawing, keys, told, tmp_path):
    shape, options = drawing, {}
    if isinstance(drawing[-1], dict):
        shape, options = (drawing[0], *drawing[1]), drawing[2]
    timeline = draw(*shape, **options).timeline
    press = f"for (const key of {['Arrow' + key for key in keys]}) document.querySelector('.scroll').dispatchEvent("
    press += "new KeyboardEvent('keydown', {key, bubbles: true}));"
    page = shown(html(timeline), press, tmp_path)
    scene = scene_of(timeline)
    assert len(re.findall(r'<rect class="cell', page)) == len(scene.items)
    assert page.count('class="stay"') == len(stays_of(scene) if scene.bars else [])
    assert told in page
