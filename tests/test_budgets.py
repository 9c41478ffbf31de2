"""What each operator's Metal kernels may do: dispatches and memory traffic, counted exactly by virtual_mps.

They hold on a GPU as well: how many dispatches an operator encodes, and which bytes its threads read and write, does
not depend on the device. An operator is a row of ROWS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_metalk import ops

SHAPES = [(512, 5632), (4, 9, 512, 64)]
DTYPES = [torch.float16, torch.float32]


@dataclass(frozen=True)
class Row:
    """One call of an operator, with all that it reads and writes among its arguments and results.

    Attributes:
        name: the test id.
        op: the dispatcher operator.
        arguments: shape and dtype -> the operator's arguments, tensors on mps.
        dispatches: exactly so many.
        unique: at most so many times the bytes of arguments and results, each byte once a dispatch.
        least: at least so many; less than 1 where a part of an argument need not be read.
        elementwise: takes no threadgroup memory.
    """

    name: str
    op: Callable[..., Any]
    arguments: Callable[[tuple[int, ...], torch.dtype], tuple]
    dispatches: int = 1
    unique: float = 1.02
    least: float = 0.99
    elementwise: bool = False


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to("mps", dtype)


def _norm(shape: tuple[int, ...], dtype: torch.dtype) -> tuple:
    return _random(shape, dtype), _random(shape[-1:], dtype), 1e-6, 0.0, True


def _norm_backward(*output_mask: bool) -> Callable[[tuple[int, ...], torch.dtype], tuple]:
    def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> tuple:
        x, weight, *_ = _norm(shape, dtype)
        return _random(shape, dtype), x, weight, torch.rand(shape[:-1]).to("mps"), 0.0, output_mask

    return arguments


def _like(n: int, *rest: Any) -> Callable[[tuple[int, ...], torch.dtype], tuple]:
    """`n` tensors of the shape, and what follows them."""
    return lambda shape, dtype: (*(_random(shape, dtype) for _ in range(n)), *rest)


def _packed(*rest: Any) -> Callable[[tuple[int, ...], torch.dtype], tuple]:
    """A fused projection of two tensors of the shape, and what follows it."""
    return lambda shape, dtype: (_random((*shape[:-1], 2 * shape[-1]), dtype), *rest)


def _packed_backward(*rest: Any) -> Callable[[tuple[int, ...], torch.dtype], tuple]:
    return lambda shape, dtype: (_random(shape, dtype), *_packed(*rest)(shape, dtype))


def _rotated(heads_first: bool) -> Callable[[tuple[int, ...], torch.dtype], tuple]:
    """q and k of the shape, k with a third of the heads, and tables; [B, S, H, D] seen as [B, H, S, D] or as it is."""

    def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> tuple:
        *batch, positions, width = shape
        batch = batch or [1, 3]
        q, k = (_random((batch[0], positions, heads, width), dtype) for heads in (batch[1], batch[1] // 3))
        xs = [q.transpose(1, 2), k.transpose(1, 2)] if heads_first else [q, k]
        cos, sin = (_random((1, positions, min(width, 128)), dtype) for _ in range(2))
        return xs, cos, sin, -2 if heads_first else 1, False, False

    return arguments


def _positions(shape: tuple[int, ...], dtype: torch.dtype) -> tuple:
    batch = shape[0] if len(shape) > 2 else 1
    positions = torch.full((batch,), 5, dtype=torch.int32, device="mps")
    return _random(shape, dtype), positions, 10000.0, min(shape[-1], 128), False, 1.0, False


def _masked(shape: tuple[int, ...], dtype: torch.dtype) -> tuple:
    mask = torch.rand(1, *shape[-2:]).to("mps") < 0.9
    return _random(shape, dtype)[None], mask, 0.125, False, False


OPS = torch.ops.torch_metalk

ROWS = [
    Row("rms_norm", OPS.rms_norm, _norm),
    Row("rms_norm_backward", OPS.rms_norm_backward, _norm_backward(True, False)),
    # Its partial sums are written by the first dispatch and added up by a second.
    Row("rms_norm_backward_weight", OPS.rms_norm_backward, _norm_backward(True, True), dispatches=2, unique=1.06),
    Row("swiglu", OPS.swiglu, _like(2), elementwise=True),
    Row("swiglu_backward", OPS.swiglu_backward, _like(3, (True, True)), elementwise=True),
    Row("swiglu_packed", OPS.swiglu_packed, _packed(), elementwise=True),
    Row("swiglu_packed_backward", OPS.swiglu_packed_backward, _packed_backward(), elementwise=True),
    Row("geglu_tanh", OPS.geglu, _like(2, "tanh"), elementwise=True),
    Row("geglu_tanh_backward", OPS.geglu_backward, _like(3, "tanh", (True, True)), elementwise=True),
    Row("geglu_exact", OPS.geglu, _like(2, "none"), elementwise=True),
    Row("geglu_exact_backward", OPS.geglu_backward, _like(3, "none", (True, True)), elementwise=True),
    Row("geglu_packed", OPS.geglu_packed, _packed("tanh"), elementwise=True),
    Row("geglu_packed_backward", OPS.geglu_packed_backward, _packed_backward("tanh"), elementwise=True),
    # Of the tables the first half is read.
    Row("rope", OPS.rope, _rotated(heads_first=True), least=0.98, elementwise=True),
    Row("rope_heads_last", OPS.rope, _rotated(heads_first=False), least=0.98, elementwise=True),
    Row("rope_backward", OPS.rope_backward, _rotated(heads_first=True), least=0.98, elementwise=True),
    Row("rope_positions", OPS.rope_positions, _positions, elementwise=True),
    Row("rope_positions_backward", OPS.rope_positions_backward, _positions, elementwise=True),
    Row("softmax", OPS.softmax, _like(1, None, 0.125, False, False)),
    Row("softmax_masked", OPS.softmax, _masked),
    # What position hides is not read.
    Row("softmax_causal", OPS.softmax, _like(1, None, 0.125, True, False), least=0.5),
    Row("softmax_backward", OPS.softmax_backward, _like(2, 0.125)),
]


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _bytes(tensors: Iterator[Tensor]) -> int:
    return sum({(t.data_ptr(), t.nbytes, t.stride()): t.nbytes for t in tensors}.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_budget(row: Row, shape: tuple[int, ...], dtype: torch.dtype, count_kernels) -> None:
    arguments = row.arguments(shape, dtype)
    with count_kernels() as c:
        results = row.op(*arguments)
    total = c.total
    assert total.dispatches == row.dispatches
    needed = _bytes(_tensors([arguments, results]))
    assert needed * row.least <= total.device_unique_bytes <= needed * row.unique, total.device_unique_bytes / needed
    if row.elementwise:
        assert total.threadgroup_memory == 0
    # What is smaller than an output (a weight, cos and sin, a mask) is shared by rows, which read it again.
    smallest_output = min(t.nbytes for t in _tensors(results) if t.numel() >= shape[-1] * shape[-2])
    for kernel in c.kernels.values():
        for buffer in kernel.buffers:
            if buffer.unique_written >= smallest_output:
                assert buffer.written == buffer.unique_written, f"{kernel.name}: {buffer.name}"
            if buffer.unique_read >= smallest_output:
                # Rows too long for registers are read a second time.
                times = 2 if "looped" in kernel.name else 1
                assert buffer.read <= times * buffer.unique_read, f"{kernel.name}: {buffer.name}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_gradient", [False, True])
def test_training_dispatches_what_the_operators_do(weight_gradient: bool, dtype: torch.dtype, count_kernels) -> None:
    """The public function under autograd: nothing is copied or cast in between."""
    x, weight = _random((4, 9, 512, 64), dtype).requires_grad_(), _random((64,), dtype).requires_grad_(weight_gradient)
    with count_kernels() as forward:
        y = ops.rms_norm(x, weight)
    with count_kernels() as backward:
        y.backward(torch.ones_like(y))
    assert forward.total.dispatches == 1
    assert backward.total.dispatches == 1 + weight_gradient
