from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.operators import DTYPES, Case, OpTests, assert_accurate, assert_rounding_only, on_device, run
from torch_metalk import ops


def make(*shape):
    return lambda: {"gate": 2 * torch.randn(shape), "up": torch.randn(shape)}


def gated_case(name, make, ours, stock):
    return Case(name, make, ours, stock, saved=("gate", "up"))


def check_bad_gated_input(op, function, device):
    """What SwiGLU and GeGLU refuse alike."""
    ones = torch.ones(2, 3)
    for up, error, message in (
        (torch.ones(2, 4), ValueError, r"'up' is a tensor of shape \(2, 4\)"),
        (torch.ones(3), ValueError, "'up' is a tensor of shape"),
        (ones.half(), TypeError, "'up' is of dtype torch.float16"),
        (ones.to("meta"), ValueError, "'up' is on meta"),
        (ones.int(), TypeError, "'up' is of dtype torch.int32"),
    ):
        with pytest.raises(error, match=f"{op}: .*{message}"):
            function(**on_device({"gate": ones, "up": up}, device))
    for gate, error, message in (
        (torch.ones(2, 3), ValueError, r"'gate_up' is a tensor of shape \(2, 3\)"),
        (torch.ones(()), ValueError, r"'gate_up' is a tensor of shape \(\)"),
        (ones.int(), TypeError, "'gate_up' is of dtype torch.int32"),
    ):
        with pytest.raises(error, match=f"{op}_packed: .*{message}"):
            function(**on_device({"gate": gate}, device))


def check_halves_of_one_projection(function, device, **kwargs):
    """gate and up as views of one tensor, as Phi3 makes them: values and the gradient of the whole."""
    fused = torch.randn(2, 5, 14, device=device, requires_grad=True)
    gate, up = fused.chunk(2, -1)
    y = function(gate, up, **kwargs)
    (grad,) = torch.autograd.grad(y.square().sum(), fused)
    separate = [t.detach().contiguous().requires_grad_() for t in (gate, up)]
    packed = fused.detach().clone().requires_grad_()
    expected = function(*separate, **kwargs)
    grads = torch.autograd.grad(expected.square().sum(), separate)
    assert_rounding_only(y, expected)
    assert_rounding_only(grad, torch.cat(grads, -1))
    y = function(packed, **kwargs)
    assert_rounding_only(y, expected)
    assert_rounding_only(torch.autograd.grad(y.square().sum(), packed)[0], torch.cat(grads, -1))


def stock(gate, up):
    return F.silu(gate) * up


def packed_case(name, shape, ours, stock):
    return Case(
        name,
        lambda: {"gate": torch.randn(shape)},
        ours,
        lambda gate: stock(*gate.chunk(2, -1)),
        saved=("gate",),
    )


class TestPackedSwiGLU(OpTests):
    op = "swiglu_packed"
    cases = tuple(packed_case(str(shape), shape, ops.swiglu, stock) for shape in ((3, 5, 22), (2, 64), (6,), (4, 2)))


class TestSwiGLU(OpTests):
    op = "swiglu"
    cases = tuple(
        gated_case(str(shape), make(*shape), ops.swiglu, stock) for shape in ((3, 5, 33), (2, 64), (7,), (4, 1))
    )


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=str)
def test_empty_projection(shape, device):
    gate_up = torch.randn(shape, device=device, requires_grad=True)
    y = ops.swiglu(gate_up)
    y.sum().backward()
    assert y.shape == (shape[0], shape[1] // 2) and gate_up.grad.shape == shape


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)], ids=str)
def test_empty(shape, device):
    gate = torch.randn(shape, device=device, requires_grad=True)
    y = ops.swiglu(gate, torch.randn(shape, device=device))
    y.sum().backward()
    assert y.shape == gate.grad.shape == shape


def test_halves_of_one_projection(device):
    check_halves_of_one_projection(ops.swiglu, device)


def test_extreme_gates(device):
    """exp overflows in float32 at -89: the limit is 0 there, not NaN."""
    gate = torch.tensor([-1e4, -100.0, -89.0, 0.0, 89.0, 1e4], device=device, requires_grad=True)
    y = ops.swiglu(gate, torch.ones_like(gate))
    (grad,) = torch.autograd.grad(y.sum(), gate)
    exact_gate = gate.detach().cpu().double().requires_grad_()
    exact = F.silu(exact_gate)
    (exact_grad,) = torch.autograd.grad(exact.sum(), exact_gate)
    torch.testing.assert_close(y.cpu().double(), exact.detach(), rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(grad.cpu().double(), exact_grad, rtol=1e-6, atol=1e-30)


def test_bad_input(device):
    check_bad_gated_input("swiglu", ops.swiglu, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 5000), (3, 2052), (2, 4099)], ids=str)
def test_rows_of_several_threadgroups(rows, columns, dtype, device):
    """Views of one projection, aligned for vectors and not: rows are cut into pieces, and the last one is not whole."""
    fused = torch.randn(rows, 2 * columns).to(device, dtype)
    gate, up = fused.chunk(2, -1)
    tensors = {"gate": gate, "up": up}
    ours, grads = run(ops.swiglu, tensors, ["gate", "up"])
    exact, exact_grads = run(stock, {n: t.cpu().double() for n, t in tensors.items()}, ["gate", "up"])
    expected, expected_grads = run(stock, {n: t.cpu() for n, t in tensors.items()}, ["gate", "up"])
    assert_accurate(ours[0], expected[0], exact[0], "y")
    for name, *triple in zip(tensors, grads, expected_grads, exact_grads, strict=True):
        assert_accurate(*triple, name)


@pytest.mark.parametrize("columns", [4096, 5000], ids=str)
def test_threadgroups_share_a_row(columns, counted_device):
    gate, up = torch.randn(2, 3, columns, device=counted_device)
    y = ops.swiglu(gate.requires_grad_(), up.requires_grad_())
    y.backward(torch.ones_like(y))


def test_a_large_tensor_is_one_row(device):
    """More columns than one row of a model has, and a number that no vector divides."""
    gate = torch.randn(2**20 + 3, device=device)
    y = ops.swiglu(gate, gate)
    assert_rounding_only(y.cpu(), stock(gate.cpu(), gate.cpu()))
