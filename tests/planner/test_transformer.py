"""The arithmetic of transformers, compared with what authors published, with torch's modules and with profiles."""

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipefit.cost.roofline import product_s
from pipefit.errors import ProfileError
from pipefit.models import build
from pipefit.planner import gpt_profile
from pipefit.planner.computed_profile import num_blocks, transformer_profile
from pipefit.planner.machines import load_topology
from pipefit.planner.methods import problem_of, space_of
from pipefit.planner.plan_options import PlanOptions
from pipefit.planner.transformer import Transformer, flops_per_iteration, num_parameters, transformer_of
from pipefit.spec import Device

# Parameters in billions, heads, hidden, layers: Narayanan et al., table 1.
TABLE = [
    (1.7, 24, 2304, 24),
    (3.6, 32, 3072, 30),
    (7.5, 32, 4096, 36),
    (18.4, 48, 6144, 40),
    (39.1, 64, 8192, 48),
    (76.1, 80, 10240, 60),
    (145.6, 96, 12288, 80),
    (310.1, 128, 16384, 96),
    (529.6, 128, 20480, 105),
    (1008.0, 160, 25600, 128),
]


@pytest.mark.parametrize(("billions", "heads", "hidden", "layers"), TABLE)
def test_the_published_parameters_come_out(billions, heads, hidden, layers):
    assert num_parameters(Transformer(layers, hidden, heads)) / 1e9 == pytest.approx(billions, abs=0.06)


def test_the_formula_with_recompute_is_the_papers_in_one_piece():
    gpt = Transformer(96, 12288, 96)
    s, h, v = gpt.sequence, gpt.hidden, gpt.vocab
    papers = 96 * 7 * s * gpt.layers * h * h * (1 + s / (6 * h) + v / (16 * gpt.layers * h))
    assert flops_per_iteration(gpt, 7, recompute=True) == pytest.approx(papers, rel=1e-12)


def test_a_computed_profile_has_the_parameters_and_flop_of_the_formulas():
    device = Device(flops=100e12, efficiency=1.0)
    gpt = Transformer(12, 1024, 16)
    profile = gpt_profile(12, 1024, 16, device=device, microbatch=4)
    # The projection shares the embedding's weights and so counts once in the formula.
    weights = sum(layer.weight_bytes for layer in profile.layers[:-1]) / 2
    assert weights == pytest.approx(num_parameters(gpt), rel=1e-12)
    seconds = sum(layer.total_s for layer in profile.layers)
    assert seconds * 100e12 == pytest.approx(flops_per_iteration(gpt, 4), rel=1e-12)
    stream = 4 * 2048 * 1024
    assert profile.layers[1].saved_bytes == stream * (34 + 5 * 16 * 2048 / 1024)


LLAMA = "llama:layers=3,hidden=512,heads=8,kv_heads=2,ffn=1408,vocab=1000,sequence=256"


def counted(model, ids):
    """Parameters of a module, and FLOP of its forward and backward by torch's own counter."""
    with FlopCounterMode(display=False) as counter:
        output = model(ids)
        getattr(output, "logits", output).sum().backward()
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops()


def test_a_llama_by_its_sizes_is_the_module_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 3, "num_attention_heads": 8}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=1000, max_position_embeddings=256, tie_word_embeddings=False
    )
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(2, 256, dtype=torch.long, device="meta")
    model = transformer_of(LLAMA)
    assert counted(module, ids) == (num_parameters(model), flops_per_iteration(model, 2))
    profile = transformer_profile(model, 2, Device(flops=1e12))
    assert sum(layer.weight_bytes for layer in profile.layers) / 2 == num_parameters(model) - 512  # the last norm


def test_a_gpt_by_its_sizes_is_the_built_in_module():
    with torch.device("meta"):
        module = build("gpt", layers=3, hidden=256, heads=4, context=128, vocab=500).layers
    model = Transformer(3, 256, 4, vocab=500, sequence=128)
    parameters, flops = counted(module, torch.zeros(2, 128, dtype=torch.long, device="meta"))
    assert parameters == num_parameters(model) + 2 * 256  # the last norm, which the paper leaves out
    assert flops == flops_per_iteration(model, 2)


