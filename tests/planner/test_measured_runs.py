"""Runs measured elsewhere: their file, their prediction, and the machine that is fitted to them."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipefit.errors import PlanError, ProfileError
from pipefit.planner.machines import load_topology
from pipefit.planner.measured_runs import MeasuredRun, fit_machine, fits, predict, read_runs
from pipefit.planner.run_folders import run_of_folder
from pipefit.planner.transformer import transformer_of
from pipefit.spec import Partition, Placement, Plan, StageSpec

pytestmark = pytest.mark.slow

MODEL = "llama:layers=8,hidden=2048,heads=16,ffn=5632,vocab=32000,sequence=2048"
HEAD = "model,devices,tensor,depth,chunks,microbatch,batch,recompute,sharded,seconds\n"
MACHINE = load_topology("dgx-a100-16")


def run_of(tensor=1, depth=1, microbatch=1, recompute="none", seconds=None, devices=16, chunks=1):
    return MeasuredRun(MODEL, devices, tensor, depth, chunks, microbatch, 256, recompute, "optimizer", seconds)


RUNS = [
    run_of(tensor, depth, microbatch, recompute)
    for tensor, depth in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (1, 4), (4, 2))
    for microbatch, recompute in ((1, "none"), (2, "layer"))
]


def slowed(efficiency=1.0, inner=1.0, memory=1.0):
    device = MACHINE.device
    device = msgspec.structs.replace(
        device,
        efficiency=efficiency * device.efficiency,
        memory_bandwidth_bytes_per_s=memory * device.memory_bandwidth_bytes_per_s,
    )
    first, *others = MACHINE.levels
    first = msgspec.structs.replace(first, bandwidth_bytes_per_s=inner * first.bandwidth_bytes_per_s)
    return msgspec.structs.replace(MACHINE, device=device, levels=(first, *others))


def measured_on(machine, runs=RUNS):
    return [timed(run, predict(run, machine).seconds) for run in runs]


def timed(run, seconds):
    return replace(run, seconds=seconds)


def test_a_fit_finds_the_machine_that_made_the_runs():
    found = fit_machine(measured_on(slowed(efficiency=0.8, inner=0.5, memory=0.9)), MACHINE)
    times = {each.name: each for each in found.constants}
    assert times["efficiency of products"].times == pytest.approx(0.8, rel=0.03)
    assert times["bandwidth of the innermost links"].times == pytest.approx(0.5, rel=0.15)
    assert np.abs(found.errors).max() < 0.02
    assert all(each.low < each.times < each.high for each in found.constants)


def test_four_runs_show_links_that_are_far_from_their_data_sheet():
    some = [run_of(1, 1), run_of(1, 2), run_of(2, 1), run_of(2, 2)]
    runs = measured_on(slowed(inner=0.1), some)
    found = fit_machine(runs, MACHINE)
    products, links = found.constants
    assert products.times == pytest.approx(1, rel=0.12) and links.times < 0.2
    assert all(predict(run, found.topology).seconds == pytest.approx(run.seconds, rel=0.1) for run in runs)


def test_the_error_of_a_run_without_itself_is_the_one_of_a_fit_without_it():
    some = [run_of(1, 1), run_of(2, 1), run_of(4, 1), run_of(1, 2), run_of(8, 1)]
    noisy = [1.05, 0.96, 1.08, 0.92, 1.03]
    runs = [timed(run, run.seconds * factor) for run, factor in zip(measured_on(MACHINE, some), noisy, strict=True)]
    found = fit_machine(runs, MACHINE)
    for index in (0, 4):
        others = fit_machine(runs[:index] + runs[index + 1 :], MACHINE)
        again = predict(runs[index], others.topology).seconds / runs[index].seconds - 1
        assert found.errors[index] == pytest.approx(again, abs=0.01)


def test_one_bad_run_does_not_turn_the_others():
    runs = measured_on(slowed(efficiency=0.8))
    runs[3] = timed(runs[3], 3 * runs[3].seconds)
    found = fit_machine(runs, MACHINE)
    assert found.errors[3] < -0.5
    others = [abs(error) for index, error in enumerate(found.errors) if index != 3]
    assert np.median(others) < 0.05


@pytest.mark.parametrize(("count", "fitted"), [(2, 1), (5, 2), (10, 5), (16, 5)])
def test_no_more_constants_are_fitted_than_runs_can_carry(count, fitted):
    assert len(fit_machine(measured_on(MACHINE)[:count], MACHINE).constants) == fitted


def test_one_run_is_refused():
    with pytest.raises(ProfileError, match="expected at least 2 measured runs to fit a constant, got 1"):
        fit_machine(measured_on(MACHINE)[:1], MACHINE)


def test_a_run_may_have_other_servers_than_the_machine():
    eight, all_of_it = predict(run_of(devices=8), MACHINE), predict(run_of(), MACHINE)
    assert 1.8 < eight.seconds / all_of_it.seconds < 2.1
    with pytest.raises(PlanError, match="servers of 8 devices cannot have 12 in all"):
        predict(run_of(devices=12), MACHINE)


def summing(depth, bytes, shard="none"):
    """Seconds of a run on four devices of one server whose copies sum gradients of so many bytes."""
    run = MeasuredRun(f"{MODEL},summed_bytes={bytes}", 4, 1, depth, 1, 1, 16, "none", shard, None)
    return predict(run, MACHINE).seconds


BLOCK_BYTES = 2 * (4 * 2048 * 2048 + 3 * 2048 * 5632 + 2 * 2048)
TABLE_BYTES = 2 * 32000 * 2048


def test_copies_sum_after_the_last_backward_and_hide_what_the_drain_leaves_time_for():
    link = 232e9
    whole_s = 2 * 3 / 4 * (8 * BLOCK_BYTES + 2 * TABLE_BYTES) / link
    assert summing(1, 4) - summing(1, 2) == pytest.approx(whole_s, rel=0.01)
    # In a pipeline the last stage sums while the first still computes; two copies move their stage's bytes once.
    first_s = (4 * BLOCK_BYTES + TABLE_BYTES) / link
    assert summing(2, 4) - summing(2, 2) == pytest.approx(first_s, rel=0.01)


def test_sums_over_copies_may_be_hidden_by_a_backward_and_a_forward():
    def seconds(batch, settings=""):
        run = MeasuredRun(MODEL + settings, 4, 1, 1, 1, 1, batch, "none", "none", None)
        return predict(run, MACHINE).seconds

    whole_s = 2 * 3 / 4 * (8 * BLOCK_BYTES + 2 * TABLE_BYTES) / 232e9
    one_s = seconds(8) - seconds(4)
    assert whole_s < one_s  # so that nothing of the sum is seen
    assert seconds(4) - seconds(4, ",overlapped=1") == pytest.approx(whole_s, rel=0.01)
    # In eight times as many bytes it takes longer than a micro-batch.
    wide = ",summed_bytes=16"
    assert one_s < 8 * whole_s
    assert seconds(4, wide) - seconds(4, wide + ",overlapped=1") == pytest.approx(one_s, rel=0.02)


def test_sums_of_micro_batches_are_held_whole_by_every_copy():
    run = MeasuredRun(MODEL, 4, 1, 1, 1, 1, 16, "none", "optimizer", None)
    wide = replace(run, model=f"{MODEL},added_bytes=4")
    more = predict(wide, MACHINE).peak_bytes - predict(run, MACHINE).peak_bytes
    assert more == pytest.approx(4 / 2 * (8 * BLOCK_BYTES + 2 * TABLE_BYTES), rel=0.001)


def test_sharded_copies_step_a_part_each():
    device = MACHINE.device
    # Adam in mixed precision moves 60 bytes of a parameter; three quarters of them are steps of other copies.
    step_s = 30 * (8 * BLOCK_BYTES + 2 * TABLE_BYTES) / device.memory_bandwidth_bytes_per_s
    assert summing(1, 2) - summing(1, 2, "optimizer") == pytest.approx(3 / 4 * step_s, rel=0.02)


def test_a_process_reserves_more_than_its_tensors_need_but_not_for_weights():
    """15 % of what comes and goes is lost; each group of devices takes 688 MiB, and CUDA 300 MB."""
    found = predict(run_of(tensor=2, depth=2), MACHINE)
    blocks, tables = 8, 2
    # Weights and gradients of 2 bytes, and 12 bytes of states, shared by four copies.
    standing = (4 + 12 / 4) * (blocks / 2 * BLOCK_BYTES / 2 + tables / 2 * TABLE_BYTES / 2) / 2
    lost = (found.peak_bytes - standing) * (1 / 0.85 - 1)
    assert found.reserved_bytes - found.peak_bytes == pytest.approx(lost + 3 * 688 * 2**20 + 300e6, rel=1e-3)


def test_memory_that_is_not_there_is_known():
    wide, narrow = predict(run_of(microbatch=16), MACHINE), predict(run_of(tensor=8, depth=2), MACHINE)
    small = msgspec.structs.replace(MACHINE.device, memory_bytes=16e9)
    assert not fits(wide, small) and fits(narrow, small)


def test_a_batch_that_cannot_be_split_is_named_with_its_run():
    with pytest.raises(PlanError, match="a run: 16 devices, tensor 1, depth 1, micro-batch 3: cannot be planned"):
        predict(run_of(microbatch=3), MACHINE)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (run_of(tensor=32, devices=32), "32 devices, .*: cannot be planned: tensor width 32: expected a divisor of 16"),
        (run_of(tensor=1, depth=16), "16 devices, .*: cannot be planned: 16 stages need at least 16 layers"),
    ],
)
def test_widths_that_a_model_does_not_allow_are_named_with_their_run(run, message):
    with pytest.raises(PlanError, match=f"a run: {message}"):
        predict(run, MACHINE)


def test_devices_that_share_a_layer_fill_their_servers():
    run = replace(run_of(tensor=3, devices=24), model="gpt:layers=8,hidden=1536,heads=24")
    with pytest.raises(PlanError, match="servers of 8 devices cannot have 24 in all, in groups of 3"):
        predict(run, MACHINE)


def test_stages_of_equal_weights_have_fewer_blocks_next_to_a_large_table():
    """Each of both tables weighs as much as five of twelve blocks: stages have 1, 5, 5 and 1 of these, not 3 each."""
    model = "llama:layers=12,hidden=2048,heads=16,ffn=5632,vocab=125440,sequence=2048"
    blocks = predict(MeasuredRun(model, 4, 1, 4, 1, 1, 512, "none", "none", None), MACHINE)
    weights = predict(MeasuredRun(model, 4, 1, 4, 1, 1, 512, "none", "none", None, cut="weights"), MACHINE)
    # The last stage is the slowest: the projection takes five blocks' time, too.
    assert weights.seconds / blocks.seconds == pytest.approx((1 + 5) / (3 + 5), rel=0.05)
    assert weights.peak_bytes < blocks.peak_bytes


def written(path: Path, *lines: str) -> Path:
    path.write_text(HEAD + "".join(f"{line}\n" for line in lines))
    return path


def test_a_file_is_read_line_by_line(tmp_path):
    quoted = f'"{MODEL}"'
    path = written(tmp_path / "runs.csv", f"{quoted},16,2,2,1,1,256,none,1,3.5", f"{quoted},8,1,1,1,4,256,layer,0,")
    (first, _), (second, line) = read_runs(path)
    assert (first.seconds, first.tensor, first.shard, first.place) == (3.5, 2, "optimizer", "runs.csv, line 2")
    assert second.seconds is None and line["recompute"] == "layer"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"MODEL",16,3,2,1,1,256,none,1,3.5', "16 devices cannot be copies of tensor 3 × depth 2"),
        (
            '"MODEL",16,two,2,1,1,256,none,1,3.5',
            "line 2: tensor: expected a whole number from 1 to 999999999, got 'two'",
        ),
        (f'"MODEL",{"9" * 5000},2,2,1,1,256,none,1,3.5', "line 2: devices: expected a whole number from 1"),
        (f'"{"x" * 200_000}",16,2,2,1,1,256,none,1,3.5', r"runs\.csv: not CSV: field larger than field limit"),
        ('"MODEL",16,2,2,1,1,256,none,1,soon', "seconds: expected a number or nothing, got 'soon'"),
        ('"MODEL",16,2,2,1,1,256,none,1,-1', "seconds: expected a number from 1e-9 to 1e9, got -1"),
        (
            '"MODEL",16,1,2,1,1,256,full,1,1',
            "line 2: recompute: expected one of none, stage, layer, selective, got 'full'",
        ),
        ('"MODEL",16,1,2,1,1,256,none,yes,1', "line 2: sharded: expected one of 0, 1, 3, got 'yes'"),
        ('"MODEL",16,1,1,2,1,256,none,1,1', "line 2: chunks: expected 1 where the depth is 1, got 2"),
        ('"llama:layers=8",16,2,2,1,1,256,none,1,1', "line 2: llama:layers=8: expected hidden=…"),
        ('"bert:layers=8",16,2,2,1,1,256,none,1,1', "line 2: bert:layers=8: expected gpt:layers=…"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_line(tmp_path, line, message):
    with pytest.raises(ProfileError, match=message):
        read_runs(written(tmp_path / "runs.csv", line.replace("MODEL", MODEL)))


def test_a_file_of_another_program_is_read_or_refused(tmp_path):
    path = tmp_path / "runs.csv"
    text = HEAD + f'"{MODEL}",16,2,2,1,1,256,none,1,3.5\n'
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert len(read_runs(path)) == 1
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(ProfileError, match=r"runs\.csv: cannot be read: not UTF-8 text"):
        read_runs(path)


def test_a_cut_may_be_named(tmp_path):
    path = tmp_path / "runs.csv"
    header = HEAD.replace("seconds", "cut,seconds")
    path.write_text(header + f'"{MODEL}",16,2,2,1,1,256,none,1,weights,3.5\n"{MODEL}",16,2,2,1,1,256,none,1,,3.5\n')
    assert [run.cut for run, _ in read_runs(path)] == ["weights", "blocks"]
    path.write_text(header + f'"{MODEL}",16,2,2,1,1,256,none,1,time,3.5\n')
    with pytest.raises(ProfileError, match="line 2: cut: expected one of blocks, weights, got 'time'"):
        read_runs(path)


def test_a_missing_column_is_named(tmp_path):
    (tmp_path / "runs.csv").write_text("model,devices\n")
    with pytest.raises(ProfileError, match="seconds, sharded, tensor missing"):
        read_runs(tmp_path / "runs.csv")


CONFIG = {"model": "gpt", "option": "layers=4,hidden=256,tied=0", "batch": 64, "precision": "bf16"}


def folder_of(path: Path, cut=((0, 1, 2), (3, 4, 5)), schedule="1f1b", **config) -> Path:
    """A folder as a run of two ranks leaves it, two copies of each."""
    stages = tuple(StageSpec(layers, recompute="layer") for layers in cut)
    Plan(Partition(stages), Placement(((0, 2), (1, 3))), schedule, 8, data=2).save(path / "plan.json")
    run = {"config": CONFIG | config, "result": {"measured_period_s": 0.25}}
    (path / "run.json").write_text(json.dumps(run))
    return path


def test_the_folder_of_a_run_is_a_measured_run(tmp_path):
    run = run_of_folder(folder_of(tmp_path))
    assert (run.devices, run.tensor, run.depth, run.microbatch, run.batch) == (4, 1, 2, 4, 64)
    assert (run.seconds, run.recompute, run.shard) == (0.25, "layer", "none")
    model = transformer_of(run.model)
    assert (model.layers, model.hidden, model.heads, model.vocab, model.sequence) == (4, 256, 4, 256, 128)
    assert (model.tied, model.bytes, model.attention) == (0, 2, "flash")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "mlp"}, "expected a run of --model gpt, .* got mlp"),
        ({"schedule": "zb-h1"}, "schedule 1f1b or interleaved, got zb-h1"),
        ({"cut": ((0, 1), (2, 3, 4, 5))}, "stages of equally many blocks"),
    ],
)
def test_a_run_that_the_law_does_not_know_is_refused(tmp_path, changed, message):
    with pytest.raises(ProfileError, match=message):
        run_of_folder(folder_of(tmp_path, **changed))


def test_a_run_that_has_not_ended_is_refused(tmp_path):
    with pytest.raises(ProfileError, match=r"a run that has ended; there is no run\.json"):
        run_of_folder(tmp_path)
