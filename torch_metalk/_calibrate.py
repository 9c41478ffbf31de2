"""Measures how long a product takes on CPU and GPU, once, for the split of its rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import torch

from torch_metalk import ops
from torch_metalk.benchmark import interleave
from torch_metalk.ops import _cpu_share
from torch_metalk.ops._cpu_share import Shares, Times

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def calibrate(
    rows: int = 512,
    in_features: int = 2048,
    out_features: int = 5632,
    dtypes: Iterable[torch.dtype] = _DTYPES,
    rounds: int = 15,
) -> dict[torch.dtype, Shares]:
    """Time `ops.matmul_rows_split` on the CPU alone and on the GPU alone, and store the times for ``cpu_share="auto"``.

    They go to ``$TORCH_METALK_CACHE/calibration.json`` (else ``~/.cache/torch_metalk``), by the device's name and
    dtype, and stay in use until the next call, so that shares, and with them results, repeat. Leave the machine alone
    meanwhile. The defaults are a layer of the size that KRNL measured.

    Args:
        rows: of the input.
        in_features: of the layer.
        out_features: of the layer.
        dtypes: which ones to measure.
        rounds: how often each is timed, taking turns; the median counts.

    Returns:
        The shares that the times come to, by dtype.

    Raises:
        RuntimeError: there is no mps device, or the extension is not in use.
    """
    device = _cpu_share.device_name()
    if device is None:
        raise RuntimeError(
            "torch_metalk.calibrate needs the mps device and the extension; torch_metalk.doctor() tells why"
        )
    for dtype in dtypes:
        generator = torch.Generator().manual_seed(0)
        x, w, dy = (
            torch.randn(shape, generator=generator).to("mps", dtype)
            for shape in ((rows, in_features), (out_features, in_features), (rows, out_features))
        )
        # As a patched model calls it: with twins of the weight and, forward, of the norm's output.
        x_float32, w_float32 = (None, None) if dtype is torch.float32 else (x.float(), w.cpu().float())
        calls = {
            (direction, share): lambda args=args, share=share: ops.matmul_rows_split(*args[:4], share, *args[4:])
            for direction, args in (
                ("forward", (x, w, True, None, x_float32, w_float32)),
                ("backward", (dy, w, False, None, None, w_float32)),
            )
            for share in (1, 0)
        }
        seconds = interleave(calls, rounds)
        times = {
            direction: Times(*(1e3 * statistics.median(seconds[direction, share]) for share in (1, 0)))
            for direction in _cpu_share.DIRECTIONS
        }
        _cpu_share.store(device, str(dtype).removeprefix("torch."), times)
    return {dtype: _cpu_share.automatic_shares(device, dtype) for dtype in dtypes}
