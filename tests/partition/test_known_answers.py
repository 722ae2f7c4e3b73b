"""What PipeDream's released optimizer answers on its published profiles."""

import pytest
from tests.partition.cases import topology

from pipefit.partition import pipedream
from pipefit.spec.published import load_profile

CODE = "pipedream-code"


@pytest.mark.parametrize(
    ("levels", "milliseconds", "stages"),
    [
        (((4, 1e9),), 205.520896, [3, 1]),
        (((16, 1e9),), 56.52976738461538, [13, 2, 1]),
        (((4, 12e9), (4, 1.25e9)), 66.88875213333333, None),
        (((8, 25e9), (2, 3.125e9)), 65.76668672, None),
    ],
)
def test_vgg16_takes_the_published_times(levels, milliseconds, stages):
    result = pipedream(load_profile("vgg16"), topology(*levels), cost=CODE)
    assert result.time_s * 1e3 == pytest.approx(milliseconds, rel=1e-9)
    if stages is not None:
        assert [stage.replicas for stage in result.partition.stages] == stages


def test_vgg16_on_4_devices_is_2_84_times_data_parallelism():
    result = pipedream(load_profile("vgg16"), topology((4, 1e9)), cost=CODE)
    assert round(result.speedup_over_data_parallel, 2) == 2.84


@pytest.mark.parametrize(
    ("levels", "milliseconds"),
    [(((4, 12e9), (4, 1.25e9)), 10.0747), (((8, 25e9), (2, 3.125e9)), 8.1259), (((4, 12e9), (3, 1.25e9)), 10.6870)],
)
def test_gnmt_is_optimal_over_all_down_sets(levels, milliseconds):
    result = pipedream(load_profile("gnmt"), topology(*levels), cost=CODE)
    assert result.exact
    assert round(result.time_s * 1e3, 4) == milliseconds


def test_lectures_table_vgg16_is_15_1_and_resnet50_data_parallel():
    slow = topology((16, 1e9))
    assert pipedream(load_profile("vgg16"), slow).configuration == "15-1"
    for cost, levels in (("ring", ((16, 1e9),)), ("ring", ((4, 12e9), (4, 1.25e9))), (CODE, ((4, 12e9), (4, 1.25e9)))):
        result = pipedream(load_profile("resnet50"), topology(*levels), cost=cost)
        assert (result.configuration, result.shape) == ("16", "data parallel")


def test_printed_formula_never_chooses_data_parallelism_for_resnet50():
    for bandwidth in (1e9, 1.25e9):
        assert pipedream(load_profile("resnet50"), topology((16, bandwidth)), cost="paper").shape != "data parallel"
