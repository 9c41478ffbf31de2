"""Patching of models, one instance at a time."""

from torch_metalk.patching._patch import PATCHABLE_OPS, patch, unpatch
from torch_metalk.patching.report import PatchReport

__all__ = ["PATCHABLE_OPS", "PatchReport", "patch", "unpatch"]
