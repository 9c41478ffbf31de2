"""Rotary position embedding from given cosines and sines (Su et al., "RoFormer", arXiv:2104.09864)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_metalk.ops import _checks
from torch_metalk.ops._operator import compute_dtype, define


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, seq_dim: int = -2, interleaved: bool = False) -> Tensor:
    r"""Rotate the first ``cos.shape[-1]`` components of the last dimension; the others pass through.

    With ``R = cos.shape[-1]``, pair ``i < R / 2`` is ``(i, i + R / 2)``, or ``(2 i, 2 i + 1)`` where interleaved, and
    turns by the angle of ``cos[..., i], sin[..., i]``. Only this first half of cos and sin is read, so that both
    members of a pair turn by the same angle; the gradient is then the rotation by the opposite angle, the same formula
    with one sign flipped. Calculated in float32 and rounded once.

    Args:
        x: ``[B, ..., S, ..., D]`` with S at `seq_dim`, float32, float16 or bfloat16 (float64 on the CPU), any strides.
        cos: ``[S, R]`` or ``[1 | B, S, R]`` with R even, R <= D, in float32 or x's dtype.
        sin: shape and dtype of cos.
        seq_dim: the dimension of x that counts positions: -2 for ``[B, H, S, D]``, 1 for ``[B, S, H, D]``.
        interleaved: pairs of neighbours (GLM, Cohere, GPT-J) instead of half-split pairs (Llama).

    Returns:
        x's shape, dtype and order in memory. Backward keeps cos and sin only.

    Raises:
        ValueError: R is odd or exceeds D, S or B do not fit x, cos or sin require a gradient, devices differ.
        TypeError: an integer tensor, cos and sin of different dtypes.
    """
    return _rope([x], cos, sin, seq_dim, interleaved, False)[0]


def rope_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, seq_dim: int = -2, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """`rope` of queries and keys in one operator; they may differ in the number of heads.

    Arguments, results and errors are those of `rope`; q and k share one dtype.
    """
    q, k = _rope([q, k], cos, sin, seq_dim, interleaved, False)
    return q, k


def _check(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, seq_dim: int) -> None:
    if not xs:
        _checks.refuse("rope", "xs", "an empty list", "at least one tensor")
    _checks.floating("rope", cos=cos, sin=sin)
    _checks.same_dtype("rope", cos=cos, sin=sin)
    _checks.rank("rope", "cos", cos, (2, 3))
    if sin.shape != cos.shape:
        _checks.refuse("rope", "sin", _checks.shape_of(sin), f"the shape of cos, {tuple(cos.shape)}")
    for name, tensor in (("cos", cos), ("sin", sin)):
        if tensor.requires_grad:
            _checks.refuse("rope", name, "a tensor that requires a gradient", "constants; detach it")
    width = cos.shape[-1]
    if width % 2:
        _checks.refuse("rope", "cos", f"of odd rotary width {width}", "an even last dimension")
    for x in xs:
        _checks.floating("rope", x=x)
        _checks.same_dtype("rope", x=xs[0], other_x=x)
        _checks.same_device("rope", x=x, cos=cos, sin=sin)
        if x.dim() < 2 or not -x.dim() <= seq_dim < x.dim() - 1 or seq_dim == -1:
            _checks.refuse("rope", "seq_dim", f"{seq_dim} for {_checks.shape_of(x)}", "a dimension before the last")
        if x.dtype not in (cos.dtype, torch.float16, torch.bfloat16) or cos.dtype not in (x.dtype, torch.float32):
            _checks.refuse("rope", "cos", f"of dtype {cos.dtype} for x of {x.dtype}", "float32 or x's dtype", TypeError)
        if width > x.shape[-1]:
            _checks.refuse("rope", "cos", f"{width} wide", f"at most the last dimension of x, {x.shape[-1]}")
        if cos.shape[-2] != x.shape[seq_dim]:
            _checks.refuse(
                "rope", "cos", f"for {cos.shape[-2]} positions", f"as many as x has at seq_dim, {x.shape[seq_dim]}"
            )
        if cos.dim() == 3 and (seq_dim % x.dim() == 0 or cos.shape[0] not in (1, x.shape[0])):
            _checks.refuse(
                "rope",
                "cos",
                f"{_checks.shape_of(cos)} for x of shape {tuple(x.shape)}",
                "[S, R], or [1 | B, S, R] where dimension 0 of x is the batch",
            )


def _angles(table: Tensor, x: Tensor, seq_dim: int, dtype: torch.dtype) -> Tensor:
    """The half of a cos or sin table that is read, shaped to broadcast over tensors like x."""
    table = table[..., : table.shape[-1] // 2].to(dtype)
    shape = [1] * x.dim()
    shape[-1], shape[seq_dim] = table.shape[-1], table.shape[-2]
    if table.dim() == 3:
        shape[0] = table.shape[0]
    return table.reshape(shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """The rotation itself: cos and sin of half the rotary width, broadcastable over x."""
    dtype = cos.dtype
    width = 2 * cos.shape[-1]
    x_ = x.to(dtype)
    out = torch.empty_like(x_)
    rotary, turned = x_, out
    if width < x.shape[-1]:
        rotary, turned = x_[..., :width], out[..., :width]
        out[..., width:] = x_[..., width:]
    if interleaved:
        x1, x2, out1, out2 = rotary[..., ::2], rotary[..., 1::2], turned[..., ::2], turned[..., 1::2]
    else:
        x1, x2 = rotary.chunk(2, -1)
        out1, out2 = turned.chunk(2, -1)
    sign = -1 if inverse else 1
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=sign)
    return out.to(x.dtype)


def _eager(xs: list[Tensor], cos: Tensor, sin: Tensor, seq_dim: int, interleaved: bool, inverse: bool):
    _check(xs, cos, sin, seq_dim)
    dtype = compute_dtype(xs[0])
    rotated, tables, rank = [], (cos, sin), None
    for x in xs:
        if rank != x.dim():
            tables, rank = [_angles(table, x, seq_dim, dtype) for table in (cos, sin)], x.dim()
        rotated.append(rotate(x, *tables, interleaved, inverse))
    return rotated


def _fake(xs: list[Tensor], cos: Tensor, sin: Tensor, seq_dim: int, interleaved: bool, inverse: bool):
    _check(xs, cos, sin, seq_dim)
    return [torch.empty_like(x) for x in xs]


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cos, sin, seq_dim, interleaved, inverse, *xs):
        out = _rope.below_autograd(list(xs), cos, sin, seq_dim, interleaved, inverse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.args = seq_dim, interleaved, not inverse
        return tuple(out)

    @staticmethod
    def backward(ctx, *dys):
        cos, sin = ctx.saved_tensors
        given = [dy for dy in dys if dy is not None]
        grads = iter(_rope_backward(given, cos, sin, *ctx.args) if given else ())
        return (None,) * 5 + tuple(None if dy is None else next(grads) for dy in dys)


def _autograd(xs, cos, sin, seq_dim, interleaved, inverse):
    return list(_Rope.apply(cos, sin, seq_dim, interleaved, inverse, *xs))


_SIGNATURE = "(Tensor[] xs, Tensor cos, Tensor sin, int seq_dim, bool interleaved, bool inverse) -> Tensor[]"
_rope = define(f"rope{_SIGNATURE}", eager=_eager, fake=_fake, autograd=_autograd)
# The same rotation, but as an operator of the backward pass: differentiating it again raises.
_rope_backward = define(f"rope_backward{_SIGNATURE}", eager=_eager, fake=_fake)
