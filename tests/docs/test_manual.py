"""The manual shows what the code gives: transcripts, tables, pictures, pages."""

import re

import pytest
from docs.pages import ROOT, pages

from docs import make_pictures, tables, transcripts
from pipefit.cli import main
from pipefit.ir.op import Op
from pipefit.schedules import find, names

NAMED = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages()]
DIALECT = re.compile(
    r"\b(foretold|foretell\w*|told|beside|go(?:es|ing)? on (?:from|with)|by (?:itself|themselves)|in turn|in a row|"
    r"held against)\b"
)
HOUSE = [name for name in names() if find(name).order.__module__.startswith("pipefit.")]


@pytest.mark.parametrize("page", NAMED)
def test_commands_print_what_the_page_shows(page):
    shown = page.read_text()
    assert transcripts.answered(shown) == shown, "bring it up to date with: python -m docs.transcripts"


@pytest.mark.parametrize("page", NAMED)
def test_every_transcript_is_run_or_marked_as_taken_once(page):
    assert transcripts.unaccounted(page.read_text()) == [], "see docs/transcripts.py for the three kinds"


SLOW_PAGES = [page for page in NAMED if any(map(transcripts.is_slow, transcripts.blocks(page.values[0].read_text())))]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", SLOW_PAGES)
def test_slow_commands_print_what_the_page_shows(page):
    assert transcripts.differences(page.read_text()) == []


def test_a_transcript_that_nothing_runs_is_found():
    block = "```console\n$ pipefit train --steps 3\ntrained\n```\n"
    marked = f"<!-- taken once: a machine -->\n\n{block}"
    assert transcripts.unaccounted(block + marked) == ["$ pipefit train --steps 3"]
    assert transcripts.unaccounted("words\n\n    $ pipefit train\n    trained\n") == ["$ pipefit train"]


def test_lines_may_be_left_out_and_rounding_may_differ():
    printed = "first\nloss 3e-16, gradients 0\nthird\nplanned in 28.6 s"
    assert transcripts.agrees("first\n…\nplanned in 2 ms", printed)
    assert transcripts.agrees("first\nloss 0, gradients 1e-16\n…", printed)
    assert not transcripts.agrees("second\n…\nplanned in 2 ms", printed)
    assert not transcripts.agrees("first\n…", "before\nfirst")


@pytest.mark.parametrize("page", NAMED)
def test_a_page_uses_the_words_of_the_field(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert sorted(set(DIALECT.findall(prose))) == []


@pytest.mark.parametrize("page", NAMED)
def test_tables_follow_from_the_code(page):
    shown = page.read_text()
    assert tables.filled(shown) == shown, "bring it up to date with: python -m docs.tables"


@pytest.mark.parametrize("name", sorted(make_pictures.SHAPES))
def test_a_picture_shows_what_the_code_draws(name, tmp_path):
    kept = make_pictures.PICTURES / f"{name}.svg"
    drawn = make_pictures.drawing(name).save(tmp_path / f"{name}.svg", width=make_pictures.WIDTH)
    assert kept.read_text() == drawn.read_text(), "bring it up to date with: python -m docs.make_pictures"
    assert kept.stat().st_size < 60_000


def test_every_schedule_has_a_page_a_picture_and_a_row():
    folder = ROOT / "docs/schedules"
    table = tables.schedules()
    for name in HOUSE:
        page = (folder / f"{name}.md").read_text()
        assert f"`{name}`" in page and f"../pictures/{name}.svg" in page and f"({name}.md)" in table
        assert all(part in page for part in ("## The law", "## When to use it", "## Source"))


def test_the_page_on_programs_names_every_operation():
    page = (ROOT / "docs/programs.md").read_text()
    assert all(f"| `{op.value}` |" in page for op in Op)


def test_the_page_on_architecture_fits_on_three_screens_and_its_files_exist():
    page = (ROOT / "docs/architecture.md").read_text()
    files = re.findall(r"`(\w+/\w+\.py)`", page)
    assert len(page.splitlines()) <= 135
    assert len(set(files)) > 20
    assert [name for name in files if not (ROOT / "src/pipefit" / name).is_file()] == []


def test_the_page_on_architecture_names_every_folder():
    page = (ROOT / "docs/architecture.md").read_text()
    folders = [path.parent.name for path in (ROOT / "src/pipefit").glob("*/__init__.py")]
    assert len(folders) > 15
    assert [name for name in folders if f"`{name}`" not in page] == []


def test_the_page_on_the_command_line_names_every_verb(capsys):
    page = (ROOT / "docs/command-line.md").read_text()
    main(["--help"])
    verbs = re.findall(r"^│ ([a-z]+)  ", capsys.readouterr().out, re.MULTILINE)
    assert len(verbs) > 8
    assert [verb for verb in verbs if f"| `{verb}` |" not in page] == []


def test_every_option_that_a_page_names_is_there(capsys):
    main(["--help"])
    text = capsys.readouterr().out
    verbs = re.findall(r"^│ ([a-z]+)  ", text, re.MULTILINE)
    known = set(re.findall(r"--[a-z][a-z-]+", text))  # of pipefit itself
    known |= {"--no-sync", "--torch-backend", "--generate-hashes", "--require-hashes"}  # of uv and pip
    known |= {"--max-restarts", "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint"}  # of torchrun
    for verb in verbs:
        main([verb, "--help"])
        known.update(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    named = {
        (page.name, option) for page in pages() for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text())
    }
    assert sorted((name, option) for name, option in named if option not in known) == []


def test_a_page_that_shows_something_else_is_found():
    block = "```console\n$ pipefit draw naive -p 2 -m 1\nNothing like it\n```\n"
    assert "rank 1" in transcripts.answered(block)
    slow = block.replace("draw naive -p 2 -m 1", "check --model gpt")
    assert transcripts.answered(slow) == slow


def test_what_the_readme_links_to_is_there():
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []
