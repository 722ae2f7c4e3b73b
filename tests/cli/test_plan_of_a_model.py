"""`pipefit plan --model`: a plan from a configuration alone, and what it says about a training."""

import json
from pathlib import Path

import pytest
from tests.verbs import answered, refused

from pipefit.cli import main

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "profiling" / "configurations"
LLAMA = FOLDER / "llama-3-8b.json"
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 4, "vocab_size": 1000}
SMALL = ("--model", str(LLAMA), "--option", ",".join(f"{name}={size}" for name, size in SIZES.items()))


def test_a_configuration_is_planned_with_its_rate_and_its_price(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    wanted = ("--tokens", "1e12", "--price", "2", "--sequence", "1024", "-o", str(plan))
    data = answered(capsys, "plan", *SMALL, "--topology", "dgx-h100-8", "--global-batch", "64", *wanted)
    found = data["training"]
    assert found["tokens_per_s"] == pytest.approx(1024 * data["predicted"]["throughput"])
    assert found["tokens_per_s_per_device"] == pytest.approx(found["tokens_per_s"] / 8)
    assert found["device_hours"] == pytest.approx(8 * 1e12 / found["tokens_per_s"] / 3600)
    assert found["cost"] == pytest.approx(2 * found["device_hours"])
    # 6 FLOP a weight and token but for the embedding, 12·l·h·s of attention.
    flops = 6 * (found["parameters"] - 1000 * 512 - 9 * 512) + 12 * 4 * 512 * 1024
    assert found["mfu"] == pytest.approx(flops * found["tokens_per_s_per_device"] / 989.4e12, rel=2e-3)
    assert json.loads(plan.read_text())["model"] == str(LLAMA)


def test_widths_depths_and_replays_are_planned_as_for_a_model_by_its_sizes(capsys):
    chosen = ("--tensor", "2", "--depth", "2", "--schedule", "1f1b", "--recompute", "layer", "--sequence", "512")
    data = answered(capsys, "plan", *SMALL, "--topology", "dgx-h100-8", "--global-batch", "64", *chosen)
    assert [(stage["tensor"], stage["recompute"]) for stage in data["stages"]] == [(2, "layer")] * 2
    assert data["data"] == 2
    assert data["training"]["hfu"] > data["training"]["mfu"]


def test_people_read_the_sequence_the_type_and_the_share_that_a_token_uses(capsys):
    sizes = "num_hidden_layers=2,hidden_size=256,intermediate_size=512,num_attention_heads=4,num_key_value_heads=4"
    model = ("--model", str(FOLDER / "mixtral-8x7b.json"), "--option", sizes)
    assert main(["plan", *model, "--topology", "dgx-h100-8", "--global-batch", "16"]) == 0
    out = capsys.readouterr().out
    assert (
        "counted on the modules of MixtralForCausalLM, bfloat16, sequence 8192 (its configuration allows 32768)" in out
    )
    assert "parameters, of which a token uses" in out and "peak: model FLOP" in out


def test_a_profile_of_a_configuration_needs_no_weights(capsys):
    data = answered(
        capsys, "profile", *SMALL, "--analytic", "--topology", "dgx-h100-8", "-b", "1,2", "--sequence", "256"
    )
    assert data["num_layers"] == 6 and data["microbatch_sizes"] == [1, 2]


def written(path, **fields):
    path.write_text(json.dumps(fields))
    return ["--model", str(path)]


def test_what_cannot_be_counted_is_refused_in_one_message(capsys, tmp_path):
    usual = ("plan", "--topology", "dgx-h100-8", "--global-batch", "8")
    odd = ("--model", "transformers:LlamaForCausalLM")
    for arguments, message in (
        (["--model", "transformers:LlamaForCausal"], "did you mean"),
        (["--model", str(tmp_path)], "it has no config.json"),
        (["--model", str(tmp_path / "x.json")], "there is no such folder or file"),
        (written(tmp_path / "a.json", model_type="none"), "does not recognize this architecture"),
        (written(tmp_path / "b.json", model_type="none", auto_map={"AutoConfig": "a.B"}), "needs Python code"),
        (written(tmp_path / "c.json", model_type="llama"), 'name one in its "architectures"'),
        ([*odd, "--option", "num_attention_heads=7"], "not a multiple of the number of attention heads"),
        ([*SMALL, "--sequence", "100", "--fp8"], "are multiples of 16; there are none"),
        ([*SMALL, "--sequence", "9000"], "allows at most 8192 (max_position_embeddings)"),
        # Positions begin after that of the padding.
        (["--model", "transformers:RobertaModel", "--sequence", "511"], "allows at most 510"),
        (["--model", str(FOLDER / "t5-base.json")], "give --sequence"),
        (["--model", str(FOLDER / "vit-base.json"), "--sequence", "12"], "takes no text"),
        (["--model", "transformers:Gemma4AssistantForCausalLM"], "Gemma4AssistantForCausalLM cannot be built"),
        (["--model", "transformers:AlbertModel", "--sequence", "8"], "has no list of blocks"),
        (["--model", "transformers:CLIPModel", "--sequence", "8"], "CLIPModel cannot be counted: AttributeError"),
        ([*SMALL, "--sequence", "64", "--tensor", "4"], "this model was counted for 1, as its sizes allow"),
        (["--model", str(FOLDER / "vit-base.json"), "--option", "num_hidden_layers=2", "--tokens", "9"], "have none"),
        ([*SMALL, "--profile", "vgg16"], "expected --profile or --model"),
        (["--profile", "vgg16", "--sequence", "8"], "--sequence: it is for --model"),
        ([*SMALL, "--price", "2"], "--price: expected --tokens too"),
        ([*SMALL, "--tokens", "9", "--price", "-1"], "price: expected a number of at least 0, got -1"),
        ([*SMALL, "--tokens", "9", "--price", "nan"], "price: expected a number of at least 0, got nan"),
        ([*SMALL, "--tokens", "inf"], "--tokens: expected a number above 0"),
        ([*SMALL, "--tokens", "9", "--sweep", "tensor=1,2"], "--tokens: it is for one plan"),
        (["--tokens", "9"], "expected --profile or --model"),
    ):
        assert message in refused(capsys, *usual, *arguments), arguments
