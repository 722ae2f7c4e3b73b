"""The laboratory of slow links and the ratio that makes it the paper's, as far as neither needs root nor torch."""

import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import main
from benchmarks.devices import devices_for
from benchmarks.network import lab as netlab
from benchmarks.network.choices import best_of_form, choices, plan_for, planned
from benchmarks.network.lab import Lab
from benchmarks.network.spec import (
    NetworkConfig,
    bandwidth_for,
    check,
    paper_ratio,
    reduction_ratio,
    scaled_speedup,
)
from benchmarks.network.traffic import program_bytes

from pipefit.cost import CostModel
from pipefit.errors import PipefitError
from pipefit.partition.conventions import CONVENTIONS, stage_s
from pipefit.schedules import Shape, generate, program_of
from pipefit.spec import Layer, Level, Profile, Topology


def test_every_host_is_on_the_switch_and_nothing_is_made_outside_namespaces() -> None:
    commands = netlab.setup_commands(Lab("pipefit-7", 2))
    made = [command[3] for command in commands if command[:3] == ("ip", "netns", "add")]
    assert made == ["pipefit-7-switch", "pipefit-7-h0", "pipefit-7-h1"]
    assert all(command[1] in ("netns", "-n") for command in commands)
    ports = [command for command in commands if "veth" in command]
    assert [(p[2], p[5], p[-1]) for p in ports] == [
        ("pipefit-7-switch", "p0", "pipefit-7-h0"),
        ("pipefit-7-switch", "p1", "pipefit-7-h1"),
    ]
    addresses = [command[5] for command in commands if "addr" in command]
    assert addresses == ["10.77.0.1/24", "10.77.0.2/24"]


def test_a_link_is_held_to_its_rate_at_both_ends_and_delayed_at_one() -> None:
    lab = Lab("pipefit-7", 1)
    host, port = netlab.shape_commands(lab, 10e6)
    assert "80000000bit" in host and "80000000bit" in port
    assert (host[2], port[2]) == ("pipefit-7-h0", "pipefit-7-switch")
    assert host[host.index("burst") + 1] == "20000"
    host, delay, port = netlab.shape_commands(lab, 10e6, 1e-3)
    assert delay[delay.index("delay") + 1] == "1000us" and "netem" not in host + port


@pytest.mark.parametrize(("bandwidth", "latency"), [(0, 0), (float("nan"), 0), (1e6, -1), (1e6, float("nan"))])
def test_a_link_that_makes_no_sense_is_refused(bandwidth: float, latency: float) -> None:
    with pytest.raises(PipefitError, match="bandwidth"):
        netlab.shape_commands(Lab("pipefit-7", 1), bandwidth, latency)


def test_a_queue_the_kernel_lacks_is_named_with_its_cure() -> None:
    said = netlab._cure(("tc", "qdisc", "netem"), "Error: Specified qdisc kind is unknown.")
    assert "no netem" in said and "leave the latency out" in said
    assert "`ip link` failed: busy" in netlab._cure(("ip", "link"), "busy\nmore")


def test_capabilities_decide_whether_a_process_may_make_namespaces() -> None:
    assert netlab.may_make_namespaces("Name:\tx\nCapEff:\t000001fffeffffff\n")
    assert not netlab.may_make_namespaces("CapEff:\t0000000000000000\n")
    assert not netlab.may_make_namespaces("CapEff:\t0000000000001000\n")  # CAP_NET_ADMIN alone
    assert not netlab.may_make_namespaces("")


def test_where_there_can_be_no_laboratory_the_benchmark_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["network"]) == 0
    assert capsys.readouterr().out.startswith("skipped: network namespaces are Linux's own")


def test_missing_commands_and_missing_rights_have_a_word_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(netlab.shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    assert netlab.why_not() == "no command tc here; install iproute2"
    monkeypatch.setattr(netlab.shutil, "which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(Path, "read_text", lambda self, **rest: "CapEff:\t0\n")
    assert "only root" in (netlab.why_not() or "")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (NetworkConfig(ranks=1), "--ranks"),
        (NetworkConfig(ranks=9), "--ranks"),
        (NetworkConfig(models=("gpt",)), "vgg or resnet, got gpt"),
        (NetworkConfig(models=()), "got none"),
    ],
)
def test_options_without_a_meaning_are_refused(config: NetworkConfig, words: str) -> None:
    with pytest.raises(PipefitError, match=words):
        check(config)


