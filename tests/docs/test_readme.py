"""The Python that README and manual show runs as it stands, page by page in one namespace."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from docs.pages import pages

from pipefit.reproduce.lectures import ENTRIES

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "docs/python.md",
        "docs/guarantees.md",
        "docs/your-model.md",
        "docs/verifier.md",
    )
]


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = blocks(page)
    assert found
    namespace = {"__name__": "__main__"}
    for number, block in enumerate(found, 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_imports_and_names_is_there(page):
    import pipefit

    text = page.read_text()
    for module, names in re.findall(r"^ *from (pipefit[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    named = {name for name in re.findall(r"\bpf\.(\w+)", text)}
    assert sorted(named - set(pipefit.__all__)) == []
    for path in re.findall(r"`(pipefit\.\w+(?:\.\w+)+)", text):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name) or importlib.util.find_spec(path), path


def test_the_study_file_of_the_manual_is_read(tmp_path):
    from pipefit import Study

    (study,) = blocks(ROOT / "docs/studies.md", "toml")
    path = tmp_path / "study.toml"
    path.write_text(study)
    Study.load(path)


@pytest.mark.parametrize("name", ["planning", "spilling"])
def test_parts_of_topologies_in_the_manual_are_read(name):
    from pipefit import Topology

    level = "[[levels]]\nname = 'server'\nwidth = 2\nbandwidth_bytes_per_s = '1 GB/s'\n"
    for part in blocks(ROOT / f"docs/{name}.md", "toml"):
        Topology.parse(f"format = 'pipefit.topology/1'\n{level}{part}")


def test_the_numbers_of_the_first_screen_are_those_of_their_pages():
    text = (ROOT / "README.md").read_text()
    counts = re.search(r"\| \*\*all\*\* \| (\d+) \| (\d+) \| (\d+) \| 0 \|", (ROOT / "docs/zoo.md").read_text())
    models = f"of [{counts[1]} models](docs/zoo.md) of six libraries and by hand, {counts[2]} train exactly as in torch"
    assert f"{models}, {counts[3]} are refused, one takes too long, none is wrong" in text
    assert int(counts[1]) == int(counts[2]) + int(counts[3]) + 1
    runs = (ROOT / "docs/published-runs.md").read_text()
    (fitted,) = re.findall(r"fitted to 33 \| \d+ \| \+[\d.]+ % \| ([\d.]+ %)", runs)
    assert f"half of the others are predicted within {fitted}" in text
    faults = (ROOT / "docs/guarantees.md").read_text()
    tried, well, same = re.search(r"SIGKILL to a rank, a worker or a study \| (\d+) \| (\d+) \| (\d+)", faults).groups()
    assert tried == well == same and f"of [{tried} runs]" in text and f"{same} resumed" in text
    kinds = [entry.kind for entry in ENTRIES.values()]
    assert f"[{len(kinds) - kinds.count('cited')} of {len(kinds)}]" in text
