"""Which share of a product's rows the CPU takes while the GPU makes the others, and where its times come from.

Both finish together where ``p * t_cpu == other + (1 - p) * t_gpu`` (KRNL, "CPU matrix units alongside the GPU").
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from torch_metalk.ops import _checks

#: Height of the GPU's tiles (csrc/geometry.h): shares are rounded to whole ones.
TILE_ROWS = 32
DIRECTIONS = ("forward", "backward")


class Times(NamedTuple):
    """What one product of all rows takes on either, in any unit."""

    cpu: float
    gpu: float


#: Milliseconds by Metal's name of the device, dtype and direction, for chips that were measured. M1 Pro: KRNL,
#: [512, 2048] by [2048, 5632], half precision on the GPU and float32 on the CPU.
CHIPS = {
    "Apple M1 Pro": {"float16": {"forward": Times(6.73, 4.0), "backward": Times(9.70, 3.5)}},
}

#: What a file of stored times calls itself.
_FORMAT = "torch_metalk calibration 1"


class Shares(NamedTuple):
    """The CPU's share of the rows in either direction, and why there is none."""

    forward: float
    backward: float
    reason: str = ""


def balanced_share(t_cpu: float, t_gpu: float, other: float = 0.0) -> float:
    """The share of rows with which CPU and GPU finish together: ``(other + t_gpu) / (t_cpu + t_gpu)``, at most 1.

    Args:
        t_cpu: what the CPU takes for all rows.
        t_gpu: what the GPU takes for them, in the same unit.
        other: other work that the GPU has to do in the same time.

    Raises:
        ValueError: a time that is not positive or not finite; `other` negative.
    """
    for name, value in (("t_cpu", t_cpu), ("t_gpu", t_gpu), ("other", other)):
        _checks.number("balanced_share", name, value)
        if not (math.isfinite(value) and (value > 0 or (name == "other" and value == 0))):
            accepted = "a finite number that is not negative" if name == "other" else "a finite number above 0"
            _checks.refuse("balanced_share", name, value, accepted)
    return min(1.0, (other + t_gpu) / (t_cpu + t_gpu))


def split_rows(rows: int, share: float) -> int:
    """How many of the rows the CPU takes: whole tiles, the nearest number of them, or all rows."""
    if share == 1:
        return rows
    return min(rows, TILE_ROWS * math.floor(share * rows / TILE_ROWS + 0.5))


def check_share(op: str, share: object) -> None:
    if isinstance(share, str):
        if share != "auto":
            _checks.refuse(op, "cpu_share", repr(share), "a number from 0 to 1, or 'auto'")
        return
    _checks.number(op, "cpu_share", share)
    if not 0 <= share <= 1:
        _checks.refuse(op, "cpu_share", share, "a number from 0 to 1, or 'auto'")


def shares(share: float | str, device: torch.device, dtype: torch.dtype) -> Shares:
    """What a share that passed `check_share` comes to on this device."""
    if device.type != "mps":
        return Shares(0.0, 0.0, f"the tensors are on {device.type}, and cpu_share is for mps")
    if share == "auto":
        return _automatic(dtype)
    return Shares(share, share, "" if share else "the share is 0")


@torch.compiler.assume_constant_result
def _automatic(dtype: torch.dtype) -> Shares:
    return automatic_shares(device_name(), dtype)


def automatic_shares(device: str | None, dtype: torch.dtype) -> Shares:
    """Shares by the times that `calibrate` stored for a device, else by those of the table."""
    if device is None:
        return Shares(0.0, 0.0, "the extension is not in use")
    name = str(dtype).removeprefix("torch.")
    for chips in (stored().chips, CHIPS):
        if times := chips.get(device, {}).get(name):
            return Shares(*(balanced_share(*times[direction]) for direction in DIRECTIONS))
    return Shares(0.0, 0.0, "no times for this chip: run torch_metalk.calibrate() once, or give a number")


@functools.cache
def device_name() -> str | None:
    """What Metal calls the device; None where the extension is not in use."""
    from torch_metalk import _extension  # finds the operators defined when it is loaded

    return importlib.import_module("torch_metalk._C").device_name() if _extension.status.loaded else None


# ---- what `calibrate` has stored


class Stored(NamedTuple):
    """Times by device, dtype and direction, as in `CHIPS`, and why a file that is there was not used."""

    chips: dict[str, dict[str, dict[str, Times]]]
    problem: str = ""


def path() -> Path:
    """``$TORCH_METALK_CACHE/calibration.json``, else in ``~/.cache/torch_metalk``."""
    folder = os.environ.get("TORCH_METALK_CACHE")
    return (Path(folder) if folder else Path.home() / ".cache" / "torch_metalk") / "calibration.json"


@functools.cache
def stored() -> Stored:
    """Read once: shares do not change while a program runs, so that its results repeat."""
    found = read(path())
    if found.problem:
        warnings.warn(f"torch_metalk: {found.problem}", stacklevel=2)
    return found


def read(file: Path) -> Stored:
    """What a file holds. One that is none of ours is a problem to tell, and no error."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Stored({})
    except (OSError, ValueError) as error:
        return Stored({}, f"{file} cannot be read, so its times are not used: {error}")
    try:
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {_FORMAT!r}")
        chips = {
            device: {
                dtype: {direction: Times(*map(float, times[direction])) for direction in DIRECTIONS}
                for dtype, times in dtypes.items()
            }
            for device, dtypes in content["milliseconds"].items()
        }
        for dtypes in chips.values():
            for times in dtypes.values():
                for direction in DIRECTIONS:
                    balanced_share(*times[direction])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Stored({}, f"{file} holds no calibration, so it is not used: {error!r}")
    return Stored(chips)


def store(device: str, dtype: str, times: dict[str, Times]) -> None:
    """Add times to the file, or replace them; a file that cannot be used is replaced. Written whole or not at all."""
    file = path()
    chips = read(file).chips
    chips.setdefault(device, {})[dtype] = times
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as temporary:
            json.dump({"format": _FORMAT, "milliseconds": chips}, temporary, indent=1)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
    stored.cache_clear()
