"""How many bytes each process moves in a step."""

from __future__ import annotations

from typing import NamedTuple

from pipefit.runtime.collectives import gather_rows
from pipefit.runtime.session import Session

__all__ = ["Traffic", "traffic"]


class Traffic(NamedTuple):
    """Bytes of the last step, of each process.

    Attributes:
        sent_bytes: activations and gradients to other ranks.
        inside_bytes: to the processes that share its rank, as a ring sends them: sums inside tensor-parallel layers,
            and gathers of messages that came in pieces.
    """

    sent_bytes: list[float]
    inside_bytes: list[float]


def traffic(session: Session, own: tuple[float, float]) -> Traffic:
    """The figures of all processes, from those of this one. Every process must ask."""
    rows = gather_rows(session, own)
    return Traffic([row[0] for row in rows], [row[1] for row in rows])
