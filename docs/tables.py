"""Tables of the manual that follow from the code; `python -m docs.tables` writes them into their pages."""

from __future__ import annotations

import re

from docs.make_pictures import SHAPES, drawing
from docs.pages import renew

from pipefit.draw.axes import label_number
from pipefit.ir.op import OP_SPEC, Op
from pipefit.schedules import find
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


TABLES = {
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
