"""The laboratory of namespaces with shaped links, where this process may build one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from benchmarks.devices import capped, devices_for, put
from benchmarks.network import lab as netlab
from benchmarks.network.lab import DEVICE, PAYLOAD, Lab, laboratory
from benchmarks.network.run import network
from benchmarks.network.spec import NetworkConfig, Scaled

from pipefit.errors import PipefitError

REASON = netlab.why_not()
pytestmark = [
    pytest.mark.dist,
    pytest.mark.long,
    pytest.mark.skipif(REASON is not None, reason=f"no laboratory of network namespaces here: {REASON}"),
]

# What waits in a queue when the sender is done must not count: the receiver's clock does.
RECEIVE = """
import socket, time
with socket.create_server(("10.77.0.2", 5000)) as server:
    print("ready", flush=True)
    link, _ = server.accept()
    first = link.recv(1 << 16)
    began, received = time.monotonic(), 0
    while data := link.recv(1 << 16):
        received += len(data)
    print(received / (time.monotonic() - began))
"""
SEND = """
import socket, sys
with socket.create_connection(("10.77.0.2", 5000)) as link:
    link.sendall(bytes(int(sys.argv[1])))
    link.shutdown(socket.SHUT_WR)
    link.recv(1)
"""
COUNT = f"print(open('/sys/class/net/{DEVICE}/statistics/tx_bytes').read())"


def run(lab: Lab, host: int, code: str, *arguments: str) -> str:
    command = lab.inside(host, [sys.executable, "-c", code, *arguments])
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def received_bytes_per_s(lab: Lab, num_bytes: int) -> float:
    command = lab.inside(1, [sys.executable, "-c", RECEIVE])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        run(lab, 0, SEND, str(num_bytes))
        return float(receiver.stdout.read())


def namespaces(name: str) -> list[str]:
    told = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in told.splitlines() if line.startswith(name)]


def devices_here() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def test_a_link_has_the_bandwidth_it_was_asked_for_and_its_device_counts_what_was_sent() -> None:
    before = devices_here()
    with laboratory(2) as lab:
        assert devices_here() == before  # nothing appears beside the machine's own network
        for asked, num_bytes in ((4e6, 2_000_000), (16e6, 8_000_000)):
            lab.shape(asked)
            sent = int(run(lab, 0, COUNT))
            rates = [received_bytes_per_s(lab, num_bytes) for _ in range(3)]
            # A machine that has no time for the two processes makes a link slower, never faster.
            assert max(rates) <= 1.2 * asked * PAYLOAD, rates
            assert 3 * num_bytes <= int(run(lab, 0, COUNT)) - sent <= 1.1 * 3 * num_bytes
    assert not namespaces(lab.name) and devices_here() == before


def test_an_error_inside_takes_the_laboratory_away_with_what_runs_in_it() -> None:
    with pytest.raises(ZeroDivisionError), laboratory(2) as lab:
        sleeper = subprocess.Popen(lab.inside(1, ["sleep", "60"]))
        raise ZeroDivisionError
    assert sleeper.wait(60) == -signal.SIGKILL
    assert not namespaces(lab.name)


# The module alone: its package would load torch.
OWNER = f"""
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("netlab", {netlab.__file__!r})
sys.modules["netlab"] = netlab = importlib.util.module_from_spec(spec)
spec.loader.exec_module(netlab)
with netlab.laboratory(1) as lab:
    print(lab.name, flush=True)
    while True:
        time.sleep(0.1)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_nothing_and_what_a_kill_leaves_the_next_run_removes(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        assert namespaces(name) == [f"{name}-h0", f"{name}-switch"] or len(namespaces(name)) == 2
        owner.send_signal(how)
        owner.wait(60)
    if how == signal.SIGKILL:
        assert len(namespaces(name)) == 2
        assert set(netlab.remove_leftovers()) >= {f"{name}-h0", f"{name}-switch"}
    assert not namespaces(name)


def test_a_laboratory_that_is_in_use_is_no_leftover() -> None:
    with laboratory(1) as lab:
        assert not [name for name in netlab.remove_leftovers() if name.startswith(lab.name)]
        assert len(namespaces(lab.name)) == 2


def require_quota(num_ranks: int) -> None:
    try:
        with capped(devices_for(num_ranks, sorted(os.sched_getaffinity(0)))):
            pass
    except PipefitError as problem:
        pytest.skip(str(problem))


SMALL = {
    "small": Scaled("convnet", "layers=4,channels=8,classes=2000", 16, "vgg16", "15-1", 5.28),
}


@pytest.mark.timeout(600)
def test_every_strategy_trains_on_the_links_and_both_counts_of_its_bytes_agree() -> None:
    require_quota(3)
    lines: list[str] = []
    config = NetworkConfig(ranks=3, models=("small",), steps=1, repeats=1)
    result = network(config, lines.append, SMALL).models[0]
    assert result.ratio == pytest.approx(result.paper_ratio)
    assert [(row.schedule, row.against) for row in result.rows] == [
        ("ddp", 3), ("data-parallel", 3), ("pipedream", 3), ("pipedream", 3), ("ddp", 6), ("1f1b", 6), ("1f1b", 6),
    ]  # fmt: skip
    assert {row.replicas for row in result.rows} == {"3", "1-1-1", "2-1"}
    for row in result.rows:
        # Headers, acknowledgements and, since so little is sent here, what opens and closes a turn.
        assert row.program_bytes <= row.counted_bytes <= 1.1 * row.program_bytes + 60_000 / (6 * 16)
    assert any("repetition 1 of 1" in line for line in lines)
    assert not [name for name in namespaces("pipefit-") if name.startswith(f"pipefit-{os.getpid()}-")]


def test_a_rank_that_fails_is_named_with_its_last_words_and_all_is_taken_away() -> None:
    require_quota(2)
    broken = {"broken": msgspec.structs.replace(SMALL["small"], options="layers=1")}
    with pytest.raises(PipefitError, match=r"(?s)rank \d of the laboratory failed.*expected at least 2 layers"):
        network(NetworkConfig(ranks=2, models=("broken",)), scaled=broken)
    assert not namespaces(f"pipefit-{os.getpid()}-")


def test_ranks_with_a_core_each_run_whether_or_not_there_are_control_groups() -> None:
    devices = devices_for(1, [0])
    with capped(devices) as groups:
        process = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
        put(process.pid, groups[0])
        assert process.wait(60) == 0
    assert not [group for group in groups if group and Path(group).exists()]


def test_a_device_gets_its_share_of_a_core_and_no_more() -> None:
    require_quota(1 + len(os.sched_getaffinity(0)))
    devices = devices_for(2, sorted(os.sched_getaffinity(0))[:1])
    code = "import time; t = time.monotonic()\nwhile time.monotonic() - t < 1.5: pass\nprint(time.process_time())"
    with capped(devices) as groups:
        process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
        put(process.pid, groups[0])
        used = float(process.communicate(timeout=120)[0])
    assert used <= 1.5 * devices.share * 1.25
    assert not [group for group in groups if Path(group).exists()]
