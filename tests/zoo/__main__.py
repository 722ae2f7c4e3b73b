"""`python -m tests.zoo [PREFIX …]`: tries models, and appends their outcomes to a file of JSON lines."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.simplefilter("ignore")

from tests.zoo.children import results  # noqa: E402
from tests.zoo.collection import LIBRARIES, specimens_of  # noqa: E402
from tests.zoo.outcome import LATE, RAW, WRONG, line, read_lines  # noqa: E402
from tests.zoo.specimen import Specimen, chosen  # noqa: E402
from tests.zoo.trial import tried  # noqa: E402

RESULTS = Path("runs/zoo.jsonl")


def main() -> int:
    """Tries models; those that have a result count by it.

    Returns:
        1: a model trains wrong, ends in a raw error, or is refused after it was accepted; 2: no model has such a name.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefixes", nargs="*", help="names of models begin so, such as hand/state or timm; none: all")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--here", action="store_true", help="in this process, with the traceback of an error")
    parser.add_argument("--list", action="store_true", help="only print the names")
    arguments = parser.parse_args()
    prefixes = arguments.prefixes
    known = {} if arguments.again else read_lines(arguments.results)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    num_named = 0
    for library in LIBRARIES:
        if prefixes and not any(prefix.split("/")[0] == library for prefix in prefixes):
            continue
        named = chosen(specimens_of(library), prefixes)
        num_named += len(named)
        counts.update(known[one.name].outcome for one in named if one.name in known)
        wanted = [one for one in named if one.name not in known]
        if arguments.list:
            sys.stdout.writelines(f"{one.name}\n" for one in wanted)
            continue
        if arguments.here:
            for one in named:
                print_trial(one)
            continue
        counts += _run(wanted, arguments.results)
    if not num_named:
        parser.error(f"no model's name begins with {' or '.join(prefixes)}; --list prints them")
    sys.stdout.write(", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()) + "\n")
    return int(any(counts[outcome] for outcome in (WRONG, RAW, LATE)))


def print_trial(specimen: Specimen) -> None:
    """Tries a model in this process, and prints its outcome with what led to it."""
    result = tried(specimen, show=traceback.print_exception)
    sys.stdout.write(
        f"{result.name}: {result.outcome} ({result.layers} layers, {result.seconds:.1f} s) {result.detail}\n"
    )


def _run(wanted: list[Specimen], path: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    begun = time.perf_counter()
    for number, result in enumerate(results(wanted), 1):
        with path.open("a") as file:
            file.write(line(result) + "\n")
        counts[result.outcome] += 1
        clock = f"{time.perf_counter() - begun:6.0f} s {number:4}/{len(wanted)}"
        sys.stdout.write(
            f"{clock} {result.name:45} {result.outcome:12} {result.seconds:5.1f} s  {result.detail[:150]}\n"
        )
        sys.stdout.flush()
    return counts


if __name__ == "__main__":
    sys.exit(main())
