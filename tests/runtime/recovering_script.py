"""A user's script, in which a process dies once: `recovering_script.py FOLDER RANK STEP [agent | grows]`.

With `grows` nobody dies: the first machine stands at the step until torchrun asks it to stop, because another has come.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import pipefit as pf
from pipefit.checkpoint.manifest import MANIFEST
from pipefit.runtime.session import current

place, rank, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
copies = 2 if {"agent", "grows"} & set(sys.argv) else 1
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
pipe = pf.Pipeline(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    parallelism=pf.Parallelism(data_parallel=copies),
)
generator = torch.Generator().manual_seed(1)
data = [(torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(8)]


def die(record: Any) -> None:
    while "grows" in sys.argv and record.step == step and pipe.plan.num_processes == 2:
        if current().stop.requested:
            return
        time.sleep(0.01)
    once = place / "died"
    if pipe.rank == rank and record.step == step and not once.exists():
        saved = place / "checkpoints" / f"step-{step - 1:06d}" / MANIFEST
        while every == 2 and not saved.exists():  # it is written while the next step computes
            time.sleep(0.01)
        # In a forward of the next step all have finished this one, and none finishes the next.
        register_module_forward_pre_hook(lambda *_: kill(once))


def kill(once: Path) -> None:
    once.touch()
    if "agent" in sys.argv:  # with the agent of its machine
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


place.mkdir(exist_ok=True)
every = 100 if copies > 1 else 2
losses = pipe.fit(data, callbacks=[pf.Checkpoints(pipe, place / "checkpoints", every=every), die])
if pipe.rank == 0 and not pipe.stop_requested:
    print(losses, pipe.plan.num_processes, flush=True)
