"""Where a spilled stage steps changes nothing: on the device, on the host, or some here and some there."""

import copy
import json

import pytest
import torch
from tests.pipelines import grouped
from tests.spill.small_runs import (
    adagrad,
    adamw,
    dampened,
    data,
    expected,
    factored,
    momentum,
    network,
    resident,
    same,
    spilled,
)
from torch import nn

from pipefit import Pipeline
from pipefit.cli import main
from pipefit.errors import PlanError
from pipefit.models import build
from pipefit.spec.options import Parallelism, Spilled

pytestmark = [pytest.mark.usefixtures("small_probes"), pytest.mark.slow]

PLACES = ["device", "host", (0, 3), (1, 2)]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("optimizer", [momentum, dampened, adamw, adagrad, factored])
@pytest.mark.parametrize("step_on", PLACES)
def test_training_is_the_same_to_the_bit_wherever_stages_step(optimizer, clip, step_on):
    other = spilled(optimizer, clip, step_on=step_on)
    losses, state = expected(optimizer, clip)
    assert [other.step(x, y) for x, y in data()] == losses
    assert same(other.state_dict(), state)
    other.close()


@pytest.mark.parametrize("how", [{"prefetch": 0}, {"slots": 1}, {"slots": 3}, {"optim_slots": 0}])
def test_slots_and_prefetching_change_nothing_where_stages_step_on_the_host(how):
    other = spilled(adamw, 0.5, step_on=(1, 3), **how)
    losses, state = expected(adamw, 0.5)
    assert [other.step(x, y) for x, y in data()] == losses
    assert same(other.state_dict(), state)
    other.close()


def test_the_states_of_stages_that_step_on_the_host_lie_there_and_take_no_room_on_the_device():
    here, there = spilled(adamw, step_on="device"), spilled(adamw, step_on="host")
    for pipe in (here, there):
        pipe.step(*data(1)[0])
    arenas = [pipe.workers[0].spilling.arena.num_bytes for pipe in (here, there)]
    assert arenas[1] < arenas[0]
    worker = there.workers[0]
    buffer = worker.spilling.tier._buffers[0]
    first, last = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
    kept = [
        value
        for optimizer in worker.optimizers.values()
        for master, state in optimizer.state.items()
        for value in (master.data, *state.values())
    ]
    assert len(kept) > 8 and all(first <= value.data_ptr() < last for value in kept)
    assert not any("optim" in str(i) for i in there.program.ranks[0])
    here.close(), there.close()


@pytest.mark.parametrize("optimizer", [dampened, adamw])
def test_checkpoints_go_between_steps_on_the_device_and_on_the_host(optimizer, tmp_path):
    batches = data(8)
    whole = resident(optimizer, 0.5)
    losses = [whole.step(x, y) for x, y in batches]
    before = None
    for number, step_on in enumerate(["host", "device", (0, 2), "host"]):
        pipe = spilled(optimizer, 0.5, step_on=step_on)
        if before:
            pipe.load(before)
        mine = slice(2 * number, 2 * number + 2)
        assert [pipe.step(x, y) for x, y in batches[mine]] == losses[mine]
        before = pipe.save(tmp_path / str(number)) or tmp_path / str(number)
        if number == 3:
            assert same(pipe.state_dict(), whole.state_dict())
        pipe.close()


def test_a_step_on_the_host_that_fails_ends_the_run_with_its_reason():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            if all(not p.is_meta for group in self.param_groups for p in group["params"]) and self.is_armed:
                raise RuntimeError("no more")
            return super().step(closure)

        is_armed = False

    pipe = spilled(lambda parameters: Failing(parameters, 0.1, momentum=0.9), step_on="host")
    pipe.step(*data(1)[0])
    Failing.is_armed = True
    with pytest.raises(RuntimeError, match="no more"):
        pipe.step(*data(1)[0])
    pipe.close()


def test_a_step_on_the_host_needs_the_records_in_its_memory(tmp_path):
    with pytest.raises(PlanError, match="from a disk they would all have to be read"):
        spilled(step_on="host", disk=tmp_path)
    with pytest.raises(PlanError, match="expected auto, device, host, or some of the stages 0, 1, 2, 3"):
        spilled(step_on=(4,))
    with pytest.raises(PlanError, match="step_on: expected one of auto, device, host or a list"):
        spilled(step_on="moon")


