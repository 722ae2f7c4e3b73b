"""Runs that lose ranks and go on in the same processes, with the numbers of a run that was never disturbed."""

import signal

import pytest
import torch
from tests.faults.repaired_jobs import (
    CLIPPED,
    COPIES,
    Fault,
    adam,
    count_forwards,
    generate,
    go_on_after_an_interruption,
    go_on_as_prepared,
    shared_layers,
    steps_in,
    train,
    train_in_pairs,
    train_over_late_connections,
    train_shared,
    train_wide,
)
from tests.parallel import tensor_jobs
from tests.runtime.jobs import batches, halving

from pipefit.models.examples import mean_cross_entropy
from pipefit.runtime.faults import noted
from pipefit.runtime.launch import LaunchError, launch
from pipefit.runtime.progress import MEETING, SAVING

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed training in this process, and its folder."""
    place = tmp_path_factory.mktemp("whole")
    return train(str(place), COPIES, []), place


def is_same(found, expected) -> bool:
    """Returns whether a training has the numbers of another one, apart from rounding."""
    same = [torch.allclose(found.weights[name], one, rtol=1e-12, atol=1e-14) for name, one in expected.weights.items()]
    return found.figures == pytest.approx(expected.figures, rel=1e-12, abs=1e-14) and all(same)


@pytest.mark.parametrize(
    ("faults", "left"),
    [
        # At the commit point; then the other copy, whose stage comes from the memory of the machine.
        ([Fault(0, "barrier", 2), Fault(2, "fwd", 4)], 2),
        ([Fault(3, "step", 3, signal.SIGSTOP)], 3),
    ],
)
def test_the_ranks_that_are_left_go_on_in_their_processes(faults, left, whole, tmp_path, caplog):
    expected, folder = whole
    options = {"folder": tmp_path / "logs", "quiet": True, "recover": 2, "deadline_s": 10}
    found = launch(train, 4, str(tmp_path), COPIES, faults, **options)
    assert len(found) == left
    assert all(is_same(one, expected) for one in found)
    # No process was started in addition to the first four.
    assert len([path for path in tmp_path.iterdir() if path.name.isdecimal()]) == 4
    assert len({one.pid for one in found}) == left
    assert steps_in(tmp_path / "log.csv") == steps_in(folder / "log.csv")
    lines = noted(tmp_path / "logs")
    assert [line["start"] for line in lines if "fault" in line] == list(range(len(faults)))
    assert lines[1]["source"] == "the ranks that are left" and lines[1]["lost"] == 0
    assert f"repair {len(faults)} of 2: {left} ranks go on" in caplog.text


def test_a_step_that_only_the_others_have_made_is_in_the_logs(whole, tmp_path, caplog):
    """The rank that writes them dies after the commit, and the others come no further than to a copy in memory."""
    expected, folder = whole
    faults = [Fault(0, "drop", 1), Fault(3, "fwd", 2, 0)]
    found = launch(train, 4, str(tmp_path), COPIES, faults, folder=tmp_path / "logs", quiet=True, recover=2)
    assert len(found) == 4 and all(is_same(one, expected) for one in found)
    assert steps_in(tmp_path / "log.csv") == steps_in(folder / "log.csv")
    assert "repair 1 of 2: 3 ranks go on" in caplog.text and "start 3 of 3: 4 ranks" in caplog.text


def plainly_trained(model, loss_of, data, clip=float("inf")) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of torch alone; then the loss of the first batch once more."""
    optimizer = adam(model.parameters())
    schedule = halving(optimizer)
    losses = []
    for x, y in [*data, data[0]]:
        loss = loss_of(model(x), y)
        losses.append(loss.item())
        if len(losses) <= len(data):
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return losses, model.state_dict()


def is_as_expected(found, expected) -> bool:
    """Returns whether losses and weights are those of torch alone, apart from rounding."""
    same = [torch.allclose(found[1][name], one, rtol=1e-9, atol=1e-12) for name, one in expected[1].items()]
    return found[0] == pytest.approx(expected[0], rel=1e-10) and all(same)


