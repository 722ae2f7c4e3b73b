"""Tables of the manual that follow from the code; `python -m docs.tables` writes them into their pages."""

from __future__ import annotations

import math
import re

import msgspec
from docs.make_pictures import SHAPES, drawing
from docs.pages import renew

from pipefit.cost import CostModel
from pipefit.draw.axes import label_number
from pipefit.ir.op import OP_SPEC, Op
from pipefit.planner import by_hand, plan_without
from pipefit.schedules import find, program_of
from pipefit.simulate import simulate
from pipefit.spec import Plan
from pipefit.verify.report import RULES

_LAW = {
    "naive": ("1 − 1/p", "model does not fit, speed does not matter; the baseline"),
    "data-parallel": ("none", "model, gradients and optimizer fit on every device"),
    "gpipe": ("(p−1)/(m+p−1)", "small activations, or recomputation; slow links"),
    "1f1b": ("(p−1)/(m+p−1)", "the first choice for synchronous training"),
    "interleaved": ("(p−1)/(vm+p−1)", "few micro-batches, fast links, many layers"),
    "breadth-first": ("(p−1)/(vm+p−1)", "few micro-batches, data parallelism around it"),
    "zb-h1": ("(p−1)/(3m+p−1), f = i = w", "as 1F1B, with memory for p micro-batches on every rank"),
    "zb-h2": ("none between updates, f = i = w", "no clipping, memory for 2p−1 micro-batches"),
    "zb-v": ("half of H1's, f = i = w", "as `zb-h1`, with fast links"),
    "pipedream": ("none, once filled", "no flush; weights of different ages are tolerated"),
    "pipedream-vertical-sync": ("none, once filled", "no flush; one version per mini-batch at every stage"),
    "pipedream-2bw": ("none, once filled", "no flush; two versions, every gradient one update old"),
    "spilled": ("first load and last write", "one device, and a model that does not fit it"),
}


def schedules() -> str:
    """Returns one row per schedule: law, figures of its picture, and when to use it."""
    rows = [
        "| schedule | bubble | in its picture | in flight on each rank | weight versions | use it when |",
        "|---|---|---|---|---|---|",
    ]
    for name, (law, when) in _LAW.items():
        figures = drawing(name).metrics
        steady = find(name).is_synchronous
        bubble = f"{100 * figures['bubble_fraction']:.1f} %" if steady else "0 %"
        held = " ".join(map(label_number, figures["peak_inflight"]))
        versions = " ".join(map(str, figures["weight_versions"]))
        rows.append(f"| [`{name}`]({name}.md) | {law} | {bubble} | {held} | {versions} | {when} |")
    return "\n".join(rows)


def instructions() -> str:
    """Returns one row per operation, from `OP_SPEC`."""
    rows = ["| op | operands | lane | roughly |", "|---|---|---|---|"]
    for op in Op:
        spec = OP_SPEC[op]
        rows.append(f"| `{op.value}` | {' '.join(spec.fields)} | {spec.lane.value} | {spec.roughly} |")
    return "\n".join(rows)


def rules() -> str:
    """Returns one row per rule of the verifier."""
    return "\n".join(
        ["| rule | holds when |", "|---|---|", *(f"| `{name}` | {what} |" for name, what in RULES.items())]
    )


LOST = ((2, 2, 2), (2, 2, 4), (4, 2, 4), (4, 2, 8), (4, 4, 8), (4, 4, 16), (8, 4, 16))
"""Stages, copies, and micro-batches of each copy."""


def lost_rank() -> str:
    """Returns one row per size of a pipeline: times of an update before and after a rank is lost, for f = b = 1/2."""
    rows = [
        "| p | d | m | undisturbed | one copy fewer | first stage: 1F1B | patched | bound | last stage: 1F1B | patched "
        "| bound |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for p, d, m in LOST:
        cost = CostModel((0.5,) * p, (0.25,) * p, (0.25,) * p)
        plan = _copies(p, d, m * d)
        row = [p, d, m, _update(plan, cost), _update(_copies(p, d - 1, m * d), cost)]
        for stage in (0, p - 1):
            rest = plan_without(plan, stage, cost=cost)
            own = msgspec.structs.replace(rest, schedule="1f1b", options={})
            bound = stage / 2 + math.ceil(m * d / (d - 1))
            row += [_update(own, cost), _update(rest, cost), bound]
        rows.append(f"| {' | '.join(f'{value:g}' for value in row)} |")
    return "\n".join(rows)


def _copies(p: int, d: int, m: int) -> Plan:
    return by_hand(p, num_ranks=p * d, replicas=(d,) * p, schedule="1f1b", num_microbatches=m)


def _update(plan: Plan, cost: CostModel) -> float:
    return simulate(program_of(plan), cost, memory=False).makespan_s


TABLES = {
    "lost rank": lost_rank,
    "schedules": schedules,
    "instructions": instructions,
    "rules": rules,
}
_PLACE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """Returns the page with its tables made anew."""
    return _PLACE.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", page)


if __name__ == "__main__":
    assert set(_LAW) <= set(SHAPES)
    renew(filled)
