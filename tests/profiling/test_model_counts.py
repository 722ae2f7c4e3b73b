"""Models by their configuration: counts of their modules on the meta device, compared with published and other figures.

Sizes in `configurations/` are those of the authors' configuration files: Llama 3 (Dubey et al. 2024, table 3), Mixtral
(Jiang et al. 2024, table 1), Qwen2.5 and Qwen3 (technical reports), Gemma 2 (table 1), DeepSeek-V3 (section 4.2), BERT,
T5, ViT (their papers).
"""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from pipefit.cutting.own import random_batch
from pipefit.errors import ProfileError
from pipefit.models import build
from pipefit.models.hub import without_weights
from pipefit.planner.computed_profile import counted_profile, profile_at, transformer_profile
from pipefit.planner.machines import load_topology
from pipefit.planner.transformer import Transformer, flops_per_iteration, num_parameters, transformer_of
from pipefit.profiling import count_model, profile_layers
from pipefit.profiling.analytic import layer_costs
from pipefit.profiling.counting import KernelCount, pretended
from pipefit.spec import Profile
from pipefit.spec.counted import Kernel, LayerCount
from pipefit.stage.split import named_layers

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent / "configurations"
H100 = load_topology("dgx-h100-8")
SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2}
SMALL |= {"num_hidden_layers": 3, "vocab_size": 1000}


def count(name, tokens, widths=(1,), lora="", fp8=False, **options):
    return count_model(lambda: without_weights(str(name), options, lora=lora), tokens, widths, fp8)


def llama(tokens=128, widths=(1,), lora="", fp8=False, **options):
    return count("transformers:LlamaForCausalLM", tokens, widths, lora, fp8, **SMALL | options)


# Parameters in billions, as their authors say, to the digits given.
PUBLISHED = {
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "mixtral-8x7b": 46.7,
    "qwen2.5-7b": 7.62,
    "qwen3-30b-a3b": 30.5,
    "deepseek-v3": 671.0,
    "gemma-2-2b": 2.61,
    "bert-large": 0.335,
    "vit-base": 0.086,
}


BYTES = (
    "output_bytes", "grad_bytes", "weight_bytes", "saved_bytes", "input_bytes", "selective_bytes", "half_bytes",
)  # fmt: skip


def to_the_digits_of(number):
    return {"abs": 0.6 * 10.0 ** -len(str(number).partition(".")[2])}


def test_published_models_are_built_without_memory():
    for name, billions in PUBLISHED.items():
        model = without_weights(str(FOLDER / f"{name}.json"), {})
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count / 1e9 == pytest.approx(billions, **to_the_digits_of(billions)), name
        assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "active"),
    [("llama-3.1-405b", 405.85), ("mixtral-8x7b", 12.9), ("deepseek-v3", 37.6)],
)
def test_layers_that_are_alike_are_counted_once_and_of_experts_those_that_are_used(name, active):
    found = count(FOLDER / f"{name}.json", 512)
    assert found.num_active / 1e9 == pytest.approx(active, **to_the_digits_of(active))
    assert max(found.kinds) < 5


