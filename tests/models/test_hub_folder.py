"""Folders that `save_pretrained` wrote: read layer by layer, refused when they do not fit, written stage by stage."""

import json
import shutil

import pytest
import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.tiny_models import SIZES, llama_folder, save_model

import pipefit as pf
from pipefit.cutting.own import random_batch
from pipefit.errors import ModelError
from pipefit.models import build
from pipefit.runtime.launch import launch
from pipefit.spec.options import Spilled

pytestmark = pytest.mark.slow

FAMILIES = {
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "experts": ("MixtralForCausalLM", {"num_local_experts": 4}),  # other names on disk, one tensor for each expert
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                                 "attn_pdrop": 0.0}),
    "bert": ("BertForMaskedLM", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
                                          "decoder_start_token_id": 0, "dropout_rate": 0.0}),
}  # fmt: skip


def fields_of(family):
    kind, own = FAMILIES[family]
    sizes = {} if family in ("gpt2", "t5") else SIZES
    return kind, {name: value for name, value in ({**sizes, **own}).items()}


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_a_folder_are_those_that_transformers_reads(family, shard, tmp_path):
    kind, fields = fields_of(family)
    model = save_model(tmp_path, kind, shard, **fields)
    empty = pf.pretrained(tmp_path)
    assert all(p.is_meta for layer in empty.layers for p in layer.module.parameters())
    pipe = pf.Pipeline(empty, optimizer=sgd, stages=2, microbatches=2)
    state, whole = pipe.state_dict(), model.state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in state.items())
    batch = random_batch(model, 4)
    with torch.no_grad():
        assert pipe.evaluate([batch]) == pytest.approx(model.eval()(**batch).loss.item(), rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_pipeline_is_saved_as_transformers_saves_and_reads_it(family, tmp_path):
    kind, fields = fields_of(family)
    save_model(tmp_path / "first", kind, **fields)
    pipe = pf.Pipeline(pf.pretrained(tmp_path / "first"), optimizer=sgd, stages=2, microbatches=2)
    batch = random_batch(pipe.layers[0].module.shell.model, 4)
    pipe.fit([batch])
    after = pipe.evaluate([batch])
    again = getattr(transformers, kind).from_pretrained(pipe.save_pretrained(tmp_path / "second"))
    with torch.no_grad():
        assert again.eval()(**batch).loss.item() == pytest.approx(after, rel=1e-6)
    state = pipe.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items() if name in state)
    # The names on disk are those that transformers itself writes.
    again.save_pretrained(tmp_path / "third")
    assert names_in(tmp_path / "second") == names_in(tmp_path / "third")


def names_in(folder):
    found = set()
    for path in folder.glob("*.safetensors"):
        with safetensors.safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    return found


def test_a_spilled_pipeline_reads_and_writes_folders_too(tmp_path):
    model = llama_folder(tmp_path / "first")
    batch = random_batch(model, 4)
    losses = []
    for number, spill in enumerate((None, Spilled("500 KiB"), Spilled(disk=tmp_path / "tier"))):
        more = {"stages": 2} if number != 1 else {"example": batch}
        pipe = pf.Pipeline(pf.pretrained(tmp_path / "first"), optimizer=sgd, microbatches=2, spill=spill, **more)
        pipe.fit([batch] * 2)
        losses.append(pipe.evaluate([batch]))
        pipe.save_pretrained(tmp_path / f"saved{number}")
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    first, *others = (
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / f"saved{number}").state_dict() for number in range(3)
    )
    assert all(torch.allclose(first[name], other[name], atol=1e-6) for other in others for name in first)


def trains(folder, lora):
    torch.manual_seed(1)  # of the adapters
    pipe = pf.Pipeline(pf.pretrained(folder, lora=lora), optimizer=sgd, microbatches=2)
    batch = random_batch(pipe.layers[0].module.shell.model, 4)
    held = {name for layer in pipe.layers for name, p in layer.module.named_parameters(layer.prefix) if not p.is_meta}
    losses = pipe.fit([batch] * 2)
    pipe.save_pretrained(folder.parent / "saved")
    return losses, pipe.evaluate([batch]), held


@pytest.mark.dist
@pytest.mark.parametrize("lora", ["", "r=4,target=q_proj+v_proj"])
def test_two_processes_read_and_write_their_own_stages(lora, tmp_path):
    folder = tmp_path / "first"
    model = llama_folder(folder)
    alone = trains(folder, lora)
    (losses, after, first), (_, _, last) = launch(trains, 2, folder, lora, threads=1)
    assert losses == pytest.approx(alone[0], rel=1e-6) and after == pytest.approx(alone[1], rel=1e-6)
    # The tied head is on both; adapters are small, and made on every process before it lets go of the others'.
    tied = {"model.embed_tokens.weight", "lm_head.weight"}
    assert {name for name in first & last if "lora" not in name} <= {f"{p}{name}" for name in tied
                                                                    for p in ("", "base_model.model.")}  # fmt: skip
    if lora:
        from peft import PeftModel

        again = PeftModel.from_pretrained(model, tmp_path / "saved")
    else:
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
        assert (tmp_path / "saved" / "tokenizer.json").is_file()
    with torch.no_grad():
        assert again.eval()(**random_batch(model, 4)).loss.item() == pytest.approx(after, rel=1e-6)


def edited(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def lacks_one(state):
    del state["model.layers.1.mlp.up_proj.weight"], state["model.norm.weight"]


def has_one_more(state):
    state["model.layers.9.mlp.up_proj.weight"] = torch.ones(2)


def has_another_shape(state):
    state["model.norm.weight"] = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lacks_one, r"2 missing: model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight"),
        (has_one_more, r"1 not of this model: model\.layers\.9\.mlp\.up_proj\.weight"),
        (has_another_shape, r"1 of another shape: model\.norm\.weight \[3\] instead of \[32\]"),
    ],
)
def test_a_folder_with_other_tensors_is_refused_and_all_are_named(change, told, tmp_path):
    llama_folder(tmp_path)
    edited(tmp_path, change)
    with pytest.raises(ModelError, match=told):
        build(str(tmp_path))


def test_a_folder_that_is_no_models_is_refused_with_what_it_lacks(tmp_path):
    with pytest.raises(ModelError, match=r"it has no config\.json"):
        build(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"cannot read its config\.json"):
        build(str(tmp_path))
    llama_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, told in (
        ({"architectures": ["OwnModel"], "auto_map": {"AutoModel": "own.OwnModel"}}, "names the class 'OwnModel'"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantised"),
        ({"model_type": "unheard-of"}, r"cannot read its config\.json"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=told):
            build(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="cannot be read"):
        build(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "told"),
    [("r=4,rank=2", "unknown setting 'rank'"), ("target=wings", "wings"), ("r=many", "many"), ("r=0", "r=0")],
)
def test_adapters_that_cannot_be_made_are_refused(settings, told, tmp_path):
    llama_folder(tmp_path)
    with pytest.raises(ModelError, match=told):
        pf.pretrained(tmp_path, lora=settings)
