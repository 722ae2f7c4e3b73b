"""Parts of a disk tier that change places, and bits that cancel each other in a sum: all of them are found."""

import os
import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
from tests.faults.shapes import SPILLED, batches, pipeline

from pipefit.errors import PipefitError, TierError
from pipefit.spill.arena import aligned
from pipefit.spill.tier_file import read_commits
from pipefit.spill.tier_store import TierStore
from pipefit.spill.tiers import Key

pytestmark = [pytest.mark.slow, pytest.mark.faults]

SIZE, STEPS = 4 * 4096, 3
KEYS = [Key(stage, kind) for stage in (0, 1) for kind in ("weights", "optim")]
Change = tuple[str, bytes]


def write(folder: Path, name: str = "rank-0") -> TierStore:
    """A tier of records of random bytes, with some committed steps."""
    tier = TierStore(folder, name)
    tier.reserve({key: SIZE for key in KEYS}, about={"model": "mine"})
    for step in range(1, STEPS + 1):
        writes = [tier.write(key, step, _random()) for key in KEYS]
        tier.commit(step, {}, writes).wait()
    return tier


def _random():
    value = aligned(SIZE)
    value.numpy()[:] = memoryview(os.urandom(SIZE))
    return value


def found(folder: Path, name: str = "rank-0") -> tuple[int | None, str]:
    """The step that is recovered, and the message where there is none."""
    tier = TierStore(folder, name)
    try:
        return tier.recover().step, ""
    except PipefitError as problem:
        return None, str(problem)
    finally:
        tier.close()


def parts(data: bytes, length: int, gaps: tuple[int, ...]) -> Iterator[Change]:
    """Two parts of a record that change places, some parts apart."""
    count = len(data) // length
    for gap in gaps:
        for first in range(0, count - gap, max(1, count // 8)):
            one, two = first * length, (first + gap) * length
            swapped = bytearray(data)
            swapped[one : one + length], swapped[two : two + length] = (
                data[two : two + length],
                data[one : one + length],
            )
            yield f"{length} bytes at {one} and {two}", bytes(swapped)


def cancelled(data: bytes) -> Iterator[Change]:
    """A bit that is set in one word and cleared in another of the same block: the sum stays."""
    for bit in range(64):
        words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, 4096, 8)]
        one = next(index for index, word in enumerate(words) if word >> bit & 1)
        two = next(index for index, word in enumerate(words) if not word >> bit & 1)
        words[one] ^= 1 << bit
        words[two] ^= 1 << bit
        yield f"bit {bit} of words {one} and {two}", b"".join(w.to_bytes(8, "little") for w in words) + data[4096:]


def test_parts_of_a_record(trial, tmp_path: Path):
    write(tmp_path).close()
    last = read_commits(tmp_path, "rank-0")[0]
    path = tmp_path / "rank-0.tier"
    whole = path.read_bytes()
    at = last.records[KEYS[0]]
    start, end = at.position(at.copy), at.position(at.copy + 1)
    data = whole[start:end]
    changes = {
        "words of a record change places": parts(data, 8, (1, 2, 511)),
        "sectors of a record change places": parts(data, 512, (1, 7, 8)),
        "blocks of a record change places": parts(data, 4096, (1, 2)),
        "bits of a record cancel each other": cancelled(data),
    }
    for fault, changed in changes.items():
        for what, other in changed:
            path.write_bytes(whole[:start] + other + whole[end:])
            step, said = found(tmp_path)
            trial(fault, f"{what}: {step} {said}", well=step == STEPS - 1)
    path.write_bytes(whole)
    assert found(tmp_path)[0] == STEPS


def test_whole_records(trial, tmp_path: Path):
    """Each record of the last two steps in the place of each other one."""
    write(tmp_path).close()
    path = tmp_path / "rank-0.tier"
    whole = path.read_bytes()
    places = [commit.records[key] for commit in read_commits(tmp_path, "rank-0") for key in KEYS]
    spans = [slice(at.position(at.copy), at.position(at.copy + 1)) for at in places]
    for one, two in combinations(range(len(spans)), 2):
        data = bytearray(whole)
        data[spans[one]], data[spans[two]] = whole[spans[two]], whole[spans[one]]
        path.write_bytes(data)
        step, said = found(tmp_path)
        # Those of the last step are in the first half: where only the step before is damaged, the last one is taken.
        is_last = one < len(KEYS)
        expected = STEPS if not is_last else STEPS - 1 if two < len(KEYS) else None
        trial("records change places", f"{one}, {two}: {step} {said}", well=step == expected)


MOVED: dict[tuple[str, tuple[str, ...]], int | None] = {
    ("another run", ("tier",)): None,
    ("another run", ("commit",)): STEPS - 1,
    ("another run", ("before",)): STEPS,
    ("another rank", ("tier",)): None,
    ("another rank", ("commit",)): None,
    ("another rank", ("before",)): STEPS,
    ("another rank", ("tier", "commit")): None,
    ("another rank", ("tier", "commit", "before", "json")): None,
}
"""Files that come from elsewhere, and the step that is recovered then; None: the tier is refused."""


def test_files(trial, tmp_path: Path):
    for number, ((of, kinds), expected) in enumerate(MOVED.items()):
        mine, other = tmp_path / f"{number}-mine", tmp_path / f"{number}-other"
        name = "rank-0" if of == "another run" else "rank-1"
        write(mine).close()
        write(other, name).close()
        for kind in kinds:
            (other / f"{name}.{kind}").replace(mine / f"rank-0.{kind}")
        step, said = found(mine)
        named = "rank-0" in said if step is None else None
        trial(f"files of {of}", f"{kinds}: {step} {said}", well=step == expected, named=named)


def test_the_files_of_one_rank_of_another_run(trial, tmp_path: Path):
    """Each rank's files are whole, and of a run with the same settings; only the names of the runs differ."""
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        pipe = pipeline(SPILLED, tmp_path / run)
        pipe.fit(batches()[:3])
        pipe.settle()
        pipe.close()
    for rank in (0, 1):
        mixed = tmp_path / f"mixed-{rank}"
        shutil.copytree(tmp_path / "one", mixed)
        for file in (tmp_path / "two" / "tier").glob(f"rank-{rank}.*"):
            shutil.copy(file, mixed / "tier")
        said = ""
        try:
            pipeline(SPILLED, mixed)
        except TierError as problem:
            said = str(problem)
        trial("files of one rank of another run", said, well=bool(said), named="are of different runs" in said)
