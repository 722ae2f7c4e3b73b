"""Models of torchaudio, small where they can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchaudio import models

from tests.zoo.calm import calm
from tests.zoo.specimen import Data, Specimen, several, vectors

SPECIMENS: list[Specimen] = []


def put(name: str, build: Callable[[], nn.Module], data: Data, **options: Any) -> None:
    """Adds a model."""
    SPECIMENS.append(Specimen(f"torchaudio/{name}", lambda: calm(build()), data, **options))


def lengths(longest: int) -> Data:
    """The length of each sequence, all of them whole."""
    return lambda samples, generator: torch.full((samples,), longest)


def wav2vec(**options: Any) -> nn.Module:
    chances = {"encoder_projection_dropout": 0.0, "encoder_attention_dropout": 0.0, "encoder_ff_interm_dropout": 0.0,
               "encoder_dropout": 0.0, "encoder_layer_drop": 0.0}  # fmt: skip
    shape = {"extractor_mode": "group_norm", "extractor_conv_layer_config": [(16, 10, 5), (16, 3, 2)],
             "extractor_conv_bias": False, "encoder_embed_dim": 16, "encoder_pos_conv_kernel": 4,
             "encoder_pos_conv_groups": 2, "encoder_num_layers": 4, "encoder_num_heads": 2,
             "encoder_ff_interm_features": 32, "encoder_layer_norm_first": False, "aux_num_out": 5}  # fmt: skip
    return models.wav2vec2_model(**{**chances, **shape, **options})


WAVES = vectors(400)
put("wav2vec2", wav2vec, WAVES)
put("wav2vec2, layer norm first", lambda: wav2vec(extractor_mode="layer_norm", encoder_layer_norm_first=True), WAVES)
put("wav2vec2 with lengths", wav2vec, several(WAVES, lengths(400)))
put("conformer", lambda: models.Conformer(16, 2, 32, 4, 3), several(vectors(12, 16), lengths(12)))
put("conformer, convolution first", lambda: models.Conformer(16, 2, 32, 4, 3, use_group_norm=True,
    convolution_first=True), several(vectors(12, 16), lengths(12)))  # fmt: skip
put("emformer", lambda: models.Emformer(16, 2, 32, 4, 4, right_context_length=1), several(vectors(9, 16), lengths(8)))
put("deepspeech", lambda: models.DeepSpeech(16, n_hidden=32, n_class=5), vectors(1, 10, 16))
put("wav2letter", lambda: models.Wav2Letter(5, "mfcc", 8), vectors(8, 200), splits=True)
put("conv-tasnet", lambda: models.ConvTasNet(2, 16, 16, 3, 16, 16, 3, 2), vectors(1, 200))
put("wavernn", lambda: models.WaveRNN([2, 2, 2], 8, 8, 1, 16, 16, 3, 8, 8, 8),
    several(vectors(1, 40), vectors(1, 8, 7)))  # fmt: skip
put("hdemucs", lambda: models.HDemucs(["a", "b"], audio_channels=1, channels=4, nfft=64, depth=2), vectors(1, 1024))
put("tacotron2", lambda: models.Tacotron2(n_symbol=12, n_mels=8, symbol_embedding_dim=16, encoder_embedding_dim=16,
    decoder_rnn_dim=16, attention_rnn_dim=16, attention_hidden_dim=16, prenet_dim=8, postnet_embedding_dim=16,
    attention_location_n_filter=4), several(lambda n, g: torch.randint(12, (n, 6), generator=g), lengths(6),
    vectors(8, 5), lengths(5)))  # fmt: skip
