"""The level of sharing that the search chooses, next to an exhaustive computation in closed form.

Legend: p depth, v chunks, d copies, m micro-batches of a copy, q layers of a stage; all layers are alike, and links
take no time. Breadth-first takes (m + (p − 1)/v)·v·q layers' forwards and backwards; a rank with one stage holds one
micro-batch at a time.
"""

import itertools

import pytest

from pipefit.errors import InfeasibleError
from pipefit.planner import plan
from pipefit.planner.explain import explain
from pipefit.spec import Device, Layer, Level, Profile, Topology

LEVELS = ("none", "optimizer", "gradients", "weights")
DEVICES, LAYERS, BATCH, STATE = 4, 16, 16, 2
FORWARD_S, BACKWARD_S, WEIGHTS, SAVED = 1e-3, 2e-3, 1e6, 2e5


def asked(memory: float, **options: object):
    layers = tuple(
        Layer(f"l{i}", FORWARD_S, BACKWARD_S / 2, BACKWARD_S / 2, 0.0, SAVED, WEIGHTS) for i in range(LAYERS)
    )
    machine = Topology((Level("machine", DEVICES, float("inf"), 0.0),), Device(memory_bytes=memory))
    return plan(
        Profile("alike", 1, layers), machine, global_batch=BATCH, schedules=["breadth-first"], recompute="none",
        chunks=[2, 4, 8], **options,
    )  # fmt: skip


def period_s(p: int, v: int) -> float:
    """Seconds per update."""
    m = BATCH * p / DEVICES
    each = LAYERS / p * (FORWARD_S + BACKWARD_S)
    return (m + (p - 1) / v) * each


def peak(p: int, v: int, level: str) -> float:
    """The most bytes of a rank: at the beginning or the end of the backwards of a chunk."""
    d = DEVICES // p
    m = BATCH // d
    q = LAYERS // (p * v)
    stage = q * WEIGHTS
    share = 1 / d
    shared = LEVELS.index(level)
    states = v * stage * STATE * (share if shared >= 1 else 1)
    if v == 1:
        # One micro-batch at a time, on ranks with all layers.
        return states + stage + stage + q * SAVED
    found = 0.0
    for chunk, is_over in itertools.product(range(v), (False, True)):
        # At the end of the last backward of a chunk its saved tensors are still there, for one micro-batch.
        saved = chunk * m * q * SAVED + (q * SAVED if is_over else m * q * SAVED)
        done = v - chunk
        whole = stage * (1 if shared >= 2 else done)
        sums = stage * share * (done - 1) if shared >= 2 else 0.0
        weights = v * stage
        if shared >= 3:
            weights = v * stage * share + stage * min(chunk + 1, 2)
        found = max(found, weights + whole + sums + saved)
    # Whole gradients of the first chunk next to their sum, after its last backward.
    if shared >= 2:
        after = stage + v * stage * share + (v * stage if shared == 2 else v * stage * share)
        found = max(found, after)
    return found + states


def exists(p: int, v: int, level: str) -> bool:
    """Plain data parallelism has one stage; weights are shared from three stages on, gradients from two."""
    if p * v > LAYERS or (p == DEVICES and level != "none"):
        return False
    if p == 1 and level in LEVELS[:2]:
        return v == 1
    return v >= {"gradients": 2, "weights": 3}.get(level, 2)


def choices(memory: float, levels: tuple[str, ...]) -> list[tuple[float, int, int, str]]:
    """(seconds, depth, chunks, level) of every plan that fits."""
    found = []
    for p, v, level in itertools.product((1, 2, 4), (1, 2, 4, 8), levels):
        if exists(p, v, level) and peak(p, v, level) <= memory:
            found.append((period_s(p, v), p, v, level))
    return found


def edges() -> list[float]:
    """Limits of memory just above and below what each choice needs."""
    points = itertools.product((1, 2, 4), (1, 2, 4, 8), LEVELS)
    needs = {peak(*point) for point in points if exists(*point)}
    return [need + offset for need in sorted(needs) for offset in (-1.0, 1.0)]


@pytest.mark.parametrize("memory", edges())
def test_the_search_finds_the_best_level_that_fits(memory: float):
    """Where every choice competes; by default gradients and weights are shared where nothing else fits."""
    every = choices(memory, LEVELS)
    plain = choices(memory, LEVELS[:2])
    if not every:
        with pytest.raises(InfeasibleError):
            asked(memory)
        return
    for fitting, options in ((every, {"shard": "any"}), (plain or every, {})):
        found = asked(memory, **options)
        best_s = min(fitting)[0]
        chosen = (found.placement.num_ranks // found.data, found.num_chunks, found.shard)
        assert found.prediction.period_s == pytest.approx(best_s)
        assert chosen in [choice[1:] for choice in fitting if choice[0] == pytest.approx(best_s)]
        assert max(found.prediction.peak_bytes) <= memory


def test_the_answer_says_why_copies_share_so_much():
    found = asked(peak(1, 8, "gradients") - 1.0, shard="any")
    assert found.shard == "weights"
    assert "sharded weights" in explain(found, width=1000) and "if copies shared less, rank 0 needs" in explain(
        found, width=1000
    )
