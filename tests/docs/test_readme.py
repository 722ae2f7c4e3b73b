"""The Python that README and manual show runs as it stands, page by page in one namespace."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name
    for name in ("README.md", "docs/python.md", "docs/guarantees.md", "docs/data-and-models.md", "docs/verifier.md")
]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = blocks(page)
    assert found
    namespace = {"__name__": "__main__"}
    for number, block in enumerate(found, 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def test_the_training_script_of_the_readme_is_the_example():
    body = (ROOT / "examples/train_sequential.py").read_text().split('"""', 2)[2].strip()
    assert body in (ROOT / "README.md").read_text()
    assert len([line for line in body.splitlines() if line]) <= 25
