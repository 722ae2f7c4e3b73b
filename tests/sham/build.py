"""Builds the simulated CUDA device once for each torch and each state of its source; prints the library's path."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("sham.cpp")
BUILT = Path(__file__).parents[2] / ".sham"
COMPILERS = ("c++", "g++", "clang++")


def library() -> Path:
    """Where the library of this torch and this source is, or will be."""
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    return BUILT / f"sham-{version}-py{sys.version_info[0]}{sys.version_info[1]}-{digest}.so"


def build() -> Path | None:
    """The library, compiled now if it is not there; None: there is no compiler.

    Raises:
        CalledProcessError: the compiler has found an error, which it has printed.
    """
    target = library()
    if target.exists():
        return target
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    found = importlib.machinery.PathFinder.find_spec("torch")
    assert found is not None and found.origin is not None
    torch = Path(found.origin).parent
    target.parent.mkdir(exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    command = [compiler, "-shared", "-fPIC", "-std=c++20", "-O1", "-w", f"-I{torch / 'include'}", str(SOURCE)]
    command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(partial)]
    subprocess.run(command, check=True)
    partial.rename(target)
    return target


if __name__ == "__main__":
    made = build()
    if made is None:
        print(f"there is no C++ compiler ({', '.join(COMPILERS)})")
        sys.exit(3)
    print(made)
