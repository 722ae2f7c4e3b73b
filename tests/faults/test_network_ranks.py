"""Networks that lose, delay, cut and reset: the losses of one process, or an end with a name, and the same losses later."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from benchmarks.network.lab import DEVICE, laboratory, why_not
from tests.faults.shapes import batches, digest
from tests.runtime import jobs
from tests.runtime.nodes import ended, start

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.faults]

SCRIPT = Path(__file__).with_name("node_job.py")
DEADLINE_S, CUT_S = 6, 2.5
ROOT = str(SCRIPT.parents[2])


@pytest.fixture(scope="module")
def lab():
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    with laboratory(2) as made:
        yield made


@pytest.fixture(scope="module")
def whole():
    """Losses and weights of one process."""
    pipe = jobs.pipeline(num_ranks=2)
    return [loss.hex() for loss in pipe.fit(batches())], digest(pipe)


def queue(lab, *words):
    """Gives both ends of the link a queue, in place of the one they have."""
    for host in range(2):
        command = ["tc", "-n", lab.namespace(host), "qdisc", "replace", "dev", DEVICE, "root", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            pytest.skip(f"this kernel has no such queue: {done.stderr.strip()}")


def begin(lab, folder, *words):
    environment = {"PIPEFIT_DEADLINE_S": str(DEADLINE_S), "PYTHONPATH": ROOT}
    return start(lab, (folder, folder), str(SCRIPT), str(folder), *words, **environment)


def until_ready(processes, folder):
    """Waits until the training is in the step of the fault."""
    while not (folder / "ready").exists():
        assert all(process.poll() is None for process in processes), ended(processes)
        time.sleep(0.02)


def is_whole(folder, whole) -> bool:
    """Whether a run ended with the losses and the weights of one process, from the step on which it resumed."""
    with contextlib.suppress(FileNotFoundError):
        done, losses, weights = json.loads((folder / "result.json").read_text())
        return [losses, weights] == [whole[0][done:], whole[1]]
    return False


QUEUES = {
    "a delay of 50 ms": ("netem", "delay", "50ms", "10ms"),
    "5 % of packets lost": ("netem", "loss", "5%"),
    "packets twice and out of order": ("netem", "delay", "5ms", "reorder", "25%", "duplicate", "5%"),
}


@pytest.mark.parametrize("fault", QUEUES)
def test_a_bad_link_changes_no_number(fault, lab, whole, trial, tmp_path):
    queue(lab, *QUEUES[fault])
    codes = [code for code, _, _ in (spoken := ended(begin(lab, tmp_path)))]
    queue(lab, "pfifo")
    trial(f"two nodes: {fault}", spoken, well=codes == [0, 0], resumed=is_whole(tmp_path, whole))


def test_a_link_that_is_cut_and_healed_changes_no_number(lab, whole, trial, tmp_path):
    processes = begin(lab, tmp_path, "wait")
    until_ready(processes, tmp_path)
    queue(lab, "netem", "loss", "100%")
    (tmp_path / "go").touch()
    time.sleep(CUT_S)  # the length of the fault, below the deadline
    queue(lab, "pfifo")
    codes = [code for code, _, _ in (spoken := ended(processes))]
    trial("two nodes: the link cut for 2.5 s", spoken, well=codes == [0, 0], resumed=is_whole(tmp_path, whole))


def cut(lab):
    queue(lab, "netem", "loss", "100%")


def reset(lab):
    """The kernel closes all connections of a node that are not of torchrun's store, and tells the other ends."""
    named = ["ss", "-K", "-t", "state", "established", "sport", "!=", ":29500", "and", "dport", "!=", ":29500"]
    done = subprocess.run(lab.inside(1, named), capture_output=True, text=True, timeout=60, check=False)
    if done.returncode or "ESTAB" not in done.stdout and len(done.stdout.splitlines()) < 2:
        pytest.skip(f"this kernel cannot close the connections of others: {done.stdout} {done.stderr}")


def lose(lab):
    """A node loses its power: everything on it is gone at once."""
    listed = subprocess.run(["ip", "netns", "pids", lab.namespace(1)], capture_output=True, text=True, check=True)
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


FAULTS = {"the link cut for good": cut, "all connections reset": reset, "a node lost": lose}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_network_that_fails_for_good_ends_the_run_which_resumes_to_the_bit(fault, lab, whole, trial, tmp_path):
    processes = begin(lab, tmp_path, "wait")
    until_ready(processes, tmp_path)
    FAULTS[fault](lab)
    (tmp_path / "go").touch()
    spoken = ended(processes)
    queue(lab, "pfifo")
    said = "".join(err for _, _, err in spoken)
    again = ended(begin(lab, tmp_path))
    trial(
        f"two nodes: {fault}",
        [spoken, again],
        well=all(code for code, _, _ in spoken) and [code for code, _, _ in again] == [0, 0],
        named="rank 1" in said,
        resumed=is_whole(tmp_path, whole),
    )