@pytest.mark.parametrize(
    ("shard", "ranks", "options", "faults", "left"),
    [
        # As others have stepped their parts; then one whose sibling is gone, in an evaluation.
        ("weights", 4, {"stages": 2, "replicas": 2}, [Fault(3, "step", 3), Fault(1, "fwd", 8)], 2),
        # As the parts that were stepped are gathered; then while the step is copied in memory.
        ("optimizer", 3, {"schedule": "data-parallel"}, [Fault(0, "drop", 2), Fault(2, SAVING, 5)], 1),
    ],
)
def test_copies_that_share_weights_take_the_part_of_a_lost_one_from_memory(
    shard, ranks, options, faults, left, tmp_path, caplog
):
    data = [(x.double(), y) for x, y in batches(6)]
    expected = plainly_trained(shared_layers(), torch.nn.functional.cross_entropy, data)
    found = launch(train_shared, ranks, shard, options, faults, folder=tmp_path, quiet=True, recover=2)
    assert f"repair 2 of 2: {left} ranks go on" in caplog.text
    assert len(found) == left and all(is_as_expected(one, expected) for one in found)


@pytest.mark.parametrize(
    ("ranks", "options", "faults", "left"),
    [
        (4, {"schedule": "data-parallel"}, [Fault(1, "bwd", 2)], 2),
        # As the parts that were stepped are gathered.
        (4, {"schedule": "data-parallel", "shard": "optimizer"}, [Fault(1, "drop", 3)], 2),
        # The only copy of the second stage, whose head is tied to the first one.
        (6, {"stages": 2, "replicas": (2, 1)}, [Fault(4, "bwd", 3)], 4),
        # As others have stepped their parts; then the last copy of that stage.
        (8, {"stages": 2, "replicas": 2, "shard": "weights"}, [Fault(3, "step", 2), Fault(6, "fwd", 4)], 4),
    ],
)
def test_a_process_that_shared_layers_with_a_lost_one_ends_and_the_others_go_on(
    ranks, options, faults, left, tmp_path, caplog
):
    data = [tensor_jobs.batch(8, step) for step in range(5)]
    expected = plainly_trained(tensor_jobs.model(), mean_cross_entropy, data, CLIPPED)
    repairs = len(faults)
    found = launch(train_in_pairs, ranks, options, faults, folder=tmp_path, quiet=True, recover=repairs)
    other = faults[0].rank ^ 1
    assert f"rank {other} has ended: it shared its layers with one that is lost" in caplog.text
    assert f"repair {repairs} of {repairs}: {left} ranks go on" in caplog.text
    assert len(found) == left and all(is_as_expected(one, expected) for one in found)


def test_a_message_of_which_a_part_has_arrived_is_not_waited_for(tmp_path, caplog):
    """Gloo once let its receiver wait without an end."""
    [expected] = launch(train_wide, 1, quiet=True)
    found = launch(train_wide, 4, folder=tmp_path, quiet=True, recover=1, deadline_s=30)
    assert "repair 1 of 1: 3 ranks go on" in caplog.text
    assert len(found) == 3 and all(one == pytest.approx(expected, rel=1e-10) for one in found)


def test_a_loss_is_planned_before_it_happens(tmp_path):
    """The first loss is; the second one comes one step later, before there are programs for it."""
    faults = [Fault(1, "fwd", 4), Fault(0, "fwd", 6)]
    expected = launch(go_on_as_prepared, 1, [], quiet=True)[0]
    found = launch(go_on_as_prepared, 4, faults, folder=tmp_path / "logs", quiet=True, recover=2)
    assert [one.taken for one in found] == [[-1, -1, -1, 1, -1, -1]] * 2
    assert [one.numbers for one in found] == [[0, 1, 2, 0, 0, 0]] * 2
    assert [one.planned for one in found] == [[True] * 3] * 2
    assert all(one.losses == pytest.approx(expected.losses, rel=1e-12) for one in found)


def test_connections_that_are_made_as_a_loss_is_reported_are_shut_down_too(whole, tmp_path, caplog):
    """The others once waited on these for their deadline, in the thread that writes a checkpoint too."""
    expected, _ = whole
    options = {"folder": tmp_path / "logs", "quiet": True, "recover": 1, "deadline_s": 60}
    found = launch(train_over_late_connections, 4, str(tmp_path), COPIES, [Fault(3, "bwd", 2)], **options)
    assert len(found) == 3 and all(is_same(one, expected) for one in found)
    assert "repair 1 of 1: 3 ranks go on" in caplog.text


