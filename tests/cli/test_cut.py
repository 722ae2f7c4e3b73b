"""`pipefit cut`: the layers of a model, as an object."""

import pytest
from tests.verbs import answered

TINY = ("--option", "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=2,vocab_size=64")


def test_layers_and_what_crosses_are_answered(capsys):
    pytest.importorskip("transformers")
    found = answered(capsys, "cut", "transformers:LlamaForCausalLM", *TINY)
    first, *others = found["layers"]
    assert first["layer"] == "before" and "enters_tensors" not in first
    assert [row["layer"] for row in others] == ["model.layers.0", "model.layers.1", "after"]
    assert all(row["enters_tensors"] == 1 and row["enters_bytes"] > 0 for row in others)


def test_weights_that_several_layers_hold_are_named(capsys):
    pytest.importorskip("transformers")
    tied = "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=2,vocab_size=64"
    found = answered(capsys, "cut", "transformers:LlamaForCausalLM", "--option", f"{tied},tie_word_embeddings=true")
    assert found["shared"] == {"model.embed_tokens.weight": ["before", "after"]}


def test_layers_of_a_sequence_have_no_borders(capsys):
    found = answered(capsys, "cut", "mlp", "--option", "layers=2,width=4")
    assert [row["layer"] for row in found["layers"]] == ["hidden0", "head"]
    assert not any("enters_bytes" in row for row in found["layers"])
