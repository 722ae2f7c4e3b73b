import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.runtime import jobs

from pipefit.errors import PipefitError
from pipefit.runtime.launch import LaunchError, launch, run_script

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
from torch import nn
import pipefit as pf

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
pipe = pf.Pipeline(model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1), microbatches=2)
generator = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    loss = pipe.step(x, y)
with open(f"{sys.argv[1]}-{pipe.rank}", "w") as file:
    file.write(repr(loss))
"""


def test_results_come_back_by_rank():
    assert launch(jobs.nothing, 3, quiet=True) == [0, 1, 2]


def test_no_ranks_are_refused():
    with pytest.raises(PipefitError, match="at least 1, got 0"):
        launch(jobs.nothing, 0)


def test_ranks_have_the_environment_of_the_moment(monkeypatch):
    monkeypatch.setenv("PIPEFIT_TEST_WORD", "now")
    assert launch(jobs.environment, 2, "PIPEFIT_TEST_WORD", quiet=True) == [(0, "now"), (1, "now")]


@pytest.mark.parametrize(("asked", "threads"), [("3", 3), ("", max(1, os.cpu_count() // 2))])
def test_ranks_have_the_threads_that_the_environment_asks_for(asked, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)  # a sum by another number of threads is rounded differently
    assert launch(jobs.threads, 2, quiet=True) == [threads, threads]


def test_two_processes_compute_what_one_does():
    losses, weights = jobs.train()
    for found, state in launch(jobs.train, 2, quiet=True):
        assert found == losses
        assert all(torch.equal(state[name], weights[name]) for name in weights)


def test_more_ranks_than_cores_compute_the_same():
    losses, weights = jobs.train({"stages": 4})
    for found, state in launch(jobs.train, 4, quiet=True):
        assert found == losses
        assert all(torch.equal(state[name], weights[name]) for name in weights)


def test_a_closed_pipeline_gives_every_process_the_whole_trained_model():
    for before, after, shape in launch(jobs.close_and_use, 2, quiet=True):
        assert before.keys() == after.keys() and shape == [8, 3]
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_spilled_model_is_given_back_in_parts():
    """None of the processes need have memory for the whole."""
    first, last = launch(jobs.close_spilled, 2, quiet=True)
    assert any(first)
    assert any(last)
    assert not any(map(all, zip(first, last, strict=True)))


def test_a_script_needs_no_main_guard(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launch(run_script, 2, str(script), [str(tmp_path / "loss")], quiet=True)
    losses = [(tmp_path / f"loss-{rank}").read_text() for rank in range(2)]
    assert losses[0] == losses[1] and float(losses[0]) > 0


def test_a_script_that_ends_with_sys_exit_0_has_not_failed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + "\nsys.exit(0)\n")
    launch(run_script, 2, str(script), [str(tmp_path / "loss")], quiet=True)


def _when_ready(path: Path, number: int) -> threading.Thread:
    """Sends this process a signal once the ranks are at work."""

    def send() -> None:
        while not path.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def test_sigterm_stops_all_ranks_after_the_same_step_and_lets_them_save(tmp_path):
    _when_ready(tmp_path / "ready", signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        launch(jobs.train_until_stopped, 2, str(tmp_path / "run"), str(tmp_path / "ready"), quiet=True)
    assert left.value.code == 143
    assert [path.name.split("-")[0] for path in (tmp_path / "run").iterdir()] == ["step"]


def test_ctrl_c_stops_all_ranks_after_the_same_step_and_lets_them_save(tmp_path):
    _when_ready(tmp_path / "ready", signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        launch(jobs.train_until_stopped, 2, str(tmp_path / "run"), str(tmp_path / "ready"), quiet=True)
    assert [path.name.split("-")[0] for path in (tmp_path / "run").iterdir()] == ["step"]


def test_a_signal_to_the_whole_process_group_lets_the_ranks_save_and_leaves_nothing(tmp_path):
    """The server of the ranks and the ranks get it too, and the ranks a second time from the launcher."""
    code = (
        "from pipefit.runtime.launch import launch\nfrom tests.runtime import jobs\nif __name__ == '__main__':\n"
        f"    launch(jobs.train_until_stopped, 2, {str(tmp_path / 'run')!r}, {str(tmp_path / 'ready')!r}, quiet=True)\n"
    )
    temporary = tmp_path / ("longer-than-the-address-of-a-socket-" * 4)
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TMPDIR": str(temporary)}
    launcher = subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)
    _wait_until((tmp_path / "ready").exists)
    os.killpg(launcher.pid, signal.SIGTERM)
    assert launcher.wait(300) == 143
    assert not list(temporary.glob("pipefit-*"))
    assert [path.name.split("-")[0] for path in (tmp_path / "run").iterdir()] == ["step"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_ends_while_its_server_loads_torch_leaves_no_process(number):
    """SIGTERM goes to the whole process group; a launcher that is killed cannot remove its folder."""
    code = (
        "from pipefit.runtime.launch import launch\nfrom tests.runtime import jobs\nif __name__ == '__main__':\n"
        "    launch(jobs.block, 2, 'never', quiet=True)\n"
    )
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TMPDIR": temporary}
        launcher = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, cwd=temporary, start_new_session=True
        )
        _wait_until(lambda: list(Path(temporary).glob("pymp-*")))
        os.killpg(launcher.pid, number) if number == signal.SIGTERM else launcher.kill()
        assert launcher.wait(300) == (143 if number == signal.SIGTERM else -number)
        _wait_until(lambda: not _with_environment(f"TMPDIR={temporary}"))
        assert number == signal.SIGKILL or not list(Path(temporary).glob("pipefit-*"))


def _with_environment(entry: str) -> list[str]:
    """The processes that were started with an entry in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
    return found


