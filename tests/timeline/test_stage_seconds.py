"""The seconds of a rank's stages in some passes."""

import pytest

from pipefit.ir.op import Op
from pipefit.schedules import Shape, generate
from pipefit.timeline.stage_seconds import middle, stage_seconds

SECONDS = {Op.FWD: 1.0, Op.BWD: 2.5, Op.BWD_INPUT: 1.5, Op.BWD_WEIGHT: 1.25, Op.RECOMPUTE: 8.0}


def timed(schedule, rank, late, **options):
    """A pass in which every instruction takes its seconds, and one forward 100 s more."""
    instructions = generate(schedule, Shape(2, 4, **options)).ranks[rank]
    starts, ends, now = [], [], 5.0
    for i in instructions:
        starts.append(now)
        now += SECONDS.get(i.op, 0.125) * (1 + i.stage)
        if late and i.op is Op.FWD and i.mb == 2:
            now += 100.0
        ends.append(now)
    return stage_seconds(instructions, starts, ends)


@pytest.mark.parametrize("late", [False, True])
def test_a_forward_and_a_backward_count_and_neither_replays_messages_nor_single_delays(late):
    assert timed("gpipe", 1, late, recompute=(0, 1)) == {1: 2 * 3.5}
    assert timed("zb-h1", 0, late) == {0: pytest.approx(1.0 + 1.5 + 1.25)}
    assert timed("interleaved", 0, late, num_chunks=2) == {0: 3.5, 2: 3 * 3.5}


def test_the_middle_of_several_passes_has_the_noise_of_a_median():
    quiet = middle([{0: 2.0}, {0: 2.0}, {0: 50.0}, {0: 2.0}, {0: 2.0}])
    assert quiet.seconds == {0: 2.0} and quiet.noise == 0.0
    uneven = middle([{0: 1.0, 1: 5.0}, {0: 1.1, 1: 5.0}, {0: 0.9, 1: 5.0}, {0: 1.2, 1: 5.0}, {0: 0.8, 1: 5.0}])
    assert uneven.seconds == {0: 1.0, 1: 5.0}
    assert uneven.noise == pytest.approx(1.86 * 0.1 / 5**0.5)
