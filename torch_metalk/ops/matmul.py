"""Matrix products with sums in float32, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_metalk.ops import _checks
from torch_metalk.ops._operator import cast, compute_dtype, define


def matmul(
    a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False, bias: Tensor | None = None
) -> Tensor:
    """``op(a) @ op(b) + bias``, sums in float32, rounded once.

    Args:
        a: ``[..., M, K]``, or ``[..., K, M]`` with `transpose_a`; ``[K]`` stands for one row, as in `torch.matmul`.
        b: ``[..., K, N]``, or ``[..., N, K]`` with `transpose_b`, which is how `nn.Linear` keeps its weight; ``[K]``
            stands for one column. Leading dimensions broadcast.
        transpose_a: read `a` transposed. Views of any strides are read where they lie, so ``a.mT`` costs the same.
        transpose_b: the same for `b`.
        bias: ``[N]``, added to each row in float32.

    Returns:
        ``[..., M, N]``, contiguous, of the dtype that those of a, b and bias promote to. Backward keeps a and b.

    Raises:
        ValueError: shapes that do not chain or broadcast, no dimension, devices differ, a transposed vector.
        TypeError: an integer or sparse tensor.
    """
    for name, tensor, transpose in (("a", a, transpose_a), ("b", b, transpose_b)):
        if not isinstance(tensor, Tensor):
            _checks.refuse("matmul", name, f"a {type(tensor).__name__}", "a tensor", TypeError)
        if tensor.dim() == 0:
            _checks.refuse("matmul", name, _checks.shape_of(tensor), "at least one dimension")
        if tensor.dim() == 1 and transpose:
            _checks.refuse("matmul", f"transpose_{name}", "True for a vector", "at least two dimensions")
    # Products of vectors are those of a row or a column, as in torch.matmul.
    row, column = a.dim() == 1, b.dim() == 1
    y = _matmul(a[None] if row else a, b[:, None] if column else b, transpose_a, transpose_b, bias)
    y = y.squeeze(-1) if column else y
    return y.squeeze(-1 if column else -2) if row else y


def _batch(t: Tensor) -> torch.Size:
    return t.shape[:-2]


def _check(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool, bias: Tensor | None, op: str = "matmul"):
    """The shape of the result."""
    _checks.floating(op, a=a, b=b, bias=bias)
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() < 2:
            _checks.refuse(op, name, _checks.shape_of(tensor), "at least two dimensions")
    k, m = (a.shape[-2], a.shape[-1]) if transpose_a else (a.shape[-1], a.shape[-2])
    n = b.shape[-2 if transpose_b else -1]
    if b.shape[-1 if transpose_b else -2] != k:
        expected = f"[..., N, {k}]" if transpose_b else f"[..., {k}, N]"
        _checks.refuse(op, "b", _checks.shape_of(b), f"{expected}, as a has K = {k}")
    for x, y in zip(reversed(_batch(a)), reversed(_batch(b)), strict=False):
        if x != y and x != 1 and y != 1:
            _checks.refuse(
                op, "b", _checks.shape_of(b), f"batch dimensions that broadcast with a's, {tuple(_batch(a))}"
            )
    if bias is not None and bias.shape != (n,):
        _checks.refuse(op, "bias", _checks.shape_of(bias), f"shape [{n}], the columns of the result")
    return (*torch.broadcast_shapes(_batch(a), _batch(b)), m, n)


def _result_dtype(a: Tensor, b: Tensor, bias: Tensor | None) -> torch.dtype:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return dtype if bias is None else torch.promote_types(dtype, bias.dtype)


def _transposed(t: Tensor, transpose: bool) -> Tensor:
    return t.mT if transpose else t


def _eager(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool, bias: Tensor | None) -> Tensor:
    _check(a, b, transpose_a, transpose_b, bias)
    dtype = compute_dtype(a, b) if bias is None else compute_dtype(a, b, bias)
    y = torch.matmul(_transposed(cast(a, dtype), transpose_a), _transposed(cast(b, dtype), transpose_b))
    if bias is not None:
        y += bias
    return cast(y, _result_dtype(a, b, bias)).contiguous()


def _fake(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool, bias: Tensor | None) -> Tensor:
    return a.new_empty(_check(a, b, transpose_a, transpose_b, bias), dtype=_result_dtype(a, b, bias))


def _check_backward(
    dy: Tensor, a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool, bias: Tensor | None
) -> None:
    shape = _check(a, b, transpose_a, transpose_b, bias, "matmul_backward")
    if dy.shape != shape:
        _checks.refuse("matmul_backward", "dy", _checks.shape_of(dy), f"the shape of the output, {shape}")
    _checks.floating("matmul_backward", a=a, dy=dy)


def _eager_backward(
    dy: Tensor,
    a: Tensor,
    b: Tensor,
    transpose_a: bool,
    transpose_b: bool,
    bias: Tensor | None,
    output_mask: list[bool],
):
    _check_backward(dy, a, b, transpose_a, transpose_b, bias)
    dtype = compute_dtype(dy, a, b)
    dy_ = cast(dy, dtype)
    a_, b_ = _transposed(cast(a, dtype), transpose_a), _transposed(cast(b, dtype), transpose_b)
    da = db = dbias = None
    if output_mask[0]:
        da = _transposed(torch.matmul(dy_, b_.mT), transpose_a).sum_to_size(a.shape)
        da = cast(da, a.dtype).contiguous()
    if output_mask[1]:
        db = _transposed(torch.matmul(a_.mT, dy_), transpose_b).sum_to_size(b.shape)
        db = cast(db, b.dtype).contiguous()
    if output_mask[2] and bias is not None:
        dbias = cast(dy_.sum_to_size(bias.shape), bias.dtype)
    return da, db, dbias


def _fake_backward(
    dy: Tensor,
    a: Tensor,
    b: Tensor,
    transpose_a: bool,
    transpose_b: bool,
    bias: Tensor | None,
    output_mask: list[bool],
):
    _check_backward(dy, a, b, transpose_a, transpose_b, bias)
    return tuple(
        t.new_empty(t.shape) if wanted and t is not None else None
        for t, wanted in zip((a, b, bias), output_mask, strict=True)
    )


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, transpose_a, transpose_b, bias):
        ctx.set_materialize_grads(False)
        # Of the bias the dtype and the length: a parameter, which is there anyway.
        ctx.save_for_backward(a, b, bias)
        ctx.transposes = transpose_a, transpose_b
        return _matmul.below_autograd(a, b, transpose_a, transpose_b, bias)

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 5
        a, b, bias = ctx.saved_tensors
        need_a, need_b, _, _, need_bias = ctx.needs_input_grad
        da, db, dbias = _matmul_backward(dy, a, b, *ctx.transposes, bias, [need_a, need_b, need_bias])
        return da, db, None, None, dbias


def _autocast(dtype: torch.dtype, a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool, bias: Tensor | None):
    """As torch's own product: in the autocast dtype."""
    a, b, bias = (
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in (a, b, bias)
    )
    return a, b, transpose_a, transpose_b, bias


_matmul = define(
    "matmul(Tensor a, Tensor b, bool transpose_a, bool transpose_b, Tensor? bias) -> Tensor",
    eager=_eager,
    fake=_fake,
    autograd=_Matmul.apply,
    autocast=_autocast,
)
_matmul_backward = define(
    "matmul_backward(Tensor dy, Tensor a, Tensor b, bool transpose_a, bool transpose_b, Tensor? bias,"
    " bool[3] output_mask) -> (Tensor da, Tensor db, Tensor dbias)",
    eager=_eager_backward,
    fake=_fake_backward,
)
