"""Models of diffusers with tiny configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from tests.zoo.calm import calm
from tests.zoo.specimen import Data, Specimen, keywords, vectors

SPECIMENS: list[Specimen] = []
LATENT = vectors(4, 16, 16)
TEXT = vectors(6, 16)
VIDEO = vectors(4, 2, 8, 8)


def steps(samples: int, generator: torch.Generator) -> Tensor:
    """A step of diffusion for each sample."""
    return torch.randint(1000, (samples,), generator=generator)


def classes(samples: int, generator: torch.Generator) -> Tensor:
    """A class for each sample."""
    return torch.randint(5, (samples,), generator=generator)


def put(name: str, config: dict[str, Any], data: Data, **options: Any) -> None:
    """Adds a class of diffusers with a configuration."""
    label = options.pop("label", name)
    build: Callable[[], nn.Module] = lambda: calm(getattr(diffusers, name)(**config))  # noqa: E731
    SPECIMENS.append(Specimen(f"diffusers/{label}", build, data, **options))


UNET = {
    "sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}  # fmt: skip
CROSS = {"cross_attention_dim": 16, "attention_head_dim": 4}
DOWN, UP = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
put("UNet2DModel", UNET | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": 4,
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}, keywords(sample=LATENT, timestep=steps))  # fmt: skip
put("UNet2DModel", UNET | {"down_block_types": ("DownBlock2D", "DownBlock2D"), "attention_head_dim": 4,
    "up_block_types": ("UpBlock2D", "UpBlock2D"), "num_class_embeds": 5},
    keywords(sample=LATENT, timestep=steps, class_labels=classes), label="UNet2DModel with classes")  # fmt: skip
put("UNet2DConditionModel", UNET | CROSS | {"down_block_types": DOWN, "up_block_types": UP},
    keywords(sample=LATENT, timestep=steps, encoder_hidden_states=TEXT))  # fmt: skip
put("UNet2DConditionModel", UNET | CROSS | {"down_block_types": DOWN, "up_block_types": UP,
    "use_linear_projection": True, "transformer_layers_per_block": 2}, keywords(sample=LATENT, timestep=steps,
    encoder_hidden_states=TEXT),
    label="UNet2DConditionModel, two transformer layers")  # fmt: skip
put("UNet1DModel", {"sample_size": 16, "in_channels": 2, "out_channels": 2, "extra_in_channels": 64,
    "block_out_channels": (32, 32), "down_block_types": ("DownBlock1DNoSkip", "DownBlock1D"),
    "up_block_types": ("UpBlock1D", "UpBlock1DNoSkip")}, keywords(sample=vectors(2, 16), timestep=steps))  # fmt: skip
put("UNet3DConditionModel", {"sample_size": 8, "in_channels": 4, "out_channels": 4, "layers_per_block": 1,
    "block_out_channels": (8, 16), "norm_num_groups": 4, "cross_attention_dim": 16, "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
    keywords(sample=VIDEO, timestep=steps, encoder_hidden_states=TEXT))  # fmt: skip
put("UNetSpatioTemporalConditionModel", {"sample_size": 8, "in_channels": 4, "out_channels": 4,
    "block_out_channels": (32, 32), "layers_per_block": 1, "cross_attention_dim": 16, "num_attention_heads": 2,
    "projection_class_embeddings_input_dim": 24, "addition_time_embed_dim": 8,
    "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
    "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")},
    keywords(sample=vectors(2, 4, 8, 8), timestep=steps, encoder_hidden_states=vectors(1, 16),
             added_time_ids=vectors(3)))  # fmt: skip
put("UVit2DModel", {"hidden_size": 16, "block_out_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "codebook_size": 16, "vocab_size": 18, "cond_embed_dim": 8, "encoder_hidden_size": 16,
    "block_num_heads": 2, "in_channels": 16, "micro_cond_encode_dim": 4, "micro_cond_embed_dim": 20, "sample_size": 8},
    keywords(input_ids=lambda n, g: torch.randint(16, (n, 8, 8), generator=g), encoder_hidden_states=TEXT,
             pooled_text_emb=vectors(8), micro_conds=vectors(5)))  # fmt: skip
VAE = {"in_channels": 3, "out_channels": 3, "norm_num_groups": 4, "block_out_channels": (8, 16), "layers_per_block": 1,
       "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}  # fmt: skip
IMAGE = vectors(3, 16, 16)
put("AutoencoderKL", VAE | {"latent_channels": 4}, IMAGE)
put("VQModel", VAE | {"latent_channels": 4, "num_vq_embeddings": 12}, IMAGE)
put("AsymmetricAutoencoderKL", {"in_channels": 3, "out_channels": 3, "norm_num_groups": 4,
    "down_block_out_channels": (8, 16), "up_block_out_channels": (8, 16), "layers_per_down_block": 1,
    "layers_per_up_block": 1, "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2}, IMAGE)  # fmt: skip
put("AutoencoderDC", {"in_channels": 3, "latent_channels": 4, "attention_head_dim": 4,
    "encoder_block_types": ("ResBlock", "EfficientViTBlock"), "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
    "encoder_block_out_channels": (8, 16), "decoder_block_out_channels": (8, 16), "encoder_layers_per_block": (1, 1),
    "decoder_layers_per_block": (1, 1), "encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,)),
    "decoder_norm_types": ["rms_norm", "rms_norm"]}, IMAGE)  # fmt: skip
put("AutoencoderOobleck", {"encoder_hidden_size": 8, "downsampling_ratios": [2, 2], "channel_multiples": [1, 2],
    "decoder_channels": 8, "decoder_input_channels": 4}, vectors(2, 32))  # fmt: skip
put("AutoencoderKLTemporalDecoder", {"block_out_channels": (32, 32), "layers_per_block": 1,
    "down_block_types": ("DownEncoderBlock2D",) * 2}, keywords(sample=IMAGE))  # fmt: skip
DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3}
put("DiTTransformer2DModel", DIT | {"in_channels": 4, "out_channels": 8, "sample_size": 16, "patch_size": 4,
    "num_embeds_ada_norm": 5, "norm_num_groups": 4},
    keywords(hidden_states=LATENT, timestep=steps, class_labels=classes))  # fmt: skip
put("PixArtTransformer2DModel", DIT | {"in_channels": 4, "out_channels": 8, "sample_size": 16, "patch_size": 4,
    "cross_attention_dim": 16, "caption_channels": 16, "use_additional_conditions": False, "norm_num_groups": 4},
    keywords(hidden_states=LATENT, timestep=steps, encoder_hidden_states=TEXT))  # fmt: skip
put("Transformer2DModel", DIT | {"in_channels": 8, "norm_num_groups": 4, "cross_attention_dim": 16},
    keywords(hidden_states=vectors(8, 8, 8), encoder_hidden_states=TEXT))  # fmt: skip
put("TransformerTemporalModel", DIT | {"in_channels": 8, "norm_num_groups": 4},
    keywords(hidden_states=vectors(8, 8, 8)), splits=False)  # fmt: skip
put("SD3Transformer2DModel", DIT | {"sample_size": 16, "patch_size": 4, "in_channels": 4, "out_channels": 4,
    "joint_attention_dim": 16, "caption_projection_dim": 16, "pooled_projection_dim": 8, "pos_embed_max_size": 16},
    keywords(hidden_states=LATENT, encoder_hidden_states=TEXT, pooled_projections=vectors(8),
    timestep=steps))  # fmt: skip
put("FluxTransformer2DModel", {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 2,
    "attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 8,
    "axes_dims_rope": (4, 2, 2)}, keywords(hidden_states=vectors(9, 4), encoder_hidden_states=TEXT,
    pooled_projections=vectors(8), timestep=lambda n, g: torch.rand(n, generator=g),
    img_ids=lambda n, g: torch.zeros(9, 3), txt_ids=lambda n, g: torch.zeros(6, 3)), splits=False)  # fmt: skip
put("LatteTransformer3DModel", DIT | {"in_channels": 4, "out_channels": 8, "sample_size": 8, "patch_size": 2,
    "video_length": 2, "caption_channels": 16, "cross_attention_dim": 16},
    keywords(hidden_states=VIDEO, timestep=steps, encoder_hidden_states=TEXT))  # fmt: skip
put("CogVideoXTransformer3DModel", DIT | {"in_channels": 4, "out_channels": 4, "time_embed_dim": 8,
    "text_embed_dim": 16, "sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 6},
    keywords(hidden_states=vectors(2, 4, 8, 8), encoder_hidden_states=TEXT, timestep=steps))  # fmt: skip
put("PriorTransformer", DIT | {"embedding_dim": 8, "num_embeddings": 6, "additional_embeddings": 4},
    keywords(hidden_states=vectors(8), timestep=steps, proj_embedding=vectors(8),
             encoder_hidden_states=vectors(6, 8)))  # fmt: skip
put("AuraFlowTransformer2DModel", {"sample_size": 16, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1,
    "num_single_dit_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "caption_projection_dim": 16,
    "joint_attention_dim": 16, "out_channels": 4, "pos_embed_max_size": 64},
    keywords(hidden_states=LATENT, encoder_hidden_states=TEXT,
             timestep=lambda n, g: torch.rand(n, generator=g)))  # fmt: skip
put("SanaTransformer2DModel", DIT | {"patch_size": 1, "in_channels": 4, "out_channels": 4,
    "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 16,
    "sample_size": 16},
    keywords(hidden_states=LATENT, encoder_hidden_states=TEXT, timestep=steps))  # fmt: skip
put("LTXVideoTransformer3DModel", DIT | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 16,
    "caption_channels": 16}, keywords(hidden_states=vectors(16, 4), encoder_hidden_states=TEXT, timestep=steps,
    encoder_attention_mask=lambda n, g: torch.ones(n, 6), num_frames=lambda n, g: 1, height=lambda n, g: 4,
    width=lambda n, g: 4))  # fmt: skip
put("Lumina2Transformer2DModel", {"sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 24,
    "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 16,
    "ffn_dim_multiplier": None, "norm_eps": 1e-5, "scaling_factor": 1.0, "axes_dim_rope": (4, 2, 2),
    "axes_lens": (128, 128, 128), "cap_feat_dim": 16}, keywords(hidden_states=LATENT,
    timestep=lambda n, g: torch.rand(n, generator=g), encoder_hidden_states=TEXT, encoder_attention_mask=lambda n,
    g: torch.ones(n, 6, dtype=torch.bool)))  # fmt: skip
put("WanTransformer3DModel", DIT | {"patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 16,
    "freq_dim": 16, "ffn_dim": 32, "cross_attn_norm": True, "rope_max_seq_len": 32},
    keywords(hidden_states=VIDEO, timestep=steps, encoder_hidden_states=TEXT))  # fmt: skip
put("CogView4Transformer2DModel", DIT | {"patch_size": 2, "in_channels": 4, "out_channels": 4, "text_embed_dim": 16,
    "time_embed_dim": 8, "condition_dim": 4, "rope_axes_dim": (64, 64)}, keywords(hidden_states=LATENT,
    encoder_hidden_states=TEXT, timestep=steps, original_size=vectors(2), target_size=vectors(2),
    crop_coords=vectors(2)))  # fmt: skip
put("ControlNetModel", {"in_channels": 4, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
    "cross_attention_dim": 16, "attention_head_dim": 4, "down_block_types": DOWN,
    "conditioning_embedding_out_channels": (8, 8)}, keywords(sample=LATENT, timestep=steps, encoder_hidden_states=TEXT,
    controlnet_cond=vectors(3, 32, 32)))  # fmt: skip
put("T2IAdapter", {"in_channels": 3, "channels": [8, 8], "num_res_blocks": 1, "downscale_factor": 4}, IMAGE)
put("StableCascadeUNet", {"in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 8,
    "conditioning_dim": 16, "block_out_channels": (16, 16), "num_attention_heads": (2, 2),
    "down_num_layers_per_block": (1, 1),
    "up_num_layers_per_block": (1, 1), "down_blocks_repeat_mappers": (1, 1), "up_blocks_repeat_mappers": (1, 1),
    "block_types_per_layer": (("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),) * 2,
    "clip_text_in_channels": 16, "clip_text_pooled_in_channels": 16, "clip_image_in_channels": 16, "clip_seq": 2,
    "pixel_mapper_in_channels": None, "switch_level": (True,), "patch_size": 1, "dropout": (0.0, 0.0)},
    keywords(sample=LATENT, timestep_ratio=lambda n, g: torch.rand(n, generator=g),
             clip_text_pooled=vectors(1, 16), clip_text=TEXT, clip_img=vectors(1, 16)))  # fmt: skip
