"""The pure half stands without torch, and `import pipefit` stays light."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pipefit"
CONTRACTS = {
    contract["type"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
LAYERS = [{part.strip(" ()") for part in layer.split("|")} for layer in CONTRACTS["layers"]["layers"]]
FIRST_PURE_LAYER = next(i for i, layer in enumerate(LAYERS) if "planner" in layer)
PURE = set().union(*LAYERS[FIRST_PURE_LAYER:])


def in_fresh_python(code: str) -> object:
    """What `code` prints, as JSON, from an interpreter that has imported nothing yet."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def pure_modules() -> list[str]:
    """Every module file of the pure half, by its dotted name."""
    paths = sorted(path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py"))
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if len(name.split(".")) > 1 and name.split(".")[1] in PURE]


def test_importing_pipefit_works_with_torch_blocked_and_loads_nothing_heavy():
    code = """
import sys; sys.modules["torch"] = None
import json, pipefit
print(json.dumps([name for name, module in sys.modules.items() if module is not None]))
"""
    loaded = set(in_fresh_python(code))
    heavy = {"torch", "numpy", "matplotlib", "jinja2", "rich", "cyclopts", "networkx", "safetensors"}
    assert "pipefit" in loaded
    assert loaded & heavy == set()


def test_every_pure_module_imports_with_torch_blocked():
    names = pure_modules()
    assert {"pipefit.errors", "pipefit.units"} <= set(names)
    code = f"""
import sys; sys.modules["torch"] = None
import importlib, json, traceback
failed = {{}}
for name in {names!r}:
    try:
        importlib.import_module(name)
    except BaseException:
        failed[name] = traceback.format_exc()
print(json.dumps(failed))
"""
    failed = in_fresh_python(code)
    assert not failed, "\n".join(failed.values())


def test_the_contract_against_torch_names_the_whole_pure_half():
    there = {name for name in PURE if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()}
    named = {name.removeprefix("pipefit.") for name in CONTRACTS["forbidden"]["source_modules"]}
    assert named == there


@pytest.mark.long
def test_a_checker_of_types_knows_every_public_name_and_no_other(tmp_path):
    import pipefit

    # A file: a package that transformers may import has `import __main__`, which would be the code of an option.
    code = tmp_path / "names.py"
    code.write_text("import pipefit as pf\n" + "".join(f"pf.{name}\n" for name in (*pipefit.__all__, "Pipelin")))
    # The names are pipefit's own: what it imports from elsewhere need not be read.
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nfollow_imports = skip\n[mypy-pipefit.*]\nfollow_imports = silent\n")
    words = ["--config-file", str(settings), "--ignore-missing-imports"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words, "--cache-dir", str(tmp_path / "cache"), str(code)],
        capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT / "src")}, timeout=500,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1 and '"Pipelin"' in errors[0], done.stdout
