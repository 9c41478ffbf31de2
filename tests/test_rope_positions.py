from __future__ import annotations

import functools

import pytest
import torch

from tests.operators import Case, OpTests, assert_rounding_only, on_device
from tests.test_rope import stock as stock_rope
from torch_metalk import ops


def stock(x, positions, base, dims, traditional=False, scale=1.0):
    """Angles in float64, then the rotation as transformers writes it, in x's dtype."""
    positions = torch.as_tensor(positions, dtype=torch.float64).to(x.device)
    if positions.dim() == 0:
        positions = positions.expand(x.shape[0] if x.dim() > 2 else 1)
    if positions.dim() == 1:
        positions = positions[:, None] + torch.arange(x.shape[-2], dtype=torch.float64, device=x.device)
    frequencies = base ** (-torch.arange(0, dims, 2, dtype=torch.float64, device=x.device) / dims)
    angle = (positions[..., None] * scale * frequencies).repeat(1, 1, 2)
    if x.dim() == 2:
        angle = angle[0]
    return stock_rope(x, angle.cos().to(x.dtype), angle.sin().to(x.dtype), interleaved=traditional)


def case(name, shape, positions, base, dims, **kwargs):
    fixed = {"base": base, "dims": dims, **kwargs}

    def make():
        tensors = {"x": torch.randn(shape)}
        return tensors | ({"positions": positions} if isinstance(positions, torch.Tensor) else {})

    if not isinstance(positions, torch.Tensor):
        fixed["positions"] = positions
    ours, reference = functools.partial(ops.rope_positions, **fixed), functools.partial(stock, **fixed)
    # What is kept is the public function's int32 tensor of positions, which is not among the arguments.
    return Case(name, make, ours, reference, saved=("<row>",), rows=lambda t: _kept(positions, shape))


def _kept(positions, shape):
    return positions.numel() if isinstance(positions, torch.Tensor) else shape[0] if len(shape) > 2 else 1


class TestRopePositions(OpTests):
    op = "rope_positions"
    cases = (
        case("int", (2, 3, 5, 8), 7, 10000.0, 8),
        case("list", (2, 3, 5, 8), [3, 100], 10000.0, 4),
        case("offset of each row", (2, 3, 5, 8), torch.tensor([0, 2047]), 500000.0, 8),
        case("positions", (2, 3, 5, 8), torch.arange(10).view(2, 5) * 37, 10000.0, 8),
        case("traditional", (2, 1, 5, 12), 2, 10000.0, 6, traditional=True),
        case("scale", (1, 2, 5, 8), 1, 10000.0, 8, scale=0.125),
        case("rank 2", (5, 8), 3, 10000.0, 8),
        case("rank 3", (2, 5, 8), [3, 4], 10000.0, 8),
        case("rank 5", (2, 2, 3, 5, 8), [3, 4], 10000.0, 8),
        case("odd width", (2, 3, 5, 7), 4, 10000.0, 6),
    )


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_accurate_at_large_positions(scale, device):
    """At 131,072 a float32 product of position and frequency is wrong by 1e-3; ours stays below 2e-6."""
    positions = torch.tensor([[131_072, 131_071, 99_999, 4097, 0]])
    x = torch.ones(1, 1, 5, 128, device=device)
    ours = ops.rope_positions(x, positions, 10000.0, 128, scale=scale).cpu().double()
    exact = stock(x.cpu().double(), positions, 10000.0, 128, scale=scale)
    # Each output is cos ± sin of one angle, so twice the bound for one of them.
    assert (ours - exact).abs().max().item() <= 2 * 2e-6


def test_the_largest_position(device):
    last = 2**31 - 1
    x = torch.randn(1, 2, 1, 16, device=device)
    ours = ops.rope_positions(x, last, 10000.0, 16)
    exact = stock(x.cpu().double(), last, 10000.0, 16)
    # 2**31 positions times the float64 rounding of a frequency: 2e-7 turns.
    torch.testing.assert_close(ours.cpu().double(), exact, rtol=0, atol=1e-5)


