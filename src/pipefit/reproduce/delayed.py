"""Whether training converges with weights of other versions: schedules × depth × learning rate × momentum × seeds.

Every stage is a layer with tanh, the last one is linear, and the data are the digits. Update t of a stage is

    w(t+1) = w(t) − lr · v(t),   v(t) = momentum · v(t−1) + ∂f(w(t − delay)),

where its delay is that of pipefit's program: the version that its `fwd s m w` names. All settings of a schedule and a
depth are trained at once, as one array. A test compares the losses with those of `Pipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipefit.draw.chart import hue, plotted
from pipefit.reproduce.drawings import versions_used
from pipefit.reproduce.entry import Bench, Picture
from pipefit.reproduce.steps import Python
from pipefit.schedules import Shape, generate
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

_NEWEST = "without stashing"
_DEPTHS = (2, 4, 8, 16)
_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_MOMENTA = (0.0, 0.9)
_SEEDS = 3
_STEPS = 400
_WIDTH = 32
_BATCH = 32
_GOOD = 0.5
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


def _study() -> dict[Setting, list[float]]:
    """Held-out losses of each setting's seeds."""
    from pipefit.data import digits

    data = digits()
    x, y, test_x, test_y = (np.asarray(part) for part in data)
    settings = list(product(_MOMENTA, _RATES, range(_SEEDS)))
    momentum, rate, seeds = (np.array(part) for part in zip(*settings, strict=True))
    rows = np.random.default_rng(0).integers(len(x), size=(_STEPS, _BATCH))
    flat = x.reshape(len(x), -1).astype(np.float64)
    batches = [(flat[row], y[row]) for row in rows]
    held = test_x.reshape(len(test_x), -1)
    found: dict[Setting, list[float]] = {}
    for method, depth in product(SCHEDULES, _DEPTHS):
        first = first_weights(depth, _WIDTH, list(seeds))
        shape = (-1, 1, 1)
        behind = delays(method, depth)
        # Settings that diverge overflow; their loss is then infinite.
        with np.errstate(over="ignore", invalid="ignore"):
            _, last = train(first, batches, rate.reshape(shape), momentum.reshape(shape), behind, method == _NEWEST)
            losses, _ = loss_of(forward(last, held)[-1], test_y)
        losses = np.nan_to_num(losses, nan=np.inf)
        for (mu, lr, _), loss in zip(settings, losses, strict=True):
            found.setdefault((method, depth, mu, lr), []).append(float(loss))
    return found


def _studied(run: Bench) -> dict[Setting, list[float]]:
    found: dict[Setting, list[float]] = run(Python("pipefit.reproduce.delayed.train(…) of every setting", _study))
    return found


def largest_rate(run: Bench, method: str, depth: int, momentum: float) -> float:
    """The largest learning rate with which all seeds converge; 0: none."""
    found = _studied(run)
    good = [rate for rate in _RATES if max(found[method, depth, momentum, rate]) <= _GOOD]
    return max(good, default=0.0)


def convergence_picture(run: Bench) -> Picture:
    """The held-out loss by learning rate: a panel for each momentum and depth, a line for each method."""
    found = _studied(run)
    rows = [["momentum", "depth", *SCHEDULES]]
    for momentum, depth in product(_MOMENTA, _DEPTHS):
        rates = [f"{largest_rate(run, method, depth, momentum):g}" for method in SCHEDULES]
        rows.append([f"{momentum:g}", str(depth), *rates])
    text = "\n".join(["The largest learning rate with which all seeds converge (0: none)", *columns(rows, right=True)])
    title = f"Held-out loss by learning rate after {_STEPS} updates: mean and range of {_SEEDS} seeds"
    return Picture(title, lambda: plotted(partial(_draw, found=found), 1080, 560, title), text)


def _draw(figure: Any, found: Mapping[Setting, list[float]]) -> None:
    grid = figure.subplots(len(_MOMENTA), len(_DEPTHS), sharex=True, sharey=True)
    for row, momentum in enumerate(_MOMENTA):
        for column, depth in enumerate(_DEPTHS):
            axes = grid[row][column]
            axes.set(xscale="log", ylim=(0, 2.6), title=f"depth {depth}, momentum {momentum:g}")
            for number, method in enumerate(SCHEDULES):
                losses = np.minimum([found[method, depth, momentum, rate] for rate in _RATES], 9.0)
                means = losses.mean(axis=1)
                axes.plot(_RATES, means, color=hue(number), marker="os^Dv"[number], label=method)
                axes.fill_between(_RATES, losses.min(axis=1), losses.max(axis=1), color=hue(number), alpha=0.15)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower left", ncols=len(SCHEDULES))
