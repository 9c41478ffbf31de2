"""Root mean square layer normalisation (Zhang and Sennrich, NeurIPS 2019)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_metalk.ops import _checks
from torch_metalk.ops._operator import cast, compute_dtype, define

_ROUNDING = ("before_weight", "after_weight")


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    rounding: str = "before_weight",
    also_float32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""``x / sqrt(mean(x**2) + eps) * (weight + weight_offset)`` over the last dimension, sums in float32.

    The families of models differ in the offset and in where they round to a half precision dtype:

    ========================  =============  ==================  =======================================
    family                    weight_offset  rounding            result dtype
    ========================  =============  ==================  =======================================
    Llama, Qwen, Mistral, …   0              ``before_weight``   the promotion of x's and weight's dtype
    Gemma 1-3                 1              ``after_weight``    x's dtype
    Olmo 2                    0              ``after_weight``    x's dtype
    ========================  =============  ==================  =======================================

    Args:
        x: ``[..., N]``, float32, float16 or bfloat16 (float64 on the CPU), any strides.
        weight: ``[N]``, any of these dtypes, or None for a norm without weight.
        eps: added to the mean square in float32; not negative, 0 is taken as it is.
        weight_offset: added to the weight in float32.
        rounding: ``"before_weight"`` rounds the normalised value to x's dtype and then multiplies;
            ``"after_weight"`` multiplies in float32 and rounds once.
        also_float32: return the result, as it was rounded, in float32 too, written by the same kernel: what the CPU's
            rows of `matmul_rows_split` start from.

    Returns:
        A contiguous tensor of x's shape, and with `also_float32` a second one, which no gradient comes from (the same
        memory where the result is float32 itself). Backward keeps x and one float32 per row, and nothing else.

    Raises:
        ValueError: x has no dimension, weight is not ``[N]``, eps is negative or not finite, weight_offset is not
            finite, unknown rounding.
        TypeError: an integer tensor, or a sparse one; eps or weight_offset no number.
    """
    # The usual arguments are known to be right at a glance: the checks' calls cost a twentieth of the whole.
    if rounding not in _ROUNDING or type(eps) is not float or type(weight_offset) is not float:
        _checks.one_of("rms_norm", "rounding", rounding, _ROUNDING)
        _checks.number("rms_norm", "eps", eps)
        _checks.number("rms_norm", "weight_offset", weight_offset)
    if not math.isfinite(weight_offset):
        _checks.refuse("rms_norm", "weight_offset", weight_offset, "a finite number")
    before_weight = rounding == "before_weight"
    if not also_float32:
        return _rms_norm(x, weight, eps, weight_offset, before_weight, False)[0]
    _check(x, weight, eps)
    twin = _result_dtype(x, weight, before_weight) is not torch.float32
    y, _, y_float32 = _rms_norm(x, weight, eps, weight_offset, before_weight, twin)
    return y, y_float32 if twin else y.detach()


def _check(x: Tensor, weight: Tensor | None, eps: float, op: str = "rms_norm") -> None:
    _checks.floating(op, x=x, weight=weight)
    if x.dim() == 0:
        _checks.refuse(op, "x", _checks.shape_of(x), "at least one dimension")
    if weight is not None and weight.shape != x.shape[-1:]:
        _checks.refuse(op, "weight", _checks.shape_of(weight), f"shape {tuple(x.shape[-1:])}, the last dimension of x")
    if not (eps >= 0 and math.isfinite(eps)):
        _checks.refuse(op, "eps", eps, "a finite number that is not negative")


