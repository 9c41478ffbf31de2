"""Rotary position embedding that calculates its own angles from positions, accurate at any position."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_metalk.ops import _checks
from torch_metalk.ops._operator import compute_dtype, define, nobody_listens
from torch_metalk.ops.rope import rotate

_MAX_POSITION = 2**31 - 1
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def rope_positions(
    x: Tensor,
    positions: int | Sequence[int] | Tensor,
    base: float,
    dims: int,
    *,
    traditional: bool = False,
    scale: float = 1.0,
) -> Tensor:
    r"""Rotate the first `dims` components by ``position * scale * base**(-2 i / dims)`` for pair i.

    Turns are counted in 64-bit fixed point, which wraps around like an angle, so that no accuracy is lost at large
    positions: the error of cosine and sine stays below 2e-6 at position 131,072, where float32 products are wrong by
    1e-3.

    Args:
        x: ``[B, ..., S, D]``, float32, float16 or bfloat16 (float64 on the CPU), any strides.
        positions: where the rows of x stand: an int is the position of the first row of each batch element; a list or
            1-D integer tensor ``[B]`` gives the first position of each; a 2-D one ``[B, S]`` gives every position. Not
            negative, below 2**31. The values of a tensor on an accelerator, or inside of `torch.compile`, are not
            checked, since that would wait for the device.
        base: the base of the frequencies, e.g. 10000; positive.
        dims: rotary width, even, at most D; the other components pass through.
        traditional: pairs are ``(2 i, 2 i + 1)`` instead of ``(i, i + dims / 2)``.
        scale: multiplies the positions.

    Returns:
        x's shape, dtype and order in memory. Backward keeps the int32 positions only.

    Raises:
        ValueError: `dims` odd, not positive or larger than D; positions negative, too large or of a wrong length;
            base or scale not finite, base not positive.
        TypeError: positions of a dtype that is no integer, x an integer tensor.
    """
    return _rope_positions(x, _positions_tensor(x, positions), base, dims, traditional, scale, False)


def _positions_tensor(x: Tensor, positions: int | Sequence[int] | Tensor) -> Tensor:
    """One int32 tensor on x's device from what users pass."""
    if not _checks.alike(x):
        _checks.floating("rope_positions", x=x)
    if x.dim() < 2:
        _checks.refuse("rope_positions", "x", _checks.shape_of(x), "rank 2 or more, [B, ..., S, D]")
    if isinstance(positions, int) and not isinstance(positions, bool):
        _check_range(x, positions, positions, offsets=True)
        batch = x.shape[0] if x.dim() > 2 else 1
        # A tensor made in inference mode, or by a mode that makes others, is good for nothing else.
        plain = not torch.compiler.is_compiling() and nobody_listens(x.device.type)
        made = _repeated if plain and not torch.is_inference_mode_enabled() else _repeated.__wrapped__
        return made(batch, positions, x.device)
    if isinstance(positions, Sequence) and not isinstance(positions, str):
        if not all(isinstance(p, int) for p in positions):
            _checks.refuse("rope_positions", "positions", repr(positions), "a list of integers", TypeError)
        if positions:
            _check_range(x, min(positions), max(positions), offsets=True)
        positions = torch.tensor(positions, dtype=torch.int64)
    elif not isinstance(positions, Tensor):
        _checks.refuse("rope_positions", "positions", repr(positions), "an int, a list or a tensor", TypeError)
    elif positions.dtype not in _INTEGERS:
        _checks.refuse("rope_positions", "positions", f"of dtype {positions.dtype}", "an integer dtype", TypeError)
    elif positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
        low, high = (int(value) for value in torch.aminmax(positions))
        _check_range(x, low, high, offsets=positions.dim() == 1)
    return positions.to(device=x.device, dtype=torch.int32)


@functools.lru_cache(maxsize=64)
def _repeated(batch: int, position: int, device: torch.device) -> Tensor:
    """Made on the device, without a copy to it. Nobody writes to it, and a loop over positions asks for it often."""
    return torch.full((batch,), position, dtype=torch.int32, device=device)


