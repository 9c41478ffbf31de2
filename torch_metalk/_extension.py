"""Finds and loads the compiled extension, or remembers why not."""

from __future__ import annotations

import importlib
import importlib.util
from typing import NamedTuple

import torch

_MODULE = "torch_metalk._C"


class Status(NamedTuple):
    """Whether the extension is loaded, and if not, why."""

    loaded: bool
    reason: str


def _load() -> Status:
    if importlib.util.find_spec(_MODULE) is None:
        if not torch.backends.mps.is_built():
            return Status(False, "not built: this torch has no mps device, which the extension is for")
        return Status(False, "not built: install with `pip install --no-build-isolation .` where clang++ is available")
    if not torch.backends.mps.is_built():
        return Status(False, "built, but this torch has no mps device, which it is for")
    try:
        importlib.import_module(_MODULE)
    except (ImportError, OSError) as error:
        return Status(False, f"built, but does not load with torch {torch.__version__}: {error}")
    return Status(True, "")


status = _load()
