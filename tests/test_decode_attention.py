from __future__ import annotations

import functools
import math

import pytest
import torch

from tests import test_attention
from tests.operators import DTYPES, Case, ForwardOpTests, assert_accurate, assert_rounding_only, on_device
from torch_metalk import ops


def stock(q, k, v, lengths=None, mask=None, **kwargs):
    """Each sequence by itself, with as many keys as it has."""
    rows = []
    for b in range(q.shape[0]):
        n = k.shape[2] if lengths is None else min(max(int(lengths[b]), 0), k.shape[2])
        if n == 0:
            rows.append(q.new_zeros(1, *q.shape[1:3], v.shape[3]))
            continue
        own = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])[b : b + 1, ..., :n]
        cut = (q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        rows.append(test_attention.stock(*cut, mask=own, is_causal=True, causal_alignment="lower_right", **kwargs))
    return torch.cat(rows)


def tensors(queries=1, keys=40, heads=4, kv_heads=2, head_dim=16, value_dim=None, lengths=(33, 40), mask=None):
    batch = 2 if lengths is None else len(lengths)
    made = test_attention.qkv(batch, heads, kv_heads, queries, keys, head_dim, value_dim)
    if lengths is not None:
        made["lengths"] = torch.tensor(lengths, dtype=torch.int32)
    if mask is not None:
        made["mask"] = mask(batch, heads, queries, keys)
    return made


def case(name, shape=None, **kwargs):
    return Case(
        name,
        functools.partial(tensors, **(shape or {})),
        functools.partial(ops.decode_attention, **kwargs),
        functools.partial(stock, **kwargs),
        saved=(),
        constant=("q", "k", "v", "mask"),
        keep_dtype=("mask",),
        # The CPU's fused kernel, which serves the twin, has its own exp.
        factor=4.0,
    )


def visible(*shape):
    return torch.rand(shape) > 0.4


class TestDecodeAttention(ForwardOpTests):
    op = "decode_attention"
    cases = (
        case("one query"),
        case("no lengths", {"lengths": None}),
        case("window and softcap", {"queries": 3}, sliding_window=5, softcap=2.0),
        case("bool mask", {"queries": 2, "mask": lambda b, h, q, k: visible(b, 1, q, k)}),
        case("additive mask", {"queries": 2, "mask": lambda *s: torch.randn(s).masked_fill(visible(*s), -math.inf)}),
        case("mask of rank 2", {"queries": 2, "mask": lambda b, h, q, k: visible(q, k)}, scale=0.3),
        case("32 rows, value dim", {"queries": 8, "heads": 4, "kv_heads": 1, "value_dim": 6}),
        case("odd head dim", {"queries": 2, "head_dim": 7, "value_dim": 5}),
        case("lengths 0, 1, beyond", {"queries": 2, "lengths": (0, 1, 99, -3)}),
    )

    @staticmethod
    def more_calls(device):
        for dtype in DTYPES:  # chunks that are joined
            given = {n: t.to(device, dtype) if t.is_floating_point() else t.to(device) for n, t in long(1).items()}
            yield functools.partial(ops.decode_attention, **given)


def long(rows, kv_heads=1, keys=1100, head_dim=8, **shape):
    """Enough keys for two chunks."""
    return tensors(heads=rows * kv_heads, kv_heads=kv_heads, keys=keys, head_dim=head_dim, lengths=(keys, 600), **shape)


def check(given, device, dtype=torch.float32, factor=4.0, **kwargs):
    moved = {n: t.to(device, dtype if t.is_floating_point() and n != "mask" else None) for n, t in given.items()}
    exact = {n: t.cpu().double() if t.is_floating_point() else t.cpu() for n, t in moved.items()}
    o = ops.decode_attention(**moved, **kwargs)
    on_cpu = {n: t.cpu() for n, t in moved.items()}
    assert_accurate(o, stock(**on_cpu, **kwargs), stock(**exact, **kwargs), "o", factor)
    return o


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("group", [1, 3, 8, 32])
def test_every_length_with_every_group(group, queries, dtype, device):
    """Ends of tiles of 32 and 128 keys, and one behind them; up to 256 rows."""
    lengths = (0, 1, 31, 33, 128, 129, 200)
    check(tensors(queries, 200, 2 * group, 2, 32, lengths=lengths), device, dtype)


@pytest.mark.parametrize("queries", range(2, 8))
def test_every_number_of_queries(queries, device):
    check(tensors(queries, lengths=(5, 40)), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(1, 1), (3, 2), (64, 64), (80, 96), (96, 33), (127, 130), (128, 128), (250, 251), (256, 256), (8, 256), (256, 8)],
)
def test_every_width(head_dim, value_dim, rows, dtype, device):
    check(tensors(1, 40, rows, 1, head_dim, value_dim), device, dtype)


