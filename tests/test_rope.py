from __future__ import annotations

import functools

import pytest
import torch

from tests.operators import DTYPES, Case, OpTests, assert_accurate, assert_rounding_only, on_device
from torch_metalk import ops


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def stock(x, cos, sin, seq_dim=-2, interleaved=False):
    """As transformers writes it: half-split as Llama and Phi3, interleaved as GLM."""
    width = cos.shape[-1]
    if interleaved:
        cos, sin = (t[..., : width // 2].repeat_interleave(2, -1) for t in (cos, sin))
    shape = [1] * x.dim()
    shape[0] = cos.shape[0] if cos.dim() == 3 else 1
    shape[seq_dim], shape[-1] = cos.shape[-2:]
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    rotary, rest = x[..., :width], x[..., width:]
    turned = rotary * cos + (rotate_pairs(rotary) if interleaved else rotate_half(rotary)) * sin
    return torch.cat((turned, rest), -1).to(x.dtype)


def stock_qk(q, k, cos, sin):
    return stock(q, cos, sin), stock(k, cos, sin)


def angles(*shape, width):
    """cos and sin as modules of transformers make them: both halves of the last dimension alike."""
    angle = 3 * torch.randn(*shape, width // 2)
    return {"cos": torch.cat((angle, angle), -1).cos(), "sin": torch.cat((angle, angle), -1).sin()}


def case(name, x_shape, table_shape, width, keep_dtype=(), **kwargs):
    return Case(
        name,
        lambda: {"x": torch.randn(x_shape)} | angles(*table_shape, width=width),
        functools.partial(ops.rope, **kwargs),
        functools.partial(stock, **kwargs),
        saved=("cos", "sin"),
        constant=("cos", "sin"),
        keep_dtype=keep_dtype,
    )


class TestRope(OpTests):
    op = "rope"
    cases = (
        case("heads first", (2, 3, 5, 16), (2, 5), 16),
        case("one table for all", (2, 3, 5, 8), (1, 5), 8),
        case("table without batch", (2, 3, 5, 8), (5,), 8),
        case("heads last", (2, 5, 3, 8), (2, 5), 8, seq_dim=1),
        case("heads last, no batch", (2, 5, 3, 8), (5,), 8, seq_dim=1),
        case("interleaved", (2, 3, 5, 8), (2, 5), 8, interleaved=True),
        case("partial", (2, 3, 5, 80), (1, 5), 20),
        case("partial interleaved", (1, 2, 5, 16), (1, 5), 8, interleaved=True),
        case("float32 table", (2, 3, 5, 8), (2, 5), 8, keep_dtype=("cos", "sin")),
        case("rank 2", (5, 6), (5,), 6),
        case("odd head", (1, 2, 4, 7), (1, 4), 6),
        case("rank 3", (2, 5, 8), (2, 5), 8, seq_dim=1),
        case("rank 3, heads last", (5, 3, 8), (5,), 8, seq_dim=0),
        case("rank 5", (2, 2, 3, 5, 8), (2, 5), 8),
        case("rank 5, heads last", (2, 5, 2, 3, 8), (2, 5), 8, seq_dim=1),
        case("vectors behind the width", (2, 5, 3, 24), (1, 5), 16, seq_dim=1),
        case("more heads than a thread takes", (1, 9, 3, 16), (1, 3), 16),
        Case(
            "q and k",
            lambda: {"q": torch.randn(2, 4, 5, 8), "k": torch.randn(2, 1, 5, 8)} | angles(2, 5, width=8),
            ops.rope_qk,
            stock_qk,
            saved=("cos", "sin"),
            constant=("cos", "sin"),
        ),
    )


def test_inverse_restores(device):
    """Forward, then the gradient's direction: cos² + sin² = 1, so only roundings remain."""
    x = torch.randn(2, 3, 9, 32, device=device, requires_grad=True)
    table = {n: t.to(device) for n, t in angles(1, 9, width=32).items()}
    y = ops.rope(x, **table)
    (restored,) = torch.autograd.grad(y, x, y.detach())
    assert_rounding_only(restored, x.detach())


def test_only_the_first_half_of_the_table_is_read(device):
    x, table = torch.randn(1, 2, 4, 8, device=device), angles(1, 4, width=8)
    spoiled = {n: torch.cat((t[..., :4], torch.full_like(t[..., 4:], float("nan"))), -1) for n, t in table.items()}
    expected = ops.rope(x, **{n: t.to(device) for n, t in table.items()})
    assert torch.equal(ops.rope(x, **{n: t.to(device) for n, t in spoiled.items()}), expected)


@pytest.mark.parametrize("q_heads", [1, 2])
def test_one_key_head_as_a_transposed_view(q_heads, device):
    """k of one head is contiguous either way round, and neither input may be overwritten."""
    k = torch.randn(1, 3, 1, 128, device=device).transpose(1, 2)
    q = torch.randn(1, 3, q_heads, 128, device=device).transpose(1, 2)
    kept = q.clone(), k.clone()
    table = {n: t.to(device) for n, t in angles(1, 3, width=128).items()}
    for ours, expected in zip(ops.rope_qk(q, k, **table), stock_qk(q, k, **table), strict=True):
        assert_rounding_only(ours, expected)
    assert torch.equal(q, kept[0])
    assert torch.equal(k, kept[1])


def test_memory_order_is_kept(device):
    """What comes as [B, S, H, D] seen as [B, H, S, D] leaves so: no copy is needed to join the heads again."""
    x = torch.randn(2, 5, 3, 8, device=device).transpose(1, 2).requires_grad_()
    y = ops.rope(x, **{n: t.to(device) for n, t in angles(1, 5, width=8).items()})
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.stride() == grad.stride() == x.stride()


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 3, 0, 8)], ids=str)
def test_empty(shape, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    y = ops.rope(x, **{n: t.to(device) for n, t in angles(1, shape[2], width=8).items()})
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


def test_width_0_is_the_identity(device):
    x = torch.randn(1, 2, 3, 8, device=device)
    empty = torch.empty(1, 3, 0, device=device)
    assert torch.equal(ops.rope(x, empty, empty), x)


X, TABLE = torch.ones(2, 3, 5, 8), torch.ones(1, 5, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cos": torch.ones(1, 5, 7), "sin": torch.ones(1, 5, 7)}, ValueError, "'cos' is of odd rotary width 7"),
        ({"cos": torch.ones(1, 5, 10), "sin": torch.ones(1, 5, 10)}, ValueError, "'cos' is 10 wide"),
        ({"sin": torch.ones(1, 5, 6)}, ValueError, "'sin'"),
        ({"sin": TABLE.half()}, TypeError, "'sin' is of dtype torch.float16"),
        ({"cos": torch.ones(1, 4, 8), "sin": torch.ones(1, 4, 8)}, ValueError, "'cos' is for 4 positions"),
        ({"cos": torch.ones(3, 5, 8), "sin": torch.ones(3, 5, 8)}, ValueError, "'cos'"),
        ({"cos": torch.ones(8), "sin": torch.ones(8)}, ValueError, "'cos'.*rank 2 or 3"),
        ({"cos": TABLE.clone().requires_grad_()}, ValueError, "'cos' is a tensor that requires a gradient"),
        ({"sin": TABLE.clone().requires_grad_()}, ValueError, "'sin' is a tensor that requires a gradient"),
        ({"x": X.int()}, TypeError, "'x' is of dtype torch.int32"),
        ({"cos": TABLE.half(), "sin": TABLE.half()}, TypeError, "'cos' is of dtype torch.float16 for x"),
        ({"x": torch.ones(8)}, ValueError, "'seq_dim'"),
        ({"seq_dim": 3}, ValueError, "'seq_dim' is 3"),
        ({"seq_dim": 0}, ValueError, "'cos'"),
        ({"cos": TABLE.to("meta"), "sin": TABLE.to("meta")}, ValueError, "'cos' is on meta"),
    ],
)
def test_bad_input(arguments, error, message, device):
    with pytest.raises(error, match=f"rope.*{message}"):
        ops.rope(**on_device({"x": X, "cos": TABLE, "sin": TABLE} | arguments, device))


