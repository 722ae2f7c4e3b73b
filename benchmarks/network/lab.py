"""A laboratory of hosts with slow links on one machine: Linux network namespaces on a bridge, shaped by `tc`.

    host 0  eth0 ═══ p0 ┐
    host 1  eth0 ═══ p1 ├ br0     one namespace per host, one for the switch; ═ is a veth pair,
    host 2  eth0 ═══ p2 ┘         limited to the rate at both ends: each way, like a full-duplex port

Nothing is made in the namespace of the machine itself, so removing the namespaces removes everything: veth pairs,
bridge and queues. Their names hold the number of the process that made them, so that the next run finds and removes
those of a killed run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipefit.errors import PipefitError

DEVICE = "eth0"
"""The network device of every host."""

PAYLOAD = 1448 / 1514
"""The share of a link's rate that a program gets: the rest of a full packet is headers of Ethernet, IP and TCP."""

_NAME = re.compile(r"pipefit-(\d+)-\w+")
_PREFIX = "10.77.0"
_MOST_HOSTS = 64
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_COMMAND_S = 20.0

# A bucket of so many seconds at the full rate: short compared with the messages measured, and never below a few
# packets, else the timer of the kernel cannot keep the rate.
_BURST_S, _LEAST_BURST_BYTES = 2e-3, 8192
# How long a packet may wait in a port's queue before it is dropped, as in a switch with little memory.
_QUEUE_S = 0.1

Command = tuple[str, ...]