@pytest.mark.parametrize("rows", [1, 12, 40])
@pytest.mark.parametrize("kwargs", [{}, {"sliding_window": 700, "softcap": 1.5}], ids=["plain", "window"])
def test_chunks_are_joined(rows, kwargs, device):
    """Two passes over the keys give what one pass gives, to rounding; one sequence ends within the first chunk."""
    given = long(rows, value_dim=12)
    o = check(given, device, **kwargs)
    moved = {n: t.to(device) for n, t in given.items()}
    assert torch.equal(ops.decode_attention(**moved, **kwargs), o)
    for b in range(2):  # each sequence with the keys it has: the other plan
        n = int(given["lengths"][b])
        alone = {name: t[b : b + 1, :, :n] if name in "kv" else t[b : b + 1] for name, t in moved.items()}
        stacked = {name: torch.cat([t] * 70) for name, t in alone.items()}
        one_pass = ops.decode_attention(**stacked, **kwargs)
        torch.testing.assert_close(o[b], one_pass[69], rtol=1e-5, atol=1e-6)  # sums in another order


@pytest.mark.parametrize("queries", [1, 8])
def test_lse(queries, device):
    """Natural logarithms, whatever the units of scores in the kernel; 0 where nothing is seen."""
    for given in (tensors(queries, lengths=(0, 33)), long(2, queries=queries)):
        moved = {n: t.to(device) for n, t in given.items()}
        keys = given["k"].shape[2]
        for mask in (None, torch.zeros(queries, keys, device=device)):
            lse = torch.ops.torch_metalk.decode_attention(*moved.values(), mask, 0.25, None, None)[1]
            k = given["k"].repeat_interleave(2, 1)
            scores = 0.25 * (given["q"].double() @ k.double().mT)
            last = given["lengths"].view(-1, 1, 1, 1) - queries + torch.arange(queries)[:, None]
            exact = scores.masked_fill(torch.arange(keys) > last, -math.inf).logsumexp(-1)
            exact = exact.masked_fill(exact == -math.inf, 0)
            torch.testing.assert_close(lse.cpu().double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_a_query_does_not_see_has_no_influence(bad, rows, device):
    given = {n: t.to(device) for n, t in tensors(2, heads=rows, kv_heads=1, lengths=(0, 7, 40)).items()}
    mask = visible(3, 1, 2, 40).to(device)
    mask[..., 5] = torch.tensor([False, True])  # one query sees this key, the other does not
    clean = ops.decode_attention(**given, mask=mask)
    spoiled = {n: t.clone() for n, t in given.items()}
    for name in "kv":
        for b, n in enumerate((0, 7, 40)):
            spoiled[name][b, :, n:] = bad
        spoiled[name].masked_fill_((~mask.any(-2))[..., None], bad)
    # To rounding, since what is not finite takes the twin from one way of calculating to another.
    assert_rounding_only(ops.decode_attention(**spoiled, mask=mask), clean)
    for name in "kv":
        one = spoiled | {name: spoiled[name].clone()}
        one[name][2, :, 5, 1] = bad
        o = ops.decode_attention(**one, mask=mask)
        assert_rounding_only(o[:2], clean[:2])
        assert_rounding_only(o[2, :, 0], clean[2, :, 0])
        if name == "v" or bad != math.inf:  # a score of -inf hides its key
            assert not o[2, :, 1].isfinite().all(-1).any()


def test_scores_that_are_nan_show_in_both_passes(device):
    given = {n: t.to(device) for n, t in long(1).items()}
    given["k"][0, 0, 1050] = math.nan
    o = ops.decode_attention(**given)
    assert o[0].isnan().all()
    assert o[1].isfinite().all()
    given["k"][:] = math.nan
    assert ops.decode_attention(**given).isnan().all()


def test_strided_caches(device):
    """Heads behind positions, as models make them, within a larger buffer."""
    given = {n: t.to(device) for n, t in tensors().items()}
    expected = ops.decode_attention(**given)
    for name in "qkv":
        buffer = torch.full((2, 50, given[name].shape[1], 20), math.nan, device=device)
        view = buffer[:, 3 : 3 + given[name].shape[2], :, 2:18].transpose(1, 2)
        view.copy_(given[name])
        assert_rounding_only(ops.decode_attention(**given | {name: view}), expected)
    once = {n: given[n][:, :1].expand(-1, 2, -1, -1) for n in "kv"}
    dense = {n: t.contiguous() for n, t in once.items()}
    assert_rounding_only(ops.decode_attention(**given | once), ops.decode_attention(**given | dense))


def test_heads_join_without_a_copy(device):
    o = ops.decode_attention(**{n: t.to(device) for n, t in tensors(3).items()})
    assert o.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_lengths_of_either_type(dtype, device):
    given = {n: t.to(device) for n, t in tensors(lengths=(3, 40)).items()}
    expected = ops.decode_attention(**given)
    given["lengths"] = torch.stack([torch.tensor([3, 40]), torch.tensor([0, 0])], 1).to(device, dtype)[:, 0]
    assert torch.equal(ops.decode_attention(**given), expected)
    if dtype == torch.int64:
        given["lengths"] = torch.tensor([3, 2**40 + 1], device=device)
        assert torch.equal(ops.decode_attention(**given), expected)


def test_lengths_are_checked_on_request(device):
    given = {n: t.to(device) for n, t in tensors(lengths=(0, 40)).items()}
    ops.decode_attention(**given, check=True)
    for bad, message in ((41, "'lengths' is up to 41; accepted: at most 40"), (-1, "'lengths' is down to -1")):
        given["lengths"][0] = bad
        with pytest.raises(ValueError, match=message):
            ops.decode_attention(**given, check=True)


@pytest.mark.parametrize("empty", ["batch", "heads", "queries", "keys", "head_dim", "value_dim"])
def test_empty(empty, device):
    shape = {"batch": 2, "heads": 2, "kv_heads": 2, "queries": 3, "keys": 4, "head_dim": 8, "value_dim": 8, empty: 0}
    if empty == "heads":
        shape["kv_heads"] = 0
    given = test_attention.qkv(**shape | {"value_dim": 8})
    given["v"] = given["v"][..., : shape["value_dim"]]
    o = ops.decode_attention(**{n: t.to(device) for n, t in given.items()})
    assert o.shape == (shape["batch"], shape["heads"], shape["queries"], shape["value_dim"])
    if empty == "head_dim":  # all scores are 0
        assert_accurate(o[:, :, 2], given["v"].mean(2), given["v"].double().mean(2), "o")
    else:
        assert torch.equal(o, torch.zeros_like(o))


def test_it_has_no_gradient(device):
    given = {n: t.to(device) for n, t in tensors().items()}
    o = ops.decode_attention(**given | {"q": given["q"].requires_grad_()})
    with pytest.raises(RuntimeError, match="decode_attention was asked for a gradient: it has none; use attention"):
        o.sum().backward()


@pytest.mark.parametrize("rows", [2, 12])
def test_checked_mode_with_chunks_and_widths(rows, checked_device):
    """Caches that end within a step, with rows that fill their vectors and lanes, and rows that do not."""
    check(long(rows, queries=2, head_dim=100, value_dim=70), checked_device)
    for head_dim, value_dim in ((64, 12), (7, 5)):
        check(tensors(1, 37, rows, 1, head_dim, value_dim, lengths=(5, 37)), checked_device)


GOOD = {"q": torch.ones(2, 4, 5, 8), "k": torch.ones(2, 2, 6, 8), "v": torch.ones(2, 2, 6, 8)}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": torch.ones(2, 4, 9, 8)}, ValueError, "'q' is of 9 queries; accepted: at most 8; attention takes more"),
        ({"q": torch.ones(2, 4, 5, 257), "k": torch.ones(2, 2, 6, 257)}, ValueError, "'q' is of head dim 257"),
        ({"v": torch.ones(2, 2, 6, 257)}, ValueError, "'v' is of head dim 257"),
        ({"q": torch.ones(2, 5, 8)}, ValueError, "'q' is a tensor of shape"),
        ({"k": torch.ones(2, 3, 6, 8), "v": torch.ones(2, 3, 6, 8)}, ValueError, "'k' is of 3 heads"),
        ({"v": torch.ones(2, 2, 5, 8)}, ValueError, "'v'"),
        ({"k": torch.ones(2, 2, 6, 8).half()}, TypeError, "'k' is of dtype torch.float16"),
        ({"lengths": torch.ones(2)}, TypeError, "'lengths' is of dtype torch.float32; accepted: int32, int64"),
        ({"lengths": torch.ones(3, dtype=torch.int32)}, ValueError, r"'lengths' is a tensor of shape \(3,\)"),
        ({"lengths": torch.ones(2, dtype=torch.int32, device="meta")}, ValueError, "'lengths' is on meta"),
        ({"mask": torch.ones(2, 5, 6, dtype=torch.bool)}, ValueError, "'mask' is a tensor of shape"),
        ({"mask": torch.ones(5, 6, dtype=torch.int32)}, TypeError, "'mask' is of dtype torch.int32"),
        ({"mask": torch.ones(5, 6).requires_grad_()}, ValueError, "'mask' is a tensor that requires a gradient"),
        ({"sliding_window": 0}, ValueError, "'sliding_window' is 0"),
        ({"softcap": 0.0}, ValueError, "'softcap' is 0"),
        ({"scale": math.nan}, ValueError, "'scale' is nan"),
        ({"scale": "1"}, TypeError, "'scale' is '1'"),
    ],
)
def test_bad_input(arguments, error, message, device):
    with pytest.raises(error, match=f"decode_attention.*{message}"):
        ops.decode_attention(**on_device(GOOD | arguments, device))
