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
        elementwise: takes no threadgroup memory.
    """

    name: str
    op: Callable[..., Any]
    arguments: Callable[[tuple[int, ...], torch.dtype], tuple]
    dispatches: int = 1
    unique: float = 1.02
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


RMS_NORM = torch.ops.torch_metalk.rms_norm.default
RMS_NORM_BACKWARD = torch.ops.torch_metalk.rms_norm_backward.default

ROWS = [
    Row("rms_norm", RMS_NORM, _norm),
    Row("rms_norm_backward", RMS_NORM_BACKWARD, _norm_backward(True, False)),
    # Its partial sums are written by the first dispatch and added up by a second.
    Row("rms_norm_backward_weight", RMS_NORM_BACKWARD, _norm_backward(True, True), dispatches=2, unique=1.06),
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
    assert needed * 0.99 <= total.device_unique_bytes <= needed * row.unique, total.device_unique_bytes / needed
    if row.elementwise:
        assert total.threadgroup_memory == 0
    # What is smaller than an output (a weight, cos and sin, a mask) is shared by rows, which read it again.
    smallest_output = min(t.nbytes for t in _tensors(results) if t.numel() >= arguments[0].numel())
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
