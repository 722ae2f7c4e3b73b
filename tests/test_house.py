"""The size and the order of the house itself."""

import ast
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

from tests.sham.mutations import MUTATIONS

PACKAGE = Path(__file__).parents[1] / "src" / "pipefit"
MODULES = sorted(PACKAGE.rglob("*.py"))


def statements(tree: ast.AST) -> Iterator[int]:
    """The size of each statement in nodes of the syntax tree; a compound one counts by its head, docstrings not at all.

    Unlike lines of code it does not change with wrapping, so nothing is gained by packing.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield 1 + size(node.args)
        elif isinstance(node, ast.ClassDef):
            yield 1 + sum(map(size, node.bases))
        elif isinstance(node, ast.If | ast.While):
            yield 1 + size(node.test)
        elif isinstance(node, ast.For):
            yield 1 + size(node.target) + size(node.iter)
        elif isinstance(node, ast.With):
            yield 1 + sum(map(size, node.items))
        elif isinstance(node, ast.Try | ast.ExceptHandler):
            yield 1
        elif isinstance(node, ast.stmt):
            yield size(node)


def size(node: ast.AST) -> int:
    return sum(1 for _ in ast.walk(node))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, names: set[str]) -> set[str]:
    """The modules of the package that a module imports: at once, later, or only for the checker of types."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & names or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & names


TREES = {path: ast.parse(path.read_text()) for path in MODULES}


def test_the_package_does_not_grow():
    """Nodes of the syntax tree. Lower the number with what you remove."""
    assert sum(map(size, TREES.values())) <= 517_813


def test_statements_hold_one_thought():
    """Nodes per statement, of the whole package. Lower the number with what you spread."""
    assert statistics.mean(nodes for tree in TREES.values() for nodes in statements(tree)) <= 11.3


def folder_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def num_lines_of_code(path: Path) -> int:
    """Lines that are not blank, nor comments, nor in texts that stand alone."""
    numbers = set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip() and not line.strip().startswith("#"):
            numbers.add(number)
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            numbers -= set(range(node.lineno, node.end_lineno + 1))
    return len(numbers)


FOLDERS = sorted({folder_of(path) for path in MODULES if path.parent != PACKAGE})
LIMITS = (11.5, 22, 18)
"""Nodes per statement, their mean and their 90th percentile; and ternaries per 1,000 lines of code."""


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_reads_one_thought_after_the_other(folder):
    modules = [path for path in MODULES if folder_of(path) == folder]
    sizes = sorted(nodes for path in modules for nodes in statements(TREES[path]))
    ternaries = sum(isinstance(node, ast.IfExp) for path in modules for node in ast.walk(TREES[path]))
    most_mean, most_usual, most_ternaries = LIMITS
    assert statistics.mean(sizes) <= most_mean
    assert sizes[len(sizes) * 9 // 10] <= most_usual
    assert 1000 * ternaries <= most_ternaries * sum(map(num_lines_of_code, modules))


def test_no_module_has_more_than_500_lines():
    assert [name_of(path) for path in MODULES if len(path.read_text().splitlines()) > 500] == []


def test_modules_do_not_import_each_other_in_a_circle():
    names = {name_of(path) for path in MODULES}
    graph = nx.DiGraph()
    for path in MODULES:
        graph.add_edges_from((name_of(path), other) for other in imports_of(path, names) if other != name_of(path))
    assert list(nx.simple_cycles(graph)) == []


def test_one_module_alone_knows_calls_of_cuda():
    """Elsewhere a device is asked what it can do, not whether it is NVIDIA's."""
    of_cuda = re.compile(r'torch\.cuda|_cuda_|\bis_cuda\b|[!=]= "cuda"')
    homes = [name_of(path) for path in MODULES if of_cuda.search(path.read_text())]
    assert homes == ["pipefit.stage.accelerator"]


def test_each_mutation_for_the_simulated_gpu_is_of_text_that_is_there_once():
    counts = {mutation.name: (PACKAGE / mutation.path).read_text().count(mutation.old) for mutation in MUTATIONS}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert all(mutation.new != mutation.old for mutation in MUTATIONS)


SAME_THING = {"registry", "versions"}
"""Names that stand for one thing in several folders."""


def test_no_two_modules_have_one_name():
    """A verb of the command line may have the name of what it calls."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        if path.stem not in ("__init__", "__main__", *SAME_THING) and path.parent.name != "cli":
            homes[path.stem].append(name_of(path))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}
