"""The page's drawings at other costs, by the script that it holds, compared with the simulator."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from importlib.resources import files

import pytest
from tests.draw.browser import needs_browser, shown

from pipefit.cost import unit
from pipefit.draw.choices import over_ranks, updates_of
from pipefit.draw.drawing import draw
from pipefit.draw.encode import encode_scene
from pipefit.draw.reasons import Why, reasons
from pipefit.draw.scene import scene_of
from pipefit.errors import ScheduleError
from pipefit.schedules import Shape, find
from pipefit.simulate import simulate

pytestmark = pytest.mark.slow

ASK = """
const found = entries.map((entry, number) => {
  const from = costsOf(entry), to = wanted[number];
  const other = priced(entry, {forward: 1, backward: 2, message: .25, work: []}, to);
  const times = other.items.map(item => [item.start, item.end, item.why, item.by]);
  const peak = entry.stages.map(() => 0);
  for (const item of other.items)
    heldAt(other, item.start).forEach((held, rank) => peak[rank] = Math.max(peak[rank], held));
  return {from, times, makespan: other.makespan, bubble: other.bubble, over: other.over, peak};
});
console.log(JSON.stringify(found));
"""


def answers(entries: list[dict], wanted: list[dict], ask: str = ASK) -> list[dict]:
    """What the page's script makes of its data."""
    texts = json.dumps({"data": json.dumps(entries), "families": "{}"})
    script = f"const texts = {texts}, wanted = {json.dumps(wanted)};"
    script += "const document = {getElementById: id => ({textContent: texts[id]})};"
    script += "".join((files("pipefit.draw") / name).read_text() for name in ("words.js", "replay.js")) + ask
    done = subprocess.run(["node", "-"], input=script, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def programs():
    for name in over_ranks():
        for p, m, v in ((2, 4, 1), (4, 8, 1), (4, 8, 2), (3, 5, 1)):
            made = find(name)
            per_update, steps = updates_of(made, m, None)
            for recompute in ((), None) if name in ("gpipe", "1f1b") else ((),):
                try:
                    yield made(Shape(p, per_update, v, steps, recompute=recompute))
                except ScheduleError:
                    continue
    yield find("pipedream")(Shape(2, 1, num_steps=8, replicas=(2, 1)))
    yield find("1f1b")(Shape(2, 4, num_steps=2, replicas=(2, 2)))


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
@pytest.mark.parametrize(
    ("forward", "backward", "message", "work"), [(1, 2, 0.5, ()), (2, 1.5, 0, (1, 3, 1)), (1, 2, 3, (2,))]
)
def test_a_drawing_at_other_costs_is_that_of_the_simulator(forward, backward, message, work):
    every = list(programs())
    entries, wanted, expected = [], [], []
    for program in every:
        header = program.header
        timeline = simulate(program, unit(header, 1, 2, latency=0.25), rendezvous=False)
        entries.append(encode_scene("x", scene_of(timeline)))
        own = [*work, *[1] * header.num_ranks][: header.num_ranks]
        wanted.append({"forward": forward, "backward": backward, "message": message, "work": own})
        cost = replace(unit(header, forward, backward, latency=message), speed=tuple(1 / share for share in own))
        expected.append(scene_of(simulate(program, cost, rendezvous=False)))
    for program, found, scene in zip(every, answers(entries, wanted), expected, strict=True):
        facts, name = scene.facts, f"{program.header.schedule} {program.header.placement}"
        assert (found["makespan"], found["bubble"]) == pytest.approx((facts.makespan_s, facts.bubble_fraction)), name
        assert found["over"] == pytest.approx(facts.bubble_over_ideal)
        assert found["peak"] == pytest.approx(facts.peak_inflight), name
        times = [time for item in found["times"] for time in item[:2]]
        assert times == pytest.approx([time for box in scene.boxes for time in (box.start_s, box.end_s)]), name
        if sum(map(len, program.header.placement)) == program.header.num_stages:
            assert found["from"] == {"forward": 1, "backward": 2, "message": 0.25, "work": []}
            # Among replicas that end together any may be named.
            late = [(Why(why), by) for _, _, why, by in found["times"]]
            assert late == [(reason.why, reason.item) for reason in reasons(scene)], name


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_the_second_pass_over_a_program_holds_as_much_as_the_first():
    # The micro-batches of a measured run repeat; only those of its last update were counted.
    program = find("1f1b")(Shape(2, 4))
    timeline = simulate(program, unit(program.header, 1, 2), repeats=2, rendezvous=False)
    ask = "console.log(JSON.stringify([1.5, entries[0].makespan - 4].map(now => heldAt(entries[0], now))));"
    first, last = answers([encode_scene("x", scene_of(timeline))], [], ask)
    assert first == last == [2, 1]


SET = """
const set = (id, value) => { byId(id).value = value; byId(id).dispatchEvent(new Event("input", {bubbles: true})); };
const click = (id, times) => { for (let i = 0; i < times; i++) byId(id).click(); };
"""


def facts_in(page: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))


@needs_browser
@pytest.mark.parametrize("width", [1280, 500])
def test_in_a_browser_costs_change_the_bubble_and_steps_the_memory(width, tmp_path):
    drawing = draw("1f1b", 4, 8)
    page = shown(drawing.html(), SET + 'set("message", "0.5"); set("work", "1, 1, 2");', tmp_path, width)
    facts = facts_in(page)
    program = drawing.program
    cost = replace(unit(program.header, 1, 2, latency=0.5), speed=(1, 1, 0.5, 1))
    timeline = simulate(program, cost, rendezvous=False)
    assert facts["makespan"] == f"{timeline.makespan_s:g}"
    assert facts["bubble"] == f"{100 * timeline.bubble_fraction:.1f} %"
    # The third start after the first one is at 3: ranks 0 to 3 hold 4, 3, 2 and 1 forwards.
    page = shown(drawing.html(), SET + 'click("next", 4);', tmp_path, width)
    assert re.findall(r"<i><b.*?</b></i><span>(.*?)</span>", page) == ["4", "3", "2", "1"]
    assert len(re.findall(r'class="cell [^"]*later', page)) == len(scene_of(drawing.timeline).boxes) - 10
    assert facts_in(page)["bubble"] == "50.0 %"