@dataclass(frozen=True)
class Lab:
    """Hosts on a switch. The methods act on the machine; what they run is given by the functions below.

    Attributes:
        name: beginning of its namespaces' names.
        num_hosts: how many there are.
    """

    name: str
    num_hosts: int

    def namespace(self, host: int) -> str:
        """The namespace of a host."""
        return f"{self.name}-h{host}"

    def address(self, host: int) -> str:
        """Its address, which only the other hosts can reach."""
        return f"{_PREFIX}.{host + 1}"

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """A command, as it runs on a host."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def shape(self, bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> None:
        """Holds every host's link to a rate, each way, and delays what it sends.

        Raises:
            PipefitError: the kernel has no such queue, above all netem for a latency.
        """
        _run_all(shape_commands(self, bandwidth_bytes_per_s, latency_s))


def setup_commands(lab: Lab) -> list[Command]:
    """The commands that make a laboratory."""
    switch = f"{lab.name}-switch"
    commands: list[Command] = [
        ("ip", "netns", "add", switch),
        ("ip", "-n", switch, "link", "add", "br0", "type", "bridge"),
        ("ip", "-n", switch, "link", "set", "br0", "up"),
    ]
    for host in range(lab.num_hosts):
        own, port = lab.namespace(host), f"p{host}"
        commands += [
            ("ip", "netns", "add", own),
            ("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", own),
            ("ip", "-n", switch, "link", "set", port, "master", "br0", "up"),
            ("ip", "-n", own, "addr", "add", f"{lab.address(host)}/24", "dev", DEVICE),
            ("ip", "-n", own, "link", "set", "lo", "up"),
            ("ip", "-n", own, "link", "set", DEVICE, "up"),
        ]
    return commands


def shape_commands(lab: Lab, bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> list[Command]:
    """The commands that limit the links to a rate; the delay is on the sending side, so it counts once per message.

    Raises:
        PipefitError: no rate, or a delay below 0.
    """
    if not bandwidth_bytes_per_s >= 1e3 or not 0 <= latency_s < 10:
        raise PipefitError(
            f"a link needs a bandwidth of at least 1 kB/s and a latency below 10 s, got {bandwidth_bytes_per_s:g} B/s "
            f"and {latency_s:g} s"
        )
    burst = max(round(bandwidth_bytes_per_s * _BURST_S), _LEAST_BURST_BYTES)
    waiting = round(bandwidth_bytes_per_s * _QUEUE_S) + burst
    rate = ("tbf", "rate", f"{round(8 * bandwidth_bytes_per_s)}bit", "burst", f"{burst}", "limit", f"{waiting}")
    switch = f"{lab.name}-switch"
    commands: list[Command] = []
    for host in range(lab.num_hosts):
        own = ("tc", "-n", lab.namespace(host), "qdisc", "replace", "dev", DEVICE)
        commands.append((*own, "root", "handle", "1:", *rate))
        if latency_s:
            # The data under way at once, in addition to the queue.
            packets = round((waiting + bandwidth_bytes_per_s * latency_s) / 500) + 100
            delay = ("netem", "delay", f"{round(latency_s * 1e6)}us", "limit", f"{packets}")
            commands.append((*own, "parent", "1:", *delay))
        commands.append(("tc", "-n", switch, "qdisc", "replace", "dev", f"p{host}", "root", "handle", "1:", *rate))
    return commands


def teardown_commands(names: Sequence[str]) -> list[Command]:
    """The commands that end namespaces, and with them all that is inside."""
    return [("ip", "netns", "del", name) for name in names]


@contextlib.contextmanager
def laboratory(num_hosts: int) -> Iterator[Lab]:
    """A laboratory for the length of a `with`; SIGTERM ends it as an exception does.

    Raises:
        PipefitError: it cannot be made; see `why_not` for the usual reasons.
    """
    if not 1 <= num_hosts <= _MOST_HOSTS:
        raise PipefitError(f"hosts: expected 1 to {_MOST_HOSTS}, got {num_hosts}")
    remove_leftovers()
    lab = Lab(f"pipefit-{os.getpid()}", num_hosts)
    with _sigterm_as_exit():
        try:
            _run_all(setup_commands(lab))
            yield lab
        finally:
            _remove(sorted(name for name in _namespaces() if name.startswith(f"{lab.name}-")))


def remove_leftovers() -> list[str]:
    """Ends the laboratories of processes that are no more; gives the names of their namespaces."""
    left = []
    for name in _namespaces():
        match = _NAME.fullmatch(name)
        if match and not Path(f"/proc/{match.group(1)}").exists():
            left.append(name)
    _remove(left)
    return left


def why_not(latency_s: float = 0.0) -> str | None:
    """Why there can be no laboratory here, in a few words; None where there can.

    The last word is a trial: a laboratory of one host is made, shaped and taken away.
    """
    if sys.platform != "linux":
        return f"network namespaces are Linux's own, and this is {sys.platform}"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no command {' and '.join(missing)} here; install iproute2"
    if not may_make_namespaces(Path("/proc/self/status").read_text(encoding="ascii", errors="replace")):
        return "only root may make network namespaces (CAP_NET_ADMIN and CAP_SYS_ADMIN)"
    try:
        with laboratory(1) as lab:
            lab.shape(1e6, latency_s)
    except PipefitError as problem:
        return str(problem)
    return None


def may_make_namespaces(status: str) -> bool:
    """Whether a process with this /proc/…/status has the capabilities."""
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", status, re.MULTILINE)
    held = int(match.group(1), 16) if match else 0
    return all(held >> capability & 1 for capability in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN))


def sent_bytes(device: str = DEVICE) -> int:
    """Bytes that have left a network device of this process's namespace since it was made, headers included."""
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.startswith("pipefit-")]


def _remove(names: Sequence[str]) -> None:
    """Kills what runs in namespaces and deletes them; a namespace lives as long as a process in it."""
    for name in names:
        inside = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
        for pid in inside.stdout.split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
    for command in teardown_commands(names):
        subprocess.run(command, capture_output=True, timeout=_COMMAND_S, check=False)


def _run_all(commands: Sequence[Command]) -> None:
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        if done.returncode:
            raise PipefitError(_cure(command, done.stderr.strip() or f"exit code {done.returncode}"))


def _cure(command: Command, said: str) -> str:
    first = said.splitlines()[0]
    for kind, without in (("netem", "leave the latency out"), ("tbf", "the laboratory cannot do without it")):
        if kind in command and ("unknown" in said or "not found" in said or "No such file" in said):
            return f"this kernel has no {kind} queue ({first}); {without}"
    return f"`{' '.join(command)}` failed: {first}"


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """SIGTERM runs the `finally` of whoever is inside, where nobody else has a handler."""

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    try:
        before = signal.signal(signal.SIGTERM, leave) if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else None
    except ValueError:  # not the main thread
        before = None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
