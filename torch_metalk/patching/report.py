"""What `patch` did, as data and as a short table."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Line(NamedTuple):
    """Modules of one class: what became of them, and why not where nothing did."""

    module_class: str
    op: str
    count: int
    reason: str = ""


class PatchReport:
    """The modules of a model by class and operator.

    Attributes:
        patched: `Line` for each module class and operator in use, with the number of modules; `reason` is empty where
            they call the operator, or says what happens instead: that calls run stock code at present (a LoRA layer
            that is merged, say) or in training (attention with dropout), or that the call is made by an operator of the
            module around (a LoRA layer of a fused MLP). Settings that decide about it, like dropout and adapters, are
            those at the time of the report.
        skipped: `Line` for each candidate that was left alone; `reason` says why.
    """

    def __init__(self, patched: Counter, skipped: Counter):
        self.patched = [Line(*key[:2], count, key[2]) for key, count in patched.items()]
        self.skipped = [Line(*key[:2], count, key[2]) for key, count in skipped.items()]

    def count(self, op: str) -> int:
        """How many modules call an operator."""
        return sum(line.count for line in self.patched if line.op == op and not line.reason)

    def __str__(self) -> str:
        header = ("module", "op", "count", "status")
        rows = [(*map(str, line[:3]), line.reason or "patched") for line in self.patched]
        rows += [(*map(str, line[:3]), f"left alone: {line.reason}") for line in self.skipped]
        if not rows:
            return "torch_metalk: nothing in this model is a candidate for the operators asked for"
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {op:<{widths[1]}}  {count:>{widths[2]}}  {status}"
            for name, op, count, status in [header, *rows]
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"<PatchReport: {sum(line.count for line in self.patched)} patched, {len(self.skipped)} kinds left alone>"
        )
