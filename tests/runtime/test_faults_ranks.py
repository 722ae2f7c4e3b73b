import math
import os
import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests.runtime import jobs

from pipefit.errors import DisagreementError, ModelError
from pipefit.ir.op import Op
from pipefit.runtime.compiled import compile_rank
from pipefit.runtime.executor import Execution
from pipefit.runtime.launch import LaunchError, launch
from pipefit.runtime.progress import (
    LEAVING,
    LOSS,
    MEETING,
    OUTSIDE,
    SAVING,
    Position,
    Progress,
    positions_of,
    progress_file,
)
from pipefit.runtime.waits import hang_report, patience, waits_for
from pipefit.schedules import Shape, find
from pipefit.spec.options import Spilled
from pipefit.stage.moments import Mark

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def program():
    """The program that the jobs run on two ranks."""
    return jobs.pipeline().program


def _first(program, rank, op, count=1):
    return [index for index, i in enumerate(program.ranks[rank]) if i.op is op][count - 1]


# ---- ranks that die or fail ------------------------------------------------------------------------------------------


def test_a_killed_rank_is_named_with_its_last_instruction(program):
    index = _first(program, 1, Op.BWD)
    with pytest.raises(LaunchError) as failure:
        launch(jobs.die_at, 2, 1, index, quiet=True)
    assert f"rank 1 failed at '{program.ranks[1][index]}' (instruction {index}, pass 2)" in str(failure.value)
    assert "SIGKILL" in str(failure.value)


def test_a_layer_that_fails_on_one_rank_is_the_callers_error():
    with pytest.raises(ModelError) as failure:
        launch(jobs.train_broken_layer, 2, quiet=True)
    assert str(failure.value).startswith("stage 1: layer 2 (Failing) failed in its forward")
    assert str(failure.value).count("this layer is broken") == 1


def test_a_loss_that_raises_is_named_with_its_rank():
    with pytest.raises(LaunchError, match=r"rank 1 failed at 'loss m0'.*KeyError: 'no such class'"):
        launch(jobs.train_broken_loss, 2, quiet=True)


def test_a_killed_run_resumes_with_the_numbers_of_one_that_was_not(tmp_path, program):
    place = str(tmp_path / "run")
    (losses, weights), _ = launch(jobs.train, 2, quiet=True)
    first, _ = launch(jobs.train_and_save, 2, place, quiet=True)
    with pytest.raises(LaunchError):
        launch(jobs.die_at, 2, 0, _first(program, 0, Op.STEP), quiet=True)
    for num_ranks in (2, 3):
        rest, state = launch(jobs.load_and_train, num_ranks, place, quiet=True)[0]
        assert first + rest == losses
        assert all(torch.equal(state[name], weights[name]) for name in weights)


def test_replicas_save_each_stage_once_and_an_export_holds_the_whole_model(tmp_path):
    state = launch(jobs.save_export_and_state, 4, str(tmp_path), quiet=True)[0]
    whole = load_file(tmp_path / "model.safetensors")
    assert whole.keys() == state.keys()
    assert all(torch.equal(whole[name], state[name]) for name in state)
    files = [load_file(tmp_path / "run" / "step-000002" / f"rank-{rank}.safetensors") for rank in range(4)]
    names = [name for file in files for name in file if not name.startswith("optim/")]
    assert sorted(names) == sorted(state)


def test_a_rank_that_cannot_save_is_heard_by_all_and_nothing_is_committed(tmp_path):
    first, second = launch(jobs.save_where_one_rank_cannot, 2, str(tmp_path), quiet=True)
    assert first == second
    assert first.startswith("rank 1: ") and "the disk is full" in first
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{}, {"replicas": 2, "microbatches": 4, "shard": "optimizer"}])
def test_ranks_write_a_checkpoint_while_training_goes_on(options, tmp_path):
    num_ranks = 4 if options else 2
    (losses, state), *_ = launch(jobs.save_behind, num_ranks, str(tmp_path), options, quiet=True)
    expected = jobs.pipeline(**options)
    assert expected.fit(jobs.batches(7)) == losses
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
    behind, waited = tmp_path / "behind", tmp_path / "waited"
    assert sorted(path.name for path in behind.iterdir()) == [f"step-{step:06d}" for step in (3, 5, 6, 7)]
    files = sorted((waited / "step-000003").iterdir())
    assert len(files) == num_ranks + 1
    assert [file.read_bytes() for file in files] == [
        file.read_bytes() for file in sorted((behind / "step-000003").iterdir())
    ]


def test_ranks_that_derive_different_programs_are_refused_before_the_first_step():
    with pytest.raises(DisagreementError, match="microbatches: rank 0 has 2, rank 1 has 4"):
        launch(jobs.train_another_program_on_one_rank, 2, quiet=True)


