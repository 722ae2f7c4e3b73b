"""`pipefit watch` among ports that are taken, clients that leave, and requests that are not for its page."""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.verbs import refused

from pipefit.run import following
from pipefit.run.following import server_of

pytestmark = pytest.mark.slow

FAULT = "ports and clients of `pipefit watch`"
HOST = "127.0.0.1"
SECRET = "a secret"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run, with a file next to it that nobody may read through the page."""
    made = tmp_path / "run"
    made.mkdir()
    (made / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5}) + "\n")
    for place in (made, tmp_path):
        (place / "secret.txt").write_text(SECRET)
    return made


@contextlib.contextmanager
def watching(folder: Path, port: int = 0) -> Iterator[int]:
    """A watcher in a thread, and its port."""
    with server_of(folder, port) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def port(folder: Path) -> Iterator[int]:
    with watching(folder) as made:
        yield made


def asked(port: int, path: str = "/", host: str | None = HOST, method: str = "GET") -> tuple[int, str]:
    """The code and the rest of the answer to a request, whose path is sent as it is."""
    lines = [f"{method} {path} HTTP/1.1", "Connection: close", *([f"Host: {host}"] if host is not None else [])]
    with socket.create_connection((HOST, port)) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        answer = b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()
    return int(answer.split()[1]), answer


def is_served(port: int) -> bool:
    code, text = asked(port)
    return code == 200 and "step 1, loss 0.5000" in text


def test_a_port_that_is_taken_is_refused_in_one_message(folder, port, trial, capsys):
    said = refused(capsys, "watch", str(folder), "--port", str(port), "--json")
    well = said.count("\n") == 1 and is_served(port)
    trial(FAULT, said, well=well, named=f"--port {port}: cannot be used" in said)


@pytest.mark.faults
@pytest.mark.parametrize("number", ["-1", "65536", "99999999999999999999", "x", "80.5"])
def test_a_port_that_cannot_be_is_refused_in_one_message(number, folder, trial, capsys):
    said = refused(capsys, "watch", str(folder), "--port", number, "--json")
    trial(FAULT, said, well=said.count("pipefit watch: ") == 1, named="--port" in said and number in said)


@pytest.mark.faults
def test_two_watchers_of_a_run_serve_the_same_page(folder, port, trial):
    with watching(folder) as second:
        trial(FAULT, second, well=second != port and is_served(port) and is_served(second))
    trial(FAULT, "the other one has ended", well=is_served(port))


OUTSIDE = [
    "/secret.txt", "/../secret.txt", "/..%2fsecret.txt", "/%2e%2e/secret.txt", "//secret.txt", "/./secret.txt",
    "/metrics.jsonl", "/etc/passwd", "//etc/passwd", "/?x", "/\\..\\secret.txt", "*", "secret.txt",
    "file:///etc/passwd", f"http://{HOST}/secret.txt", "/" + "a" * 70_000,
]  # fmt: skip


@pytest.mark.faults
def test_paths_that_are_not_the_page_are_refused(port, trial):
    for path in OUTSIDE:
        code, text = asked(port, path)
        trial(FAULT, path[:50], well=code in (404, 414) and SECRET not in text and is_served(port))


FOREIGN = [
    None, "", "evil.example", f"evil.example:{80}", f"{HOST}.evil.example", "localhost.evil.example:80",
    "evil.example:127.0.0.1", f"evil.example/{HOST}", "0.0.0.0", "[::1]:80", f"x@{HOST}",
]  # fmt: skip


@pytest.mark.faults
def test_names_that_are_not_of_this_machine_are_refused(port, trial):
    for host in FOREIGN:
        trial(FAULT, host, well=asked(port, host=host)[0] == 404 and is_served(port))
    # A browser leaves out the port where it is 80.
    for host in (HOST, "localhost", f"{HOST}:{port}", f"localhost:{port}"):
        trial(FAULT, host, well=asked(port, host=host)[0] == 200)


@pytest.mark.faults
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "NONSENSE"])
def test_requests_that_change_something_are_refused(method, port, trial):
    trial(FAULT, method, well=asked(port, method=method)[0] == 501 and is_served(port))


def reset(client: socket.socket) -> None:
    """Closes a connection by a reset."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


REQUEST = f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()


def silent_client(port: int) -> socket.socket:
    """A client that has sent half a request."""
    client = socket.create_connection((HOST, port))
    client.sendall(REQUEST[:10])
    return client


def test_clients_that_leave_are_no_error(port, trial, capfd, monkeypatch):
    """One leaves within its request, one before a long answer, and one has not said all."""
    answering, gone, ended = threading.Event(), threading.Event(), threading.Semaphore(0)
    original = ThreadingHTTPServer.shutdown_request

    def shutdown_request(*args: Any) -> None:
        original(*args)
        ended.release()

    def long_page(folder: Path, follows: bool) -> str:
        answering.set()
        gone.wait()
        return "x" * (64 << 20)

    monkeypatch.setattr(ThreadingHTTPServer, "shutdown_request", shutdown_request)
    reset(silent_client(port))
    ended.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(following, "page_of", long_page)
        client = socket.create_connection((HOST, port))
        client.sendall(REQUEST)
        answering.wait()
        reset(client)
        gone.set()
        ended.acquire()
    said = capfd.readouterr().err
    trial(FAULT, said, well="Traceback" not in said)
    with contextlib.closing(silent_client(port)):
        trial(FAULT, "a client that has not said all", well=asked(port)[0] == 200)