@pytest.mark.parametrize("precision", [{"loss_scale": 2.0**126}, {"clip_norm": 0.5, "loss_scale": 256.0}])
def test_steps_with_a_scaled_loss_are_passed_by_and_taken_alike(precision):
    """A scale that is too large makes gradients infinite: those steps are passed by, wherever they would be taken."""

    def run(place):
        pipe = Pipeline(
            network(),
            **grouped(
                loss=nn.functional.cross_entropy,
                optimizer=adamw,
                microbatches=3,
                seed=3,
                precision="bf16",
                stages=[3, 2, 1, 1],
                chunks=4,
                spill=Spilled(step_on=place),
                **precision,
            ),
        )
        losses = [pipe.step(1000 * x, y) for x, y in data()]
        weights, scale = pipe.state_dict(), pipe.loss_scale.scale
        pipe.close()
        return losses, weights, scale

    (losses, weights, scale), *others = (run(place) for place in ("device", "host", (1, 2)))
    assert scale < precision["loss_scale"] or precision["loss_scale"] == 256.0
    for other in others:
        assert other[0] == losses and same(other[1], weights) and other[2] == scale


def test_training_from_the_command_line_is_the_same_wherever_it_steps(tmp_path, capsys):
    words = ["--model", "gpt", "--option", "layers=3,hidden=32,context=16,tied=false", "--steps", "3", "--batch", "4"]
    words += ["--microbatches", "2", "--optimizer", "adam", "--data", "synthetic", "--device-memory", "700KiB"]
    found = []
    for place in ("device", "host", "auto"):
        assert main(["train", *words, "--step-on", place, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["losses"])
    assert found[0] == found[1] == found[2]
    assert main(["train", *words, "--step-on", "host", "--disk", str(tmp_path)]) != 0
    assert "from a disk they would all have to be read" in capsys.readouterr().err


def test_a_plan_that_steps_on_the_host_is_followed(tmp_path):
    """What the plan says is what runs: its file, its program, the machine's memory."""
    bundle = build("gpt", layers=4, hidden=32, heads=2, context=8, vocab=32, tied=False)
    x, y = bundle.example(4, 0)
    how = {"loss": bundle.loss, "optimizer": adamw, "microbatches": 2}
    one = Pipeline(copy.deepcopy(bundle.layers), **grouped(stages=1, **how))
    other = Pipeline(bundle.layers, **grouped(example=(x, y), spill=Spilled("700 KiB", step_on="host"), **how))
    told = other.plan.spill
    assert told.on_host == tuple(range(len(other.plan.partition.stages))) and not told.optim_slots
    assert other.program.header.spill.on_host == told.on_host
    for _ in range(3):
        assert one.step(x, y) == other.step(x, y)
    assert same(one.state_dict(), other.state_dict())
    assert other.workers[0].spilling.arena.num_bytes < told.peak_bytes <= 700 * 1024
    other.close()


def test_stages_that_share_a_weight_step_on_the_device_and_the_rest_on_the_host():
    bundle = build("gpt", layers=2, hidden=16, heads=2, context=8, vocab=32)
    x, y = bundle.example(6, 0)
    losses = []
    for place in ("device", "host"):
        pipe = Pipeline(
            copy.deepcopy(bundle.layers),
            loss=bundle.loss,
            optimizer=adamw,
            stages=4,
            microbatches=3,
            spill=Spilled(step_on=place),
            parallelism=Parallelism(chunks=4),
        )
        losses.append([pipe.step(x, y) for _ in range(3)])
        on_host = pipe.program.header.spill.on_host
        pipe.close()
    assert losses[0] == losses[1] and on_host == (1, 2)


def test_a_model_of_the_meta_device_is_drawn_into_records_that_step_on_the_host():
    with torch.device("meta"):
        bundle = build("gpt", layers=3, hidden=16, heads=2, context=8, vocab=32, tied=False)
    pipes = []
    for more in ({"stages": 1}, {"stages": 5, "chunks": 5, "spill": Spilled(step_on="host")}):
        layers = copy.deepcopy(bundle.layers)
        pipes.append(Pipeline(layers, **grouped(loss=bundle.loss, optimizer=adamw, microbatches=2, seed=5, **more)))
    x, y = bundle.example(4, 0)
    for _ in range(2):
        assert pipes[0].step(x, y) == pipes[1].step(x, y)
    assert same(pipes[0].state_dict(), pipes[1].state_dict())
    pipes[1].close()
