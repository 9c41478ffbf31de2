"""Measuring: interleaved timing with its spread, and exact counts of what a step costs."""

from torch_metalk.benchmark.counting import StepCost, peak_memory, step_cost
from torch_metalk.benchmark.timing import Ratio, interleave, ratio

__all__ = ["Ratio", "StepCost", "interleave", "peak_memory", "ratio", "step_cost"]
