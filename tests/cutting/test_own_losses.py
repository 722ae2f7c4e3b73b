"""Losses of transformers' own: those of micro-batches, by their weights, give that of the batch."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

import pipefit as pf

WARNING = "for some samples"


def pictures(classes):
    """A model that says of each pixel what it is, and pictures of which large parts do not count."""
    torch.manual_seed(0)
    config = SegformerConfig(
        num_labels=classes,
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 1, 1],
        decoder_hidden_size=8,
        hidden_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    model = SegformerForSemanticSegmentation(config).double().train()
    model.decode_head.batch_norm.eval()
    nn.init.normal_(model.decode_head.classifier.weight)  # else all losses are nearly those of guessing
    labels = torch.randint(max(classes, 2), (4, 32, 32))
    labels[0, :, 4:] = labels[1, :16] = 255
    return model, {"pixel_values": torch.randn(4, 3, 32, 32, dtype=torch.float64), "labels": labels}


def sounds(reduction):
    """A model of speech, and texts of which one is short."""
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        mask_time_prob=0.0,
        ctc_loss_reduction=reduction,
    )
    labels = torch.randint(1, 12, (4, 6))
    labels[0, 2:] = -100
    batch = {"input_values": torch.randn(4, 400, dtype=torch.float64), "labels": labels}
    return Wav2Vec2ForCTC(config).double().train(), batch


def words():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    ids = torch.randint(30, (4, 6))
    return LlamaForCausalLM(config).double().train(), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("make", "kind"), [(pictures, 3), (pictures, 1), (sounds, "mean")], ids=["classes", "one class", "sounds"]
)
def test_labels_weigh_as_in_the_models_own_loss(make, kind, caplog):
    model, batch = make(kind)
    whole = copy.deepcopy(model)(**batch).loss
    pipe = pf.Pipeline(model, optimizer=torch.optim.SGD, stages=2, microbatches=4, example=batch)
    assert pipe.fit([batch]) == pytest.approx([whole.item()], rel=1e-6)
    assert WARNING not in caplog.text


def test_an_own_loss_that_is_a_sum_is_said(caplog):
    model, batch = sounds("sum")
    pf.Pipeline(model, optimizer=torch.optim.SGD, stages=2, microbatches=4, example=batch)
    assert "the loss of Wav2Vec2ForCTC for some samples is" in caplog.text


def total(logits, labels, vocab_size, **_):
    return nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), reduction="sum")


@pytest.mark.parametrize("has_example", [False, True])
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_sum_is_said_without_an_example_and_before_weights_are_read(has_example, is_folder, tmp_path, caplog):
    model, batch = words()
    whole = model
    if is_folder:
        model.save_pretrained(tmp_path)
        model = pf.pretrained(tmp_path)
        whole = model.model
    whole.loss_function = total
    example = batch if has_example else None
    pf.Pipeline(model, optimizer=torch.optim.SGD, stages=2, microbatches=4, example=example)
    assert "the loss of LlamaForCausalLM for some samples is" in caplog.text


@pytest.mark.parametrize("has_example", [False, True])
def test_nothing_is_said_of_a_mean_and_the_model_stays_as_it_was(has_example, caplog):
    model, batch = words()
    before = copy.deepcopy(model.state_dict())
    example = batch if has_example else None
    pf.Pipeline(model, optimizer=torch.optim.SGD, stages=2, microbatches=4, example=example)
    assert WARNING not in caplog.text
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