def test_grouped_queries_gates_and_fused_attention_change_what_they_should():
    def block(**changes):
        sizes = {"layers": 2, "hidden": 1024, "heads": 16, "sequence": 4096, **changes}
        return transformer_profile(
            Transformer(**sizes), 1, Device(flops=100e12, memory_bandwidth_bytes_per_s=1e12)
        ).layers[1]

    plain = block()
    assert block(kv_heads=4).weight_bytes < plain.weight_bytes < block(gated=1).weight_bytes
    assert block(attention="flash").saved_bytes < plain.saved_bytes / 5
    assert block(attention="flash").forward_s < plain.forward_s < block(attention="eager").forward_s
    assert block(attention="flash1").forward_s > block(attention="flash").forward_s
    assert block(fused_norms=0).forward_s > plain.forward_s
    assert block(fused_norms=0).saved_bytes > plain.saved_bytes


def test_sequence_parallelism_divides_what_is_between_the_products():
    def shard(sequence_parallel):
        model = Transformer(2, 2048, 16, sequence_parallel=sequence_parallel)
        return transformer_profile(model, 1, load_topology("dgx-a100-8").device, tensor=8).layers[1]

    whole, divided = shard(0), shard(1)
    stream = 2 * 2048 * 2048
    assert whole.saved_bytes - divided.saved_bytes == 5 * stream * 7 / 8
    assert divided.forward_s < whole.forward_s
    assert divided.weight_bytes == whole.weight_bytes


def test_a_product_may_keep_its_gathered_input_or_a_part_of_it():
    def kept(settings, tensor=8):
        return layers_of(f",{settings}", tensor).layers[1].saved_bytes

    stream = 2 * 2048 * 4096
    more = kept("sequence_parallel=1,gathered=1") - kept("sequence_parallel=1,gathered=0")
    assert more == 2 * stream * 7 / 8  # the inputs of the two products after the norms
    assert kept("gathered=1") == kept("gathered=0")


BLOCK = "llama:layers=2,hidden=4096,heads=32,ffn=11008,sequence=2048"


def layers_of(settings="", tensor=8, machine="8xH100"):
    topology = load_topology(machine)
    return transformer_profile(transformer_of(BLOCK + settings), 1, topology.device, tensor=tensor, topology=topology)


def test_a_gate_that_sums_its_own_gradient_adds_an_all_reduce_to_the_backward():
    plain, more = layers_of().layers[1], layers_of(",sums=3").layers[1]
    own = layers_of(tensor=1).layers[1]
    # Two trees over 8 devices: up and down, the bytes over the links and three messages one after another.
    sum_s = 2 * (2 * 2048 * 4096 / 348e9 + 3 * 3.4e-6)
    assert more.backward_input_s - plain.backward_input_s == pytest.approx(sum_s, rel=0.01)
    assert more.forward_s == plain.forward_s
    assert layers_of(",sums=3", tensor=1).layers[1] == own


def test_a_loss_on_whole_logits_is_repeated_by_every_device_of_a_rank():
    def loss_s(settings, tensor):
        profile = layers_of(settings, tensor)
        head = profile.layers[-1]
        return head.forward_s + head.backward_s + profile.loss_s

    logits = 2048 * 32000
    moved_s = (6 + 16 + 4 + 4 + 16 + 6) * logits * 7 / 8 / 3008e9
    # Gathered, copied into a list, and joined.
    gathered_s = 7 / 8 * 2 * logits / 348e9 + (4 + 4) * logits / 3008e9
    shared = loss_s(",fused_loss=0", 1) - loss_s("", 1)  # other kernels, on as many logits
    found = loss_s(",fused_loss=0", 8) - loss_s("", 8) - shared / 8
    assert found == pytest.approx(moved_s + gathered_s, rel=0.08)


