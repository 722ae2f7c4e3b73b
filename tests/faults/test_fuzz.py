"""Random files and random command lines: an answer or one message, never a traceback and never exit code 70."""

import contextlib
import inspect
import io
import json
import string
import time
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.faults.test_flips import written

from pipefit.cli import main
from pipefit.errors import PipefitError

# The few cases of `make test` are the same each time; `make faults` looks for new ones.
CASES = settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MANY = settings(CASES, max_examples=500, derandomize=False)

SMALL = st.integers(-3, 9)
NUMBERS = st.one_of(SMALL, st.sampled_from([2**31, 2**63, 2**64, 10**20, 10**400]), st.floats())
TEXTS = st.one_of(
    st.sampled_from(
        ["", "nan", "inf", "-1", "0", "1e999", "1.5", "9" * 5000, "cpu", "foo", "2,1", "a=b", "=", "1 GiB"]
    ),
    st.text(string.printable, max_size=8),
    NUMBERS.map(str),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
VERBS = {
    "draw": ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "pipedream", "spilled", "nothing", "mine.pipe"],
    "verify": ["mine.pipe", "plan.json", "p.json", "none.pipe"],
    "simulate": ["mine.pipe", "plan.json", "p.json", "none.pipe"],
    "plan": [],
    "synthesize": [],
    "train": [],
    "schedules": [],
    "report": [".", "none"],
    "study": ["study.toml", "t.toml", "none"],
    "run": ["script.py", "none"],
    "links": [],
    "reproduce": ["bubble", "none", ""],
    "cut": ["mlp", "none", "mlp:x"],
}
MOST_S = 10.0
"""Seconds of processor time that an answer may take."""


def options_of(verb: str) -> list[str]:
    """The options of a verb, and one that it does not have."""
    known = inspect.signature(import_module(f"pipefit.cli.{verb}").command).parameters.values()
    named = [one.name for one in known if one.kind is one.KEYWORD_ONLY]
    return ["--nothing", *(f"--{name.replace('_', '-')}" for name in named)]


VALUES = st.one_of(
    TEXTS, st.sampled_from(["mine.pipe", "plan.json", "p.json", "t.toml", "study.toml", "local:2", "host"])
)


