"""A matrix product whose last rows the CPU makes while the GPU makes the others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_metalk.ops import _checks, _cpu_share
from torch_metalk.ops._operator import cast, define
from torch_metalk.ops.matmul import _autocast as _autocast_product
from torch_metalk.ops.matmul import _check as _check_product
from torch_metalk.ops.matmul import _eager as _eager_product
from torch_metalk.ops.matmul import _eager_backward as _eager_product_backward
from torch_metalk.ops.matmul import _result_dtype


def matmul_rows_split(
    a: Tensor,
    b: Tensor,
    transpose_b: bool = False,
    bias: Tensor | None = None,
    cpu_share: float | str = "auto",
    a_float32: Tensor | None = None,
    b_float32: Tensor | None = None,
) -> Tensor:
    """``a @ op(b) + bias`` on CPU and GPU at once: the last rows by torch's CPU product in float32.

    On mps the CPU works on the memory that the GPU uses; where the CPU cannot see that, its rows are copied to and fro.
    The operator waits until the GPU has made its operands, which no other operator does. The gradient of `a` is split
    as well. On other devices this is one product, whatever the share.

    Args:
        a: ``[..., M, K]``; all leading dimensions count as rows.
        b: ``[K, N]``, or ``[N, K]`` with `transpose_b`, which is how `nn.Linear` keeps its weight.
        transpose_b: read `b` transposed.
        bias: ``[N]``.
        cpu_share: the CPU's share of the rows, from 0 to 1, in both directions; rounded to whole tiles of 32 rows. Or
            ``"auto"``: the one with which both finish together, by the times that `torch_metalk.calibrate` stored or
            those of a table of chips; 0 where neither knows the chip.
        a_float32: the values of `a` in float32, on the same device, as `rms_norm(..., also_float32=True)` writes them.
            Without it the CPU converts its rows.
        b_float32: the values of `b` in float32, on the CPU. Without it the CPU converts all of `b` on every call.

    Returns:
        ``[..., M, N]``, contiguous, of the dtype that those of a, b and bias promote to: what `matmul` gives, but for
        the order of sums. Backward keeps b and b_float32, and a only for the gradients of b and bias.

    Raises:
        ValueError: shapes that do not chain, devices that differ, a share outside of 0 to 1, a twin of another shape,
            on another device, or that requires a gradient.
        TypeError: an integer or sparse tensor, a share that is no number, a twin that is not float32.
    """
    op = "matmul_rows_split"
    for name, tensor in (("a", a), ("b", b)):
        if not isinstance(tensor, Tensor):
            _checks.refuse(op, name, f"a {type(tensor).__name__}", "a tensor", TypeError)
    _cpu_share.check_share(op, cpu_share)
    share = _cpu_share.shares(cpu_share, a.device, a.dtype)
    rows = math.prod(a.shape[:-1])
    forward, backward = (_cpu_share.split_rows(rows, p) for p in share[:2])
    return _matmul_rows_split(a, b, transpose_b, bias, a_float32, b_float32, forward, backward)


def _check_twin(op: str, name: str, twin: Tensor | None, of: Tensor | None, device: torch.device) -> None:
    if twin is None:
        return
    if not isinstance(twin, Tensor):
        _checks.refuse(op, name, f"a {type(twin).__name__}", "a tensor", TypeError)
    if twin.dtype != torch.float32:
        _checks.refuse(op, name, f"of dtype {twin.dtype}", "torch.float32", TypeError)
    if twin.layout is not torch.strided:
        _checks.refuse(op, name, f"of layout {twin.layout}", "strided tensors", TypeError)
    if twin.shape != of.shape:
        _checks.refuse(op, name, _checks.shape_of(twin), f"the shape of its original, {tuple(of.shape)}")
    if twin.device != device:
        _checks.refuse(op, name, f"on {twin.device}", device)
    if twin.requires_grad:
        _checks.refuse(op, name, "a tensor that requires a gradient", "constants; detach it")


def _check_weight(op: str, b: Tensor, b_float32: Tensor | None) -> None:
    if b.dim() != 2:
        _checks.refuse(op, "b", _checks.shape_of(b), "two dimensions")
    _check_twin(op, "b_float32", b_float32, b, torch.device("cpu"))


def _check_rows(op: str, rows: int, **cpu_rows: int) -> None:
    for name, value in cpu_rows.items():
        if not 0 <= value <= rows:
            _checks.refuse(op, name, value, f"0 to {rows}, the rows there are")


def _check(a, b, transpose_b, bias, a_float32, b_float32, cpu_rows, backward_cpu_rows):
    """The shape of the result."""
    op = "matmul_rows_split"
    shape = _check_product(a, b, False, transpose_b, bias, op)
    _check_weight(op, b, b_float32)
    _check_twin(op, "a_float32", a_float32, a, a.device)
    _check_rows(op, math.prod(shape[:-1]), cpu_rows=cpu_rows, backward_cpu_rows=backward_cpu_rows)
    return shape


def _eager(a, b, transpose_b, bias, a_float32, b_float32, cpu_rows, backward_cpu_rows):
    _check(a, b, transpose_b, bias, a_float32, b_float32, cpu_rows, backward_cpu_rows)
    return _eager_product(a, b, False, transpose_b, bias)


def _fake(a, b, transpose_b, bias, a_float32, b_float32, cpu_rows, backward_cpu_rows):
    shape = _check(a, b, transpose_b, bias, a_float32, b_float32, cpu_rows, backward_cpu_rows)
    return a.new_empty(shape, dtype=_result_dtype(a, b, bias))


def _check_backward(dy, a, b, transpose_b, b_float32, cpu_rows, output_mask):
    """The shape of the gradient of a."""
    op = "matmul_rows_split_backward"
    # The gradient of a is a product with the other form of b.
    shape = _check_product(dy, b, False, not transpose_b, None, op)
    _check_weight(op, b, b_float32)
    if a is None and (output_mask[1] or output_mask[2]):
        _checks.refuse(op, "a", None, "a tensor, for the gradients of b and bias")
    _check_rows(op, math.prod(shape[:-1]), cpu_rows=cpu_rows)
    return shape


def _eager_backward(dy, a, b, transpose_b, bias, b_float32, a_dtype, cpu_rows, output_mask):
    _check_backward(dy, a, b, transpose_b, b_float32, cpu_rows, output_mask)
    da = db = dbias = None
    if output_mask[1] or output_mask[2]:
        _, db, dbias = _eager_product_backward(dy, a, b, False, transpose_b, bias, [False, *output_mask[1:]])
    if output_mask[0]:
        da = cast(_eager_product(dy, b, False, not transpose_b, None), a_dtype)
    return da, db, dbias


def _fake_backward(dy, a, b, transpose_b, bias, b_float32, a_dtype, cpu_rows, output_mask):
    shape = _check_backward(dy, a, b, transpose_b, b_float32, cpu_rows, output_mask)
    da = dy.new_empty(shape, dtype=a_dtype) if output_mask[0] else None
    db = b.new_empty(b.shape) if output_mask[1] else None
    return da, db, bias.new_empty(bias.shape) if output_mask[2] and bias is not None else None


class _MatmulRowsSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, transpose_b, bias, a_float32, b_float32, cpu_rows, backward_cpu_rows):
        ctx.set_materialize_grads(False)
        need_b, need_bias = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        # Of the bias the dtype and the length: a parameter, which is there anyway.
        ctx.save_for_backward(a if need_b or need_bias else None, b, bias, b_float32)
        ctx.constants = transpose_b, a.dtype, backward_cpu_rows
        return _matmul_rows_split.below_autograd(
            a, b, transpose_b, bias, a_float32, b_float32, cpu_rows, backward_cpu_rows
        )

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 8
        a, b, bias, b_float32 = ctx.saved_tensors
        transpose_b, dtype, cpu_rows = ctx.constants
        need_a, need_b, _, need_bias, *_ = ctx.needs_input_grad
        mask = [need_a, need_b, need_bias]
        da, db, dbias = _matmul_rows_split_backward(dy, a, b, transpose_b, bias, b_float32, dtype, cpu_rows, mask)
        return da, db, None, dbias, None, None, None, None


def _autocast(dtype, a, b, transpose_b, bias, a_float32, b_float32, cpu_rows, backward_cpu_rows):
    """As torch's own product: in the autocast dtype, of which the given twins are none where it is another one.

    A twin on the CPU brings its autocast here too; that of the operands' device is the one that counts.
    """
    device = a.device.type
    if not torch.is_autocast_enabled(device):
        return a, b, transpose_b, bias, a_float32, b_float32, cpu_rows, backward_cpu_rows
    dtype = torch.get_autocast_dtype(device)
    a_, b_, *_, bias = _autocast_product(dtype, a, b, False, transpose_b, bias)
    a_float32, b_float32 = a_float32 if a_ is a else None, b_float32 if b_ is b else None
    return a_, b_, transpose_b, bias, a_float32, b_float32, cpu_rows, backward_cpu_rows


_matmul_rows_split = define(
    "matmul_rows_split(Tensor a, Tensor b, bool transpose_b, Tensor? bias, Tensor? a_float32, Tensor? b_float32,"
    " int cpu_rows, int backward_cpu_rows) -> Tensor",
    eager=_eager,
    fake=_fake,
    autograd=_MatmulRowsSplit.apply,
    autocast=_autocast,
)
_matmul_rows_split_backward = define(
    "matmul_rows_split_backward(Tensor dy, Tensor? a, Tensor b, bool transpose_b, Tensor? bias, Tensor? b_float32,"
    " ScalarType a_dtype, int cpu_rows, bool[3] output_mask) -> (Tensor da, Tensor db, Tensor dbias)",
    eager=_eager_backward,
    fake=_fake_backward,
)
