"""A user's script on two nodes: `node_job.py FOLDER [wait]`. With `wait`, rank 0 waits in a step for the fault."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.faults.shapes import EVERY, batches, digest
from tests.runtime import jobs

import pipefit as pf

FAULT_STEP = 3

folder = Path(sys.argv[1])
(folder / f"rank-{os.environ['RANK']}.pid").write_text(str(os.getpid()))
pipe = jobs.pipeline(num_ranks=2)
checkpoints = folder / "checkpoints"
if any(checkpoints.glob("step-*")):
    pipe.load(checkpoints)


def wait(record: Any) -> None:
    """Tells the test that the training is under way, and waits until the network has its fault."""
    if pipe.rank == 0 and record.step == FAULT_STEP and sys.argv[2:] == ["wait"]:
        (folder / "ready").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)


done = pipe.num_updates
losses = pipe.fit(batches()[done:], callbacks=[wait, pf.Checkpoints(pipe, checkpoints, every=EVERY)])
weights = digest(pipe)
if pipe.rank == 0:
    (folder / "result.json").write_text(json.dumps([done, [loss.hex() for loss in losses], weights]))