def test_the_ratio_of_the_papers_models_follows_from_their_published_graphs() -> None:
    # VGG-16: 553.43 MB and 672.535 ms; ResNet-50: 102.23 MB and 443.419 ms; 16 devices at 0.3125 GB/s.
    assert paper_ratio("vgg16") == pytest.approx(2 * 15 / 16 * 553.430176e6 / 0.3125e9 / 0.672535)
    assert paper_ratio("vgg16") == pytest.approx(4.937, abs=1e-3)
    assert paper_ratio("resnet50") == pytest.approx(1.383, abs=1e-3)


@pytest.mark.parametrize("num", [2, 3, 4, 8])
def test_the_bandwidth_gives_back_the_ratio_it_is_made_for(num: int) -> None:
    bandwidth = bandwidth_for(4.94, 8e6, 0.3, num)
    assert reduction_ratio(8e6, 0.3, num, bandwidth) == pytest.approx(4.94)


def test_a_speedup_is_scaled_by_the_devices_that_compute() -> None:
    assert scaled_speedup(5.28, 4) == pytest.approx(5.28 * (3 / 4) / (15 / 16))
    assert scaled_speedup(5.28, 16) == pytest.approx(5.28)
    assert scaled_speedup(1.0, 4) == 1.0


def test_ranks_that_share_cores_are_devices_of_one_speed() -> None:
    assert devices_for(2, [0, 1]).share == 1.0
    three = devices_for(3, [0, 1])
    assert three.cores == (0, 1, 0) and three.share == 0.45
    assert devices_for(4, [5]).share == pytest.approx(0.225)


def _profile() -> Profile:
    """Two heavy layers with few weights, then two light ones with many, as VGG-16 has them."""
    heavy = [Layer(f"conv{n}", 0.05, 0.05, 0.05, 1e5, 0, 1e5) for n in range(2)]
    light = [Layer(f"fc{n}", 0.002, 0.002, 0.002, 1e3, 0, 4e6) for n in range(2)]
    return Profile("small vgg", 32, (*heavy, *light))


def _network(num: int) -> Topology:
    return Topology((Level("lab", num, 8e6),))


@pytest.mark.parametrize("replicas", [(1, 1), (3, 1), (2, 1, 1), (1, 1, 1, 1)])
def test_the_best_cuts_are_those_of_trying_all(replicas: tuple[int, ...]) -> None:
    from itertools import combinations, pairwise

    profile, network, rule = _profile(), _network(4), CONVENTIONS["ring"]

    def time_s(ends: tuple[int, ...]) -> float:
        found = []
        for (start, end), copies in zip(pairwise(ends), replicas, strict=True):
            part = profile.layers[start:end]
            compute, weights = sum(layer.total_s for layer in part), sum(layer.weight_bytes for layer in part)
            found.append(float(stage_s(rule, compute, weights, copies, 8e6, 1, first=start == 0)))
        for cut, (left, right) in zip(ends[1:-1], pairwise(replicas), strict=True):
            found.append(2 * profile.layers[cut - 1].output_bytes / (8e6 * min(left, right)))
        return max(found)

    best = min(time_s((0, *cuts, 4)) for cuts in combinations(range(1, 4), len(replicas) - 1))
    stages = best_of_form(profile, network, replicas).stages
    assert time_s((0, *(stage.layers[-1] + 1 for stage in stages))) == pytest.approx(best)


def test_weights_at_the_end_are_answered_by_replicas_before_them() -> None:
    answers = {answer.cost: answer for answer in planned(_profile(), _network(4))}
    assert answers["ring"].replicas == "3-1"
    assert answers["ring"].minibatch_s < answers["ring"].data_parallel_s


@pytest.mark.parametrize("num", [2, 3, 4])
def test_every_strategy_has_a_program_for_all_ranks_and_its_group_a_data_parallelism(num: int) -> None:
    found = choices(_profile(), _network(num))
    bases = {choice.minibatches for choice in found if choice.schedule == "ddp"}
    for choice in found:
        assert choice.against in bases
        if choice.schedule != "ddp":
            program = program_of(plan_for(choice, num, 32), num_steps=12)
            assert program.header.num_ranks == num
    assert ("hybrid" in {choice.strategy for choice in found}) == (num > 2)


def test_a_program_sends_what_its_messages_and_rings_hold() -> None:
    program = generate("1f1b", Shape(depth=2, num_microbatches=4, replicas=(2, 1)))
    cost = CostModel(
        forward_s=(1, 1),
        backward_input_s=(1, 1),
        backward_weight_s=(1, 1),
        act_bytes=(10, 0),
        grad_bytes=(7, 0),
        weight_bytes=(100, 1000),
    )
    # Replicas of stage 0 send two activations each and half of twice the gradients; rank 2 four gradients.
    assert program_bytes(program, cost) == [120, 120, 28]
