"""`pipefit train --recover N` and `pipefit run --recover N`: the command resumes after a rank has died."""

import json
import os
import signal
import threading
import time

import pytest

from pipefit.cli import main
from pipefit.runtime.progress import positions_of

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("small_probes")]


def _by_step(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def _losses(folder):
    return list(_by_step(folder).values())


SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
import pipefit as pf

place, once = Path(sys.argv[1]), Path(sys.argv[1]) / "died"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
pipe = pf.Pipeline(model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1), microbatches=2)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)

def die(record):
    if sys.argv[2:] == ["die"] and record.step == 10 and pipe.rank == 1 and not once.exists():
        once.touch()
        exec(os.environ.get("BEFORE_ITS_DEATH", ""))
        os.kill(os.getpid(), signal.SIGKILL)

losses = []
for epoch in range(3):
    losses += pipe.fit(loader, callbacks=[pf.Checkpoints(pipe, place / "checkpoints", every=3), die])
if pipe.rank == 0:
    (place / "losses").write_text(repr(losses))
"""


def test_a_script_with_epochs_of_a_loader_goes_on(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    said = {}
    for name in ("plain", "die"):
        (tmp_path / name).mkdir()
        words = ["run", "-n", "2", "--recover", "1", "--json", "--logs", str(tmp_path / name / "logs"), str(script)]
        assert main([*words, str(tmp_path / name), name]) == 0
        said[name] = (tmp_path / name / "losses").read_text()
    assert said["die"] == said["plain"] and said["plain"].count(",") == 11
    assert (tmp_path / "die" / "died").exists()


DAMAGES = {
    "a byte of the log": "log.write_bytes(b'x' + log.read_bytes()[1:])",
    "no log": "log.unlink()",
    "the list of earlier checkpoints": "earlier.write_text(earlier.read_text()[:-3]); os.utime(earlier, ns=(at, at))",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_only_checkpoints_decide_whether_a_run_goes_on(damage, tmp_path, monkeypatch):
    script, place = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    place.mkdir()
    words = ["run", "-n", "2", "--recover", "1", "--json", "--logs", str(place / "logs"), str(script), str(place)]
    assert main([*words, "plain"]) == 0  # its checkpoints are those of an earlier run for the next one
    plain = (place / "losses").read_text()
    files = "log, earlier = place / 'checkpoints/metrics.jsonl', place / 'checkpoints/earlier.json'\n"
    # The first rank may still be writing the loss of the last saved step, or its checkpoint.
    files += "import time\nwhile '\"step\":9,' not in log.read_text().replace(' ', ''): time.sleep(0.005)\n"
    files += "while not (place / 'checkpoints/step-000009.1').exists(): time.sleep(0.005)\n"
    monkeypatch.setenv("BEFORE_ITS_DEATH", f"{files}at = earlier.stat().st_mtime_ns\n{DAMAGES[damage]}")
    assert main([*words, "die"]) == 0
    said = (place / "logs" / "rank-0.log").read_text()
    losses = (place / "losses").read_text()
    if damage == "no log":
        assert losses.count("nan") == 9 and losses.split(",")[9:] == plain.split(",")[9:]
        assert "the losses of 9 steps are in no log" in said
    elif damage == "a byte of the log":
        assert losses == plain.replace(plain[1:].split(",")[0], "nan", 1)
        assert "metrics.jsonl:1: not the figures of a step" in said
    else:
        assert losses == plain and "earlier.json is damaged" in said


def _kill_when_trained(folder, rank, num_steps):
    """A thread that kills a rank once some steps are in the log."""

    def kill():
        log = folder / "metrics.jsonl"
        while not log.exists() or len(log.read_text().splitlines()) < num_steps:
            time.sleep(0.005)
        os.kill(positions_of(folder / "logs", rank + 1)[rank].pid, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_goes_on_and_its_report_says_so(ranks, tmp_path, capsys):
    words = f"train --model mlp --data digits --batch 32 --microbatches 2 --steps 400 --ranks {ranks}".split()
    faulty, plain = tmp_path / "faulty", tmp_path / "plain"
    thread = _kill_when_trained(faulty, ranks - 1, 6)
    assert main([*words, "--recover", "1", "--checkpoint-every", "4", "-o", str(faulty)]) == 0
    thread.join()
    printed = capsys.readouterr().out
    assert main([*words, "--plan", str(faulty / "plan.json"), "-o", str(plain)]) == 0
    assert len(_losses(plain)) == 400 and _losses(faulty) == _losses(plain)
    assert f"fault: rank {ranks - 1} failed" in printed and "resumed after step" in printed
    fault, recovery = json.loads((faulty / "run.json").read_text())["result"]["faults"]
    assert (
        "SIGKILL" in fault["fault"] and recovery["resumed"] % 4 == 0 and recovery["lost"] <= 8
    )  # one may be half written
    page = (faulty / "report.html").read_text()
    assert "<h2>Faults and moves</h2>" in page and f"rank {ranks - 1} failed" in page


@pytest.mark.long
def test_a_training_grows_again(tmp_path, caplog):
    """It has no end of its own, because nobody knows when the new process is there."""
    place = tmp_path / "run"
    words = "train --model mlp --ranks 4 --replicas 2 --microbatches 4 --steps 100000 --quick --recover 2 --grow"
    thread = _kill_when_trained(place, 2, 6)
    stop = threading.Thread(target=_stop_when_grown, args=(place,), daemon=True)
    stop.start()
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "-o", str(place)])
    assert ended.value.code == 128 + signal.SIGTERM
    thread.join()
    said = caplog.text
    assert "repair 1 of 2: 3 ranks go on" in said and "rank 2 enters: 4 ranks go on" in said
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    sizes = [len(line["memory_bytes"]) for line in lines]
    assert [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before] == [4, 3, 4]


def _stop_when_grown(place):
    """Stops this process when ranks have trained for some steps with a process that was started again."""
    notes = place / "logs" / "faults.jsonl"
    while not notes.exists() or "entered" not in notes.read_text():
        time.sleep(0.01)
    log = place / "metrics.jsonl"
    steps = len(log.read_text().splitlines())
    while len(log.read_text().splitlines()) < steps + 5:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.long
@pytest.mark.long
def test_a_spilled_training_goes_on_from_the_records_on_its_disk(tmp_path, capsys):
    words = "train --model gpt --option layers=3,hidden=32,context=16,tied=false,dropout=0.1 --data text --batch 4"
    words = [*words.split(), *"--microbatches 2 --steps 80 --ranks 2 --json".split()]
    faulty, plain = tmp_path / "faulty", tmp_path / "plain"
    thread = _kill_when_trained(faulty, 1, 6)
    assert main([*words, "--disk", str(tmp_path / "tier"), "--recover", "1", "-o", str(faulty)]) == 0
    thread.join()
    assert main([*words, "--plan", str(faulty / "plan.json"), "--disk", str(tmp_path / "other"), "-o", str(plain)]) == 0
    found, expected = _by_step(faulty), _by_step(plain)
    # A step may be committed before its loss is known.
    assert len(expected) == 80 and len(expected.keys() - found.keys()) <= 2
    assert found == {step: expected[step] for step in found}
    recovery = json.loads((faulty / "run.json").read_text())["result"]["faults"][1]
    assert recovery["source"] == "the records on its disk" and recovery["resumed"] >= 5 and recovery["lost"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--transport", "local", "--recover", "2"], "no process is started"),
        (["--recover", "0"], "--recover: expected a whole number of at least 1"),
        (["--ranks", "2", "--recover", "1", "--min-ranks", "3"], "min_ranks: expected 1 to 2"),
        (["--ranks", "2", "--min-ranks", "1"], "min_ranks: expected with recover"),
        (["--ranks", "2", "--grow"], "grow: expected with recover"),
    ],
)
def test_options_that_do_not_fit_are_refused(words, said, capsys):
    assert main(["train", "--model", "mlp", *words]) == 2
    assert said in capsys.readouterr().err
