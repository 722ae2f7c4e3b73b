"""A user's script without a main guard whose loader has workers: `loader_script.py FOLDER [die | worker] [WORD…]`.

With `die` a rank kills itself once, with `worker` a worker of its loader: `rank=1 step=6`. `spawn` and `forkserver` are
other ways to start workers.
"""

import json
import multiprocessing as mp
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pipefit as pf

place = Path(sys.argv[1])
method = next((word for word in sys.argv if word in ("spawn", "forkserver")), None)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))
pipe = pf.Pipeline(
    model, loss=nn.CrossEntropyLoss(), optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1), microbatches=2
)
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(32, 4, generator=generator), torch.randint(0, 3, (32,), generator=generator))
workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}
loader = DataLoader(data, batch_size=8, shuffle=True, **workers)


def number(name: str, usual: int) -> int:
    return next((int(word.partition("=")[2]) for word in sys.argv if word.startswith(f"{name}=")), usual)


def die(record: Any) -> None:
    once = place / "died"
    if (pipe.rank, record.step) != (number("rank", 1), number("step", 6)) or once.exists():
        return
    victims = {"die": os.getpid(), "worker": next((child.pid for child in mp.active_children()), None)}
    for word in {"die", "worker"}.intersection(sys.argv):
        once.touch()
        os.kill(victims[word], signal.SIGKILL)


losses = pipe.fit(loader, 10, callbacks=[pf.Checkpoints(pipe, place / "checkpoints", every=2), die])
(place / f"losses-{pipe.rank}.json").write_text(json.dumps(losses))
