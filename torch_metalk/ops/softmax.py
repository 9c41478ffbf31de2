"""Softmax over the last dimension with scale and mask, for attention that materialises its scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_metalk.ops import _checks
from torch_metalk.ops._operator import cast, compute_dtype, define

_ALIGNMENT = ("upper_left", "lower_right")


def softmax(
    x: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    causal_alignment: str = "upper_left",
    scale: float = 1.0,
) -> Tensor:
    r"""``softmax(scale * x + mask)`` over the last dimension, with statistics in float32 and rounded once.

    What is hidden (mask False or -inf, causal) is 0 in the result, whatever x holds there, and gets no gradient. So is
    a row in which everything is hidden. `torch.finfo(dtype).min` in an additive mask is a number like any other.

    Args:
        x: scores ``[..., Q, K]``, float32, float16 or bfloat16 (float64 on the CPU), any strides; rank 1 is one row.
        mask: broadcastable to x: bool (True is seen) or floating (added); a constant.
        is_causal: query i sees keys up to i, by `causal_alignment`. Combined with the mask.
        causal_alignment: where Q and K differ: ``"upper_left"`` puts query 0 at key 0, ``"lower_right"`` puts the last
            query at the last key.
        scale: multiplies x; finite.

    Returns:
        A contiguous tensor of x's shape and dtype. Backward keeps this result only.

    Raises:
        ValueError: x has no dimension, or one with `is_causal`; a mask that does not broadcast or requires a gradient;
            scale not finite, unknown alignment.
        TypeError: an integer tensor, a mask of integers, scale no number.
    """
    _checks.one_of("softmax", "causal_alignment", causal_alignment, _ALIGNMENT)
    _checks.number("softmax", "scale", scale)
    return _softmax(x, mask, scale, is_causal, causal_alignment == "lower_right")


def _check(x: Tensor, mask: Tensor | None, scale: float, is_causal: bool, op: str = "softmax") -> None:
    _checks.floating(op, x=x)
    if x.dim() < (2 if is_causal else 1):
        accepted = "[..., Q, K] with is_causal" if is_causal else "at least one dimension"
        _checks.refuse(op, "x", _checks.shape_of(x), accepted)
    if not math.isfinite(scale):
        _checks.refuse(op, "scale", scale, "a finite number")
    if mask is None:
        return
    _checks.same_device(op, x=x, mask=mask)
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            _checks.refuse(op, "mask", f"of dtype {mask.dtype}", "bool, or a floating dtype to be added", TypeError)
        _checks.floating(op, mask=mask)
    sizes = zip(mask.shape[::-1], x.shape[::-1], strict=False)
    if mask.dim() > x.dim() or any(m not in (1, full) for m, full in sizes):
        _checks.refuse(op, "mask", _checks.shape_of(mask), f"a shape that broadcasts to x's, {tuple(x.shape)}")
    if mask.requires_grad:
        _checks.refuse(op, "mask", "a tensor that requires a gradient", "constants; detach it")


def _eager(x: Tensor, mask: Tensor | None, scale: float, is_causal: bool, lower_right: bool) -> Tensor:
    _check(x, mask, scale, is_causal)
    if x.numel() == 0:
        return x.new_empty(x.shape)
    scores = cast(x, compute_dtype(x)) * scale
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(~mask, -math.inf)
    elif mask is not None:
        scores.add_(cast(mask, scores.dtype)).masked_fill_(mask == -math.inf, -math.inf)
    if is_causal:
        queries, keys = x.shape[-2:]
        shift = keys - queries if lower_right else 0
        last = torch.arange(shift, shift + queries, device=x.device)[:, None]
        scores.masked_fill_(torch.arange(keys, device=x.device) > last, -math.inf)
    maximum = scores.amax(-1, keepdim=True)
    terms = scores.sub_(maximum.masked_fill_(maximum == -math.inf, 0)).exp_()
    total = terms.sum(-1, keepdim=True)
    return cast(terms.div_(total.masked_fill_(total == 0, 1)), x.dtype).contiguous()


def _fake(x: Tensor, mask: Tensor | None, scale: float, is_causal: bool, lower_right: bool) -> Tensor:
    _check(x, mask, scale, is_causal)
    return x.new_empty(x.shape)


def _check_backward(dy: Tensor, y: Tensor, scale: float) -> None:
    _check(y, None, scale, False, "softmax_backward")
    _checks.gradient("softmax_backward", dy, y)


def _eager_backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    _check_backward(dy, y, scale)
    dtype = compute_dtype(dy, y)
    y_ = cast(y, dtype)
    # Where y is 0 nothing counts, not even a dy that is not finite.
    dy_ = cast(dy, dtype).masked_fill(y_ == 0, 0)
    dx = (dy_ - (dy_ * y_).sum(-1, keepdim=True)).mul_(y_).mul_(scale).masked_fill_(y_ == 0, 0)
    return cast(dx, y.dtype).contiguous()


def _fake_backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    _check_backward(dy, y, scale)
    return y.new_empty(y.shape)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask, scale, is_causal, lower_right):
        y = _softmax.below_autograd(x, mask, scale, is_causal, lower_right)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, dy):
        dx = None if dy is None else _softmax_backward(dy, *ctx.saved_tensors, ctx.scale)
        return dx, None, None, None, None


_softmax = define(
    "softmax(Tensor x, Tensor? mask, float scale, bool is_causal, bool lower_right) -> Tensor",
    eager=_eager,
    fake=_fake,
    autograd=_Softmax.apply,
)
_softmax_backward = define(
    "softmax_backward(Tensor dy, Tensor y, float scale) -> Tensor",
    eager=_eager_backward,
    fake=_fake_backward,
)
