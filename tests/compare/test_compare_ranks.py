"""`pipefit compare` on two processes, small: every strategy trains the same, and refusals name their reason."""

import json
import math
import signal
from dataclasses import replace

import pytest
from tests.verbs import refused

from pipefit.calibrate.overhead import runtime_costs
from pipefit.cli import main
from pipefit.cli.compare import _ending_early
from pipefit.compare.comparison import Comparison, Row
from pipefit.compare.rounds import compare_on_ranks
from pipefit.compare.settings import STRATEGIES, USUAL, WHOLE, CompareConfig
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current

pytestmark = pytest.mark.dist

SMALL = CompareConfig(
    model="gpt",
    option="layers=2,hidden=16,context=8",
    # Two threads on a busy machine wait for each other over every tiny operation.
    strategies=",".join(name for name in STRATEGIES if name != "all-threads"),
    microbatches=(1, 4, 16),
    batch=8,
    steps=2,
    repeats=1,
    optimizer="sgd",
    lr=0.05,
    limit=0,  # what is compared must not depend on how busy the machine is
)
REFUSED = {("data-parallel", 1), ("torch-1f1b", 1)}


@pytest.fixture(scope="module")
def found() -> Comparison:
    first, second = launch(compare_on_ranks, 2, SMALL, threads=1, quiet=True)
    assert len(first.rows) == len(second.rows)
    return first


def of(found: Comparison, strategy: str, m: int) -> Row:
    return next(row for row in found.rows if (row.strategy, row.num_microbatches) == (strategy, m))


@pytest.mark.long
def test_every_strategy_is_measured_where_it_has_a_meaning(found):
    cells = {(name, m) for name in STRATEGIES for m in ((1,) if name in WHOLE else (1, 4))} - {("all-threads", 1)}
    assert {(row.strategy, row.num_microbatches) for row in found.rows} == cells - REFUSED
    assert all(len(row.utilisation) == 2 for row in found.rows)


@pytest.mark.long
def test_a_batch_that_cannot_be_cut_is_refused_with_the_reason(found):
    reasons = {(item.strategy, item.num_microbatches): item.reason for item in found.refused}
    assert {cell for cell in reasons if cell[1] < 16} == REFUSED
    assert "8 samples cannot be split into 16" in reasons["gpipe", 16]
    assert "fewer micro-batches (1) than stages (2)" in reasons["torch-1f1b", 1]


@pytest.mark.long
def test_synchronous_strategies_have_one_loss_and_delayed_ones_another(found):
    expected = of(found, "one-thread", 1).final_loss
    delayed = {"pipedream", "pipedream-2bw"}
    for row in found.rows:
        if row.strategy not in delayed:
            assert math.isclose(row.final_loss, expected, rel_tol=1e-4), row
    assert of(found, "pipedream-2bw", 4).final_loss != expected


@pytest.mark.long
def test_a_pipeline_keeps_half_the_weights_on_each_rank(found):
    one = of(found, "one-thread", 1)
    assert one.speedup == 1 and one.peak_bytes[0] > one.peak_bytes[1]
    assert of(found, "accumulate", 4).speedup_accumulated == 1


@pytest.mark.long
def test_schedules_and_one_process_are_predicted_and_peers_are_not(found):
    predicted = {row.strategy for row in found.rows if row.predicted_step_s is not None}
    assert predicted == {row.strategy for row in found.rows} - {"ddp", "torch-gpipe", "torch-1f1b"}
    assert all(row.predicted_step_s > 0 for row in found.rows if row.strategy in predicted)


@pytest.mark.long
def test_the_choice_is_among_the_schedules_that_train_alike(found):
    delayed = {"pipedream", "pipedream-2bw"}
    pipelines = [row for row in found.rows if STRATEGIES[row.strategy] == "schedule" and row.strategy not in delayed]
    assert found.choice.chosen.predicted_step_s == min(row.predicted_step_s for row in pipelines)
    assert found.choice.best.step_s == min(row.step_s for row in pipelines)


@pytest.mark.long
def test_the_verb_answers_json_and_leaves_figures_and_a_chart(tmp_path, capsys):
    words = "compare --model mlp --option layers=3,width=8 --strategies one-thread,gpipe -m 2 --batch 4 --steps 1"
    assert main([*words.split(), "--repeats", "2", "--limit", "0", "-o", str(tmp_path / "out"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["repeats"] == 2 and data["data"] in ("digits", "synthetic")
    assert [row["strategy"] for row in data["rows"]] == ["one-thread", "gpipe"]
    assert data["rows"][1]["speedup"] == pytest.approx(data["rows"][0]["step_s"] / data["rows"][1]["step_s"])
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["rows"] == data["rows"]
    assert (tmp_path / "out" / "compare.svg").read_text().startswith("<svg")


@pytest.mark.long
@pytest.mark.parametrize(
    ("limit", "is_asked", "why"),
    [(1e-7, False, "no time within --limit 1e-07"), (0.0, True, "the comparison was interrupted")],
)
def test_what_is_measured_is_kept_when_time_is_up_or_the_user_ends_it(limit, is_asked, why, tmp_path):
    """The limit, of microseconds, leaves one row, measured once; so does a file that Ctrl-C makes."""
    asked = tmp_path / "end"
    if is_asked:
        asked.touch()
    few = replace(SMALL, strategies="one-thread,gpipe,1f1b", microbatches=(2,), repeats=100, limit=limit)
    first, second = launch(compare_on_ranks, 2, few, print, asked, threads=1, quiet=True)
    assert [row.strategy for row in first.rows] == [row.strategy for row in second.rows] == ["one-thread"]
    assert first.repeats == 1
    assert [(item.strategy, item.reason) for item in first.refused] == [("gpipe", why), ("1f1b", why)]


def test_ctrl_c_asks_for_the_end_and_a_second_one_ends_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt), _ending_early(tmp_path / "end") as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked.exists()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_few_strategies_are_usual_and_all_are_named_by_one_word():
    assert CompareConfig().names == USUAL and set(USUAL) < set(STRATEGIES)
    assert CompareConfig(strategies="all").names == tuple(STRATEGIES)
    assert CompareConfig(strategies="gpipe,").names == ("gpipe",)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--strategies gpip", "did you mean gpipe"),
        ("--ranks 1", "expected a whole number of at least 2, got 1"),
        ("-m 64 --batch 8", "cannot be split"),
        ("--model gpd", "did you mean gpt"),
        ("--microbatches 1,x", "--microbatches"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_message(words, told, capsys):
    assert told in refused(capsys, "compare", *words.split())


def calibrated() -> tuple[float, float]:
    costs = runtime_costs(current())
    return costs.overhead_s, costs.post_s


@pytest.mark.long
def test_costs_of_the_executor_are_measured_once_for_all_ranks():
    first, second = launch(calibrated, 2, threads=1, quiet=True)
    assert first == second
    assert min(first) > 0
