"""What is in use, what is not, and why."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

from torch_metalk import _extension
from torch_metalk._version import __version__
from torch_metalk.ops import _cpu_share
from torch_metalk.ops._operator import OPERATORS

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "numpy")


class Diagnosis(dict):
    """The findings as a dictionary of plain values (`json.dumps` takes it), printed as a table."""

    def __str__(self) -> str:
        lines = [f"torch_metalk {self['torch_metalk']} on {self['platform']}, Python {self['python']}"]
        lines += [f"  {name:<14} {version or 'not installed'}" for name, version in self["packages"].items()]
        lines += [f"device         {self['device']['name']}"]
        if self["device"]["reason"]:
            lines += [f"  mps is not in use: {self['device']['reason']}"]
        extension = self["extension"]
        lines += [f"extension      {'in use' if extension['loaded'] else 'not in use: ' + extension['reason']}"]
        split = self["row_split"]
        lines += [f"row split      {split['device'] or 'not in use: it is for mps and the extension'}"]
        lines += [f"  {split['problem']}"] if split["problem"] else []
        for dtype, on in split["cpu_shares"].items() if split["device"] else ():
            told = on["reason"] or f"{on['forward']:.2f} of the rows forward, {on['backward']:.2f} backward"
            lines += [f"  {dtype:<14} {told}"]
        width = max(map(len, self["operators"]))
        lines += [f"{'operator':<{width}}  on mps        elsewhere"]
        lines += [f"{name:<{width}}  {on['mps']:<12}  {on['other']}" for name, on in self["operators"].items()]
        return "\n".join(lines)

    __repr__ = __str__


def doctor() -> Diagnosis:
    """Versions, device, extension and the implementation of every operator.

    Returns:
        A dictionary that prints as a table: ``torch_metalk``, ``python``, ``platform``; ``packages``: name to version
        or None; ``device``: ``name`` and the ``reason`` why it is not mps; ``extension``: ``loaded`` and the ``reason``
        why not; ``row_split``: ``device``, Metal's name of it, ``cpu_shares``: dtype to the CPU's shares by
        ``cpu_share="auto"`` and the ``reason`` why they are 0, and the ``problem`` with stored times; ``operators``:
        name to ``{"mps": "Metal" | "eager twin", "other": "eager twin"}``.
    """
    return Diagnosis(
        torch_metalk=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: _version(name) for name in _PACKAGES},
        device=_device(),
        extension=_extension.status._asdict(),
        row_split=_row_split(),
        operators={
            name: {"mps": "Metal" if _has_metal(name) else "eager twin", "other": "eager twin"} for name in OPERATORS
        },
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    if torch.backends.mps.is_available():
        return {"name": "mps", "reason": ""}
    if torch.backends.mps.is_built():
        return {"name": "cpu", "reason": "torch is built for it, but macOS 14 or an Apple GPU is missing"}
    return {"name": "cpu", "reason": "this build of torch has no mps device (it exists on macOS)"}


def _row_split() -> dict[str, Any]:
    device = _cpu_share.device_name()
    return {
        "device": device,
        "problem": _cpu_share.stored().problem,
        "cpu_shares": {
            str(dtype).removeprefix("torch."): _cpu_share.automatic_shares(device, dtype)._asdict()
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        },
    }


def _has_metal(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"torch_metalk::{name}", "MPS")
