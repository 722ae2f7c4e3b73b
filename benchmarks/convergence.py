"""When training with weights of other versions converges: schedules × depth × learning rate × momentum × seeds.

Every stage is a layer with tanh, the last one is linear, and the data are the digits. Update t of a stage is

    w(t+1) = w(t) − lr · v(t),   v(t) = momentum · v(t−1) + ∂f(w(t − delay)),

where its delay is that of pipefit's program: the version that its `fwd s m w` names. All settings of a schedule and a
depth are trained at once, as one array. A test compares the losses with those of `Pipeline`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipefit.draw.chart import hue, plotted
from pipefit.reproduce.drawings import versions_used
from pipefit.schedules import Shape, generate
from pipefit.spec.files import write_atomically
from pipefit.units import columns

Array = NDArray[np.float64]

SCHEDULES: Mapping[str, str] = {
    "1F1B": "1f1b",
    "2BW": "pipedream-2bw",
    "stashing": "pipedream",
    "vertical sync": "pipedream-vertical-sync",
    "without stashing": "pipedream",
}
"""Methods, and the schedule that gives their delays. Without stashing a backward takes the newest weights."""

NEWEST = "without stashing"
DEPTHS = (2, 4, 8, 16)
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
MOMENTA = (0.0, 0.9)
WIDTH = 32
BATCH = 32
GOOD = 0.5
"""Held-out loss of all seeds up to which a setting counts as converged; chance is at 2.3."""

Setting = tuple[str, int, float, float]
"""A method, a depth, a momentum and a learning rate."""


def delays(method: str, depth: int) -> list[int]:
    """Updates by which the weights of each stage's forward are behind the newest, once the pipeline is full."""
    schedule = SCHEDULES[method]
    microbatches = depth
    if schedule.startswith("pipedream") and schedule != "pipedream-2bw":
        microbatches = 1
    last = 3 * depth
    used = versions_used(generate(schedule, Shape(depth, microbatches, num_steps=last + 1)))
    return [last - used[stage, last * microbatches]["fwd"] for stage in range(depth)]


def first_weights(depth: int, width: int, seeds: Sequence[int]) -> list[Array]:
    """The first weights of each stage: (setting, inputs, outputs) of variance 1/inputs."""
    sizes = [64] + [width] * (depth - 1) + [10]
    found = []
    for stage in range(depth):
        inputs = sizes[stage]
        draws = [np.random.default_rng((seed, stage)).normal(size=(inputs, sizes[stage + 1])) for seed in seeds]
        found.append(np.array(draws) / np.sqrt(inputs))
    return found


def forward(weights: Sequence[Array], x: Array) -> list[Array]:
    """The input of every stage, and the logits."""
    values = [x]
    for weight in weights[:-1]:
        values.append(np.tanh(values[-1] @ weight))
    return [*values, values[-1] @ weights[-1]]


