"""Process groups of links: all ranks make the same ones in the same order, however many programs and pipelines come."""

import torch
from torch import nn

from pipefit import Pipeline
from pipefit.runtime.launch import launch

STEPS = (2, 3, 2)


def train_by_turns() -> list[list[float]]:
    """Two pipelines in one run, each over programs of several lengths that all use the same links."""
    pipes = [_pipeline("pipedream"), _pipeline("1f1b")]
    return [pipe.fit([(torch.ones(6, 4), torch.zeros(6, 4))] * steps) for pipe in pipes for steps in STEPS]


def _pipeline(schedule: str) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
        schedule=schedule,
        microbatches=1 if schedule == "pipedream" else 3,
    )


def test_a_second_pipeline_finds_its_groups_after_a_first_one_has_run_several_programs() -> None:
    """With each further program, ranks once made groups again for links that were not theirs.

    Torch names groups by how many a process has made, so ranks came to call one group by different names and waited
    for each other for ever.
    """
    losses = launch(train_by_turns, 3, threads=1, quiet=True, deadline_s=15)
    assert losses[0] == losses[1] == losses[2]
    assert all(len(told) == steps for told, steps in zip(losses[0], STEPS * 2, strict=True))