def _result_dtype(x: Tensor, weight: Tensor | None, round_before_weight: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if weight is not None and round_before_weight else x.dtype


def _eager(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_weight: bool, also_float32: bool
):
    y, rstd = _normalize(x, weight, eps, weight_offset, round_before_weight)
    return y, rstd, y.to(torch.float32, copy=True) if also_float32 else None


def _normalize(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_weight: bool):
    _check(x, weight, eps)
    dtype = compute_dtype(x)
    x_ = cast(x, dtype).contiguous()
    if x.shape[-1] == 0:
        rstd = x_.new_full(x.shape[:-1], math.inf if eps == 0 else eps**-0.5)
        return _empty(x, weight, round_before_weight), rstd
    rstd = torch.linalg.vector_norm(x_, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    y = x_ * rstd
    if weight is None:
        return cast(y, x.dtype), rstd.squeeze(-1)
    result_dtype = _result_dtype(x, weight, round_before_weight)
    if round_before_weight:
        y = cast(cast(y, x.dtype), torch.promote_types(dtype, result_dtype))
    factor = cast(weight, y.dtype)
    y *= factor + weight_offset if weight_offset else factor
    return cast(y, result_dtype), rstd.squeeze(-1)


def _empty(x: Tensor, weight: Tensor | None, round_before_weight: bool) -> Tensor:
    return x.new_empty(x.shape, dtype=_result_dtype(x, weight, round_before_weight))


def _fake(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_weight: bool, also_float32: bool
):
    _check(x, weight, eps)
    y, rstd = _empty(x, weight, round_before_weight), x.new_empty(x.shape[:-1], dtype=compute_dtype(x))
    return y, rstd, x.new_empty(x.shape, dtype=torch.float32) if also_float32 else None


def _backward_check(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> None:
    _check(x, weight, 0.0, "rms_norm_backward")
    _checks.gradient("rms_norm_backward", dy, x)
    if rstd.shape != x.shape[:-1]:
        _checks.refuse("rms_norm_backward", "rstd", _checks.shape_of(rstd), f"one per row of x, {tuple(x.shape[:-1])}")


def _eager_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float, output_mask: list[bool]
):
    _backward_check(dy, x, weight, rstd)
    dtype = compute_dtype(x, dy)
    n = x.shape[-1]
    dy_, x_, rstd_ = cast(dy, dtype), cast(x, dtype), cast(rstd, dtype).unsqueeze(-1)
    dx = dweight = None
    if output_mask[1] and weight is not None:
        dweight = (dy_ * x_).mul_(rstd_).reshape(math.prod(x.shape[:-1]), n).sum(0).to(weight.dtype)
    if output_mask[0]:
        if weight is None:
            g = dy_
        else:
            factor = cast(weight, dtype)
            g = dy_ * (factor + weight_offset if weight_offset else factor)
        # d/dx of x * rstd: rstd * (g - x * rstd^2 * mean(g * x)), the mean first: rstd^2 can overflow alone.
        mean = (g * x_).sum(-1, keepdim=True).mul_(rstd_).mul_(rstd_)
        dx = torch.addcmul(g, x_, mean, value=-1 / max(n, 1)).mul_(rstd_)
        dx = cast(dx, x.dtype).contiguous()
    return dx, dweight


def _fake_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float, output_mask: list[bool]
):
    _backward_check(dy, x, weight, rstd)
    dx = x.new_empty(x.shape) if output_mask[0] else None
    return dx, weight.new_empty(weight.shape) if output_mask[1] and weight is not None else None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, weight_offset, round_before_weight, also_float32):
        y, rstd, y_float32 = _rms_norm.below_autograd(x, weight, eps, weight_offset, round_before_weight, also_float32)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rstd, *(() if y_float32 is None else (y_float32,)))
        ctx.save_for_backward(x, weight, rstd)
        ctx.weight_offset = weight_offset
        return y, rstd, y_float32

    @staticmethod
    def backward(ctx, dy, *_):
        if dy is None:
            return (None,) * 6
        mask = list(ctx.needs_input_grad[:2])
        dx, dweight = _rms_norm_backward(dy, *ctx.saved_tensors, ctx.weight_offset, mask)
        return dx, dweight, None, None, None, None


_rms_norm = define(
    "rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset, bool round_before_weight, bool also_float32)"
    " -> (Tensor y, Tensor rstd, Tensor y_float32)",
    eager=_eager,
    fake=_fake,
    autograd=_RMSNorm.apply,
)
_rms_norm_backward = define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float weight_offset, bool[2] output_mask)"
    " -> (Tensor dx, Tensor dweight)",
    eager=_eager_backward,
    fake=_fake_backward,
)