def answer(words: list[str]) -> tuple[int, str]:
    """The exit code of a command and its standard error."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(words)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
    return code, said.getvalue()


def check_answer(trial, fault, words):
    began = time.process_time()
    code, said = answer(words)
    seconds = time.process_time() - began
    well = code in (0, 1, 2) and "Traceback" not in said and "mistake of pipefit" not in said and seconds < MOST_S
    trial(
        fault,
        f"pipefit {words!r}: {code} {said[-400:]} {seconds:.1f} s",
        well=well,
        named=bool(said.strip()) if code == 2 else None,
    )


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a file of each kind, as the working directory; training ends before it starts."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    (tmp_path / "script.py").write_text("raise SystemExit(3)")
    for starts in ("cli.train._trained", "runtime.launch.launch", "study.execute.study_run.StudyRun.run"):
        monkeypatch.setattr(f"pipefit.{starts}", _started)
    return tmp_path


def _started(*_, **options):
    raise PipefitError("the run would start now")


# ---- files -------------------------------------------------------------------------------------------------------


def replaced(data, path, value):
    """JSON data with the value at one place replaced."""
    if not path:
        return value
    if isinstance(data, dict) and data:
        key = sorted(data)[path[0] % len(data)]
        return {**data, key: replaced(data[key], path[1:], value)}
    if isinstance(data, list) and data:
        index = path[0] % len(data)
        return [*data[:index], replaced(data[index], path[1:], value), *data[index + 1 :]]
    return value


def json_files(trial, place, path, value):
    for name, words in (("plan.json", ["verify"]), ("plan.json", ["simulate"]), ("p.json", ["plan", "--profile"])):
        whole = (place / name).read_text()
        changed = replaced(json.loads(whole), path, value)
        (place / name).write_text(json.dumps(changed))
        more = ["--topology", "local:2", "-m", "2"] if words[0] == "plan" else []
        check_answer(
            trial, f"a random value in {'a plan' if name == 'plan.json' else 'a profile'}", [*words, name, *more]
        )
        (place / name).write_text(whole)


def toml_value(value) -> str:
    return json.dumps(value) if not isinstance(value, dict | type(None)) else "{}"


def toml_files(trial, place, line, value):
    for name, words in (("t.toml", ["simulate", "mine.pipe", "--topology"]), ("study.toml", [])):
        file = Path(place / name)
        lines = file.read_text().splitlines()
        index = line % len(lines)
        key = lines[index].partition("=")[0]
        changed = [*lines[:index], f"{key}= {toml_value(value)}" if "=" in lines[index] else "", *lines[index + 1 :]]
        file.write_text("\n".join(changed))
        if words:
            check_answer(trial, "a random value in a topology", [*words, name])
        else:
            study_file(trial, file)
        file.write_text("\n".join(lines))


def study_file(trial, file):
    from pipefit.study.file import load_study

    try:
        load_study(file)
        trial("a random value in a study file", "", well=True)
    except PipefitError as problem:
        trial("a random value in a study file", "", well=True, named=file.name in str(problem))
    except Exception as problem:
        trial("a random value in a study file", f"{file.read_text()}\n{problem!r}", well=False)


def program_files(trial, place, changes):
    whole = (place / "mine.pipe").read_text()
    lines = whole.splitlines()
    for index, word, value in changes:
        words = lines[index % len(lines)].split(" ")
        words[word % len(words)] = value
        lines[index % len(lines)] = " ".join(words)
    (place / "mine.pipe").write_text("\n".join(lines), encoding="utf-8", errors="replace")
    for verb in (["verify"], ["simulate"], ["draw", "-p", "2", "-m", "2"]):
        check_answer(trial, "a random program", [*verb, "mine.pipe"])
    (place / "mine.pipe").write_text(whole)


PATHS = st.lists(st.integers(0, 12), max_size=6)
WORDS = st.one_of(
    TEXTS, st.sampled_from(["s0", "s9", "m7", "m99999999", "w5", ">1", "<0", ">9", "bwd", "step", "reduce", "*"])
)
CHANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5), WORDS), min_size=1, max_size=4)
LINES = st.lists(st.tuples(st.integers(0, 99), st.none() | VALUES), max_size=5)


def command_lines(trial, place, verb, first, options):
    words = [verb, *(VERBS[verb][first % len(VERBS[verb]) :][:1] if VERBS[verb] else [])]
    known = options_of(verb)
    for number, value in options:
        option = known[number % len(known)]
        words += [option] if value is None else [option, value]
    if verb == "draw":
        words += [] if "--stages" in words else ["-p", "2"]
        words += [] if "--microbatches" in words else ["-m", "2"]
    check_answer(trial, "a random command line", words)


FUZZ = {
    "plans and profiles": (json_files, (PATHS, JSON)),
    "topologies and studies": (toml_files, (st.integers(0, 20), JSON)),
    "programs": (program_files, (CHANGES,)),
    "command lines": (command_lines, (st.sampled_from(sorted(VERBS)), st.integers(0, 9), LINES)),
}


@pytest.mark.parametrize("kind", FUZZ)
@pytest.mark.slow
def test_random_input_gets_an_answer(kind, trial, place):
    run, strategies = FUZZ[kind]
    CASES(given(st.tuples(*strategies))(lambda values: run(trial, place, *values)))()


@pytest.mark.parametrize("kind", FUZZ)
@pytest.mark.faults
def test_very_much_random_input_gets_an_answer(kind, trial, place):
    run, strategies = FUZZ[kind]
    MANY(given(st.tuples(*strategies))(lambda values: run(trial, place, *values)))()
