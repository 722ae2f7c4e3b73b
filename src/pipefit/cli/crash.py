"""The file that tells what happened when pipefit itself was wrong."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
import traceback

import pipefit


def keep_evidence(problem: BaseException, arguments: list[str]) -> str:
    """Writes versions, the command and the traceback to a new file, and returns its path."""
    torch = sys.modules.get("torch")
    lines = [
        f"pipefit {pipefit.__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"torch {getattr(torch, '__version__', 'not imported')}",
        f"command: pipefit {shlex.join(arguments)}",
        "",
        *traceback.format_exception(problem),
    ]
    handle, path = tempfile.mkstemp(prefix="pipefit-error-", suffix=".log")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
    return path
