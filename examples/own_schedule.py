"""A schedule of your own: proved, drawn, compared, and run.

python examples/own_schedule.py                all ranks in this process
pipefit run -n 2 examples/own_schedule.py      each rank a process
"""

import torch
from torch import nn

import pipefit as pf
from pipefit.verify import verify


@pf.schedule
def weights_later(task):
    """1F1B with backwards in two halves: weight gradients wait until a rank would otherwise be idle."""
    for rank in range(task.num_ranks):
        (stage,) = task.stages_of(rank)
        mbs = task.microbatches_of(stage, rank)
        warmup = min(task.num_ranks - 1 - rank, len(mbs))
        order = [pf.fwd(stage, mb) for mb in mbs[:warmup]]
        for position, mb in enumerate(mbs):
            order += [pf.fwd(stage, later) for later in mbs[position + warmup : position + warmup + 1]]
            order.append(pf.bwd_input(stage, mb))
            order += [pf.bwd_weight(stage, mbs[position - rank])] if position >= rank else []
        yield order + [pf.bwd_weight(stage, mb) for mb in mbs[max(len(mbs) - rank, 0) :]]


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    x = torch.randn(256, 16)
    y = x[:, :4].argmax(1)
    pipe = pf.Pipeline(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, 0.5),
        schedule="weights-later",
        microbatches=8,
    )
    losses = pipe.fit([(x, y)] * 20)
    if pipe.rank == 0:
        mine = pf.draw("weights-later", num_stages=4, num_microbatches=8, input=1, weight=1)
        print(verify(mine.program))
        print(mine)
        for name in ("1f1b", "weights-later"):
            bubble = pf.draw(name, num_stages=4, num_microbatches=8, input=1, weight=1).metrics["bubble_fraction"]
            print(f"{name}: bubble {bubble:.1%}")
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps")
