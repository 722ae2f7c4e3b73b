"""Published runs and their predictions: the score, which may only become better."""

import pytest

from pipefit.planner.machines import load_topology
from pipefit.planner.measured_runs import MeasuredRun, predict, read_runs
from pipefit.planner.transformer import transformer_of
from pipefit.reproduce.run_scores import RUNS, kendall, published_runs


def test_every_published_run_names_its_source():
    lines = [line for _, line in read_runs(RUNS)]
    assert len(lines) == 515 and all(line["source"].startswith("github.com/") for line in lines)
    others = {"korthikanti", "llama-13b", "bloom", "gpt-1.3b", "megatron-core"}
    assert {line["collection"] for line in lines} == others | {"torchtitan", "torchtitan-h200"}


def test_an_order_with_ties_is_neither_right_nor_wrong_there():
    assert kendall([(1, 1), (1, 2), (2, 3)]) == pytest.approx(2 / 3)


def test_runs_of_bloom_are_older_than_its_gradients_of_4_bytes():
    """Its source says that BF16_Optimizer, which has them, came on 28 February 2022."""
    lines = [line for _, line in read_runs(RUNS) if line["collection"] == "bloom"]
    assert {line["source"][-7:] for line in lines} == {f"(02-{day})" for day in (21, 23, 24, 25)}
    assert not any("_bytes=" in line["model"] for line in lines)


def test_runs_of_torchtitan_share_weights_block_by_block_as_its_code_does():
    for run, line in read_runs(RUNS):
        if line["collection"].startswith("torchtitan"):
            model = transformer_of(run.model)
            assert (run.shard, run.depth, run.chunks) == ("weights", 1, model.layers)
            assert (model.torchtitan, model.summed_bytes, model.attention) == (1, 4, "flash")
            # Runs whose 8 bits are scaled by rows, or whose micro-batches are not published, are left out.
            assert run.batch == run.microbatch * run.devices // run.tensor


@pytest.mark.slow
@pytest.mark.parametrize(("microbatch", "least"), [(4, 0.25), (2, 0.15), (1, 0.05)])
def test_interleaving_gains_on_405_billion_parameters_as_published(microbatch, least):
    """torchtitan reports 28 % more, without the size of its micro-batches."""
    blocks = "layers=126,hidden=16384,heads=128,kv_heads=8,ffn=53248,vocab=128256,sequence=8192"
    model = f"llama:{blocks},torchtitan=1,summed_bytes=4,fused_passes=1,sequence_parallel=1,overlapped=1,fp8=1"
    machine = load_topology("grand-teton-h100-512")

    def seconds(chunks):
        run = MeasuredRun(model, 512, 8, 8, chunks, microbatch, 256, "layer", "optimizer", None)
        return predict(run, machine).seconds

    assert seconds(1) / seconds(2) - 1 > least
    assert seconds(2) > seconds(4)


@pytest.mark.long
def test_the_score_is_at_least_the_one_of_the_manual():
    found = published_runs()
    scores = {(each.collection, each.constants): each for each in found.scores}
    assert scores["korthikanti", "data sheet"].ninth < 0.04
    fitted = scores["llama-13b", "fitted"]
    assert fitted.runs == 132 and fitted.median < 0.04 and fitted.ninth < 0.1
    assert fitted.tau > 0.78 and fitted.regret < 0.03 and fitted.memory > 0.948
    plain = scores["llama-13b", "data sheet"]
    assert plain.median < 0.084 and plain.ninth < 0.165 and plain.memory > 0.947
    assert plain.tau > 0.8 and plain.regret < 0.02
    assert scores["bloom", "data sheet"].median < 0.17 and scores["bloom", "data sheet"].tau > 0.6
    assert scores["megatron-core", "data sheet"].median < 0.02
    assert scores["gpt-1.3b", "data sheet"].median < 0.06
    assert scores["torchtitan", "data sheet"].median < 0.1 and scores["torchtitan", "data sheet"].ninth < 0.15
    assert scores["torchtitan", "fitted"].median < 0.05
    assert scores["torchtitan-h200", "data sheet"].ninth < 0.02
    # Four runs that repeat one that the machine is fitted to do not judge.
    others = scores["bloom", "fitted"]
    assert others.runs == 32 and others.median < 0.035 and others.ninth < 0.11
    # Micro-batches of one sample are the best choice in every group of LLaMA.
    judged = [each for each in found.judged["llama-13b", "fitted"] if each.run.seconds is not None]
    for group in {each.group for each in judged}:
        best = min((each for each in judged if each.group == group), key=lambda each: each.expected.seconds)
        assert best.run.microbatch == 1, group
    assert "llama-13b" in found.text and found.svg().startswith("<svg")
