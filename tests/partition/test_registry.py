from importlib.metadata import EntryPoint

import pytest
from tests.partition.cases import chain, topology

from pipefit.errors import PlanError
from pipefit.partition import partition, partitioner_names, registry
from pipefit.spec import Partition

PROFILE = chain([1, 1, 1, 3])


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("uniform", {}, [2, 2]),
        ("minmax", {}, [3, 1]),
        ("gpipe", {}, [3, 1]),
        ("by_hand", {"counts": [1, 3]}, [1, 3]),
        ("hydra", {"capacity_bytes": 10}, [4]),
        ("pipedream", {}, [3, 1]),
    ],
)
def test_every_name_partitions(method, options, expected):
    found = partition(PROFILE, 2, method, **options)
    assert [len(stage.layers) for stage in found.stages] == expected
    assert method in partitioner_names()


def test_pipedream_by_name_takes_a_topology():
    found = partition(chain([15, 1], weights=[0, 1e9]), method="pipedream", topology=topology((16, 1e3)))
    assert [stage.replicas for stage in found.stages] == [15, 1]


def test_unknown_methods_and_options_are_refused_with_the_known_ones():
    with pytest.raises(PlanError, match="did you mean gpipe"):
        partition(PROFILE, 2, "gpip")
    with pytest.raises(PlanError, match="its options: speeds"):
        partition(PROFILE, 2, "gpipe", cost=[1])
    with pytest.raises(PlanError, match="expected num_stages"):
        partition(PROFILE, method="gpipe")
    with pytest.raises(PlanError, match="at most 1 stages"):
        partition(chain([1, 1], weights=[1, 1]), 1, "hydra", capacity_bytes=4)


def mine(profile, num_stages, first=1):
    return Partition.from_counts([first, len(profile) - first])


def test_other_packages_add_partitioners_by_entry_point(monkeypatch):
    point = EntryPoint("mine", f"{__name__}:mine", "pipefit.partitioners")
    monkeypatch.setattr(EntryPoint, "load", lambda self: mine)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    assert "mine" in partitioner_names()
    assert [len(stage.layers) for stage in partition(PROFILE, 2, "mine", first=3).stages] == [3, 1]
