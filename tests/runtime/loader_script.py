"""A user's script without a main guard whose loader has workers: `loader_script.py FOLDER [die] [spawn | forkserver]`.

With `die` one rank kills itself once.
"""

import json
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


def die(record: Any) -> None:
    once = place / "died"
    if "die" in sys.argv and pipe.rank == 1 and record.step == 6 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)


losses = pipe.fit(loader, 10, callbacks=[pf.Checkpoints(pipe, place / "checkpoints", every=2), die])
(place / f"losses-{pipe.rank}.json").write_text(json.dumps(losses))
