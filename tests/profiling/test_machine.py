"""The machine while it is measured."""

import pytest

from pipefit.profiling.machine import CpuUse, cores_of_others


@pytest.mark.parametrize(
    ("busy_s", "idle_s", "own_s", "others"),
    [
        (20.0, 0.0, 5.0, 1.5),  # two cores for ten seconds, of which this run took five
        (20.0, 0.0, 20.0, 0.0),
        (20.0, 0.0, 20.5, 0.0),  # the readings of processes are not of one moment
        (75.0, 5.0, 10.0, 0.0),  # of eight cores one is half free: nobody waits
        (78.0, 2.0, 10.0, 6.8),
    ],
)
def test_other_programs_count_where_no_core_is_free(busy_s, idle_s, own_s, others):
    before = CpuUse(100.0, 100.0, 7.0, 50.0)
    after = CpuUse(100.0 + busy_s, 100.0 + idle_s, 7.0 + own_s, 60.0)
    assert cores_of_others(before, after, own_s) == pytest.approx(others)


def test_without_a_time_between_two_readings_nothing_is_known():
    now = CpuUse(1.0, 1.0, 1.0, 1.0)
    assert cores_of_others(now, now, 0.0) == 0.0


def test_a_reading_of_this_machine_only_grows():
    before, after = CpuUse.now(), CpuUse.now()
    assert before is not None and after is not None
    assert all(later >= earlier for earlier, later in zip(before, after, strict=True)) and before.busy_s > 0