def test_a_projection_before_a_loss_on_whole_logits_is_replayed_with_the_layers_and_its_loss_is_not():
    plain = layers_of(",fused_loss=0").layers[-1]
    replayed = plain.replaying("layer")
    product_s = 2 * 2048 * 4096 * 32000 / 8 / (989e12 * 0.71)
    gathered_s = 7 / 8 * 2 * 2048 * 32000 / 348e9 + (4 + 4) * 2048 * 32000 / 3008e9
    assert replayed.backward_s - plain.backward_s == pytest.approx(product_s + gathered_s, rel=0.15)
    assert replayed.saved_bytes == plain.saved_bytes and plain.replay_bytes("layer") == 0
    own = layers_of().layers[-1]
    assert own.replaying("layer") == own


def test_heads_that_are_not_aligned_run_without_tensor_cores():
    """BLOOM's authors measured 162.7 s a step with 128 heads of 108 in place of 121.3 s with 64 of 216."""
    machine = load_topology("jean-zay-a100-384")

    def seconds(heads):
        model = transformer_of(f"gpt:layers=2,hidden=13824,heads={heads}")
        block = transformer_profile(model, 4, machine.device, tensor=8, topology=machine).layers[1]
        return block.forward_s + block.total_s

    assert 1.2 < seconds(128) / seconds(64) < 1.5
    assert 1.0 < seconds(96) / seconds(64) < 1.05


def test_a_rotation_and_a_gate_of_one_kernel_each_move_and_keep_less():
    plain, fused = layers_of(tensor=1).layers[1], layers_of(",fused_passes=1", tensor=1).layers[1]
    tokens, e, kernel_s = 2048, 2, 4e-6
    # Rotations of queries and keys moved 10 elements and move 2; SiLU and its product moved 5 and move 3.
    less = e * tokens * (8 * 2 * 4096 + 2 * 11008)
    assert plain.forward_s - fused.forward_s == pytest.approx(less / 3008e9 + (4 + 1) * kernel_s, rel=1e-6)
    assert plain.saved_bytes - fused.saved_bytes == e * tokens * 11008


def test_sums_that_overlap_with_products_only_show_their_first_of_t_pieces():
    shared = ",sequence_parallel=1"
    plain, overlapped = (layers_of(shared + more, tensor=4).layers[1] for more in ("", ",overlapped=1"))
    # Four halves of a sum each way, next to a product each: rings of four devices, the bytes over the links and three
    # messages there. The output of attention takes less time than its half, all others more.
    half_s = 3 / 4 * 2 * 2048 * 4096 / 348e9 + 3 * 3.4e-6
    short_s = product_s(load_topology("8xH100").device, 2048, 4096, 1024)
    assert short_s < half_s
    assert plain.forward_s - overlapped.forward_s == pytest.approx(3 / 4 * (3 * half_s + short_s), rel=0.01)
    assert plain.backward_s - overlapped.backward_s == pytest.approx(3 / 4 * 4 * half_s, rel=0.01)
    assert plain.saved_bytes == overlapped.saved_bytes
    # Sums that take longer than the products are seen for the rest of the time.
    slow, hidden = (layers_of(shared + more, machine="8xRTX4090").layers[1] for more in ("", ",overlapped=1"))
    products_s = layers_of(tensor=1, machine="8xRTX4090").layers[1].forward_s / 8
    assert 0 < slow.forward_s - hidden.forward_s < products_s
    own = layers_of(tensor=1).layers[1]
    assert layers_of(",overlapped=1", tensor=1).layers[1] == own


def test_gradients_may_be_summed_in_more_bytes_than_weights_have():
    plain, wide = layers_of(), layers_of(",summed_bytes=4")
    assert (plain.summed_per_byte, wide.summed_per_byte) == (1, 2)
    assert wide.layers == plain.layers


