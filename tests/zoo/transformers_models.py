"""Models of transformers with tiny configurations and their own losses; `scripts/sweep-transformers` tries them all."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from tests.zoo.calm import calm
from tests.zoo.specimen import Data, Specimen, keywords, tokens, vectors

SPECIMENS: list[Specimen] = []
SMALL = {
    "vocab_size": 100, "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "n_inner": 64,
    "intermediate_size": 64,
    "d_ff": 64, "hidden_dim": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_hidden_layers": 4, "n_layer": 4,
    "n_layers": 4, "num_layers": 4, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "num_local_experts": 4,
    "num_experts": 4, "num_experts_per_tok": 2, "word_embed_proj_dim": 32, "embedding_size": 32,
    "max_position_embeddings": 64, "n_positions": 64, "image_size": 32, "patch_size": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "state_size": 4, "sliding_window": 16, "layerdrop": 0.0,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "rotary_dim": 4, "moe_intermediate_size": 32,
}  # fmt: skip
CHANCES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "activation_dropout",
           "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate", "hidden_dropout", "classifier_dropout",
           "drop_path_rate", "classifier_dropout_prob", "summary_first_dropout")  # fmt: skip
TEXT = keywords(input_ids=tokens(99, 10), labels=tokens(99, 10))
IMAGES = keywords(pixel_values=vectors(3, 32, 32), labels=lambda n, g: torch.randint(2, (n,), generator=g))


def _make(name: str, keeps_chance: bool, more: dict[str, Any]) -> nn.Module:
    kind = getattr(transformers, name)
    usual = kind.config_class()
    given = {field: value for field, value in SMALL.items() if hasattr(usual, field)}
    if not keeps_chance:
        given |= {field: 0.0 for field in CHANCES if hasattr(usual, field)}
    config = kind.config_class(**{**given, **more})
    config._experts_implementation = "eager"
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    made = kind(config)
    return made if keeps_chance else calm(made)


def put(name: str, data: Data, *, dropout: bool = False, **more: Any) -> None:
    """Adds a class of transformers."""
    label = f"transformers/{name}{', with dropout' if dropout else ''}"
    SPECIMENS.append(Specimen(label, lambda: _make(name, dropout, more), data, is_random=dropout, loss=None))


for causal in ("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM",
               "Qwen3ForCausalLM", "GemmaForCausalLM", "PhiForCausalLM", "OPTForCausalLM", "BloomForCausalLM",
               "GPTNeoXForCausalLM", "MambaForCausalLM"):  # fmt: skip
    put(causal, TEXT)
for masked in ("BertForMaskedLM", "RobertaForMaskedLM", "AlbertForMaskedLM", "DistilBertForMaskedLM",
               "ElectraForMaskedLM", "DebertaV2ForMaskedLM"):  # fmt: skip
    put(masked, TEXT)
for sequence in ("T5ForConditionalGeneration", "BartForConditionalGeneration", "PegasusForConditionalGeneration"):
    put(sequence, TEXT)
for vision in ("ViTForImageClassification", "DeiTForImageClassification", "BeitForImageClassification",
               "ConvNextForImageClassification", "Dinov2ForImageClassification"):  # fmt: skip
    put(vision, IMAGES)
put(
    "SwinForImageClassification",
    IMAGES,
    embed_dim=16,
    depths=[2, 2],
    num_attention_heads=[2, 4],
    window_size=4,
    patch_size=4,
)
put("ResNetForImageClassification", IMAGES, embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1])
for random in ("GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration", "OPTForCausalLM"):
    put(random, TEXT, dropout=True)
put("ViTForImageClassification", IMAGES, dropout=True, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
