"""`pipefit train --model FOLDER`: a model of transformers, its tokenizer, the user's records."""

import json
import shutil

import pytest
import torch
import transformers
from tests.tiny_models import llama_folder, save_model, save_tokenizer

from pipefit.cli import main

pytestmark = [pytest.mark.usefixtures("small_probes"), pytest.mark.slow]

USUAL = {"--steps": "6", "--batch": "4", "--lr": "1e-3", "--warmup": "0", "--transport": "local"}


def words_for(folder, *words):
    usual = [word for name, value in USUAL.items() if name not in words for word in (name, value)]
    return ["train", *usual, "--json", "--model", str(folder), *words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tuned")
    llama_folder(place / "model")
    lines = [json.dumps({"prompt": f"{n % 10} and {n // 10} are", "completion": f" {n}"}) for n in range(40)]
    (place / "sums.jsonl").write_text("\n".join(lines))
    return place


def trained(folder, *words, capsys):
    assert main(words_for(folder / "model", "--data", str(folder / "sums.jsonl"), *words)) == 0
    return json.loads(capsys.readouterr().out)


def test_a_folder_is_fine_tuned_and_comes_back_as_a_folder(folder, tmp_path, capsys):
    found = trained(folder, "-o", str(tmp_path / "run"), capsys=capsys)
    assert found["held_out_loss"] < found["held_out_before"]
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    # The last tenth is held out; labels that are learned count, however they are spread over batches.
    total = count = 0.0
    for line in (folder / "sums.jsonl").read_text().splitlines()[-4:]:
        record = json.loads(line)
        prompt = tokenizer(record["prompt"])["input_ids"]
        ids = torch.tensor([prompt + tokenizer(record["completion"])["input_ids"] + [0]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum").item()
        count += ids.shape[1] - len(prompt)
    assert total / count == pytest.approx(found["held_out_loss"], rel=1e-5)
    # Its stages have answered as the whole model does.
    sample, record = found["samples"][0], json.loads((folder / "sums.jsonl").read_text().splitlines()[36])
    assert (sample["prompt"], sample["target"]) == (record["prompt"], record["completion"])
    prompt = tokenizer(record["prompt"], return_tensors="pt").input_ids
    written = model.generate(prompt, do_sample=False, max_new_tokens=50)[0, prompt.shape[1] :]
    assert sample["answer"] == tokenizer.decode(written, skip_special_tokens=True)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "From the held-out data" in page and f"<pre>{record['prompt']}</pre>" in page


def test_the_best_evaluation_is_kept_and_ends_a_run_that_gets_no_better(folder, tmp_path, capsys):
    words = ("--evaluate-every", "1", "--patience", "2", "--steps", "30", "--lr", "3", "-o", str(tmp_path / "run"))
    found = trained(folder, *words, capsys=capsys)
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    held_out = [entry["held_out_loss"] for entry in entries if "held_out_loss" in entry]
    assert len(held_out) < 30 and min(held_out) == min(held_out[:-2])
    assert found["held_out_loss"] == pytest.approx(min(held_out), rel=1e-6)
    best, ending, *_ = found["notes"]  # and perhaps that the machine was busy
    assert f"best held-out loss {min(held_out):.4f} at step {1 + held_out.index(min(held_out))}" in best
    assert f"ended at step {len(held_out)} of 30: no better held-out loss in 2 evaluations" in ending
    assert found["paths"]["best"] == str(tmp_path / "run" / "best")


def test_records_of_a_file_are_evaluated_on_and_none_is_held_out(folder, tmp_path, capsys):
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": "1 and 1 are", "completion": " 2"}))
    words = ("--eval-data", str(tmp_path / "other.jsonl"), "--epochs", "1", "--steps")
    given = [
        word for word in words_for(folder / "model", "--data", str(folder / "sums.jsonl"), *words) if word != "--steps"
    ]
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["losses"]) == 40 // 4
    assert [sample["prompt"] for sample in found["samples"]] == ["1 and 1 are"]


def test_a_wrong_record_is_refused_before_the_model_is_read(folder, tmp_path, capsys):
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "wrong.jsonl").write_text('{"question": 1}')
    assert main(words_for(tmp_path / "model", "--data", str(tmp_path / "wrong.jsonl"))) == 2
    assert "line 1 of" in capsys.readouterr().err
    assert main(words_for(tmp_path / "model", "--data", str(folder / "sums.jsonl"))) == 2
    assert "its weights cannot be read" in capsys.readouterr().err


def test_a_model_in_a_folder_writes_what_transformers_writes(folder, capsys):
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    for words, text in (([], "1 and 1 are"), (["--chat"], "user: 1 and 1 are<end>")):
        assert (
            main(["generate", str(folder / "model"), "--prompt", "1 and 1 are", "--tokens", "5", "--json", *words]) == 0
        )
        ids = tokenizer(text, return_tensors="pt").input_ids
        written = model.generate(ids, do_sample=False, max_new_tokens=5)[0, ids.shape[1] :]
        assert json.loads(capsys.readouterr().out)["text"] == tokenizer.decode(written, skip_special_tokens=True)


def test_a_run_on_bytes_writes_with_its_newest_checkpoint(tmp_path, capsys):
    words = "train --model gpt --option layers=1,hidden=16,heads=1,context=16 --steps 3 --batch 4 --ranks 1 --quick -o"
    assert main([*words.split(), str(tmp_path / "run")]) == 0
    capsys.readouterr()
    found = []
    for more in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"]):
        given = ["--prompt", "The", "--tokens", "20", "--temperature", "1", "--json"]
        assert main(["generate", str(tmp_path / "run"), *given, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["text"])
    assert found[0] == found[1] != found[2] and len(found[0]) >= 20


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["FOLDER", "--prompt", "x"], "expected the folder of a model or of a run"),
        (["none", "--prompt", "x"], "got none"),
        (["FOLDER", "--prompt="], "--prompt"),
    ],
)
def test_what_writes_no_text_is_refused(words, told, tmp_path, capsys):
    assert main(["generate", *(word.replace("FOLDER", str(tmp_path)) for word in words)]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.long
def test_adapters_over_the_folder_are_trained_and_saved_alone(folder, tmp_path, capsys):
    found = trained(folder, "--lora", "r=4,alpha=8", "--lr", "1e-2", "-o", str(tmp_path / "run"), capsys=capsys)
    assert found["held_out_loss"] < found["held_out_before"]
    assert (tmp_path / "run" / "model" / "adapter_config.json").is_file()
    assert not list((tmp_path / "run" / "model").glob("model*.safetensors"))
    config = json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "model")
    assert main(["generate", str(tmp_path / "run"), "--prompt", "1 and 1 are", "--tokens", "5", "--json"]) == 0
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert f"base_model: {folder / 'model'}" in card and "lora_alpha: 8" in card and "More Information" not in card


