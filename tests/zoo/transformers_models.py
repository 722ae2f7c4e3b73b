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
    "n_routed_experts": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "shared_expert_intermediate_size": 32,
}  # fmt: skip
CHANCES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "activation_dropout",
           "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate", "hidden_dropout", "classifier_dropout",
           "drop_path_rate", "classifier_dropout_prob", "summary_first_dropout")  # fmt: skip
TEXT = keywords(input_ids=tokens(99, 10), labels=tokens(99, 10))
SMALL_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
                "image_size": 32, "patch_size": 8}  # fmt: skip


def labels(samples: int, generator: torch.Generator) -> torch.Tensor:
    """One of two classes for each sample."""
    return torch.randint(2, (samples,), generator=generator)


IMAGES = keywords(pixel_values=vectors(3, 32, 32), labels=labels)
WAVES = keywords(input_values=vectors(400), labels=tokens(30, 4))


def _make(name: str, keeps_chance: bool, more: dict[str, Any]) -> nn.Module:
    kind = getattr(transformers, name)
    usual = kind.config_class()
    given = {field: value for field, value in SMALL.items() if hasattr(usual, field)}
    if not keeps_chance:
        given |= {field: 0.0 for field in CHANCES if hasattr(usual, field)}
    given |= more
    config = kind.config_class(**{field: value for field, value in given.items() if value is not None})
    config._experts_implementation = "eager"
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    made = kind(config)
    return made if keeps_chance else calm(made)


def put(name: str, data: Data, *, dropout: bool = False, **more: Any) -> None:
    """Adds a class of transformers; a field that is None has its usual value."""
    label = f"transformers/{name}{', with dropout' if dropout else ''}"
    SPECIMENS.append(Specimen(label, lambda: _make(name, dropout, more), data, is_random=dropout, loss=None))


CAUSAL = (
    "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM", "GemmaForCausalLM", "PhiForCausalLM", "OPTForCausalLM", "BloomForCausalLM",
    "GPTNeoXForCausalLM", "MambaForCausalLM", "Phi3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM",
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GPTJForCausalLM", "MptForCausalLM", "CodeGenForCausalLM",
    "StableLmForCausalLM", "Starcoder2ForCausalLM", "OlmoForCausalLM", "Olmo2ForCausalLM", "OlmoeForCausalLM",
    "CohereForCausalLM", "Cohere2ForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM",
    "RecurrentGemmaForCausalLM", "CTRLLMHeadModel", "OpenAIGPTLMHeadModel", "PersimmonForCausalLM",
    "NemotronForCausalLM", "GlmForCausalLM", "Glm4ForCausalLM", "SmolLM3ForCausalLM", "HeliumForCausalLM",
    "Exaone4ForCausalLM", "Ernie4_5ForCausalLM", "GptOssForCausalLM", "ArceeForCausalLM", "DiffLlamaForCausalLM",
    "GPTBigCodeForCausalLM", "BioGptForCausalLM", "GPTNeoXJapaneseForCausalLM", "BitNetForCausalLM",
    "FalconMambaForCausalLM", "Lfm2ForCausalLM", "ApertusForCausalLM", "SeedOssForCausalLM",
    "HunYuanDenseV1ForCausalLM", "JetMoeForCausalLM", "RwkvForCausalLM",
)  # fmt: skip
MASKED = (
    "BertForMaskedLM", "RobertaForMaskedLM", "AlbertForMaskedLM", "DistilBertForMaskedLM", "ElectraForMaskedLM",
    "DebertaV2ForMaskedLM", "DebertaForMaskedLM", "MPNetForMaskedLM", "XLMRobertaForMaskedLM", "RoFormerForMaskedLM",
    "FNetForMaskedLM", "ConvBertForMaskedLM", "MobileBertForMaskedLM", "SqueezeBertForMaskedLM",
    "NystromformerForMaskedLM", "YosoForMaskedLM", "BigBirdForMaskedLM", "ErnieForMaskedLM", "MegatronBertForMaskedLM",
    "RemBertForMaskedLM", "ModernBertForMaskedLM", "IBertForMaskedLM", "EsmForMaskedLM",
    "RobertaPreLayerNormForMaskedLM", "Data2VecTextForMaskedLM", "XLMWithLMHeadModel", "LayoutLMForMaskedLM",
)  # fmt: skip
ENCODER_DECODER = (
    "T5ForConditionalGeneration", "BartForConditionalGeneration", "PegasusForConditionalGeneration",
    "MBartForConditionalGeneration", "BlenderbotForConditionalGeneration", "BlenderbotSmallForConditionalGeneration",
    "LongT5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration",
    "SwitchTransformersForConditionalGeneration", "M2M100ForConditionalGeneration", "NllbMoeForConditionalGeneration",
    "PLBartForConditionalGeneration", "MvpForConditionalGeneration", "BigBirdPegasusForConditionalGeneration",
)  # fmt: skip
VISION = (
    "ViTForImageClassification", "DeiTForImageClassification", "BeitForImageClassification",
    "Dinov2ForImageClassification", "Dinov2WithRegistersForImageClassification", "ViTMSNForImageClassification",
    "Data2VecVisionForImageClassification", "IJepaForImageClassification",
)  # fmt: skip
for name in (*CAUSAL, *MASKED, *ENCODER_DECODER):
    put(name, TEXT)
