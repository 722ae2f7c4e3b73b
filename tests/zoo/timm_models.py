"""Models of timm, one or two of each family, the small ones, on small images."""

from __future__ import annotations

from typing import Any

import timm
from torch import nn

from tests.zoo.calm import calm
from tests.zoo.specimen import Specimen, vectors

SHORT = {"depth": 4, "embed_dim": 48, "num_heads": 3}
LEVELS = {"layers": (1, 1, 1, 1), "channels": (16, 32, 48, 64)}
WINDOWS = {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}

CONVOLUTIONAL: dict[str, dict[str, Any]] = {
    # made by its authors for tests
    "test_byobnet": {"size": 64}, "test_convnext": {}, "test_convnext2": {}, "test_efficientnet": {},
    "test_efficientnet_gn": {}, "test_efficientnet_evos": {}, "test_mambaout": {}, "test_nfnet": {}, "test_resnet": {}, 
    "test_vit": {"size": 64}, "test_vit2": {"size": 64}, "test_vit4": {"size": 64}, "test_coatnet": {"size": 64}, 
    "test_maxvit": {"size": 64}, "test_vit_relpos": {"size": 64},
    # mobile
    "mnasnet_small": {}, "mnasnet_050": {}, "semnasnet_075": {}, "spnasnet_100": {}, "fbnetc_100": {}, "fbnetv3_b": {},
    "rexnet_100": {}, "rexnetr_100": {}, "lcnet_050": {}, "mobilenetv1_100": {}, "mobilenetv2_050": {},
    "mobilenetv3_small_050": {}, "mobilenetv3_large_075": {}, "mobilenetv4_conv_small_035": {},
    "mobilenetv4_hybrid_medium_075": {}, "efficientnet_b0": {}, "efficientnet_lite0": {}, "tf_efficientnetv2_b0": {},
    "efficientnet_es": {}, "mixnet_s": {}, "tinynet_e": {}, "hardcorenas_a": {}, "ghostnet_050": {},
    "ghostnetv3_050": {"size": 64}, "repghostnet_050": {}, "mobileone_s0": {}, "fasternet_t0": {}, "starnet_s050": {},
    "shvit_s1": {}, "repvit_m0_9": {}, "efficientvit_b0": {}, "efficientvit_m0": {"size": 64},
    # convolutional
    "densenet121": {"growth_rate": 8, "block_config": (2, 2, 2, 2)},
    "densenetblur121d": {"growth_rate": 8, "block_config": (2, 2, 2, 2)},
    "inception_v3": {"size": 96}, "resnext26ts": {}, "seresnext26ts": {}, "gcresnext26ts": {}, "eca_resnext26ts": {},
    "resnetv2_18": {}, "resnetv2_50": LEVELS, "regnetx_002": {}, "regnety_002": {},
    "regnetz_005": {}, "repvgg_a0": {}, "cspresnet50": {}, "darknet17": {}, "cs3darknet_s": {}, "convnext_atto": {},
    "convnextv2_atto": {}, "convnext_zepto_rms": {}, "hgnetv2_b0": {}, "hrnet_w18_small": {}, "dla34": {},
    "dla46_c": {}, "dla46x_c": {}, "dpn48b": {}, "ese_vovnet19b_slim": {}, "skresnet18": {}, "seresnet18": {},
    "legacy_seresnet18": {}, "resnet10t": {}, "resnet18d": {}, "resnetblur18": {}, "ecaresnet26t": {},
    "resnetrs50": LEVELS, "res2net50_26w_4s": LEVELS, "res2next50": LEVELS, "resnest14d": {}, "selecsls42": {},
    "resnet50": LEVELS, "wide_resnet50_2": LEVELS, "resnext50_32x4d": LEVELS, "gernet_s": {}, "nf_regnet_b0": {},
    "nf_resnet26": {}, "inception_next_atto": {}, "rdnet_tiny": {},
    "legacy_xception": {}, "xception41": {}, "tresnet_m": {}, "mambaout_femto": {},
    "nextvit_small": {"size": 64},
}  # fmt: skip

ATTENTION: dict[str, dict[str, Any]] = {
    # and convolutions
    "mobilevit_xxs": {}, "mobilevitv2_050": {}, "coatnet_pico_rw_224": {}, "coatnet_nano_cc_224": {},
    "maxvit_pico_rw_256": {}, "maxxvit_rmlp_nano_rw_256": {}, "edgenext_xx_small": {}, "fastvit_t8": {},
    "poolformer_s12": {}, "poolformerv2_s12": {}, "botnet26t_256": {}, "lambda_resnet26t": {},
    "levit_128s": {}, "levit_conv_128s": {}, "visformer_tiny": {},
    "efficientformerv2_s0": {}, "swiftformer_xs": {}, "vit_tiny_r_s16_p8_224": {},
    # without
    "pvt_v2_b0": {}, "swin_tiny_patch4_window7_224": WINDOWS, "swinv2_tiny_window8_256": WINDOWS,
    "swinv2_cr_tiny_224": WINDOWS, "vit_tiny_patch16_224": {"depth": 4}, "vit_relpos_small_patch16_224": SHORT,
    "vit_srelpos_small_patch16_224": SHORT, "vit_small_patch16_18x2_224": SHORT, "vit_base_patch16_siglip_224": SHORT,
    "vit_base_patch16_clip_quickgelu_224": SHORT, "vit_small_patch14_reg4_dinov2": SHORT | {"size": 56},
    "vit_little_patch16_reg1_gap_256": SHORT, "deit_tiny_distilled_patch16_224": {"depth": 4},
    "deit3_small_patch16_224": SHORT, "beit_base_patch16_224": SHORT, "beitv2_base_patch16_224": SHORT,
    "eva02_tiny_patch14_224": {"depth": 4, "size": 56}, "eva_giant_patch14_224": SHORT | {"size": 56},
    "vit_base_patch16_rope_reg1_gap_256": SHORT | {"embed_dim": 96}, "cait_xxs24_224": {"depth": 4},
    "xcit_nano_12_p16_224": {"depth": 4}, "tnt_s_patch16_224": {"depth": 4}, "twins_svt_small": {},
    "mixer_s32_224": {}, "gmixer_12_224": {}, "gmlp_ti16_224": {}, "resmlp_12_224": {}, "pit_ti_224": {},
    "pit_ti_distilled_224": {},
    "davit_tiny": {"embed_dims": (24, 48, 48, 48), "depths": (1, 1, 1, 1), "num_heads": (3, 3, 3, 3)},
    "nest_tiny": {}, "tiny_vit_5m_224": {}, "hiera_tiny_224": {}, "convit_tiny": {"depth": 4}, "gcvit_xxtiny": {},
    "sequencer2d_s": {"layers": (1, 1, 1, 1)},
}  # fmt: skip


def _make(name: str, size: int, more: dict[str, Any]) -> nn.Module:
    try:
        return calm(timm.create_model(name, num_classes=5, img_size=size, **more))
    except TypeError:
        return calm(timm.create_model(name, num_classes=5, **more))


def _specimen(name: str, size: int, options: dict[str, Any]) -> Specimen:
    more = dict(options)
    size = more.pop("size", size)
    return Specimen(f"timm/{name}", lambda: _make(name, size, more), vectors(3, size, size))


SPECIMENS = [_specimen(name, 32, options) for name, options in CONVOLUTIONAL.items()]
SPECIMENS += [_specimen(name, 64, options) for name, options in ATTENTION.items()]
