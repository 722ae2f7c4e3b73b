"""The device of a process, by the name that a user gave."""

from __future__ import annotations

from typing import Any

import torch

from pipefit.errors import PipefitError


def usable_device(name: Any) -> torch.device:
    """The device of a name such as "cpu" or "cuda:0", or of a `torch.device`.

    Raises:
        PipefitError: there is no such device here, or it holds no numbers.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device).zero_().item()
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as problem:
        raise PipefitError(f"--device {name}: cannot be used here: {str(problem).splitlines()[0]}") from None
    return device
