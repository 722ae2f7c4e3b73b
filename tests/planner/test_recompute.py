"""Kinds of recomputation in plans: seconds, memory, and the choice under a limit."""

import pytest

from pipefit.cost import FREE, of_plan
from pipefit.errors import PlanError
from pipefit.planner import by_hand, plan
from pipefit.planner.computed_profile import gpt_profile
from pipefit.planner.estimate import estimate
from pipefit.planner.methods import problem_of
from pipefit.planner.space import Config
from pipefit.schedules import program_of
from pipefit.simulate import simulate
from pipefit.spec import Device, Layer, Level, Profile, Topology

B, S, H, A = 1, 512, 1024, 16
BLOCKS = 24
GPT = gpt_profile(BLOCKS, H, A, sequence=S, device=Device(flops=1e14))
STREAM = 2 * B * S * H


def machine(num_devices: int = 4, memory: float = float("inf")) -> Topology:
    device = Device(flops=1e14, memory_bytes=memory)
    return Topology((Level("link", num_devices, bandwidth_bytes_per_s=1e11),), device)


def costs(kind: str, schedule: str = "1f1b", m: int = 8):
    made = by_hand(len(GPT), num_ranks=4, schedule=schedule, num_microbatches=m, stages=[7, 6, 6, 7], recompute=kind)
    return made, of_plan(GPT, made, machine(), runtime=FREE)


def test_saved_bytes_of_each_kind_are_those_of_the_papers():
    block = S * B * H * (34 + 5 * A * S / H)
    expected = {"none": block, "stage": block, "selective": 34 * S * B * H, "layer": STREAM}
    for kind, each in expected.items():
        assert costs(kind)[1].saved_bytes[1] == pytest.approx(6 * each)
    # The input of a block is among the values that it saves, and is kept anyway.
    room = {"none": 0, "stage": 0, "selective": 5 * A * S * S * B, "layer": block - STREAM}
    assert {kind: costs(kind)[1].replay_bytes[1] for kind in room} == pytest.approx(room)


def test_a_backward_takes_as_much_longer_as_its_replay_takes():
    plain, layer, chosen = (costs(kind)[1] for kind in ("none", "layer", "selective"))
    # The head is never replayed.
    blocks = [plain.forward_s[0], plain.forward_s[1], plain.forward_s[2], plain.forward_s[1]]
    for stage, again in enumerate(blocks):
        before = plain.backward_input_s[stage] + plain.backward_weight_s[stage]
        after = layer.backward_input_s[stage] + layer.backward_weight_s[stage]
        assert after == pytest.approx(before + again)
        share = S / (6 * H + S)
        after = chosen.backward_input_s[stage] + chosen.backward_weight_s[stage]
        assert after == pytest.approx(before + share * again)


@pytest.mark.parametrize("m", [4, 16])
def test_the_memory_of_gpipe_is_boundaries_and_a_stage_that_of_layers_all_inputs_and_a_layer(m: int):
    """N boundaries and L/K layers of one micro-batch (GPipe §2.3); N·L/K inputs of layers, one layer (PTD-P §3.5)."""
    peaks = {}
    for kind in ("none", "stage", "layer"):
        made, cost = costs(kind, "gpipe", m)
        always = cost.resident_bytes([1]) + cost.weight_bytes[1] + cost.wgrad_bytes[1]
        peaks[kind] = simulate(program_of(made), cost, memory=True).peak_bytes(1) - always
    block = S * B * H * (34 + 5 * A * S / H)
    few = 3 * STREAM  # an input and an output on their way, and a gradient
    assert peaks["none"] == pytest.approx(m * 6 * block, abs=few)
    assert peaks["stage"] == pytest.approx((m - 1) * STREAM + 6 * block, abs=few)
    assert peaks["layer"] == pytest.approx(m * 6 * STREAM + block, abs=few)


@pytest.mark.parametrize("kind", ["selective", "layer"])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_an_estimate_with_replays_is_what_the_simulator_says(schedule: str, chunks: int, kind: str):
    problem = problem_of(GPT, machine(), 16)
    config = Config(schedule, 1, 4, 1, chunks, 1, 16, kind)
    found = estimate(problem, config)
    assert {stage.recompute for stage in found.partition.stages} == {kind}
    made = by_hand(
        len(GPT), num_ranks=4, schedule=schedule, num_microbatches=16, num_chunks=chunks, recompute=kind,
        stages=[len(stage.layers) for stage in found.partition.stages],
    )  # fmt: skip
    timeline = simulate(program_of(made), of_plan(GPT, made, machine(), runtime=FREE), memory=True)
    assert found.step_s == pytest.approx(timeline.makespan_s, rel=0.03)
    for rank, peak in enumerate(found.peak_bytes):
        # A message on its way is held at both of its ends.
        assert timeline.peak_bytes(rank) - 3 * STREAM <= peak <= 1.1 * timeline.peak_bytes(rank)


def test_the_less_memory_the_more_is_replayed():
    def kinds(memory: float) -> set[str]:
        made = plan(GPT, machine(4, memory), global_batch=16, microbatch_sizes=[1], depths=[4], schedules=["gpipe"],
                    tensors=[1])  # fmt: skip
        return {str(stage.recompute) for stage in made.partition.stages}

    free = plan(GPT, machine(), global_batch=16, microbatch_sizes=[1], depths=[4], schedules=["gpipe"], tensors=[1])
    most = max(free.prediction.peak_bytes)
    assert kinds(1.01 * most) == {"none"}
    assert kinds(0.85 * most) == {"selective"}
    assert kinds(0.6 * most) & {"stage", "layer"}


def test_a_profile_without_the_figures_is_told_so():
    plain = Profile("plain", 1, tuple(Layer(f"l{i}", 1.0, 1.0, 1.0, 8.0, 80.0, 8.0) for i in range(8)))
    for kind in ("layer", "selective"):
        with pytest.raises(PlanError, match=f"recompute {kind}: profile plain has no figures"):
            plan(plain, machine(2), global_batch=8, recompute=kind)
    assert plan(plain, machine(2), global_batch=8).schedule


def test_halves_are_not_planned_with_replays_of_layers():
    found = estimate(problem_of(GPT, machine(), 16), Config("zb-h1", 1, 4, 1, 1, 1, 16, "layer"))
    assert found.partition is None and "each of the two halves" in found.why