@pytest.mark.parametrize("name", ["bert-large", "t5-base", "vit-base"])
def test_flop_are_those_that_torch_counts_on_the_whole_module(name):
    """The reference runs the whole model on the meta device, with attention as two products."""
    tokens = 64
    own = {"num_hidden_layers": 2}
    image = torch.zeros(2, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    batch = {"pixel_values": image, "labels": torch.zeros(2, dtype=torch.long, device="meta")}
    if name == "vit-base":
        tokens = 0
    else:
        ids = torch.zeros(2, tokens, dtype=torch.long, device="meta")
        batch = {"input_ids": ids, "labels": ids}
    if name == "t5-base":
        own = {"num_layers": 2}
    found = count(FOLDER / f"{name}.json", tokens, **own)
    model = without_weights(str(FOLDER / f"{name}.json"), own)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    assert 2 * found.flops == pytest.approx(counter.get_total_flops(), rel=1e-9)


def test_flop_of_image_classifiers_are_those_that_torch_counts(tmp_path):
    """Padding by name, lists of lists of blocks, kernels that are alike at one micro-batch size only."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"image_size": 32, "patch_size": 8}
    siglip = {"model_type": "siglip", "architectures": ["SiglipForImageClassification"]}
    parts = {"vision_config": sizes, "text_config": {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 50}}
    (tmp_path / "siglip.json").write_text(json.dumps(siglip | parts))
    images = torch.zeros(2, 3, 32, 32, dtype=torch.bfloat16, device="meta")
    labels = torch.zeros(2, dtype=torch.long, device="meta")
    for name, options in (
        ("transformers:DeiTForImageClassification", sizes),
        ("transformers:PoolFormerForImageClassification", {"depths": [1, 1, 1, 1]}),
        (tmp_path / "siglip.json", {}),
    ):
        model = without_weights(str(name), options)
        model.set_attn_implementation("eager")
        with FlopCounterMode(display=False) as counter:
            model(pixel_values=images, labels=labels).loss.backward()
        assert 2 * count(name, 0, **options).flops == counter.get_total_flops() > 0, name


def test_weights_that_another_module_uses_have_gradients():
    """MobileBERT's head multiplies by the tables of two modules whose forwards it does not call; one is tied."""
    name = "transformers:MobileBertForMaskedLM"
    options = {"num_hidden_layers": 2, "vocab_size": 2000}
    found = count(name, 16, **options)
    model = without_weights(name, options)
    model.set_attn_implementation("eager")
    ids = torch.zeros(2, 16, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert 2 * found.flops == counter.get_total_flops()
    profile = counted_profile(found, "", 1, H100.device)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert profile.weights_of(range(len(profile))) == (weights, weights)


def test_a_model_that_its_first_forward_changes_is_counted_as_changed():
    """BigBird takes whole attention from a short sequence on."""
    name = "transformers:BigBirdForMaskedLM"
    options = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = transformers.BigBirdForMaskedLM(transformers.BigBirdConfig(**options))
    ids = torch.zeros(2, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert 2 * count(name, 64, **options).flops == counter.get_total_flops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_experts_are_counted_in_types_of_which_torch_does_not_know_the_form_of_grouped_products(dtype):
    name = "transformers:MixtralForCausalLM"
    options = SMALL | {"num_local_experts": 4}
    found = count_model(lambda: without_weights(name, options).to(dtype), 32)
    assert found.flops == count(name, 32, **options).flops


def test_grouped_keys_are_counted_where_torch_does_not_know_them(monkeypatch):
    """Before 2.13 torch's own count of FLOP raised an AssertionError for fewer heads of keys than of queries."""

    def refused(*args, **kwargs):
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")

    for each in [packet for packet in flop_registry if "scaled_dot_product" in str(packet)]:
        monkeypatch.setitem(flop_registry, each, refused)
    counter = KernelCount([])
    with pretended():
        q, k, v = (torch.empty(2, heads, 64, 16, requires_grad=True) for heads in (8, 2, 2))
        with counter:
            made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            made.backward(torch.empty_like(made))
    forward, backward = (kernel for kernel in counter.take() if kernel.kind.startswith("attention"))
    whole = 2 * 2 * 2 * 8 * 64 * 64 * 16
    # Half above the diagonal is left out; a core takes all 64 rows of a head at a time.
    assert (forward.sizes[0], forward.sizes[1], forward.sizes[3]) == (whole, whole / 2, whole / 16)
    assert (backward.sizes[0], backward.sizes[1], backward.sizes[3]) == (2 * whole, 5 / 4 * whole, 5 / 32 * whole)


def test_counted_bytes_are_those_of_a_measured_run():
    """The reference cuts the model with its weights, runs the layers and asks autograd what it keeps."""
    sizes = SMALL | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    measured = build("transformers:LlamaForCausalLM", **sizes)
    batch = random_batch(measured.layers.model, 2, tokens=32)
    kept = profile_layers(measured.layers, batch, measured.loss, batch, repeats=1).layers
    counted = count_model(lambda: without_weights("transformers:LlamaForCausalLM", sizes, dtype="float32"), 32)
    found = counted_profile(counted, "llama", 2, H100.device).layers
    unknown = [field for field in BYTES if not getattr(kept[1], field)]
    assert unknown == ["grad_bytes"]  # of a block: as many as of its output
    for field in ("name", *BYTES):
        assert [getattr(layer, field) for layer in found] == [getattr(layer, field) for layer in kept], field


def test_a_llama_by_its_sizes_has_the_numbers_of_the_module_that_it_stands_for():
    text = "llama:layers=3,hidden=256,heads=8,kv_heads=2,ffn=704,vocab=1000,sequence=512,fused_norms=0,fused_loss=0"
    model = transformer_of(text)
    found = llama(512, (1, 2))
    assert found.flops == flops_per_iteration(model, 1)
    assert found.num_parameters == num_parameters(model)
    for tensor in (1, 2):
        ours = profile_at(counted_profile(found, "llama", 4, H100.device), 4, tensor, H100).layers
        short = transformer_profile(model, 4, H100.device, topology=H100, tensor=tensor).layers
        block, other = ours[1], short[1]
        assert block.weight_bytes == pytest.approx(other.weight_bytes, rel=1e-3)  # norms are whole on every device
        assert (block.output_bytes, block.input_bytes) == (other.output_bytes, other.input_bytes)
        # The module also keeps what its rotations and norms need: sines, cosines, a number for each token.
        assert block.saved_bytes == pytest.approx(other.saved_bytes, rel=0.03)
        assert ours[0].weight_bytes == short[0].weight_bytes
    big = llama(4096, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    text = "llama:layers=3,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=1000,sequence=4096,fused_norms=0"
    text += ",attention=cudnn"  # which torch chooses on an H100
    block = counted_profile(big, "llama", 1, H100.device).layers[1]
    other = transformer_profile(transformer_of(text), 1, H100.device).layers[1]
    assert block.forward_s == pytest.approx(other.forward_s, rel=0.01)
    # Products of gradients, and adding these up over micro-batches.
    assert block.backward_weight_s == pytest.approx(other.backward_weight_s, rel=0.015)
    assert block.backward_s == pytest.approx(other.backward_s, rel=0.035)


def test_linear_layers_of_blocks_in_8_bits_gain_what_a_llama_by_its_sizes_gains():
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    text = "llama:layers=3,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=1000,sequence=4096,fused_norms=0"
    text += ",attention=cudnn"  # which torch chooses on an H100
    plain, fast = (llama(4096, (1, 2), fp8=fp8, **sizes) for fp8 in (False, True))
    assert fast.needs_fp8 and not plain.needs_fp8
    assert (fast.flops, fast.num_parameters) == (plain.flops, plain.num_parameters)
    for tensor in (1, 2):
        before, after = (counted_profile(each, "", 1, H100.device, tensor=tensor).layers for each in (plain, fast))
        slow, quick = (
            transformer_profile(transformer_of(f"{text},fp8={fp8}"), 1, H100.device, tensor=tensor).layers
            for fp8 in (0, 1)
        )
        # Queries, keys and values, and gate and up, are products of their own here: each converts the input that they
        # share, and has a kernel for the gradient of its output.
        again_s = {"forward_s": 3 * (4 * 4096 * 4096 / 3008e9 + 4e-6), "backward_input_s": 3 * 4e-6}
        for field in ("forward_s", "backward_input_s", "backward_weight_s"):
            gained_s = getattr(before[1], field) - getattr(after[1], field) + again_s.get(field, 0.0)
            assert gained_s == pytest.approx(getattr(slow[1], field) - getattr(quick[1], field), rel=0.05), field
        # Embedding, head and attention stay, and so do all bytes.
        assert (after[0], after[-1]) == (before[0], before[-1])
        assert after[1].attention_s == before[1].attention_s
        assert [getattr(after[1], field) for field in BYTES] == [getattr(before[1], field) for field in BYTES]
    with pytest.raises(ProfileError, match=r"device\.fp8_flops: fp8 needs it"):
        counted_profile(fast, "", 1, load_topology("dgx-a100-8").device)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_table_counts_once_where_one_stage_has_both_of_its_layers(tied):
    counted = llama(widths=(1, 2), tie_word_embeddings=tied)
    profile = counted_profile(counted, "llama", 1, H100.device)
    weights = [layer.weight_bytes for layer in profile.layers]
    assert profile.weights_of(range(5)) == (2 * counted.num_parameters,) * 2
    assert profile.weights_of(range(4))[0] == sum(weights[:4])
    repeated = 2 * 1000 * 256 if tied else 0
    assert sum(weights) - profile.weights_of(range(5))[0] == repeated
    half = counted_profile(counted, "llama", 1, H100.device, tensor=2)
    assert sum(layer.weight_bytes for layer in half.layers) - half.weights_of(range(5))[0] == repeated / 2
    sizes = transformer_of(f"gpt:layers=3,hidden=256,heads=8,vocab=1000,tied={int(tied)}")
    short = transformer_profile(sizes, 1, H100.device)
    assert short.weights_of(range(5))[0] == sum(layer.weight_bytes for layer in short.layers) - repeated
    for made in (profile, short):
        # Adam in mixed precision moves 60 bytes for a weight, in one kernel.
        moved_s = 30 * made.weights_of(range(5))[0] / H100.device.memory_bandwidth_bytes_per_s
        assert made.optimizer_of(range(5)) == made.optimizer_s == pytest.approx(moved_s + H100.device.kernel_s)
        apart_s = made.optimizer_of(range(4)) + made.optimizer_of([4])
        assert apart_s == pytest.approx(made.optimizer_s * (1 + repeated / made.weights_of(range(5))[0]))


def test_weights_of_any_type_and_those_of_pictures_take_their_memory_once(tmp_path):
    """A table that three layers share, routers in 4 bytes, a tower that tokens do not need."""
    tower = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    tower |= {"num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    text = {"model_type": "llama", "max_position_embeddings": 64} | SMALL
    llava = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    (tmp_path / "llava.json").write_text(json.dumps(llava | {"text_config": text, "vision_config": tower}))
    t5 = {"d_model": 64, "d_ff": 64, "num_layers": 1, "vocab_size": 100}
    experts = {"hidden_size": 64, "num_hidden_layers": 2, "first_k_dense_replace": 1, "vocab_size": 100}
    for name, sizes in (
        (tmp_path / "llava.json", {}),
        (FOLDER / "t5-base.json", t5),
        (FOLDER / "deepseek-v3.json", experts),
    ):
        model = without_weights(str(name), sizes)
        profile = counted_profile(count(name, 16, **sizes), "", 1, H100.device)
        weights, trained = profile.weights_of(range(len(profile)))
        assert weights == sum(parameter.nbytes for parameter in model.parameters()), name
        unused = 0
        if name.name == "llava.json":
            unused = sum(
                p.nbytes
                for path, p in model.named_parameters()
                if "language_model" not in path and "lm_head" not in path
            )
        assert trained == weights - unused


def test_a_gpt_by_its_sizes_has_the_numbers_of_the_built_in_module():
    sizes = {"layers": 3, "hidden": 256, "heads": 4, "vocab": 500}
    with torch.device("meta"):
        module = build("gpt", context=128, **sizes).layers
    ids = torch.zeros(2, 128, dtype=torch.long)
    counts = [one.count for one in layer_costs(named_layers(module), ids, H100.device, 2, torch.bfloat16)]
    kernels = [kernel for count in counts for kernel in (*count.forward, *count.backward_input, *count.backward_weight)]
    model = Transformer(sequence=128, dropout=0, attention="flash", **sizes)
    assert sum(kernel.model_flops for kernel in kernels) == flops_per_iteration(model, 2)
    short = transformer_profile(model, 2, H100.device).layers[1]
    assert counts[1].figures["weight_bytes"] == short.weight_bytes
    assert counts[1].figures["output_bytes"] == short.output_bytes
    # The module has a kernel for GELU and one for its bias, which keep as much as one for both.
    assert counts[1].figures["saved_bytes"] == pytest.approx(short.saved_bytes, rel=0.02)


def test_devices_that_share_a_layer_sum_twice_in_each_way_and_have_their_part():
    found = llama(widths=(1, 2, 8))
    whole, half = (found.at(1, tensor)[1] for tensor in (1, 2))
    assert [sum(kernel.kind == "sum" for kernel in way) for way in (half.forward, half.backward_input)] == [2, 2]
    assert half.figures["weight_bytes"] < 0.51 * whole.figures["weight_bytes"]
    assert half.figures["saved_bytes"] < whole.figures["saved_bytes"]
    assert found.widths == (1, 2)  # two heads of keys


def test_a_profile_of_a_count_comes_back_from_its_file_and_is_computed_for_other_devices(tmp_path):
    made = counted_profile(llama(widths=(1, 2)), "llama", 1, H100.device)
    read = Profile.load(made.save(tmp_path / "llama.profile.json"))
    assert read == made
    slow = load_topology("dgx-a100-8")
    again = counted_profile(read.counted, "llama", 1, slow.device, topology=slow)
    assert again.layers[1].forward_s > made.layers[1].forward_s
    assert again.layers[1].saved_bytes == made.layers[1].saved_bytes


def test_adapters_train_alone_and_need_fewer_products():
    full, adapted = llama(), llama(lora="r=4")
    trained = sum(layer.figures["trained_bytes"] for layer in adapted.at(1))
    weights = sum(layer.figures["weight_bytes"] for layer in adapted.at(1))
    assert trained < weights / 20
    assert 0.6 * full.flops < adapted.flops < 0.85 * full.flops
    # Below the first adapter nothing needs a gradient.
    assert not adapted.at(1)[0].backward_input and not adapted.at(1)[0].backward_weight


def test_replays_keep_the_input_of_a_block_or_all_but_the_scores():
    figures = llama().at(2)[1].figures
    assert figures["input_bytes"] == 2 * 128 * 256 * 2
    assert figures["input_bytes"] < figures["selective_bytes"] <= figures["saved_bytes"]


def test_a_layer_whose_kernels_differ_from_one_size_to_another_is_refused():
    kernel = Kernel("pass", (1.0, 1.0))
    with pytest.raises(ProfileError, match="differ from one micro-batch to another"):
        LayerCount({}, (kernel,)).towards(LayerCount({}, (kernel, kernel)), 2.0)
