"""Timing by ratios: variants take turns, so that each pair of runs shares one state of the machine.

A machine that slows down between two blocks of runs shows a difference where there is none; between two runs next to
each other it hardly can.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


def interleave(
    variants: dict[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 2,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> dict[str, list[float]]:
    """Run every variant once a round, in an order drawn anew each round.

    Args:
        variants: name to what is timed, without arguments.
        rounds: how many timed rounds.
        warmup: rounds before that, not timed.
        seed: of the orders.
        progress: called with the number of rounds done.

    Returns:
        Name to seconds, one number a round. Work on an accelerator is waited for.
    """
    order = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for i in range(-warmup, rounds):
        order.shuffle(names)
        for name in names:
            _synchronize()
            start = time.perf_counter()
            variants[name]()
            _synchronize()
            if i >= 0:
                seconds[name].append(time.perf_counter() - start)
        if progress is not None and i >= 0:
            progress(i + 1)
    return seconds


def _synchronize() -> None:
    if torch.backends.mps.is_available():
        torch.mps.synchronize()


class Ratio(NamedTuple):
    """The median of ratios of paired runs, with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(seconds: list[float], baseline: list[float], *, resamples: int = 10_000, seed: int = 0) -> Ratio:
    """How long a variant takes compared with a baseline that it took turns with; below 1 it is faster.

    The interval is the percentile bootstrap of the median over pairs (Efron, "Bootstrap Methods", 1979).
    """
    ratios = [a / b for a, b in zip(seconds, baseline, strict=True)]
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    low, high = (medians[round(q * (resamples - 1))] for q in (0.025, 0.975))
    return Ratio(statistics.median(ratios), low, high)
