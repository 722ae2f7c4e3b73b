"""`pipefit --version`: versions, commit and devices."""

from __future__ import annotations

import contextlib

import pipefit


def version_of(package: str) -> str | None:
    """The version of an installed package, without loading it; None: there is none."""
    from importlib.metadata import PackageNotFoundError, version

    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def version_text() -> str:
    """Versions, commit and devices, without loading torch."""
    import platform

    from pipefit.run.config import num_cores, num_gpus
    from pipefit.units import counted

    torch = version_of("torch") or "not installed"
    devices = "no GPU"
    if num_gpus():
        devices = counted(num_gpus(), "GPU")
    return (
        f"pipefit {pipefit.__version__} ({_commit()})\nPython {platform.python_version()}, torch {torch}\n"
        f"{counted(num_cores(), 'core')}, {devices}"
    )


def _commit() -> str:
    """The commit of the source: what pip has noted of a repository, or that of the checkout the package lies in."""
    import json
    import subprocess
    from importlib.metadata import PackageNotFoundError, distribution
    from pathlib import Path

    with contextlib.suppress(PackageNotFoundError, ValueError, KeyError, TypeError):
        noted = json.loads(distribution("pipefit").read_text("direct_url.json") or "")
        return f"commit {noted['vcs_info']['commit_id'][:12]}"
    root = Path(pipefit.__file__).resolve().parents[2]
    if (root / ".git").exists() and (root / "src" / "pipefit").is_dir():
        git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            return f"commit {found.replace('-dirty', ' with changes')}"
    return "no commit known"
