"""The notebook runs from top to bottom."""

import asyncio
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

DOCS = Path(__file__).parents[2] / "docs"


def printed(notebook) -> str:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def test_the_notebook_is_kept_small_with_its_outputs_and_without_errors():
    path = DOCS / "tour.ipynb"
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert path.stat().st_size < 300_000
    assert sum(bool(cell.outputs) for cell in code) >= len(code) - 1  # all but the imports show something
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Jupyter warns about its own event loops and sockets
def test_the_notebook_runs_from_top_to_bottom():
    notebook = nbformat.read(DOCS / "tour.ipynb", as_version=4)
    measuring = [cell for cell in notebook.cells if "launch(tour_jobs.compare," in cell.source]
    for cell in measuring:  # one round, where a reader who looks at the times wants six
        cell.source = cell.source.replace(", threads=1)", ", 1, threads=1)")
    client = nbclient.NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(DOCS)}}
    )
    asyncio.run(client.async_execute())
    text = printed(notebook)
    assert len(measuring) == 2
    assert text.count("equal: True") == 4 and "bubble 11.1%, where 1F1B's is 27.3%" in text
    losses = [line.split()[-1] for line in text.splitlines() if " loss 5." in line]
    assert len(losses) == 9 and len(set(losses[:7])) == 1 and len(set(losses)) == 3
