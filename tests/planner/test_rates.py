"""The rate of products by the type of their numbers: of 16, 32 and 64 bits."""

import msgspec
import pytest
import torch
from torch import nn

from pipefit.cost import of_plan
from pipefit.models.hub import without_weights
from pipefit.planner import gpt_profile, plan
from pipefit.planner.computed_profile import counted_profile
from pipefit.planner.explain import explain
from pipefit.planner.machines import load_topology, topology_names
from pipefit.planner.training_figures import training
from pipefit.profiling import analytic_profile, count_model
from pipefit.spec import Device, Level, Topology

A100 = load_topology("dgx-a100-8").device
RTX3090 = load_topology("rtx3090-64").device
FIGURES = {2: "flops", 4: "fp32_flops", 8: "fp64_flops"}


def at_one_rate(device: Device, flops: float) -> Device:
    return msgspec.structs.replace(device, flops=flops, fp32_flops=0.0, fp64_flops=0.0)


def seconds(profile):
    return [(layer.forward_s, layer.backward_input_s, layer.backward_weight_s) for layer in profile.layers]


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_a_transformer_takes_the_rate_of_its_type(element_bytes):
    flops = getattr(A100, FIGURES[element_bytes])
    found = gpt_profile(4, 4096, 32, device=A100, bytes=element_bytes)
    alone = gpt_profile(4, 4096, 32, device=at_one_rate(A100, flops), bytes=element_bytes)
    assert seconds(found) == seconds(alone)
    # Products of a block, of 24bsh² FLOP, at no more than the rate of a large one.
    least_s = 24 * 2048 * 4096**2 / (flops * A100.efficiency)
    assert least_s < found.layers[1].forward_s < 1.6 * least_s


@pytest.mark.parametrize(("dtype", "element_bytes"), [("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_a_counted_model_takes_the_rate_of_its_type(dtype, element_bytes):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 4, "num_key_value_heads": 2}
    options = sizes | {"num_hidden_layers": 2, "vocab_size": 1000}
    counted = count_model(lambda: without_weights("transformers:LlamaForCausalLM", options, dtype=dtype), 128)
    found = counted_profile(counted, "llama", 1, A100)
    alone = counted_profile(counted, "llama", 1, at_one_rate(A100, getattr(A100, FIGURES[element_bytes])))
    assert found.element_bytes == element_bytes
    assert seconds(found) == seconds(alone)


@pytest.mark.parametrize(
    ("of_layers", "wanted", "half", "element_bytes"),
    [
        (torch.float32, None, None, 4),
        (torch.float64, None, None, 8),
        (torch.complex64, None, None, 4),
        (torch.float32, torch.bfloat16, None, 2),
        (torch.float32, None, torch.bfloat16, 2),
    ],
)
def test_layers_take_the_rate_of_the_type_that_their_products_have(of_layers, wanted, half, element_bytes):
    with torch.device("meta"):
        layers = [nn.Linear(512, 512, dtype=of_layers) for _ in range(2)]
        x = torch.empty(64, 512, dtype=of_layers)
    device = Device(flops=8e12, fp32_flops=4e12, fp64_flops=2e12, efficiency=1.0)
    found = analytic_profile(layers, x, device, dtype=wanted, half=half)
    alone = analytic_profile(
        layers, x, at_one_rate(device, getattr(device, FIGURES[element_bytes])), dtype=wanted, half=half
    )
    assert seconds(found) == seconds(alone)
    assert found.element_bytes == element_bytes


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_devices_that_differ_are_as_fast_as_they_are_in_the_type(element_bytes):
    """In 16 bits an A100 is four times as fast as an RTX 3090, in 32 bits half as fast."""
    desk = Topology((Level("desk", 2, 25e9),), devices=(A100, RTX3090))
    profile = gpt_profile(12, 2048, 16, device=A100, bytes=element_bytes)
    made = plan(profile, desk, global_batch=16, depths=[2], schedules=["1f1b"])
    field = FIGURES[element_bytes]
    ratio = getattr(RTX3090, field) * RTX3090.efficiency / (getattr(A100, field) * A100.efficiency)
    assert of_plan(profile, made, desk).speed == pytest.approx((1.0, ratio))
    first, last = (sum(profile.layers[i].total_s for i in stage.layers) for stage in made.partition.stages)
    assert (first > last) == (ratio < 1)
    text = explain(made, profile, topology=desk)
    assert text == explain(made, profile, topology=desk.for_elements(element_bytes))


def test_the_share_of_the_peak_is_that_of_the_type():
    machine = load_topology("dgx-a100-8")
    profile = gpt_profile(8, 2048, 16, device=machine.device, bytes=4)
    made = plan(profile, machine, global_batch=16)
    told = training(made, machine, 1e9)
    assert told["model_flops_per_device"] / told["mfu"] == pytest.approx(19.5e12)
    assert 0.5 < told["mfu"] <= machine.device.efficiency


def test_every_shipped_gpu_with_tensor_cores_has_its_rates():
    for name in topology_names():
        device = load_topology(name).device
        if name.startswith(("tpu", "gtx")):
            assert device.fp32_flops == 0
        else:
            assert 0 < device.fp64_flops <= device.fp32_flops < device.flops, name