# ---- ranks that stand still ------------------------------------------------------------------------------------------


def test_a_stopped_rank_is_named_within_the_deadline(program):
    index = _first(program, 0, Op.FWD)
    with pytest.raises(LaunchError) as failure:
        launch(jobs.stop_at, 2, 0, index, quiet=True, deadline_s=1.5)
    text = str(failure.value)
    assert "(deadline 60.0 s" not in text and "(deadline 600.0 s" not in text, "the usual deadlines"
    assert f"rank 0 is stopped (by SIGSTOP or a debugger), at '{program.ranks[0][index]}'" in text
    assert "rank 1 waits for" in text and "detected by rank 1" in text


@pytest.mark.parametrize("what", ["save", "behind", "load", "evaluate", "report", "state_dict", "leave"])
def test_a_stopped_rank_is_named_wherever_another_waits_for_it(what, tmp_path):
    with pytest.raises(LaunchError, match=r"rank 1 is stopped \(by SIGSTOP or a debugger\)") as failure:
        launch(jobs.stop_rank_1_in, 2, what, str(tmp_path / "run"), quiet=True, deadline_s=1.0)
    assert "detected by rank 0" in str(failure.value)


@pytest.mark.parametrize("index", [8, 12, 20])
def test_a_rank_that_stops_under_pipedream_is_named(index):
    """Its last message is on its way, so that nobody seems to wait for it."""
    with pytest.raises(LaunchError, match="rank 1 is stopped"):
        launch(jobs.stop_pipedream_at, 2, 1, index, quiet=True, deadline_s=1.0)


def test_a_rank_that_stays_outside_the_program_is_named():
    with pytest.raises(LaunchError, match="rank 1 has been outside the program too long") as failure:
        launch(jobs.dawdle_between_steps, 2, 1, quiet=True, deadline_s=1.5)
    assert "in dawdle_between_steps" in str(failure.value)


def test_ranks_that_do_not_meet_in_a_process_group_are_ended_and_told():
    """Torch would wait for half an hour, without a word."""
    with pytest.raises(LaunchError, match=r"rank [01] does not join the others: making process groups with the others"):
        launch(jobs.train_where_one_rank_makes_no_groups, 2, quiet=True, deadline_s=1.5)


def test_a_slow_checkpoint_is_no_hang(tmp_path):
    launch(jobs.save_slowly, 2, str(tmp_path / "run"), quiet=True, deadline_s=1.0)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-000001"]


# ---- who is to blame -------------------------------------------------------------------------------------------------


def _chain():
    return find("gpipe")(Shape(3, 2))


def _at(program, rank, op, mb, passes=1, pid=1):
    index = next(k for k, i in enumerate(program.ranks[rank]) if i.op is op and i.mb == mb)
    return Position(passes, index, 0, pid, 0.0)


def test_a_rank_waits_for_the_sender_of_what_its_instruction_needs():
    program = _chain()
    positions = {r: _at(program, r, Op.FWD, 0) for r in range(3)}
    assert [list(waits_for(program, r, positions)) for r in range(3)] == [[], [0], [1]]


def test_a_rank_does_not_wait_for_one_that_has_sent():
    program = _chain()
    positions = {0: _at(program, 0, Op.BWD, 0), 1: _at(program, 1, Op.FWD, 0), 2: _at(program, 2, Op.FWD, 0)}
    assert [list(waits_for(program, r, positions)) for r in (1, 2)] == [[], [1]]


def test_a_rank_that_waits_for_a_copy_of_its_own_waits_for_no_other(tmp_path):
    """The watchdog of a spilled run ended with a KeyError, so that a hang was never found."""
    spilled = {"schedule": "breadth-first", "stages": 4, "chunks": 2, "num_ranks": 2}
    program = jobs.pipeline(spill=Spilled(disk=tmp_path), **spilled).program
    awaits = [compile_rank(program, 0).awaits[index] for index in range(len(program.ranks[0]))]
    copies = [i for i, own in enumerate(awaits) if own and all(program.ranks[0][k].op is Op.FETCH for k in own)]
    positions = {r: Position(1, copies[0], 0, os.getpid(), 0.0, waits=r == 0) for r in range(2)}
    assert copies and waits_for(program, 0, positions) == {}


def test_a_message_that_was_sent_may_not_have_arrived():
    program = _chain()
    waiting = _at(program, 1, Op.FWD, 0)._replace(waits=True)
    positions = {0: _at(program, 0, Op.BWD, 0), 1: waiting, 2: _at(program, 2, Op.FWD, 0)}
    assert [list(waits_for(program, r, positions)) for r in (1, 2)] == [[0], [1]]