@pytest.mark.long
@pytest.mark.dist
def test_processes_that_share_the_folders_layers_learn_the_same(folder, tmp_path, capsys):
    """The prediction is made while the model has no weights yet."""
    adapters = ("--lora", "r=4,dropout=0.1", "--steps", "3", "--lr", "1e-2")
    alone = trained(folder, *adapters, "--ranks", "1", capsys=capsys)
    words = (*adapters, "--ranks", "2", "--tensor", "2", "--transport", "distributed")
    shared = trained(folder, *words, "-o", str(tmp_path), capsys=capsys)
    assert shared["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert (tmp_path / "model" / "adapter_model.safetensors").is_file()


@pytest.mark.long
def test_a_resumed_fine_tuning_ends_where_a_straight_one_does(folder, tmp_path, capsys):
    words = ("--checkpoint-every", "3")
    straight = trained(folder, *words, "-o", str(tmp_path / "a"), capsys=capsys)
    resumed = trained(folder, *words, "-o", str(tmp_path / "b"), "--resume",
                      str(tmp_path / "a" / "checkpoints" / "step-000003"), capsys=capsys)  # fmt: skip
    assert resumed["losses"] == straight["losses"][3:]
    assert resumed["held_out_loss"] == straight["held_out_loss"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--context", "129"), "takes at most 128 tokens"),
        (("--patience", "2"), "give --evaluate-every"),
        (("--lora", "r=4,targets=x"), "unknown setting 'targets'"),
        (("--option", "hidden_size=3"), "its configuration is in config.json"),
        (("--batch", "50"), "batch must be between 1 and the 36 samples"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_message(words, told, folder, capsys):
    assert main(words_for(folder / "model", "--data", str(folder / "sums.jsonl"), *words)) == 2
    assert told in capsys.readouterr().err


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path, capsys):
    save_tokenizer(tmp_path, 300)
    save_model(tmp_path, vocab_size=100)
    assert main(words_for(tmp_path, "--data", "text", "--context", "32")) == 2
    assert "they do not belong together" in capsys.readouterr().err
