"""Runs the tests marked `gpu` on the simulated device: what it finds fails them, and so does a new wait of the host.

`tests/sham/waits.json` lists for each case the places of pipefit where the host waits for a device, in any process.
With PIPEFIT_SHAM_WRITE=1 it is written anew; look at the difference before you commit it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).with_name("waits.json")

NOT_HERE = {
    "test_one_rank_with_nccl_begins_trains_and_ends": "a torch for the CPU has no NCCL",
    "test_a_program_that_has_used_the_gpu_cannot_fork_workers": "this driver opens no /dev/nvidia0",
    "test_records_come_back_as_they_were_while_the_device_computes": "products as large as a CPU needs minutes for",
    "test_every_way_of_the_benchmark_runs": "it also runs torch's own sharding, with NCCL",
    "test_a_cap_covers_what_the_libraries_of_the_gpu_take": "it measures products that a CPU needs minutes for",
    "test_a_plan_for_a_cap_keeps_it": "a model as large as a CPU needs minutes for",
    "test_tf32_rounds_products": "its kernels are those of the CPU, which round nothing",
}
"""Tests that a simulated device cannot run, with the reason."""


def listed() -> dict[str, list[str]]:
    """The known waits of each case."""
    if not LIST.exists():
        return {}
    groups = json.loads(LIST.read_text())
    return {case: group["waits"] for group in groups for case in group["cases"]}


def write(found: dict[str, list[str]]) -> None:
    """Writes the list: the cases that have the same waits are together."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for case, waits in sorted(found.items()):
        groups.setdefault(tuple(waits), []).append(case)
    rows = [{"waits": list(waits), "cases": cases} for waits, cases in sorted(groups.items())]
    LIST.write_text(json.dumps(rows, indent=1) + "\n")


class Sham:
    """The plugin: one log for all processes of all tests."""

    def __init__(self, log: Path) -> None:
        self.log, self.known, self.found = log, listed(), listed()
        os.environ["PIPEFIT_SHAM_LOG"] = str(log)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            reason = NOT_HERE.get(item.name)
            if reason:
                item.add_marker(pytest.mark.skip(reason=f"not on the simulated GPU: {reason}"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.start = self.log.stat().st_size
        sys.modules["sham_driver"].begin_case()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield
        with self.log.open() as file:
            file.seek(self.start)
            lines = [json.loads(line) for line in file]
        expects_findings = item.get_closest_marker("finds") is not None
        findings = {text for kind, text in lines if kind == "finding"}
        if findings and not expects_findings:
            pytest.fail("\n".join(sorted(findings)), pytrace=False)
        waits = sorted({text for kind, text in lines if kind == "wait"})
        case = item.nodeid.removeprefix("tests/")
        self.found[case] = waits
        new = set(waits) - set(self.known.get(case, []))
        if new and "PIPEFIT_SHAM_WRITE" not in os.environ:
            pytest.fail(f"the host waits for the GPU at new places: {sorted(new)}", pytrace=False)

    def pytest_sessionfinish(self) -> None:
        self.log.unlink()
        if "PIPEFIT_SHAM_WRITE" in os.environ:
            assert "PYTEST_XDIST_WORKER" not in os.environ, "only one process can write the list: -n 0"
            write({case: waits for case, waits in self.found.items() if waits})


def pytest_configure(config: Any) -> None:
    """Begins where the driver is loaded; without it there is nothing to do."""
    if "sham_driver" in sys.modules:
        handle, path = tempfile.mkstemp(prefix="pipefit-sham-", suffix=".jsonl")
        os.close(handle)
        config.pluginmanager.register(Sham(Path(path)))