def test_a_generation_is_repeated_after_a_loss(tmp_path, caplog):
    expected, tokens = generate([])
    options = {"folder": tmp_path / "logs", "quiet": True, "recover": 1}
    found = launch(generate, 4, [Fault(3, "fwd", 4)], **options)
    assert [one[1] for one in found] == [tokens] * 3
    assert all(one[0] == pytest.approx(expected, rel=1e-6) for one in found)
    assert "repair 1 of 1: 3 ranks go on" in caplog.text


@pytest.mark.slow
@pytest.mark.faults
def test_a_rank_that_is_lost_while_all_make_process_groups_is_not_waited_for(whole, tmp_path, caplog):
    """The others wait for its address, which ends at once, or for its connection: then all are started again."""
    expected, _ = whole
    options = {"folder": tmp_path / "logs", "quiet": True, "recover": 1}
    found = launch(train, 4, str(tmp_path), COPIES, [Fault(3, MEETING, 0)], **options)
    assert all(is_same(one, expected) for one in found)
    if len(found) == 3:
        assert "repair 1 of 1: 3 ranks go on" in caplog.text
    else:
        assert "making process groups" in caplog.text and "start 2 of 2: 4 ranks" in caplog.text


def test_a_repair_that_turns_out_to_be_impossible_counts_once(whole, tmp_path, caplog):
    """The last copy of a stage is lost before the step is copied in memory."""
    expected, _ = whole
    faults = [Fault(1, "bwd", 2), Fault(3, SAVING, 4)]
    found = launch(train, 4, str(tmp_path), COPIES, faults, folder=tmp_path / "logs", quiet=True, recover=2)
    assert len(found) == 4 and all(is_same(one, expected) for one in found)
    assert "not repaired in place: " in caplog.text and "start 3 of 3: 4 ranks" in caplog.text
    assert [line["start"] for line in noted(tmp_path / "logs") if "fault" in line] == [0, 1]


def test_a_rank_that_hangs_while_the_others_meet_again_is_ended(whole, tmp_path, caplog):
    """They once waited for it without an end."""
    expected, _ = whole
    faults = [Fault(3, "bwd", 2), Fault(1, MEETING, 2, signal.SIGSTOP)]
    options = {"folder": tmp_path / "logs", "quiet": True, "recover": 2, "deadline_s": 5}
    found = launch(train, 4, str(tmp_path), COPIES, faults, **options)
    assert len(found) == 4 and all(is_same(one, expected) for one in found)
    assert "repair 1 of 2: 3 ranks go on" in caplog.text
    assert "a rank was lost while the others met again" in caplog.text and "start 3 of 3: 4 ranks" in caplog.text


def test_a_step_whose_forwards_change_a_buffer_is_not_repeated(tmp_path, caplog):
    """They once changed it twice."""
    fault = Fault(1, "bwd", 2)
    found = launch(count_forwards, 3, fault, folder=tmp_path / "logs", quiet=True, recover=1)
    [(losses, count)] = launch(count_forwards, 1, fault, quiet=True)
    assert [one[1] for one in found] == [count] * 3 == [12] * 3
    assert all(one[0] == pytest.approx(losses, rel=1e-12) for one in found)
    assert "rank 2: a forward of the step has changed the buffer 6.count" in caplog.text


@pytest.mark.parametrize("what", ["close", "checkpoint"])
def test_what_is_interrupted_is_repeated_by_those_that_had_done_it_too(what, tmp_path):
    """Such a rank once skipped a part of it in the repetition, and the others waited for it until their deadline."""
    options = {"folder": tmp_path / "logs", "quiet": True, "recover": 1, "deadline_s": 20}
    found = launch(go_on_after_an_interruption, 2, what, str(tmp_path / "checkpoints"), **options)
    assert found == [[False] * len(found[0])] * 2


def test_an_error_of_the_users_code_is_no_loss(tmp_path):
    with pytest.raises(LaunchError, match="a fault of the user's code"):
        launch(train, 4, str(tmp_path), COPIES, [Fault(2, "bwd", 2, 0)], folder=tmp_path / "logs", quiet=True)
