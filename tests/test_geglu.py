from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional as F

from tests.operators import OpTests, run
from tests.test_swiglu import check_bad_gated_input, check_halves_of_one_projection, gated_case, make, packed_case
from torch_metalk import ops


def stock(gate, up, approximate):
    return F.gelu(gate, approximate=approximate) * up


class TestPackedGeGLU(OpTests):
    op = "geglu_packed"
    cases = tuple(
        packed_case(
            approximate,
            (3, 5, 22),
            functools.partial(ops.geglu, approximate=approximate),
            functools.partial(stock, approximate=approximate),
        )
        for approximate in ("tanh", "none")
    )


class TestGeGLU(OpTests):
    op = "geglu"
    cases = tuple(
        gated_case(
            f"{approximate} {shape}",
            make(*shape),
            functools.partial(ops.geglu, approximate=approximate),
            functools.partial(stock, approximate=approximate),
        )
        for approximate in ("tanh", "none")
        for shape in ((3, 5, 33), (7,))
    )


def test_exact_and_tanh_differ(device):
    """They are 1e-4 apart at 2: one must not stand in for the other."""
    gate = torch.full((4,), 2.0, device=device)
    tanh, exact = (ops.geglu(gate, torch.ones_like(gate), a).cpu().double() for a in ("tanh", "none"))
    reference = torch.full((4,), 2.0, dtype=torch.float64)
    # A float32 rounding of 2, against a difference of 9e-5.
    torch.testing.assert_close(tanh, F.gelu(reference, approximate="tanh"), rtol=0, atol=1e-6)
    torch.testing.assert_close(exact, F.gelu(reference), rtol=0, atol=1e-6)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_empty(approximate, device):
    gate = torch.randn(0, 3, device=device, requires_grad=True)
    y = ops.geglu(gate, gate, approximate)
    y.sum().backward()
    assert y.shape == gate.grad.shape == (0, 3)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_halves_of_one_projection(approximate, device):
    check_halves_of_one_projection(ops.geglu, device, approximate=approximate)


def test_bad_input(device):
    check_bad_gated_input("geglu", ops.geglu, device)
    with pytest.raises(ValueError, match=r"geglu.*'approximate' is 'sigmoid'; accepted: 'tanh', 'none'"):
        ops.geglu(torch.ones(2), torch.ones(2), "sigmoid")


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_accurate_everywhere(approximate, device):
    """Between the pieces of the error function, far out where the exponential underflows, and where its square
    overflows; value and slope."""
    gate = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([-1e30, -1e19, -200.0, 200.0, 1e19, 1e30])])
    tensors = {"gate": gate.to(device), "up": torch.ones_like(gate, device=device)}
    function = functools.partial(ops.geglu, approximate=approximate)
    reference = functools.partial(stock, approximate=approximate)
    ours, grads = run(function, tensors, ["gate"], [torch.ones_like(gate)])
    exact, exact_grads = run(
        reference, {n: t.cpu().double() for n, t in tensors.items()}, ["gate"], [torch.ones_like(gate).double()]
    )
    # Relative to the gate, since 1 + erf and 1 + tanh round at 1; the exact slope of the tails is 0 or 1.
    error = (ours[0].cpu().double() - exact[0].detach()).abs() / gate.double().abs().clamp(min=1)
    slope_error = (grads[0].cpu().double() - exact_grads[0].nan_to_num(0.0)).abs()
    assert error.max() <= 4 * torch.finfo(torch.float32).eps
    # torch's own slope of the tanh form is off by 9 roundings.
    assert slope_error[gate.abs() <= 200].max() <= 12 * torch.finfo(torch.float32).eps
