"""Tensor and sequence parallelism over processes: equal to one process, divided bytes, whole checkpoints, refusals."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.parallel import tensor_jobs as jobs

from pipefit.errors import PlanError
from pipefit.models.examples import mean_cross_entropy
from pipefit.parallel import widths_of
from pipefit.runtime.launch import LaunchError, launch
from pipefit.testing import Outcome, compare, expected, tolerance_of

ALL = {2: jobs.TWO, 4: jobs.FOUR, 8: jobs.EIGHT}
# Eight processes on two cores take their time.
pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    found = {}
    for count, tasks in ALL.items():
        parts = launch(jobs.outcomes, count, list(tasks.values()), threads=1, quiet=True)
        found |= {name: Outcome.joined([part[index] for part in parts]) for index, name in enumerate(tasks)}
    return found


@pytest.mark.parametrize(("count", "name"), [(count, name) for count, tasks in ALL.items() for name in tasks])
def test_tensor_parallel_processes_compute_what_one_process_computes(
    count: int, name: str, outcomes: dict[str, Outcome]
) -> None:
    task = ALL[count][name]
    got = outcomes[name]
    assert sorted(got.gradients) == list(range(count)), "every process holds its part of the mesh"
    result = compare(got, expected(task), tolerance_of(torch.float64))
    assert result.equal, result


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def facts(saved: Path) -> list[dict[str, Any]]:
    return launch(jobs.facts_of_two, 2, str(saved), threads=1, quiet=True)


def test_each_process_has_its_part_of_the_weights_and_all_have_the_same_loss(facts: list[dict[str, Any]]) -> None:
    whole = sum(p.nbytes for p in jobs.model()[1].parameters())
    shared = 8 * 6 * jobs.SIZES["hidden"]  # two norms and the two biases after the sums, in float64
    for fact in facts:
        assert fact["bytes of a block"] - shared == (whole - shared) / 2
    assert facts[0]["first loss"] == facts[1]["first loss"]
    x, y = jobs.batch(4, 0)
    assert facts[0]["first loss"] == pytest.approx(mean_cross_entropy(jobs.model()(x), y).item(), rel=1e-12)


def test_a_plan_says_how_wide_and_the_pipeline_follows(facts: list[dict[str, Any]]) -> None:
    for fact in facts:
        width, pieces, loss = fact["planned"]
        assert (width, pieces, loss) == (2, True, fact["first loss"])


def test_widths_are_those_that_every_layer_allows() -> None:
    assert widths_of(list(jobs.model()), 8) == (1, 2, 4)
    assert widths_of(list(jobs.model(vocab=13)), 8) == (1,)
    assert widths_of([*jobs.model(), torch.nn.Linear(4, 4)], 8) == (1,)


def test_the_state_has_whole_weights_under_the_users_names(facts: list[dict[str, Any]]) -> None:
    wanted = jobs.model().state_dict()
    for fact in facts:
        for state in (fact["state"], fact["loaded state"]):
            assert {name: value.shape for name, value in state.items()} == {n: v.shape for n, v in wanted.items()}
        assert all(torch.equal(fact["state"][name], fact["loaded state"][name]) for name in wanted)
        assert torch.equal(fact["state"]["embed.token.weight"], fact["state"]["head.project.weight"])
        assert "the model has torch.Size([32, 8]), the state torch.Size([33, 8])" in fact["longer"]
        assert "the Pipeline was closed" in fact["closed"]
        assert fact["class after close"] == "Block"


def test_a_checkpoint_of_two_processes_goes_on_at_any_width(facts: list[dict[str, Any]], saved: Path) -> None:
    wanted = facts[0]["second loss"]
    assert facts[0]["second loss after load"] == pytest.approx(wanted, rel=1e-12), "with sequence parallelism"
    loss, state = jobs.load_with_one(str(saved))
    assert loss == pytest.approx(wanted, rel=1e-12)
    for name, value in facts[0]["trained"].items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=name)
    exported = load_file(saved / "model.safetensors")
    assert torch.equal(exported["block0.attention.qkv.weight"], facts[0]["state"]["block0.attention.qkv.weight"])


def test_other_losses_and_metrics_see_the_whole_output(facts: list[dict[str, Any]]) -> None:
    x, y = jobs.batch(4, 0)
    assert facts[0]["smoothed loss"] == pytest.approx(jobs.smooth(jobs.model()(x), y).item(), rel=1e-12)
    assert facts[0]["metric"][1] == jobs.SIZES["vocab"]


def test_a_block_is_what_torchs_dtensor_makes_of_it(facts: list[dict[str, Any]]) -> None:
    for fact in facts:
        assert fact["oracle"] and max(fact["oracle"].values()) < 1e-12, fact["oracle"]


@pytest.fixture(scope="module")
def sent() -> list[dict[str, Any]]:
    return launch(jobs.bytes_of_four, 4, threads=1, quiet=True)


def test_scatter_gather_and_sequence_parallelism_send_half_at_width_two(sent: list[dict[str, Any]]) -> None:
    for process in sent:
        whole, inside, gathers = process["whole"]
        # Two micro-batches of 2 × 8 × 8 float64, out or back.
        assert whole == 2 * 2 * 8 * 8 * 8 and gathers == 0
        assert process["pieces"] == (whole / 2, inside + whole / 2, 2)
        assert process["sequence"][0] == whole / 2 and process["sequence"][2] == 0
        assert f"sent to other ranks: {', '.join(['2 KiB'] * 4)}" in process["whole, told"]
        assert f"sent to other ranks: {', '.join(['1 KiB'] * 4)}" in process["pieces, told"]
        assert any(line.startswith("moved inside each rank: ") for line in process["pieces, told"])


def test_what_cannot_be_cut_travels_whole(sent: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).double()
    wanted = mean_cross_entropy(model(torch.ones(2, 3).double()), torch.tensor([0, 2])).item()
    for process in sent:
        # Two micro-batches of 3 float64: no even halves, so nothing to gather.
        assert process["odd"] == (pytest.approx(wanted, rel=1e-12), 2 * 3 * 8, 0)


def test_what_cannot_be_divided_is_refused_alike_on_every_process() -> None:
    first, second = launch(jobs.all_refused, 2, threads=1, quiet=True)
    assert first == second
    words = [
        "2 processes cannot be a mesh of tensor=3 × a pipeline; start a multiple of 3",
        "layer 0 (Linear) has no tensor rule",
        "heads=1 is no multiple of tensor=2",
        "vocab=13 is no multiple of tensor=2",
        "sequence parallelism splits the sequence by tensor=2, but an input has shape [4, 5]",
        "replicas [2, 1] need 3 ranks, there are 1",
        "drawn layer by layer, which tensor parallelism cannot do",  # all would draw the same part
        "Adafactor is not known to",
    ]
    for told, word in zip(first, words, strict=True):
        assert len(told) == 1 and word in told[0]


def test_ranks_in_one_process_cannot_share_a_rank() -> None:
    with pytest.raises(PlanError, match="tensor=2 needs a process for each part: start 4"):
        jobs.pipeline(jobs.model(), tensor=2, stages=2)


def test_a_process_that_stands_still_is_named_by_those_that_wait_for_it() -> None:
    with pytest.raises(LaunchError, match="rank 3 is stopped") as told:
        launch(jobs.stand_still_inside_a_layer, 4, threads=1, quiet=True, deadline_s=1.5)
    assert "of rank 3" in str(told.value) and "'fwd s1 m0 w0'" in str(told.value)


def test_mixed_precision_and_divided_optimizers_go_with_tensor_parallelism(tmp_path: Path) -> None:
    found = launch(jobs.losses_together, 4, str(tmp_path), threads=1, quiet=True)
    assert jobs.load_with_one(str(tmp_path))[0] == pytest.approx(found[0]["next"], rel=1e-12)
    for name, options in jobs.TOGETHER.items():
        plain = {key: value for key, value in options.items() if key not in ("sequence_parallel", "shard")}
        wanted = jobs.losses_of(plain)
        assert all(process[name] == found[0][name] for process in found)
        tolerance = 2e-2 if "precision" in options else 1e-10
        assert found[0][name] == pytest.approx(wanted, rel=tolerance), name
        assert wanted[-1] != wanted[0]


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    return launch(jobs.measured_parts, 2, threads=1, quiet=True)


def test_parts_are_measured_alike_and_their_layers_left_as_they_were(measured: list[dict[str, Any]]) -> None:
    one, other = measured
    assert one["profile"] == other["profile"]
    assert one["class"] == "Block"
    assert one["profile"].microbatch_size == 2
    # Without what others give, two gathers and two scatters of a block take a microsecond each at least.
    assert all(layer.forward_s > 4e-6 and layer.backward_s > 4e-6 for layer in one["profile"].layers[1:-1])


@pytest.mark.skipif(sys.platform != "linux", reason="threads are told apart by /proc")
def test_the_carriers_of_sums_give_way(measured: list[dict[str, Any]]) -> None:
    for fact in measured:
        assert fact["carriers that give way"].count(True) >= 1