def test_a_server_of_ranks_that_was_killed_is_no_mistake_of_pipefit(monkeypatch):
    def killed(*_):
        raise EOFError("unexpected EOF")

    monkeypatch.setattr("multiprocessing.context.ForkServerProcess.start", killed)
    with pytest.raises(LaunchError, match="the process from which the ranks start was killed"):
        launch(jobs.nothing, 2, quiet=True)


def test_a_refused_run_leaves_no_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(PipefitError, match="too few for 100 micro-batches"):
        launch(jobs.train, 2, {"microbatches": 100}, quiet=True)
    assert not list(tmp_path.glob("pipefit-*"))


def test_ctrl_c_ends_ranks_that_are_blocked(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPEFIT_GRACE_S", "0.5")
    _when_ready(tmp_path / "ready-1", signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        launch(jobs.block, 2, str(tmp_path / "ready"), quiet=True)
    assert not any(_is_alive(tmp_path / f"ready-{rank}") for rank in range(2))


def test_ranks_that_are_blocked_end_after_the_grace_time(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPEFIT_GRACE_S", "0.5")
    _when_ready(tmp_path / "ready-1", signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        launch(jobs.block, 2, str(tmp_path / "ready"), quiet=True)
    assert left.value.code == 143


def _is_alive(file: Path) -> bool:
    try:
        state = Path(f"/proc/{int(file.read_text())}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return False
    return state != "Z"


@pytest.mark.slow
def test_ranks_die_with_a_launcher_that_is_killed(tmp_path):
    code = (
        "from pipefit.runtime.launch import launch\nfrom tests.runtime import jobs\n"
        f"if __name__ == '__main__':\n    launch(jobs.block, 2, {str(tmp_path / 'ready')!r}, quiet=True)\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TMPDIR": str(temporary)}
    launcher = subprocess.Popen([sys.executable, "-c", code], env=environment)
    files = [tmp_path / f"ready-{rank}" for rank in range(2)]
    _wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    assert list(temporary.glob("pipefit-*"))
    launcher.kill()
    launcher.wait()
    _wait_until(lambda: not any(map(_is_alive, files)))
    assert not [path for path in temporary.iterdir() if path.name.startswith(("pipefit", "pymp"))]


def _wait_until(condition):
    """The test's own timeout ends a wait in vain."""
    while not condition():
        time.sleep(0.05)
