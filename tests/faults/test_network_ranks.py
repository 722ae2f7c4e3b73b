"""Networks that lose, delay, cut and reset: the losses of one process, or an end with a name and a resumed run."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.network.lab import laboratory, why_not
from tests.faults.shapes import batches, digest, is_there
from tests.runtime import jobs
from tests.runtime.nodes import ended, start

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.faults]

SCRIPT, SWITCH = (Path(__file__).with_name(name) for name in ("node_job.py", "bad_switch.py"))
PORTS = ("p0", "p1")
DEADLINE_S, CUT_S, AGENT_S = 6, 2.5, 5
ROOT = SCRIPT.parents[2]


class Link:
    """Two nodes, and between them a switch that damages what passes."""

    def __init__(self, lab):
        self.lab, self.switch = lab, f"{lab.name}-switch"
        for port in PORTS:
            subprocess.run(["ip", "-n", self.switch, "link", "set", port, "nomaster"], check=True, timeout=60)
        words = ["ip", "netns", "exec", self.switch, sys.executable, str(SWITCH), *PORTS]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline() == "ready\n"

    def rule(self, words):
        """Lets the switch follow a rule from now on."""
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def lose(self, node):
        """Everything on a node is gone at once."""
        listed = subprocess.run(["ip", "netns", "pids", self.lab.namespace(node)], capture_output=True, text=True)
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def close(self):
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()
        self._process.wait(60)


@pytest.fixture(scope="module")
def lab():
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    with laboratory(2) as made:
        yield made


@pytest.fixture
def link(lab):
    """A link that is whole; what still runs on the nodes after the test is ended."""
    with contextlib.closing(Link(lab)) as made:
        yield made
        for node in range(2):
            made.lose(node)


@pytest.fixture(scope="module")
def whole():
    """Losses and weights of one process."""
    pipe = jobs.pipeline(num_ranks=2)
    return [loss.hex() for loss in pipe.fit(batches())], digest(pipe)


def begin(lab, folder, *words, options=()):
    environment = {"PIPEFIT_DEADLINE_S": str(DEADLINE_S), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return start(lab, (folder, folder), *options, str(SCRIPT), str(folder), *words, **environment)


def until_ready(processes, folder):
    """Waits until the training is in the step of the fault."""
    while not (folder / "ready").exists():
        assert all(process.poll() is None for process in processes), ended(processes)
        time.sleep(0.02)


def ranks_in(folder):
    """The processes of the ranks that began last."""
    return [int((folder / f"rank-{rank}.pid").read_text()) for rank in range(2)]


def until_ended_all(pids):
    """Waits until processes are gone."""
    while any(map(is_there, pids)):
        time.sleep(0.05)


def codes(spoken) -> list[int]:
    return [code for code, _, _ in spoken]


def is_whole(folder, whole) -> bool:
    """Whether a run ended with the losses and the weights of one process, from the step on which it resumed."""
    with contextlib.suppress(FileNotFoundError):
        done, losses, weights = json.loads((folder / "result.json").read_text())
        return [losses, weights] == [whole[0][done:], whole[1]]
    return False


RULES = {
    "a delay of 50 ms": "delay 0.05",
    "5 % of packets lost": "lose 0.05",
    "packets twice and out of order": "shuffle 0.25",
}


@pytest.mark.parametrize("fault", RULES)
def test_a_bad_link_changes_no_number(fault, link, whole, trial, tmp_path):
    link.rule(RULES[fault])
    spoken = ended(begin(link.lab, tmp_path))
    trial(f"two nodes: {fault}", spoken, well=codes(spoken) == [0, 0], resumed=is_whole(tmp_path, whole))


def test_a_link_that_is_cut_and_healed_changes_no_number(link, whole, trial, tmp_path):
    processes = begin(link.lab, tmp_path, "wait")
    until_ready(processes, tmp_path)
    link.rule("cut")
    (tmp_path / "go").touch()
    time.sleep(CUT_S)  # the length of the fault, below the deadline
    link.rule("heal")
    spoken = ended(processes)
    trial("two nodes: the link cut and healed", spoken, well=codes(spoken) == [0, 0], resumed=is_whole(tmp_path, whole))


FAULTS = {
    "the link cut for good": lambda link: link.rule("cut"),
    "all connections reset": lambda link: link.rule("reset"),
    "a node lost": lambda link: link.lose(1),
}
RESTARTS = ("--max-restarts=3", "--rdzv-conf=join_timeout=20,read_timeout=10")


def is_named(fault, spoken):
    """Whether each rank names the other one where nothing passes between them.

    Of a closed connection torch says that it was closed, and not whose: there is no name to check.
    """
    said = [err for _, _, err in spoken]
    if "cut" in fault:
        return all(f"rank {1 - node} is the cause" in said[node] for node in range(2))
    return "lost a dead or unreachable peer" in "".join(said)


@pytest.mark.parametrize("options", [(), RESTARTS], ids=["once", "restarts"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_network_that_fails_for_good_ends_the_run_which_resumes_to_the_bit(
    fault, options, link, whole, trial, tmp_path
):
    processes = begin(link.lab, tmp_path, "wait", options=options)
    until_ready(processes, tmp_path)
    first = ranks_in(tmp_path)
    FAULTS[fault](link)
    (tmp_path / "go").touch()
    until_ended_all(first)
    # torchrun's own processes wait for minutes for a node that has left; only the ranks are on trial.
    for node, process in enumerate(processes):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(AGENT_S)
        link.lose(node)
    link.rule("heal")
    spoken = ended(processes)
    again = ended(begin(link.lab, tmp_path))
    trial(
        f"two nodes: {fault}",
        [spoken, again],
        well=all(codes(spoken)) and codes(again) == [0, 0],
        named=is_named(fault, spoken),
        resumed=is_whole(tmp_path, whole),
    )


PASSING = {
    "the link cut, healed once the ranks ended": lambda link, ranks: link.rule("cut"),
    "all connections reset for a while": lambda link, ranks: link.rule("reset"),
    "a rank killed": lambda link, ranks: os.kill(ranks[1], signal.SIGKILL),
}


@pytest.mark.parametrize("fault", PASSING)
def test_torchrun_starts_the_ranks_of_two_nodes_again_which_resume_to_the_bit(fault, link, whole, trial, tmp_path):
    processes = begin(link.lab, tmp_path, "wait", options=RESTARTS)
    until_ready(processes, tmp_path)
    first = ranks_in(tmp_path)
    PASSING[fault](link, first)
    (tmp_path / "go").touch()
    until_ended_all(first)
    link.rule("heal")
    spoken = ended(processes)
    trial(
        f"two nodes, restarted: {fault}",
        spoken,
        well=codes(spoken) == [0, 0] and not set(first) & set(ranks_in(tmp_path)),
        named=is_named(fault, spoken),
        resumed=is_whole(tmp_path, whole),
    )