def test_bad_input_of_q_and_k():
    with pytest.raises(TypeError, match=r"rope_qk.*'k' is of dtype torch.float16"):
        ops.rope_qk(X, X.half(), TABLE, TABLE)


def test_many_tensors_of_different_shapes(device):
    """The operator takes any number of tensors: pairs share a dispatch, what does not fit together does not."""
    table = {n: t.to(device) for n, t in angles(5, width=8).items()}
    xs = [
        torch.randn(shape, device=device) for shape in ((2, 3, 5, 8), (1, 1, 5, 8), (1, 2, 5, 12), (5, 8), (0, 1, 5, 8))
    ]
    results = torch.ops.torch_metalk.rope(xs, table["cos"], table["sin"], -2, False, False)
    for x, y in zip(xs, results, strict=True):
        assert_rounding_only(y, ops.rope(x, **table))


def test_threadgroups_share_heads_and_positions(counted_device):
    q, k = (torch.randn(2, heads, 67, 40, device=counted_device) for heads in (9, 3))
    ops.rope_qk(q, k, **{n: t.to(counted_device) for n, t in angles(2, 67, width=32).items()})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_work_than_one_threadgroup(dtype, device):
    q, k = (torch.randn(2, 67, heads, 64).to(device, dtype).transpose(1, 2) for heads in (9, 3))
    table = angles(2, 67, width=64)
    exact_table = {n: t.to(dtype).double() for n, t in table.items()}
    table = {n: t.to(device, dtype) for n, t in table.items()}
    results = ops.rope_qk(q, k, **table)
    expected = stock_qk(q.cpu(), k.cpu(), **{n: t.cpu() for n, t in table.items()})
    exact = stock_qk(q.cpu().double(), k.cpu().double(), **exact_table)
    for i, triple in enumerate(zip(results, expected, exact, strict=True)):
        assert_accurate(*triple, f"tensor {i}")
