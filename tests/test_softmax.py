from __future__ import annotations

import functools
import math

import pytest
import torch

from tests.operators import DTYPES, Case, OpTests, assert_accurate, assert_rounding_only, on_device, run
from torch_metalk import ops

LOWEST = torch.finfo(torch.float32).min


def hidden_by_position(x, lower_right):
    queries, keys = x.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(1 + (keys - queries) * lower_right)


def stock(x, *, mask=None, is_causal=False, causal_alignment="upper_left", scale=1.0):
    """torch.softmax in x's dtype, which keeps its rounded result for backward as ours does."""
    scores = x * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(x.dtype)
    if is_causal:
        scores = scores.masked_fill(hidden_by_position(x, causal_alignment == "lower_right"), -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0)


def case(name, shape, mask=None, keep_dtype=(), **kwargs):
    ours, reference = functools.partial(ops.softmax, **kwargs), functools.partial(stock, **kwargs)

    def make():
        return {"x": 3 * torch.randn(shape)} | ({"mask": mask()} if mask else {})

    # Where one term is nearly 1, dy - sum(dy * y) cancels, and what is left of it is the rounding of that very term and
    # of the sum of its row, an accident of one element: hence a larger factor.
    return Case(name, make, ours, reference, saved=("<output>",), constant=("mask",), keep_dtype=keep_dtype, factor=4.0)


def visible(*shape):
    return lambda: torch.rand(shape) < 0.6


class TestSoftmax(OpTests):
    op = "softmax"
    cases = (
        case("one row", (7,)),
        case("one key", (4, 1)),
        case("plain", (3, 5, 33), scale=0.3),
        case("vectors", (2, 3, 5, 64)),
        case("causal", (2, 3, 5, 9), is_causal=True),
        case("causal, more queries", (9, 5), is_causal=True),
        case("causal lower right", (2, 5, 9), is_causal=True, causal_alignment="lower_right"),
        case("causal lower right, more queries", (9, 5), is_causal=True, causal_alignment="lower_right"),
        case("bool mask", (2, 3, 5, 12), visible(2, 1, 5, 12)),
        case("mask of keys", (2, 3, 5, 12), visible(2, 1, 1, 12)),
        case("mask of queries", (2, 5, 12), visible(5, 1)),
        case("mask and causal", (2, 3, 5, 7), visible(7), is_causal=True, scale=0.25),
        case("additive mask", (2, 3, 5, 12), lambda: torch.randn(3, 5, 12)),
        case("float32 mask", (2, 5, 12), lambda: torch.randn(5, 12), keep_dtype=("mask",)),
        case("rank 5", (2, 1, 3, 4, 6), visible(2, 1, 1, 4, 6)),
    )