for name in VISION:
    put(name, IMAGES)

put("DeepseekV2ForCausalLM", TEXT, head_dim=None, num_key_value_heads=4, topk_group=1, n_group=1,
    first_k_dense_replace=1)  # fmt: skip
put("DeepseekV3ForCausalLM", TEXT, head_dim=None, num_key_value_heads=4, topk_group=1, n_group=1,
    first_k_dense_replace=1)  # fmt: skip
put("FalconForCausalLM", TEXT, head_dim=None)
put("GPTNeoForCausalLM", TEXT, attention_types=[[["global", "local"], 2]])
put("Mamba2ForCausalLM", TEXT, num_heads=8, head_dim=8, n_groups=2, chunk_size=4)
put("FunnelForMaskedLM", TEXT, num_hidden_layers=None, block_sizes=[2, 2], bos_token_id=1, eos_token_id=2)
put("XmodForMaskedLM", TEXT, default_language="en_XX", languages=["en_XX"])
put("MarianMTModel", TEXT, pad_token_id=99, decoder_start_token_id=99)
put("ProphetNetForConditionalGeneration", TEXT, num_hidden_layers=None, num_encoder_layers=2, num_decoder_layers=2,
    num_encoder_attention_heads=4, num_decoder_attention_heads=4)  # fmt: skip
put("LongformerForMaskedLM", TEXT, attention_window=4)

WINDOWS = {"embed_dim": 16, "depths": [2, 2], "num_attention_heads": None, "num_heads": [2, 4], "window_size": 4}
put("SwinForImageClassification", IMAGES, patch_size=4, **WINDOWS)
put("Swinv2ForImageClassification", IMAGES, patch_size=4, **WINDOWS)
STAGES = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
put("ResNetForImageClassification", IMAGES, embedding_size=8, **STAGES)
put("RegNetForImageClassification", IMAGES, embedding_size=8, groups_width=8, **STAGES)
put("BitForImageClassification", IMAGES, embedding_size=8, num_groups=4, **STAGES)
put("ConvNextForImageClassification", IMAGES, patch_size=2, **STAGES)
put("ConvNextV2ForImageClassification", IMAGES, patch_size=2, **STAGES)
put("PoolFormerForImageClassification", IMAGES, patch_size=None, **STAGES)
put("FocalNetForImageClassification", IMAGES, embed_dim=8, hidden_sizes=[8, 16], depths=[1, 2], focal_levels=[2, 2],
    focal_windows=[3, 3], patch_size=4)  # fmt: skip
put("PvtV2ForImageClassification", IMAGES, num_attention_heads=[1, 2, 2, 2], **STAGES)
put("SegformerForImageClassification", IMAGES, num_attention_heads=[1, 2, 2, 2], **STAGES)
put("CvtForImageClassification", IMAGES, embed_dim=[8, 16, 16], num_heads=[1, 2, 2], depth=[1, 2, 3],
    drop_path_rate=None)  # fmt: skip
put("LevitForImageClassification", keywords(pixel_values=vectors(3, 64, 64), labels=labels), image_size=64,
    patch_size=16, hidden_sizes=[16, 16, 16], num_attention_heads=[2, 2, 2], depths=[1, 1, 1],
    key_dim=[8, 8, 8], drop_path_rate=None)  # fmt: skip
put("MobileNetV1ForImageClassification", IMAGES, depth_multiplier=0.25)
put("MobileNetV2ForImageClassification", IMAGES, depth_multiplier=0.35)
put("CLIPForImageClassification", IMAGES, vision_config=SMALL_VISION)
put("SiglipForImageClassification", IMAGES, vision_config=SMALL_VISION)

for name in ("GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration", "OPTForCausalLM"):
    put(name, TEXT, dropout=True)
put("ViTForImageClassification", IMAGES, dropout=True, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)

SPEECH = {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_conv_pos_embeddings": 4,
          "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "feat_proj_dropout": 0.0,
          "final_dropout": 0.0, "apply_spec_augment": False, "mask_time_prob": 0.0, "pad_token_id": 0}  # fmt: skip
for name in ("Wav2Vec2ForCTC", "HubertForCTC"):
    put(name, WAVES, **SPEECH)
put("WhisperForConditionalGeneration", keywords(input_features=vectors(8, 24), labels=tokens(99, 6)),
    num_mel_bins=8, max_source_positions=12, max_target_positions=16, decoder_start_token_id=1)  # fmt: skip
put("Speech2TextForConditionalGeneration", keywords(input_features=vectors(24, 8), labels=tokens(99, 6)),
    input_feat_per_channel=8, max_source_positions=24, max_target_positions=16, decoder_start_token_id=1,
    conv_channels=16)  # fmt: skip
