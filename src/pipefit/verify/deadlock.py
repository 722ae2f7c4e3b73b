"""Rule `deadlock`: no cycle of waiting, under the strictest execution there is (`pipefit.ir.blocking`)."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.ir.blocking import Blocking
from pipefit.verify.subject import Finding, Subject


def deadlock(s: Subject) -> Iterator[Finding]:
    """Every cycle of ranks that wait for each other, as a list."""
    run = Blocking(s.graph)
    stuck = run.run()
    for cycle in run.cycles(stuck):
        lines = ["these wait for each other:"]
        for rank in cycle:
            _, index = s.place(stuck[rank])
            text = s.graph.instructions[stuck[rank]]
            lines.append(f"      rank {rank} waits at [{index}] {text}, for {s.where(run.waits_for(stuck[rank]))}")
        yield s.at("deadlock", stuck[cycle[0]], "\n".join(lines))
