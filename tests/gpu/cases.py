"""The synchronous schedules that the tests on GPUs train, in one process each."""

from typing import Any

SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "naive": {"schedule": "naive", "stages": 3},
    "data-parallel": {"schedule": "data-parallel", "num_ranks": 2},
    "gpipe": {"schedule": "gpipe", "stages": 4},
    "1f1b": {"schedule": "1f1b", "stages": 4},
    "1f1b, replicated": {"schedule": "1f1b", "stages": 2, "replicas": 2},
    "1f1b, sharded optimizer": {"schedule": "1f1b", "stages": 2, "replicas": 2, "shard": "optimizer"},
    "breadth-first, shared weights": {
        "schedule": "breadth-first",
        "stages": 4,
        "chunks": 2,
        "replicas": 2,
        "shard": "weights",
    },
    "interleaved": {"schedule": "interleaved", "stages": 4, "chunks": 2},
    "breadth-first": {"schedule": "breadth-first", "stages": 4, "chunks": 2},
    "zb-h1": {"schedule": "zb-h1", "stages": 4},
    "zb-h2": {"schedule": "zb-h2", "stages": 3},
    "zb-v": {"schedule": "zb-v", "stages": 4, "chunks": 2},
}