def _check_range(x: Tensor, low: int, high: int, offsets: bool) -> None:
    last = high + (max(x.shape[-2] - 1, 0) if offsets else 0)
    if low < 0 or last > _MAX_POSITION:
        _checks.refuse("rope_positions", "positions", f"from {low} to {last}", f"0 to {_MAX_POSITION}")


def _check(x: Tensor, positions: Tensor, base: float, dims: int, scale: float) -> None:
    _checks.floating("rope_positions", x=x)
    _checks.same_device("rope_positions", x=x, positions=positions)
    if x.dim() < 2:
        _checks.refuse("rope_positions", "x", _checks.shape_of(x), "rank 2 or more, [B, ..., S, D]")
    if positions.dtype != torch.int32:
        _checks.refuse("rope_positions", "positions", f"of dtype {positions.dtype}", "int32", TypeError)
    batch = x.shape[0] if x.dim() > 2 else 1
    if tuple(positions.shape) not in ((batch,), (batch, x.shape[-2])):
        _checks.refuse(
            "rope_positions",
            "positions",
            _checks.shape_of(positions),
            f"one offset per batch row ({batch},) or one position per row ({batch}, {x.shape[-2]})",
        )
    if dims <= 0 or dims % 2 or dims > x.shape[-1]:
        _checks.refuse("rope_positions", "dims", dims, f"an even number from 2 to the last dimension, {x.shape[-1]}")
    if not (math.isfinite(base) and base > 0):
        _checks.refuse("rope_positions", "base", base, "a finite positive number")
    if not math.isfinite(scale):
        _checks.refuse("rope_positions", "scale", scale, "a finite number")


def turns_per_position(base: float, dims: int, scale: float) -> list[int]:
    """For each pair the turns that one position adds, in units of 2**-64 turns, as signed 64-bit integers."""
    turns = (scale * base ** (-2 * i / dims) / (2 * math.pi) for i in range(dims // 2))
    return [(round((t % 1.0) * 2**64) + 2**63) % 2**64 - 2**63 for t in turns]


def _cos_sin(x: Tensor, positions: Tensor, base: float, dims: int, scale: float) -> tuple[Tensor, Tensor]:
    p = positions.to(torch.int64)
    if p.dim() == 1:
        p = p[:, None] + torch.arange(x.shape[-2], device=x.device)
    fraction = p[..., None] * torch.tensor(turns_per_position(base, dims, scale), device=x.device)
    angle = fraction.to(compute_dtype(x)) * (2 * math.pi / 2**64)
    angle = angle.view(p.shape[0], *[1] * (x.dim() - 3), *angle.shape[1:]) if x.dim() > 2 else angle[0]
    return angle.cos(), angle.sin()


def _eager(
    x: Tensor, positions: Tensor, base: float, dims: int, traditional: bool, scale: float, inverse: bool
) -> Tensor:
    _check(x, positions, base, dims, scale)
    return rotate(x, *_cos_sin(x, positions, base, dims, scale), traditional, inverse)


def _fake(
    x: Tensor, positions: Tensor, base: float, dims: int, traditional: bool, scale: float, inverse: bool
) -> Tensor:
    _check(x, positions, base, dims, scale)
    return torch.empty_like(x)


class _RopePositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, base, dims, traditional, scale, inverse):
        y = _rope_positions.below_autograd(x, positions, base, dims, traditional, scale, inverse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(positions)
        ctx.args = base, dims, traditional, scale, not inverse
        return y

    @staticmethod
    def backward(ctx, dy):
        dx = None if dy is None else _rope_positions_backward(dy, *ctx.saved_tensors, *ctx.args)
        return (dx, *(None,) * 6)


_SIGNATURE = "(Tensor x, Tensor positions, float base, int dims, bool traditional, float scale, bool inverse) -> Tensor"
_rope_positions = define(f"rope_positions{_SIGNATURE}", eager=_eager, fake=_fake, autograd=_RopePositions.apply)
# The same rotation, but as an operator of the backward pass: differentiating it again raises.
_rope_positions_backward = define(f"rope_positions_backward{_SIGNATURE}", eager=_eager, fake=_fake)
