"""The records of `pipefit reproduce`: every value is joined with what makes it by its name, in one place."""

import pytest

from pipefit.errors import PipefitError
from pipefit.reproduce.entry import Bench
from pipefit.reproduce.lectures import read_lectures
from pipefit.reproduce.ours import make_of
from pipefit.reproduce.outcome import run_entry
from pipefit.reproduce.steps import Draw, filled, is_call, places_of, step_of

HEAD = """
deck = "d"
[[entries]]
name = "e"
topic = "t"
line = "l"
kind = "drawn"
source = "s"
"""
ONE = """
[[entries.values]]
name = "makespan"
published = 9
ours = { figure = "makespan", draw = ["gpipe", 5, 5], backward = 0 }
"""
OTHER = """
[[entries.values]]
name = "ranks"
published = 5
ours = { figure = "num_ranks", draw = ["gpipe", 5, 5] }
"""


def read(text: str):
    (entries,) = read_lectures([HEAD + text]).values()
    return entries


def refused(text: str) -> str:
    with pytest.raises(PipefitError) as caught:
        read(text)
    return str(caught.value)


@pytest.mark.parametrize("text", [ONE + OTHER, OTHER + ONE])
def test_the_order_of_values_does_not_matter(text):
    (entry,) = read(text)
    found = {each.value.name: (each.ours, each.agrees) for each in run_entry(entry).values}
    assert found == {"makespan": (9.0, True), "ranks": (5, True)}


def test_mistakes_in_records_are_refused_with_entry_and_value():
    assert "e: two values are called 'makespan'" in refused(ONE + ONE)
    assert "e: makespan: expected `ours`" in refused(ONE.replace("ours", "theirs"))
    assert "e: v: ours: no figure is called 'rat'; did you mean rate" in refused(
        '[[entries.values]]\nname = "v"\nours = { figure = "rat", plan = ["vgg16", "pcie-4"] }\n'
    )
    assert "e: v: ours: no call is named 'c'" in refused(
        '[[entries.values]]\nname = "v"\nours = { figure = "rate", call = "c" }\n'
    )
    assert "expected a call" in refused(
        '[[entries.values]]\nname = "v"\nours = { figure = "rate", schedule = "1f1b" }\n'
    )
    assert "expected figure, descends or one of" in refused('[[entries.values]]\nname = "v"\nours = { rate = 1 }\n')
    wide = '[[entries.values]]\nname = "v"\npublished = 1\nwithin = 0.25\nours = { figure = "resumes_alike" }\n'
    assert "e: v: within: expected at most 0.15, got 0.25; make it a trend" in refused(wide)


def test_an_entry_that_is_like_another_has_its_values():
    like = '[[entries]]\nname = "again"\ntopic = "elsewhere"\nlike = "e"\n'
    entry, again = read(ONE + like)
    assert (again.topic, again.like, again.source) == ("elsewhere", "e", "s")
    assert [value.name for value in again.values] == [value.name for value in entry.values]


def test_places_of_templates_are_filled_and_other_keys_are_options():
    calls = {"deep": {"draw": ["{name}", "{p}", 8], "title": "{p} of {name}"}}
    assert places_of(calls["deep"]) == {"name", "p"}
    step = step_of({"call": "deep", "name": "gpipe", "p": 4, "recompute": True}, calls)
    assert step.places == ("gpipe", 4, 8)
    assert step.options == {"title": "4 of gpipe", "recompute": True}
    assert step_of({"draw": ["gpipe", 4, 8], "recompute": True}, {}) == Draw("gpipe", 4, 8, recompute=True)
    assert filled(["{x}", "x = {x}", "{y}"], {"x": 2}) == [2, "x = 2", "{y}"]
    assert is_call({"call": "deep"}) and is_call({"plan": []}) and not is_call({"given": {}})


def bubble(**more):
    return {"figure": "bubble_fraction", "draw": ["gpipe", 4, "{x}"], **more}


def test_figures_are_related_over_calls_and_points():
    run = Bench()

    def ours(record):
        return make_of(record, {})(run)

    three, one = {"draw": ["gpipe", 4, 9]}, {"draw": ["gpipe", 4, 1]}  # bubbles of 3/12 and 3/4
    ratio = {"figure": "bubble_fraction", **three, "over": one}
    assert ours(ratio) == pytest.approx(1 / 3)
    assert ours({"figure": "bubble_fraction", **three, "gain_over": one}) == pytest.approx(1 / 3 - 1)
    assert ours({"figure": "bubble_fraction", **three, "saved_over": one}) == pytest.approx(1 - 1 / 3)
    assert ours({"figure": "makespan", **one, "over": {"figure": "period"}}) == 1, "the call is shared"
    assert ours({"descends": [{"figure": "bubble_fraction", **one}, {"figure": "bubble_fraction", **three}]}) is True
    assert ours({"falls": bubble(), "each": [1, 2, 4]}) is True
    assert ours({"falls": bubble(), "each": [4, 2, 1]}) is False
    assert ours({"falls": bubble(), "each": [4, 2, 1], "limit": 2}) is True
    assert ours({"falls": bubble(), "each": [1]}) is False, "one point shows no trend"
    assert ours({"rises": bubble(), "each": [4, 2, 1]}) is True
    assert ours({"rises": bubble(), "each": [4, 2, 1], "limit": 2}) is False
    assert ours({"most": bubble(), "each": [4, 1, 2]}) == pytest.approx(3 / 4)
    assert ours({"best": bubble(), "each": [{"x": 4}, {"x": 1}]}) == 1
    assert ours({"figure": "peak_inflight", "draw": ["1f1b", 3, 8], "at": "max"}) == 3
    assert ours({"figure": "peak_inflight", "draw": ["1f1b", 3, 8], "at": 2}) == 1
