"""A user's script of which a rank gets a signal: `signal_job.py SHAPE FOLDER [RANK OP WHEN SIGNAL]`.

It resumes from what is in the folder, and leaves its losses and the checksum of its weights there.
"""

import json
import signal
import sys
from pathlib import Path

from tests.faults.shapes import CONTINUED, EVERY, SPILLED, Place, batches, digest, pipeline, signal_at

import pipefit as pf

shape, folder = sys.argv[1], Path(sys.argv[2])
pipe = pipeline(shape, folder)
checkpoints = folder / "checkpoints"
if any(checkpoints.glob("step-*")):
    pipe.load(checkpoints)
if sys.argv[3:]:
    rank, op, when, name = sys.argv[3:]
    signal_at(pipe, Place(int(rank), op, when), signal.Signals[name], folder / CONTINUED)
done, left = pipe.num_updates, batches()[pipe.num_updates :]
# A spilled training commits each step to its disk.
saving = [] if shape == SPILLED else [pf.Checkpoints(pipe, checkpoints, every=EVERY)]
losses = pipe.fit(left, len(left), callbacks=saving) if left else []
if pipe.stop_requested:
    sys.exit(128 + signal.SIGTERM)
weights = digest(pipe)
if pipe.rank == 0:
    (folder / "result.json").write_text(json.dumps([done, [loss.hex() for loss in losses], weights]))