def loss_of(logits: Array, y: NDArray[np.int64]) -> tuple[Array, Array]:
    """The mean cross entropy of each setting, and its gradient."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    chances = np.exp(shifted)
    chances /= chances.sum(axis=-1, keepdims=True)
    hot = np.eye(logits.shape[-1])[y]
    losses = -np.log(np.maximum((chances * hot).sum(axis=-1), 1e-12)).mean(axis=-1)
    return losses, (chances - hot) / len(y)


def train(
    weights: list[Array],
    batches: Sequence[tuple[Array, NDArray[np.int64]]],
    rate: Array,
    momentum: Array,
    behind: Sequence[int],
    newest: bool = False,
) -> tuple[list[Array], list[Array]]:
    """Trains all settings at once.

    Args:
        weights: of each stage, (setting, inputs, outputs).
        batches: inputs (samples, features) and labels (samples,) of each update.
        rate: the learning rate of each setting, (setting, 1, 1).
        momentum: likewise.
        behind: the delay of each stage, in updates.
        newest: whether backwards use the newest weights in place of their forward's.

    Returns:
        The losses of each update, and the last weights.
    """
    history = [weights]
    speeds = [np.zeros_like(weight) for weight in weights]
    losses = []
    for x, y in batches:
        old = [history[max(len(history) - 1 - delay, 0)][stage] for stage, delay in enumerate(behind)]
        values = forward(old, x)
        loss, gradient = loss_of(values.pop(), y)
        losses.append(loss)
        following = []
        for stage in reversed(range(len(weights))):
            own = np.swapaxes(values[stage], -1, -2) @ gradient
            back = old[stage]
            if newest:
                back = history[-1][stage]
            gradient = (gradient @ np.swapaxes(back, -1, -2)) * (1 - values[stage] ** 2)
            speeds[stage] = momentum * speeds[stage] + own
            following.append(history[-1][stage] - rate * speeds[stage])
        history.append(following[::-1])
        del history[: -max(behind) - 2]
    return losses, history[-1]


def study(steps: int, seeds: int) -> dict[Setting, list[float]]:
    """Held-out losses of each setting's seeds."""
    from pipefit.data import digits

    x, y, test_x, test_y = (np.asarray(part) for part in digits())
    settings = list(product(MOMENTA, RATES, range(seeds)))
    momentum, rate, own_seeds = (np.array(part) for part in zip(*settings, strict=True))
    rows = np.random.default_rng(0).integers(len(x), size=(steps, BATCH))
    flat = x.reshape(len(x), -1).astype(np.float64)
    batches = [(flat[row], y[row]) for row in rows]
    held = test_x.reshape(len(test_x), -1)
    shape = (-1, 1, 1)
    found: dict[Setting, list[float]] = {}
    for method, depth in product(SCHEDULES, DEPTHS):
        print(f"{method}, depth {depth} …", file=sys.stderr, flush=True)
        first = first_weights(depth, WIDTH, list(own_seeds))
        behind = delays(method, depth)
        # Settings that diverge overflow; their loss is then infinite.
        with np.errstate(over="ignore", invalid="ignore"):
            _, last = train(first, batches, rate.reshape(shape), momentum.reshape(shape), behind, method == NEWEST)
            losses, _ = loss_of(forward(last, held)[-1], test_y)
        for (mu, lr, _), loss in zip(settings, np.nan_to_num(losses, nan=np.inf), strict=True):
            found.setdefault((method, depth, mu, lr), []).append(float(loss))
    return found


def table(found: Mapping[Setting, list[float]]) -> str:
    """The largest learning rate with which all seeds converge; "-": none."""
    rows = [["momentum", "depth", *SCHEDULES]]
    for momentum, depth in product(MOMENTA, DEPTHS):
        row = [f"{momentum:g}", str(depth)]
        for method in SCHEDULES:
            good = [rate for rate in RATES if max(found[method, depth, momentum, rate]) <= GOOD]
            row.append(f"{max(good):g}" if good else "-")
        rows.append(row)
    return "\n".join(columns(rows, right=True))


def draw(figure: Any, found: Mapping[Setting, list[float]]) -> None:
    """A panel for each momentum and depth: the held-out loss by learning rate, a line for each method."""
    grid = figure.subplots(len(MOMENTA), len(DEPTHS), sharex=True, sharey=True)
    for row, momentum in enumerate(MOMENTA):
        for column, depth in enumerate(DEPTHS):
            axes = grid[row][column]
            axes.set(xscale="log", ylim=(0, 2.6), title=f"depth {depth}, momentum {momentum:g}")
            for number, method in enumerate(SCHEDULES):
                losses = np.minimum([found[method, depth, momentum, rate] for rate in RATES], 9.0)
                axes.plot(RATES, losses.mean(axis=1), color=hue(number), marker="os^Dv"[number], label=method)
                axes.fill_between(RATES, losses.min(axis=1), losses.max(axis=1), color=hue(number), alpha=0.15)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower left", ncols=len(SCHEDULES))


def main(*, output: Path | None = None, steps: int = 400, seeds: int = 3) -> None:
    """When training with weights of other versions converges; two minutes.

    Args:
        output: the figure, as .svg.
        steps: updates of each setting.
        seeds: of the first weights.
    """
    found = study(steps, seeds)
    print(f"largest learning rate with which all {seeds} seeds converge in {steps} updates\n\n{table(found)}")
    if output is not None:
        title = f"Held-out loss by learning rate after {steps} updates: mean and range of {seeds} seeds"
        write_atomically(output, plotted(partial(draw, found=found), 1080, 560, title))
