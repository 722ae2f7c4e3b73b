"""Memory over time as a snapshot of torch's allocator, read by torch's own functions."""

import pickle

import pytest
from torch.cuda import _memory_viz

from pipefit.cost import CostModel
from pipefit.schedules import Shape, generate
from pipefit.simulate import simulate
from pipefit.simulate.snapshot import memory_snapshot, save_snapshot

COST = CostModel((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), step_s=(1.0, 1.0), saved_bytes=(5e6, 7e6), act_bytes=(1e6, 0),
                 weight_bytes=(2e6, 3e6), optim_bytes=(4e6, 6e6))  # fmt: skip


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream"])
def test_the_bytes_that_are_allocated_at_a_time_are_the_timeline_s(schedule):
    timeline = simulate(generate(schedule, Shape(2, 4)), COST)
    found = memory_snapshot(timeline, COST)
    for rank, events in enumerate(found["device_traces"]):
        held = most = 0
        living = {}
        for event in events:
            if event["action"] == "alloc":
                place = range(event["addr"], event["addr"] + event["size"])
                assert all(place.stop <= other.start or other.stop <= place.start for other in living.values())
                living[event["addr"]] = place
                held += event["size"]
            elif event["action"] == "free_completed":
                held -= len(living.pop(event["addr"]))
            most = max(most, held)
        assert most == timeline.peak_bytes(rank) == timeline.memory[rank][-1][1] + most - held


def test_torch_reads_a_snapshot_that_is_saved(tmp_path):
    timeline = simulate(generate("1f1b", Shape(2, 3)), COST)
    path = save_snapshot(timeline, COST, tmp_path / "memory.pickle")
    found = pickle.loads(path.read_bytes())
    text = _memory_viz.trace(found)
    assert "Device 1" in text and "MEM[0:5.7MiB]" in text
    assert "snapshot.pickle" in _memory_viz.trace_plot(found)