def test_a_stopped_rank_is_the_cause_though_nobody_waits_for_it():
    program = _chain()
    with subprocess.Popen(["sleep", "100"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        positions = {r: _at(program, r, Op.FWD, 0, pid=os.getpid()) for r in range(3)}
        positions[1] = Position(3, OUTSIDE, 0, process.pid, 0.0)
        page = hang_report(0, program, positions, 61.0, 60.0, 3)
        process.kill()
    assert page.startswith("rank 1 is stopped")


@pytest.mark.parametrize(("idle_s", "is_hang"), [(1.0, False), (11.0, True)])
def test_a_save_that_shows_signs_of_life_is_no_hang(idle_s, is_hang):
    saving = Position(1, SAVING, 0, os.getpid(), 100.0)
    positions = {0: saving._replace(waits=True), 1: saving}
    assert (patience(0, None, positions, 1.0, 100.0 + idle_s) == 1.0) is is_hang
    positions[0] = positions[0]._replace(index=LEAVING)
    assert patience(0, None, positions, 1.0, 1e9) == math.inf, "another may take its time before it leaves"


def test_the_report_follows_the_chain_to_the_rank_that_waits_for_nobody():
    program = _chain()
    positions = {r: _at(program, r, Op.FWD, 0) for r in range(3)}
    page = hang_report(2, program, positions, 61.0, 60.0, 3)
    assert page.startswith("rank 0 does not continue, though it waits for no other rank: at 'fwd s0 m0")
    assert "rank 2 waits for" in page and "rank 1 waits for" in page


def test_ranks_whose_hosts_are_ahead_of_their_gpus_are_judged_by_the_gpus(tmp_path):
    """The hosts had launched the whole pass and waited for its loss: each rank seemed to wait for all others."""
    program = _chain()
    positions = {}
    for rank in range(3):
        stuck = _at(program, rank, Op.FWD, 0).index
        progress = Progress(progress_file(tmp_path, rank))
        progress.passes = 1
        progress.at(LOSS)
        assert progress.position.of_device.index == LOSS
        progress.device_at(stuck)
        positions[rank] = positions_of(tmp_path, 3)[rank].of_device
    assert [list(waits_for(program, rank, positions)) for rank in range(3)] == [[], [0], [1]]
    page = hang_report(2, program, positions, 61.0, 60.0, 3)
    assert page.startswith("rank 0 does not continue, though it waits for no other rank: at 'fwd s0 m0")
    assert "  rank 1: its GPU is at 'fwd s1 m0" in page
    progress.at(LOSS)
    assert progress.position.of_device.index == LOSS, "the host has moved on"


def test_a_gpu_stands_before_the_first_instruction_that_it_has_not_begun():
    program = _chain()
    run = Execution(compile_rank(program, 0), None, None, [], Progress())
    begun = SimpleNamespace(query=lambda: True)
    not_begun = SimpleNamespace(query=lambda: False)
    run.starts = [Mark(0.0, begun), 0.0, Mark(0.0, begun), Mark(0.0, not_begun), Mark(0.0, not_begun), 0.0]
    assert run.stands_before() == 3
    run.starts[3:] = [0.0, 0.0]
    assert run.stands_before() == -1


def test_a_rank_that_waits_for_the_loss_blames_one_still_in_its_pass():
    program = _chain()
    here = Position(1, LOSS, 0, 1, 0.0)
    positions = {0: here, 1: here, 2: _at(program, 2, Op.BWD, 1)}
    assert list(waits_for(program, 0, positions)) == [2]


@pytest.mark.parametrize(
    ("here", "cause"),
    [
        (Position(1, LOSS, 0, 1, 0.0), 1),
        (Position(1, MEETING, 0, 1, 0.0), 1),
        (Position(1, SAVING, 0, 1, 0.0, waits=True), 1),
        (Position(1, SAVING, 0, 1, 0.0), 0),
    ],
)
def test_a_rank_that_waits_for_all_does_not_blame_itself_where_another_is_on_another_machine(here, cause):
    """Two machines, of which each named its own rank when the network between them was cut."""
    page = hang_report(0, None, {0: here}, 61.0, 60.0, 2)
    assert page.startswith(f"rank {cause} ")


def test_a_rank_outside_the_program_waits_for_nobody():
    program = _chain()
    positions = {0: Position(1, OUTSIDE, 0, 1, 0.0), 1: _at(program, 1, Op.FWD, 0, passes=2)}
    assert waits_for(program, 0, positions) == {}
    assert list(waits_for(program, 1, positions)) == [0]