def test_sums_of_micro_batches_in_more_bytes_are_converted_and_added_by_kernels_of_their_own():
    plain, wide = layers_of(tensor=1).layers, layers_of(",added_bytes=4", tensor=1).layers
    # Converted (2 read, 4 written) and added (4 + 4 read, 4 written), in place of 2 + 2 read and 2 written.
    more = (18 - 6) / 3008e9
    products = 4 * 4096 * 4096 + 2 * 4096 * 11008 + 4096 * 11008
    assert wide[1].backward_weight_s - plain[1].backward_weight_s == pytest.approx(more * products + 4 * 4e-6, rel=0.01)
    table = 32000 * 4096
    assert wide[0].backward_s - plain[0].backward_s == pytest.approx(more * table + 4e-6, rel=0.01)
    assert wide[2 + 1].backward_weight_s - plain[2 + 1].backward_weight_s == pytest.approx(more * table, rel=0.02)


def test_products_in_8_bits_are_up_to_twice_as_fast_and_the_rest_stays():
    plain, fast = layers_of(tensor=1), layers_of(",fp8=1", tensor=1)
    assert 1.2 < plain.layers[1].total_s / fast.layers[1].total_s < 2
    assert fast.layers[-1] == plain.layers[-1]
    assert fast.layers[1].weight_bytes == plain.layers[1].weight_bytes
    assert fast.layers[1].attention_s == plain.layers[1].attention_s
    with pytest.raises(ProfileError, match=r"device\.fp8_flops: fp8 needs it"):
        layers_of(",fp8=1", machine="8xA100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama:layers=2,hidden=64", "expected heads=…"),
        ("llama:layers=2,hidden=64,heads=4,kv_heads=3", "kv_heads: expected a divisor of 4 heads, got 3"),
        ("llama:layers=2,hidden=64,heads=4,attention=fast", "got 'attention=fast'"),
        ("llama:layers=2,hidden=64,heads=4,width=3", "expected NAME=NUMBER with one of layers"),
        ("bert:layers=2", "expected gpt:layers=… or llama:layers=…"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(text, message):
    with pytest.raises(ProfileError, match=message):
        transformer_of(text)


@pytest.mark.parametrize(
    ("text", "widths"),
    [
        ("gpt:layers=2,hidden=1600,heads=25", (1,)),
        ("gpt:layers=2,hidden=2304,heads=24", (1, 2, 4, 8)),
        ("llama:layers=2,hidden=1024,heads=16,kv_heads=4", (1, 2, 4)),
        ("llama:layers=2,hidden=1024,heads=16,ffn=2050", (1, 2)),
    ],
)
def test_devices_share_a_layer_only_where_its_heads_and_its_feed_forward_split_evenly(text, widths):
    profile = transformer_profile(transformer_of(text))
    assert space_of(problem_of(profile, load_topology("dgx-a100-8")), PlanOptions()).tensors == widths


def test_a_width_that_heads_do_not_allow_is_refused_by_name():
    model = transformer_of("llama:layers=2,hidden=1024,heads=16,kv_heads=4,ffn=4096")
    with pytest.raises(ProfileError, match="tensor width 8: expected a divisor of 4 heads of keys, and of ffn"):
        transformer_profile(model, tensor=8)


def test_a_measured_gpt_may_be_shared_by_devices_as_one_by_its_sizes():
    """A profile that `pipefit profile` measured of the built-in model has its name, not its sizes as text."""
    computed = gpt_profile(6, 256, 16, device=Device(flops=1e12))
    measured = msgspec.structs.replace(computed, model="gpt(layers=6, hidden=256)", computed_for=None)
    other = msgspec.structs.replace(measured, model="resnet")
    widths = [
        space_of(problem_of(profile, load_topology("dgx-a100-8")), PlanOptions()).tensors
        for profile in (computed, measured, other)
    ]
    assert widths[0] == widths[1] == (1, 2, 4, 8, 16) and widths[2] == (1,)
    assert [num_blocks(profile) for profile in (computed, measured, other)] == [6, 6, 0]