@pytest.mark.parametrize("keys", [255, 4100, 8192, 8193, 9001], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
def test_long_rows(keys, dtype, kind, device):
    """Rows of several simdgroups, and rows too long for registers, which are read twice."""
    x = (4 * torch.randn(3, keys)).to(device, dtype)
    kwargs = {
        "plain": {},
        "causal": {"is_causal": True, "causal_alignment": "lower_right"},
        "mask": {"mask": (torch.rand(3, keys) < 0.5).to(device)},
    }[kind]
    on_cpu = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
    ours, grads = run(functools.partial(ops.softmax, **kwargs), {"x": x}, ["x"])
    exact, exact_grads = run(functools.partial(stock, **on_cpu), {"x": x.cpu().double()}, ["x"])
    expected, expected_grads = run(functools.partial(stock, **on_cpu), {"x": x.cpu()}, ["x"])
    assert_accurate(ours[0], expected[0], exact[0], "y")
    assert_accurate(grads[0], expected_grads[0], exact_grads[0], "dx")


@pytest.mark.parametrize("keys", [6, 9001], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["bool", "additive", "causal"])
def test_hidden_scores_have_no_influence(keys, poison, kind, device):
    """They are zeros, not small numbers: the product with v must not see what stands there."""
    x = torch.randn(4, keys)
    hidden = torch.ones(4, keys, dtype=torch.bool).triu(1) if kind == "causal" else torch.rand(4, keys) < 0.5
    bias = torch.zeros(4, keys).masked_fill(hidden, -math.inf)
    kwargs = {"bool": {"mask": ~hidden}, "additive": {"mask": bias}, "causal": {"is_causal": True}}[kind]
    kwargs = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
    spoiled = x.masked_fill(hidden, poison).to(device).requires_grad_()
    clean = x.to(device).requires_grad_()
    y, expected = (ops.softmax(t, **kwargs) for t in (spoiled, clean))
    assert torch.equal(y, expected)
    assert torch.equal(y.cpu()[hidden], torch.zeros(int(hidden.sum())))
    dy = torch.randn(4, keys)
    (grad,) = torch.autograd.grad(y, spoiled, dy.masked_fill(hidden, poison).to(device))
    (expected_grad,) = torch.autograd.grad(expected, clean, dy.to(device))
    assert torch.equal(grad, expected_grad)


@pytest.mark.parametrize("keys", [6, 9001], ids=str)
def test_rows_without_anything_to_see_are_zero(keys, device):
    x = torch.randn(2, keys, device=device, requires_grad=True)
    mask = torch.tensor([[True], [False]], device=device).expand(2, keys)
    y = ops.softmax(x, mask=mask)
    y.square().sum().backward()
    assert torch.equal(y[1].cpu(), torch.zeros(keys))
    assert torch.equal(x.grad[1].cpu(), torch.zeros(keys))
    torch.testing.assert_close(y[0].sum().item(), 1.0, rtol=1e-5, atol=0)


@pytest.mark.parametrize("keys", [6, 9001], ids=str)
def test_a_row_of_the_lowest_number_is_uniform(keys, device):
    """transformers marks rows of padding with finfo.min, not with -inf: they are averages."""
    x = torch.randn(2, keys, device=device)
    y = ops.softmax(x, mask=torch.full((2, keys), LOWEST, device=device))
    torch.testing.assert_close(y.cpu(), torch.full((2, keys), 1 / keys), rtol=1e-5, atol=0)


@pytest.mark.parametrize("keys", [6, 9001], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_visible_scores_that_are_not_finite_show(keys, poison, device):
    x = torch.randn(3, keys)
    x[1, -1] = poison
    y = ops.softmax(x.to(device)).cpu()
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("keys", [6, 9001], ids=str)
def test_large_scores(keys, device):
    """exp of them overflows in float32; of their difference to the maximum it does not."""
    x = (1e4 * torch.randn(3, keys)).to(device)
    exact = torch.softmax(x.cpu().double(), -1)
    assert_accurate(ops.softmax(x), torch.softmax(x.cpu(), -1), exact, "y")
    # A thread that sees nothing, beside a maximum far below 0.
    low = torch.full((1, keys), -1e5)
    mask = torch.zeros(1, keys, dtype=torch.bool)
    mask[0, :2] = True
    y = ops.softmax(low.to(device), mask=mask.to(device)).cpu()
    assert y[0, :2].tolist() == [0.5, 0.5]
    assert y[0, 2:].eq(0).all()


@pytest.mark.parametrize("make_mask", [lambda m: m.mT.contiguous().mT, lambda m: m[:, :1].expand_as(m)], ids=["T", "1"])
def test_masks_are_read_by_their_strides(make_mask, device):
    x = torch.randn(2, 3, 5, 8, device=device)
    for mask in (torch.rand(5, 8) < 0.5, torch.randn(5, 8)):
        strided = make_mask(mask.to(device))
        assert_rounding_only(ops.softmax(x, mask=strided), ops.softmax(x, mask=strided.contiguous()))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0,)], ids=str)
def test_empty(shape, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    y = ops.softmax(x, scale=0.5)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


X = torch.ones(2, 3, 5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": X.int()}, TypeError, "'x' is of dtype torch.int32"),
        ({"x": torch.ones(())}, ValueError, r"'x' is a tensor of shape \(\)"),
        ({"x": torch.ones(3), "is_causal": True}, ValueError, r"'x' is a tensor of shape \(3,\).*with is_causal"),
        ({"mask": torch.ones(4, dtype=torch.bool)}, ValueError, r"'mask' is a tensor of shape \(4,\)"),
        ({"mask": torch.ones(1, 2, 3, 5)}, ValueError, "'mask'"),
        ({"mask": torch.ones(5, dtype=torch.int64)}, TypeError, "'mask' is of dtype torch.int64"),
        ({"mask": torch.ones(5, requires_grad=True)}, ValueError, "'mask' is a tensor that requires a gradient"),
        ({"mask": torch.ones(5, device="meta")}, ValueError, "'mask' is on meta"),
        ({"scale": math.inf}, ValueError, "'scale' is inf"),
        ({"scale": "1"}, TypeError, "'scale' is '1'"),
        ({"causal_alignment": "lower_left"}, ValueError, "'causal_alignment' is 'lower_left'"),
    ],
)
def test_bad_input(arguments, error, message, device):
    with pytest.raises(error, match=f"softmax.*{message}"):
        ops.softmax(**on_device({"x": X} | arguments, device))
