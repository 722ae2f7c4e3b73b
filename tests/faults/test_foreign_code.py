"""Folders of models that bring Python code of their own: refused with one message, and the code is never run."""

import json
import shutil
from pathlib import Path

import pytest
import transformers
from tests.tiny_models import llama_folder
from tests.verbs import refused

from pipefit.errors import ModelError
from pipefit.models.hub import limits_of, pretrained, tokenizer_of
from pipefit.run.continuation import _whole_model

pytestmark = pytest.mark.slow

PLANTED = """
import pathlib
import transformers
pathlib.Path({mark!r}).touch()

class Config(transformers.LlamaConfig):
    model_type = "planted"

class Model(transformers.LlamaForCausalLM):
    pass

class Tokenizer(transformers.PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {
    "AutoConfig": "planted.Config",
    "AutoModel": "planted.Model",
    "AutoModelForCausalLM": "planted.Model",
    "AutoTokenizer": ["planted.Tokenizer", "planted.Tokenizer"],
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """The folder of a small model that needs no code."""
    folder = tmp_path_factory.mktemp("plain")
    llama_folder(folder)
    return folder


@pytest.fixture
def mark(tmp_path) -> Path:
    """The file that the planted code makes when it is run."""
    return tmp_path / "ran"


def edit(path: Path, **fields: object) -> None:
    """Replaces fields of a file of JSON, which need not exist."""
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | fields))


@pytest.fixture
def folder(plain, mark, tmp_path) -> Path:
    """Adds code to the folder, and names it in the configuration."""
    made = tmp_path / "model"
    shutil.copytree(plain, made)
    (made / "planted.py").write_text(PLANTED.format(mark=str(mark)))
    edit(made / "config.json", model_type="planted", architectures=["Model"], auto_map=AUTO_MAP)
    edit(made / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=AUTO_MAP)
    return made


def adapter_over(folder: Path) -> Path:
    """A folder of adapters over a model with code."""
    made = folder.parent / "adapter"
    made.mkdir()
    edit(made / "adapter_config.json", peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=str(folder))
    return made


READERS = {
    "its configuration and weights": pretrained,
    "its sizes": limits_of,
    "its tokenizer": tokenizer_of,
    "its weights, to write text": _whole_model,
    "adapters over it": lambda folder: _whole_model(adapter_over(folder)),
}


def test_the_planted_code_would_be_run_by_those_who_trust_it(folder, mark, tmp_path, monkeypatch):
    """Else the tests below would show nothing."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=True)
    assert mark.exists()


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.faults] * (what != "its tokenizer")) for what in READERS]
)
def test_code_of_a_folder_is_refused_and_never_run(what, folder, mark, trial):
    with pytest.raises(ModelError) as problem:
        READERS[what](folder)
    said = str(problem.value)
    well = "\n" not in said and "trust_remote_code" not in said and not mark.exists()
    trial("code in the folder of a model", said, well=well, named=str(folder.parent) in said and "never runs" in said)


@pytest.mark.faults
@pytest.mark.parametrize("verb", ["train", "generate"])
def test_verbs_refuse_it_too(verb, folder, mark, trial, capsys):
    words = {
        "train": ["train", "--model", str(folder), "--steps", "1", "--transport", "local", "--quick", "--json"],
        "generate": ["generate", str(folder), "--prompt", "a", "--json"],
    }
    said = refused(capsys, *words[verb])
    trial("code in the folder of a model", said, well=not mark.exists(), named=str(folder) in said)


@pytest.mark.faults
def test_a_folder_whose_class_transformers_has_is_read_by_that_class(folder, mark, trial):
    edit(folder / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    kind = type(pretrained(folder).shell.model).__name__
    trial("code in the folder of a model", kind, well=kind == "LlamaForCausalLM" and not mark.exists())
