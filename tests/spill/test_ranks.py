"""A cap on each device of a pipeline: the plan it gets, and the same numbers as without one."""

import json
import re

import msgspec
import pytest
import torch
from tests.pipelines import grouped

from pipefit import Pipeline, Plan
from pipefit.cli import main
from pipefit.errors import InfeasibleError, PlanError
from pipefit.models import build
from pipefit.spec.options import Spilled, Updates

pytestmark = [pytest.mark.usefixtures("small_probes"), pytest.mark.slow]

BATCH, MICROBATCHES = 8, 4


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


def model(tied=False):
    torch.manual_seed(0)
    return build("gpt", layers=8, hidden=32, heads=2, context=8, vocab=32, tied=tied, dropout=0.1)


def capped(cap="100 KiB", ranks=2, tied=False, clip=None, **more):
    bundle = model(tied)
    example = bundle.example(BATCH, 0)
    where = {key: more.pop(key) for key in ("disk", "host_memory", "step_on") if key in more}
    pipe = Pipeline(
        bundle.layers,
        **grouped(
            loss=bundle.loss,
            optimizer=adamw,
            microbatches=MICROBATCHES,
            example=example,
            ranks=ranks,
            clip_norm=clip,
            seed=3,
            spill=Spilled(cap, **where),
            **more,
        ),
    )
    return pipe, bundle


def same(one, other, bundle, steps=3):
    for number in range(steps):
        x, y = bundle.example(BATCH, number)
        assert one.step(x, y) == other.step(x, y)
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("ranks", "where"),
    [(2, {}), (3, {"step_on": "device"}), (2, {"disk": True}), (3, {"disk": True})],
    ids=["2-host", "3-on-device", "2-disk", "3-disk"],
)
def test_ranks_under_a_cap_train_as_one_process_that_holds_everything(ranks, where, tmp_path):
    where = {key: tmp_path / "tier" if key == "disk" else value for key, value in where.items()}
    pipe, _ = capped("500 KiB", ranks, **where)
    plan = pipe.plan
    assert plan.spill and plan.schedule == "breadth-first" and plan.placement.num_ranks == ranks and plan.num_chunks > 1
    assert max(plan.prediction.peak_bytes) == plan.spill.peak_bytes <= 500 * 1024
    bundle = model()
    one = Pipeline(
        bundle.layers, loss=bundle.loss, optimizer=adamw, microbatches=MICROBATCHES, stages=1, updates=Updates(seed=3)
    )
    same(one, pipe, bundle)
    pipe.close()


@pytest.mark.parametrize("tied", [False, True])
def test_clipping_and_shared_weights_over_ranks_under_a_cap_are_those_of_the_same_pipeline_without(tied):
    pipe, _ = capped("500 KiB", 2, tied=tied, clip=0.5)
    assert pipe.plan.spill is not None
    bundle = model(tied)
    plan = msgspec.structs.replace(pipe.plan, spill=None)
    one = Pipeline(bundle.layers, loss=bundle.loss, optimizer=adamw, plan=plan, updates=Updates(clip_norm=0.5, seed=3))
    same(one, pipe, bundle)
    pipe.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_under_a_cap_train_as_the_same_copies_without(ranks):
    pipe, _ = capped("500 KiB", ranks, replicas=2)
    assert pipe.plan.spill and pipe.plan.data == 2 and pipe.plan.placement.num_ranks == ranks
    bundle = model()
    plan = msgspec.structs.replace(pipe.plan, spill=None)
    one = Pipeline(bundle.layers, loss=bundle.loss, optimizer=adamw, plan=plan, updates=Updates(seed=3))
    same(one, pipe, bundle)
    pipe.close()


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 5), ("gpipe", 1), ("breadth-first", 5)])
def test_a_schedule_that_is_asked_for_is_taken(schedule, chunks):
    cap, place = ("940 KiB", "host") if chunks == 1 else ("500 KiB", "device")
    pipe, _ = capped(cap, 2, schedule=schedule, chunks=chunks, step_on=place)
    assert (pipe.plan.schedule, pipe.plan.num_chunks) == (schedule, chunks)
    bundle = model()
    plan = msgspec.structs.replace(pipe.plan, spill=None)
    one = Pipeline(bundle.layers, loss=bundle.loss, optimizer=adamw, plan=plan, updates=Updates(seed=3))
    same(one, pipe, bundle)
    pipe.close()


def test_ranks_that_hold_the_model_between_them_are_not_spilled():
    pipe, bundle = capped("3 MiB", 2)
    assert pipe.plan.spill is None and (pipe.plan.schedule, len(pipe.plan.partition.stages)) == ("1f1b", 2)
    pipe.step(*bundle.example(BATCH, 0))


def test_a_cap_too_small_names_the_smallest_that_works_for_so_many_ranks():
    with pytest.raises(InfeasibleError, match=r"on each of 2 ranks: the smallest cap that works is") as refusal:
        capped("20 kB")
    smallest = re.search(r"the smallest cap that works is ([\d.]+ KiB)", str(refusal.value)).group(1)
    pipe, _ = capped(smallest)
    pipe.close()


def test_an_asynchronous_schedule_is_refused():
    with pytest.raises(PlanError, match="pipedream does not flush"):
        capped(schedule="pipedream")


def test_the_memory_of_the_host_is_for_all_ranks_together():
    pipe, _ = capped("500 KiB", 2, host_memory="4 MiB")
    held = [worker.spilling.tier._host_bytes for worker in pipe.workers]
    assert 0.99 * 4 * 2**20 < sum(held) <= 4 * 2**20 and min(held) > 0
    pipe.close()


def test_the_plan_of_the_command_line_runs_as_it_stands(tmp_path, capsys):
    words = ["--model", "gpt", "--option", "layers=8,hidden=32,context=16,dropout=0.1,tied=false", "--steps", "3"]
    words += ["--batch", "8", "--data", "synthetic", "--transport", "local", "--json"]
    found = []
    run = ["--device-memory", "600KiB", "--ranks", "2", "-o", str(tmp_path / "run")]
    plan = ["--plan", str(tmp_path / "run" / "plan.json"), "--disk", str(tmp_path / "tier")]
    for more in ([*run, "--disk", str(tmp_path / "tier")], plan, ["--ranks", "1"]):
        assert main(["train", *words, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["losses"])
    assert Plan.load(tmp_path / "run" / "plan.json").placement.num_ranks == 2
    assert found[0] == found[1] == found[2]
