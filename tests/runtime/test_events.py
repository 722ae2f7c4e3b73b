"""The faults and moves of a run in words, and their places on its curves."""

from pipefit.run.curves import curves
from pipefit.runtime.faults import GREW, IN_PLACE, LOST, MOVED, REPAIRED, RESTARTED, events_of

PLAN = "planned anew: zb-h1, copies of the stages 2, 1"
LINES = [
    {"fault": "rank 3 failed", "start": 0, "time": 1.0},
    {"resumed": 4, "source": IN_PLACE, "lost": 0, "ranks": 3, "plan": PLAN, "seconds": 0.05, "start": 1, "time": 1.1},
    {"move": "layer 3 from rank 1 to 0", "why": "rank 1 is slow", "step": 5, "gain": 0.4, "before_s": 0.03}
    | {"after_s": 0.02, "seconds": 0.01, "start": 1, "time": 1.5},
    {"entered": 4, "step": 6, "start": 1, "time": 1.7},
    {"fault": "rank 1 failed", "start": 1, "time": 2.0},
    {"fault": "rank 1 failed again", "start": 2, "time": 2.5},
    {"resumed": 7, "source": "memory", "lost": 1, "ranks": 3, "start": 3, "time": 3.0},
    {"damaged": True},
]


def test_a_fault_stands_with_the_recovery_from_it_and_a_move_with_its_reason():
    assert [tuple(event) for event in events_of(LINES)] == [
        (
            4,
            REPAIRED,
            "rank 3 failed",
            f"resumed after step 4 from the ranks that are left on 3 ranks ({PLAN}); 0 steps done again, 50 ms to the "
            "next finished step",
        ),
        (5, MOVED, "layer 3 from rank 1 to 0: rank 1 is slow", "30 ms to 20 ms per step; it took 10 ms"),
        (6, GREW, "a process that was started again has entered", "after step 6 on 4 ranks"),
        (None, LOST, "rank 1 failed", ""),
        (8, RESTARTED, "rank 1 failed again", "resumed after step 7 from memory on 3 ranks; 1 step done again"),
    ]


def test_torchrun_starts_again_without_a_line_about_the_fault():
    (event,) = events_of([LINES[-2]])
    assert event.what == "processes were lost or added; torchrun has started all ranks again"


def test_events_are_lines_across_the_curves():
    entries = [{"step": step, "loss": 1.0 / step} for step in range(1, 10)]
    (plain,) = curves(entries, None)
    (marked,) = curves(entries, None, events_of(LINES))
    assert all(f">{kind}<" in marked and f">{kind}<" not in plain for kind in (REPAIRED, MOVED, GREW, RESTARTED))
    assert marked.count("stroke-dasharray") > plain.count("stroke-dasharray")
