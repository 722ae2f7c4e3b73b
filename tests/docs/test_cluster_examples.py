"""The examples for Slurm and Kubernetes give torchrun options that it has, and pipefit ones that it has."""

import re
import shlex

import pytest
from docs.pages import ROOT
from torch.distributed.run import get_args_parser

from pipefit.cli.app import make_app

CLUSTER = ROOT / "examples/cluster"


def started(words: list[str]) -> list[str]:
    """The command of pipefit that torchrun starts."""
    given = get_args_parser().parse_args(words)
    assert given.module and given.training_script == "pipefit" and given.rdzv_backend == "c10d"
    make_app(given.training_script_args).parse_args(given.training_script_args, print_error=False, exit_on_error=False)
    return given.training_script_args


def test_the_job_of_slurm_starts_doctor_and_train_by_torchrun():
    script = (CLUSTER / "train.sbatch").read_text()
    start = re.search(r"start=\(torchrun (.*?)\)$", script, re.MULTILINE | re.DOTALL)[1]
    for name in ("SLURM_NNODES", "SLURM_GPUS_ON_NODE:-1"):
        start = start.replace("${" + name + "}", "2").replace("$" + name, "2")
    shown = re.search(r"sbatch examples/cluster/train.sbatch (.*)$", script, re.MULTILINE)[1].replace("…", "hidden=64")
    for call in re.findall(r'^srun "\$\{start\[@\]\}" (.*)$', script, re.MULTILINE):
        words = shlex.split(f"{start} {call}".replace('"$@"', shown))
        assert started(words)[0] in ("doctor", "train")


def test_the_job_of_kubernetes_starts_train_by_torchrun(monkeypatch):
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())["spec"]
    (container,) = job["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    command = container["command"] + container["args"]
    # What the operator sets, by the names that torchrun reads.
    for name, value in (("NNODES", "2:2"), ("RDZV_BACKEND", job["elasticPolicy"]["rdzvBackend"])):
        monkeypatch.setenv(f"PET_{name}", value)
    assert command[0] == "torchrun" and started(command[1:])[0] == "train"
