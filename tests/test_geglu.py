from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional as F

from tests.operators import OpTests
from tests.test_swiglu import bad_gated_input, gated_case, halves_of_one_projection, make
from torch_metalk import ops


def stock(gate, up, approximate):
    return F.gelu(gate, approximate=approximate) * up


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
    halves_of_one_projection(ops.geglu, device, approximate=approximate)


def test_bad_input():
    bad_gated_input("geglu", ops.geglu)
    with pytest.raises(ValueError, match=r"geglu.*'approximate' is 'sigmoid'; accepted: 'tanh', 'none'"):
        ops.geglu(torch.ones(2), torch.ones(2), "sigmoid")
