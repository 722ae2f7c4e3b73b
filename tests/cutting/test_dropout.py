"""Models of transformers with dropout, and adapters of peft: 1, 2 and 4 stages draw what plain torch draws."""

from functools import cache

import pytest
import torch
import transformers
from torch import nn

import pipefit as pf
from pipefit.cutting.own import random_batch
from pipefit.testing import check

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 50}
MODELS = {
    "Llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2, "attention_dropout": 0.3}),
    "GPT-2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": 50, "n_positions": 32,
                                  "bos_token_id": 1, "eos_token_id": 2,
                                  "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}),
    "BERT": ("BertForMaskedLM", {**SIZES, "max_position_embeddings": 32,
                                 "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}),
}  # fmt: skip
ADAPTERS = {"Llama": "all-linear", "GPT-2": ["c_attn", "c_proj", "c_fc"], "BERT": ["query", "value", "dense"]}


def model(name, adapters=False):
    torch.manual_seed(0)
    kind, fields = MODELS[name]
    family = getattr(transformers, kind)
    made = family(family.config_class(**fields))
    if adapters:
        fan_in_fan_out = name == "GPT-2"
        config = peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=ADAPTERS[name], fan_in_fan_out=fan_in_fan_out)
        made = peft.get_peft_model(made, config)
        for path, parameter in made.named_parameters():
            if "lora_B" in path:  # zeros, which would hide an error
                nn.init.normal_(parameter, std=0.1)
    return made.double().train()


@cache
def cut_of(name, adapters):
    """The proof of a cut takes longer than a training; a check trains copies and leaves the cut as it is."""
    return pf.cut(model(name, adapters))


def checked(name, adapters, stages, **options):
    made = cut_of(name, adapters)

    def example(samples, seed):
        batch = random_batch(made.model, samples, seed)
        return batch, batch

    spread = pf.Parallelism(ranks=stages, **options)
    return check(made, parallelism=spread, example=example, steps=2, microbatches=2, batch_size=5)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_drops_trains_as_in_plain_torch(name, adapters, stages):
    found = checked(name, adapters, stages)
    assert found.equal, found


@pytest.mark.parametrize("recompute", ["stage", "layer", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_a_replay_drops_the_same(name, recompute):
    found = checked(name, False, 2, recompute=recompute)
    assert found.equal, found


@pytest.mark.parametrize("name", MODELS)
def test_its_forward_does_drop(name):
    made = model(name, adapters=True)
    batch = random_batch(made, 4)
    with torch.no_grad():
        assert made(**batch).loss != made(**batch).loss
        assert made.eval()(**batch).loss == made(**batch).loss
