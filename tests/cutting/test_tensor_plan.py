"""The plan for tensor parallelism that a model of transformers brings, followed or refused; in one process."""

import pytest
import torch
import transformers

import pipefit as pf
from pipefit.cutting.own import random_batch
from pipefit.errors import ModelError
from pipefit.parallel import Mesh, release, shard_layers, widths_of
from pipefit.parallel.region import IsolatedRegion
from pipefit.stage.materialise import materialise
from tests.tiny_models import save_model

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip


def cut_model(kind="LlamaForCausalLM", plan=None, **fields):
    torch.manual_seed(0)
    found = getattr(transformers, kind)
    config = found.config_class(**({} if kind == "GPT2LMHeadModel" else SIZES) | fields)
    config._experts_implementation = "eager"
    model = found(config)
    model.tp_plan = model.tp_plan | (plan or {})
    return pf.cut(model.train())


def mesh_of(index=0, width=2):
    return Mesh(width, index, IsolatedRegion(None, width, index))


def shapes(made):
    return {name: tuple(p.shape) for layer in made.layers for name, p in layer.module.named_parameters(layer.prefix)}


@pytest.mark.parametrize(("kind", "fields", "width", "told"), [
    ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}, 2, "GPT2LMHeadModel has no plan"),
    ("LlamaForCausalLM", {"num_key_value_heads": 1}, 2,
     r"model\.layers\.0\.self_attn\.k_proj: heads=1 is no multiple of tensor=2; widths that divide it: 1"),
    ("LlamaForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 66}, 4,
     r"mlp\.gate_proj: weight\.shape\[0\]=66 is no multiple of tensor=4"),
    ("LlamaForCausalLM", {"plan": {"model.layers.*.mlp.up_proj": "sequence_parallel"}}, 2,
     r"model\.layers\.0\.mlp\.up_proj \(Linear\): .* shards it by 'sequence_parallel'"),
    ("LlamaForCausalLM", {"plan": {"model.norm": "colwise"}}, 2, r"model\.norm \(LlamaRMSNorm\): .* by 'colwise'"),
    ("MixtralForCausalLM", {"num_local_experts": 4, "plan": {"model.layers.*.mlp.experts.down_proj": "grouped_gemm"}},
     2, r"model\.layers\.0\.mlp\.experts \(MixtralExperts\): .* shards it by 'moe_tp_experts'"),
])  # fmt: skip
def test_what_a_plan_cannot_do_is_refused_and_nothing_is_changed(kind, fields, width, told):
    made = cut_model(kind, **fields)
    before = shapes(made)
    with pytest.raises(ModelError, match=told):
        shard_layers(made.layers, mesh_of(width=width))
    assert shapes(made) == before


def test_adapters_of_another_kind_than_lora_are_refused():
    from peft import LoraConfig, get_peft_model

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj \(Linear\)"):
        shard_layers(pf.cut(adapted).layers, mesh_of())


def test_a_model_of_no_plan_has_one_width_and_others_those_of_their_heads():
    assert widths_of([layer.module for layer in cut_model().layers], 8) == (1, 2)
    assert widths_of([layer.module for layer in cut_model(vocab_size=99).layers], 8) == (1, 2)
    gpt = cut_model("GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4)
    assert widths_of([layer.module for layer in gpt.layers], 8) == (1,)


@pytest.mark.parametrize(("vocabulary", "kept"), [(100, 50), (101, 101)])
def test_a_tied_vocabulary_is_sharded_at_both_ends_or_at_none(vocabulary, kept):
    made = cut_model(vocab_size=vocabulary, tie_word_embeddings=True)
    kinds = [type(module) for module in made.shell.model.modules()]
    whole, mesh = shapes(made), mesh_of(1)
    shard_layers(made.layers, mesh)
    found = shapes(made)
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == (kept, 32)
    assert found["model.layers.0.mlp.down_proj.weight"] == (32, 32)
    assert {name: tuple(mesh.whole_shape(name, torch.Size(shape))) for name, shape in found.items()} == whole
    release(mesh)
    assert [type(module) for module in made.shell.model.modules()] == kinds


def test_products_of_one_tensor_are_entered_once():
    made = cut_model()
    mesh = mesh_of()
    shard_layers(made.layers, mesh)
    payload = made.layers[0].module(random_batch(made.shell.model, 2))
    payload["values"] = [value.detach().requires_grad_(value.is_floating_point()) for value in payload["values"]]
    mesh.region.exchanges.clear()
    output = made.layers[1].module(payload)["values"][0]
    assert len(mesh.region.exchanges) == 2
    output.sum().backward()
    assert len(mesh.region.exchanges) == 4, "not one for each of query, key, value, gate and up"


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_each_process_takes_its_part_of_a_folder(kind, index, tmp_path):
    whole = save_model(tmp_path, kind, "20KB", **{"num_local_experts": 4} if "Mix" in kind else {}).state_dict()
    made, mesh = pf.pretrained(tmp_path), mesh_of(index)
    shard_layers(made.layers, mesh)
    materialise(made.layers, 0, torch.device("cpu"), made.initialise_layer.over(mesh))
    for layer in made.layers:
        for name, value in layer.module.named_parameters(layer.prefix):
            assert torch.equal(value, mesh.part(name, whole[name])), name
    assert mesh.shards["model.layers.0.self_attn.o_proj.weight"].dim == 1
