"""`pipefit cut`: the layers of a model as an object and as a picture."""

import xml.etree.ElementTree as ET

import pytest
from tests.verbs import answered, refused

TINY = ("--option", "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=2,vocab_size=64")


def test_layers_and_what_crosses_are_answered_and_drawn(capsys, tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "cut.svg"
    found = answered(capsys, "cut", "transformers:LlamaForCausalLM", *TINY, "-o", str(path))
    names = [row["layer"] for row in found["layers"]]
    assert names == ["before", "model.layers.0", "model.layers.1", "after"]
    drawn = ["".join(item.itertext()).strip() for item in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    assert {*names, "parameters"} <= set(drawn)
    assert sum("in 1 tensor" in words for words in drawn) == len(names) - 1


def test_weights_that_several_layers_hold_are_named(capsys):
    pytest.importorskip("transformers")
    tied = "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=2,vocab_size=64"
    found = answered(capsys, "cut", "transformers:LlamaForCausalLM", "--option", f"{tied},tie_word_embeddings=true")
    assert found["shared"] == {"model.embed_tokens.weight": ["before", "after"]}


def test_layers_of_a_sequence_are_drawn_without_borders(capsys, tmp_path):
    path = tmp_path / "mlp.svg"
    found = answered(capsys, "cut", "mlp", "--option", "layers=2,width=4", "-o", str(path))
    assert [row["layer"] for row in found["layers"]] == ["hidden0", "head"]
    words = "".join(ET.parse(path).getroot().itertext())
    assert "parameters" in words and "tensor" not in words


def test_a_picture_has_one_ending(capsys, tmp_path):
    assert ".svg" in refused(capsys, "cut", "mlp", "-o", str(tmp_path / "cut.jpg"))