def test_ways_to_give_positions_agree(device):
    x = torch.randn(2, 3, 5, 8, device=device)
    rows = torch.arange(5) + 4
    expected = ops.rope_positions(x, 4, 10000.0, 8)
    for positions in ([4, 4], torch.tensor([4, 4]), rows.expand(2, 5), torch.tensor([4, 4], dtype=torch.int16)):
        assert torch.equal(ops.rope_positions(x, positions, 10000.0, 8), expected)
    on_device = torch.tensor([4, 4], device=device)
    assert torch.equal(ops.rope_positions(x, on_device, 10000.0, 8), expected)


def test_inverse_restores(device):
    x = torch.randn(2, 3, 9, 32, device=device, requires_grad=True)
    y = ops.rope_positions(x, 1000, 10000.0, 32)
    (restored,) = torch.autograd.grad(y, x, y.detach())
    assert_rounding_only(restored, x.detach())


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 3, 0, 8)], ids=str)
def test_empty(shape, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    ops.rope_positions(x, 5, 10000.0, 8).sum().backward()
    assert x.grad.shape == shape


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dims": 7}, ValueError, "'dims' is 7"),
        ({"dims": 0}, ValueError, "'dims' is 0"),
        ({"dims": 10}, ValueError, "'dims' is 10"),
        ({"positions": -1}, ValueError, "'positions' is from -1"),
        ({"positions": [1, -2]}, ValueError, "'positions' is from -2"),
        ({"positions": 2**31 - 2}, ValueError, "'positions' is from"),
        ({"positions": [1, 2, 3]}, ValueError, r"'positions' is a tensor of shape \(3,\)"),
        ({"positions": torch.zeros(2, 4, dtype=torch.int32)}, ValueError, "'positions'"),
        ({"positions": torch.zeros((), dtype=torch.int32)}, ValueError, "'positions'"),
        ({"positions": torch.zeros(2)}, TypeError, "'positions' is of dtype torch.float32"),
        ({"positions": [1.5, 2.5]}, TypeError, r"'positions' is \[1.5, 2.5\]"),
        ({"positions": True}, TypeError, "'positions' is True"),
        ({"positions": "12"}, TypeError, "'positions' is '12'"),
        ({"positions": None}, TypeError, "'positions' is None"),
        ({"base": 0.0}, ValueError, "'base' is 0"),
        ({"base": float("inf")}, ValueError, "'base' is inf"),
        ({"scale": float("nan")}, ValueError, "'scale' is nan"),
        ({"x": torch.ones(8)}, ValueError, "'x'"),
        ({"x": torch.ones(2, 3, 5, 8).long()}, TypeError, "'x' is of dtype torch.int64"),
    ],
)
def test_bad_input(arguments, error, message, device):
    good = {"x": torch.ones(2, 3, 5, 8), "positions": 0, "base": 10000.0, "dims": 8}
    with pytest.raises(error, match=f"rope_positions.*{message}"):
        ops.rope_positions(**on_device(good | arguments, device))


def test_a_width_whose_turns_fit_no_argument(device):
    """4 KB of arguments hold the turns of 512 pairs; more go through a buffer."""
    x = torch.randn(1, 1, 3, 1100)
    ours = ops.rope_positions(x.to(device), 50, 10000.0, 1030)
    assert_rounding_only(ours.cpu(), stock(x.double(), 50, 10000.0, 1030).float())


def test_positions_by_their_strides(device):
    positions = torch.arange(20, dtype=torch.int32, device=device).view(5, 4)[:, ::2].T
    x = torch.randn(2, 1, 5, 8, device=device)
    expected = ops.rope_positions(x, positions.contiguous(), 10000.0, 8)
    assert torch.equal(ops.rope_positions(x, positions, 10000.0, 8), expected)
