from __future__ import annotations

import functools
import importlib
import math
import sys

import pytest
import torch

from tests.operators import DTYPES, Case, OpTests, assert_accurate, assert_rounding_only, run
from torch_metalk import ops


def stock(
    q, k, v, mask=None, is_causal=False, causal_alignment="upper_left", scale=None, sliding_window=None, softcap=None
):
    """The definition, with all scores at once; softmax in float32 as transformers' eager attention does."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    i = torch.arange(q.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)
    if causal_alignment == "lower_right":
        i = i + k.shape[2] - q.shape[2]
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if is_causal:
        allowed = allowed & (j <= i)
    if sliding_window is not None:
        allowed = allowed & ((i - j) < sliding_window)
        if not is_causal:
            allowed = allowed & ((j - i) < sliding_window)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        allowed = allowed & (mask > -math.inf)
        scores = scores + mask.masked_fill(mask == -math.inf, 0)
    scores = scores.masked_fill(~allowed, -math.inf)
    nothing = ~allowed.any(-1, keepdim=True)
    p = scores.masked_fill(nothing, 0).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return p.masked_fill(nothing, 0).to(q.dtype) @ v


def qkv(batch=2, heads=4, kv_heads=2, queries=9, keys=9, head_dim=8, value_dim=None):
    return {
        "q": torch.randn(batch, heads, queries, head_dim),
        "k": torch.randn(batch, kv_heads, keys, head_dim),
        "v": torch.randn(batch, kv_heads, keys, value_dim or head_dim),
    }


def case(name, shape=None, mask=None, algorithm="auto", **kwargs):
    def make():
        tensors = qkv(**(shape or {}))
        return tensors if mask is None else tensors | {"mask": mask()}

    def attention(q, k, v, mask=None):
        return ops.attention(q, k, v, mask=mask, algorithm=algorithm, **kwargs)

    def rows(tensors):
        return math.prod(tensors["q"].shape[:3])

    saved = ("q", "k", "v", "<output>", "<row>") + (("mask",) if mask else ())
    return Case(
        name,
        make,
        attention,
        functools.partial(stock, **kwargs),
        saved,
        constant=("mask",),
        keep_dtype=("mask",),
        # The CPU's fused kernel adds in blocks and has its own exp: up to 3 times the definition's float32 error.
        factor=4.0,
        rows=rows,
    )


def bool_mask(*shape):
    mask = torch.rand(shape) > 0.4
    mask[..., 1, :] = False  # a row that may attend to nothing
    return mask


def additive_mask(*shape):
    mask = torch.randn(shape)
    mask[..., 2, :] = -math.inf
    return mask.masked_fill(torch.rand(shape) > 0.7, -math.inf)


# Every line that ends in "blockwise" has a twin that the CPU's fused kernel serves: both are in use on the CPU.
class TestAttention(OpTests):
    op = "attention"
    cases = (
        case("plain"),
        case("causal", is_causal=True),
        case("cross", {"queries": 5, "keys": 11}),
        case("cross causal upper left", {"queries": 5, "keys": 11}, is_causal=True),
        case("cross causal lower right", {"queries": 5, "keys": 11}, is_causal=True, causal_alignment="lower_right"),
        case("more queries than keys", {"queries": 8, "keys": 3}, is_causal=True, causal_alignment="lower_right"),
        case("window", is_causal=True, sliding_window=3),
        case("window both ways", sliding_window=2),
        case("mask of rank 2", mask=lambda: bool_mask(9, 9)),
        case("mask per batch", mask=lambda: bool_mask(2, 1, 9, 9)),
        case("mask per head, causal", mask=lambda: bool_mask(2, 4, 9, 9), is_causal=True),
        case("mask of keys", mask=lambda: torch.rand(2, 1, 1, 9) > 0.3),
        case("additive mask, blockwise", mask=lambda: additive_mask(2, 1, 9, 9)),
        case("additive mask per head, blockwise", mask=lambda: additive_mask(2, 4, 9, 9), is_causal=True),
        case("softcap, blockwise", softcap=2.0, is_causal=True),
        case("value dim, blockwise", {"value_dim": 12}, is_causal=True, sliding_window=4),
        case("one kv head", {"heads": 4, "kv_heads": 1}, is_causal=True, scale=0.3),
        case("decode", {"queries": 1, "keys": 33}),
        case("head dim 7", {"head_dim": 7, "kv_heads": 4}),
        case("materialised", algorithm="materialised", is_causal=True, sliding_window=4),
        case(
            "materialised, blockwise",
            {"value_dim": 12},
            mask=lambda: additive_mask(2, 4, 9, 9),
            algorithm="materialised",
            softcap=2.0,
        ),
    )

    @staticmethod
    def more_calls(device):
        for dtype in DTYPES:
            for head_dim in (128, 256):
                tensors = {n: t.to(device, dtype) for n, t in qkv(1, 1, 1, 1, 1, head_dim).items()}
                yield functools.partial(
                    run, functools.partial(ops.attention, algorithm="tiled"), tensors, ["q", "k", "v"]
                )
        # Rows of scores that no threadgroup takes in one pass.
        tensors = {n: t.to(device) for n, t in qkv(1, 1, 1, 1, 8193, 8).items()}
        yield functools.partial(ops.attention, **tensors, algorithm="materialised")


@pytest.fixture(params=["tiled", "materialised"])
def attend(request, device):
    """`ops.attention` both ways of the Metal kernels; the twin has one of its own."""
    if device.type == "cpu" and request.param != "tiled":
        pytest.skip("the CPU has one algorithm")
    return functools.partial(ops.attention, algorithm=request.param)


def float64(function, tensors, **kwargs):
    wide = {n: t.cpu().double() if t.is_floating_point() else t.cpu() for n, t in tensors.items()}
    return function(**wide, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (16, 8, 128)])
def test_no_output_depends_on_the_future(heads, kv_heads, head_dim, dtype, device, attend):
    tensors = {n: t.to(device, dtype) for n, t in qkv(1, heads, kv_heads, 64, 64, head_dim).items()}
    before = attend(**tensors, is_causal=True)
    for t in (0, 3, 4, 31, 32, 62):
        changed = {n: x.clone() for n, x in tensors.items()}
        changed["k"][:, :, t + 1 :] = 7.0
        changed["v"][:, :, t + 1 :] = -5.0
        after = attend(**changed, is_causal=True)
        assert torch.equal(after[:, :, : t + 1], before[:, :, : t + 1]), f"row {t} or before"
        assert not torch.equal(after[:, :, t + 1 :], before[:, :, t + 1 :])


@pytest.mark.parametrize("hidden", [False, -math.inf], ids=["bool", "-inf"])
@pytest.mark.parametrize("keys", [4, 40])
def test_a_row_that_attends_to_nothing_is_zero(hidden, keys, device, attend):
    tensors = {n: t.to(device).requires_grad_() for n, t in qkv(1, 1, 1, 2, keys, 4).items()}
    mask = torch.ones(2, keys, dtype=torch.bool) if hidden is False else torch.zeros(2, keys)
    mask[0] = hidden
    o = attend(**tensors, mask=mask.to(device))
    assert torch.equal(o[0, 0, 0], torch.zeros_like(o[0, 0, 0]))
    # Gradients from the other row only: the same as without this row.
    grads = torch.autograd.grad(o.sum(), list(tensors.values()))
    assert torch.equal(grads[0][0, 0, 0], torch.zeros_like(grads[0][0, 0, 0]))
    alone = {n: t.detach().clone().requires_grad_() for n, t in tensors.items()}
    o = attend(alone["q"][:, :, 1:], alone["k"], alone["v"])
    for grad, expected in zip(grads, torch.autograd.grad(o.sum(), list(alone.values())), strict=True):
        assert_rounding_only(grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_finfo_min_is_a_number(dtype, device, attend):
    """A whole row of it is a constant added to every score: the mean of v, and its gradient."""
    tensors = {n: t.to(device, dtype) for n, t in qkv(1, 1, 1, 2, 4, 4).items()}
    mask = torch.zeros(2, 4, device=device)
    mask[0] = torch.finfo(torch.float32).min
    (o,), (dv,) = run(functools.partial(attend, mask=mask), tensors, ["v"], [torch.ones(1, 1, 2, 4)])
    mean = tensors["v"].cpu().double().mean(2)
    torch.testing.assert_close(
        o[:, :, 0].cpu().double(), mean, rtol=0, atol=2 * torch.finfo(dtype).eps * mean.abs().max().item()
    )
    (_,), (exact,) = run(
        functools.partial(stock, mask=mask.cpu().double()),
        {n: t.cpu().double() for n, t in tensors.items()},
        ["v"],
        [torch.ones(1, 1, 2, 4)],
    )
    torch.testing.assert_close(dv.cpu().double(), exact, rtol=0, atol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("highest", [0, 33])
def test_a_row_far_below_zero(highest, device, attend):
    """-5,000 on every score, so that lse cannot hold the logarithm of their sum, and one of 40 stands out a little."""
    tensors = {n: t.to(device) for n, t in qkv(1, 1, 1, 3, 40, 4).items()}
    bias = torch.full((3, 40), -5000.0)
    bias[:, highest] += 3.0
    names, incoming = list(tensors), [torch.randn(1, 1, 3, 4)]
    found, grads = run(functools.partial(attend, mask=bias.to(device)), tensors, names, incoming)
    exact, exact_grads = run(
        functools.partial(stock, mask=bias.double()),
        {n: t.cpu().double() for n, t in tensors.items()},
        names,
        [incoming[0].double()],
    )
    for ours, right in zip(found + grads, exact + exact_grads, strict=True):
        # Scores of 5,000 have steps of 2^-11 in float32, weights of a row an error of as much of themselves.
        torch.testing.assert_close(ours.cpu().double(), right, rtol=0, atol=2**-10 * right.abs().max().item())


def test_left_padding(device, attend):
    """Lengths 3 and 9 in one batch: the last row of each equals the sequence on its own."""
    tensors = {n: t.to(device) for n, t in qkv(2, 4, 2, 9, 9, 16).items()}
    padding = torch.ones(2, 9, dtype=torch.bool, device=device)
    padding[0, :6] = False
    mask = padding[:, None, None, :] & torch.ones(9, 9, dtype=torch.bool, device=device).tril()
    o = attend(**tensors, mask=mask)
    for row, start in ((0, 6), (1, 0)):
        alone = attend(*(t[row : row + 1, :, start:] for t in tensors.values()), is_causal=True)
        assert_rounding_only(o[row, :, -1], alone[0, :, -1])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_hidden_nan_does_not_leak(bad, dtype, softcap, device, attend):
    """NaN in padded keys and values reaches neither outputs nor gradients of valid rows."""
    tensors = {n: t.to(device, dtype) for n, t in qkv(1, 4, 2, 6, 6, 8).items()}
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool, device=device)
    mask[..., 4:] = False
    function = functools.partial(attend, mask=mask, softcap=softcap)
    incoming = [torch.randn(1, 4, 6, 8)]
    clean = run(function, tensors, list(tensors), incoming)
    for name in ("k", "v"):
        tensors[name][:, :, 4:] = bad
    (o,), grads = run(function, tensors, list(tensors), incoming)
    assert_rounding_only(o, clean[0][0])
    for grad, expected in zip(grads, clean[1], strict=True):
        assert_rounding_only(grad, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_spoilt_query_reaches_only_keys_that_it_sees(bad, dtype, softcap, device, attend):
    """A row of NaN in q, or in the incoming gradient, as padding may hold: query 4 sees keys 2 to 4."""
    tensors = {n: t.to(device, dtype) for n, t in qkv(1, 4, 2, 9, 9, 8).items()}
    function = functools.partial(attend, is_causal=True, sliding_window=3, softcap=softcap)
    incoming = torch.randn(1, 4, 9, 8)
    (_, clean) = run(function, tensors, list(tensors), [incoming])
    for spoilt_do in (False, True):
        spoilt, grads_in = dict(tensors), incoming.clone()
        if spoilt_do:
            grads_in[:, :, 4] = bad
        else:
            spoilt["q"] = tensors["q"].clone()
            spoilt["q"][:, :, 4] = bad
        _, (dq, dk, dv) = run(function, spoilt, list(spoilt), [grads_in])
        others = [0, 1, 2, 3, 5, 6, 7, 8]
        assert_rounding_only(dq[:, :, others], clean[0][:, :, others])
        for grad, expected in ((dk, clean[1]), (dv, clean[2])):
            keys = [0, 1, 5, 6, 7, 8]
            assert_rounding_only(grad[:, :, keys], expected[:, :, keys])
        assert not dv[:, :, 2:5].isfinite().all(-1).any()


def test_nan_reaches_exactly_the_rows_that_attend_to_it(device, attend):
    tensors = {n: t.to(device) for n, t in qkv(1, 2, 2, 6, 6, 8).items()}
    clean = attend(**tensors, is_causal=True)
    for name in ("k", "v"):
        spoiled = {n: t.clone() for n, t in tensors.items()}
        spoiled[name][:, :, 3, 2] = math.nan
        o = attend(**spoiled, is_causal=True)
        assert_rounding_only(o[:, :, :3], clean[:, :, :3])
        assert o[:, :, 3:].isnan().any(-1).all()


@pytest.mark.parametrize("bad", ["q", "k", "v"])
def test_unrestricted_nan_spoils_what_it_should(bad, device, attend):
    """Without a mask every query sees every key: nothing may hide a number that is not finite."""
    tensors = {n: t.to(device) for n, t in qkv(1, 2, 1, 6, 40, 8).items()}
    tensors[bad][:, :, 3, 2] = math.nan
    (o,), grads = run(attend, tensors, list(tensors))
    rows = slice(3, 4) if bad == "q" else slice(None)
    assert o[:, :, rows].isnan().any(-1).all()
    assert grads[0][:, :, rows].isnan().all()
    if bad == "q":
        assert o[:, :, [0, 1, 2, 4, 5]].isfinite().all()


@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
def test_permuted_inputs(which, device, attend):
    tensors = {n: torch.randn(84, 3, 3, 64, device=device) for n in ("q", "k", "v")}
    dense = {n: t.permute(0, 2, 1, 3).contiguous() for n, t in tensors.items()}
    given = {n: tensors[n].permute(0, 2, 1, 3) if which in (n, "all") else dense[n] for n in tensors}
    assert_rounding_only(attend(**given), attend(**dense))


@pytest.mark.parametrize("keys", [1, 31, 33, 38, 1024, 1025])
def test_nothing_behind_the_last_key_counts(keys, device, attend):
    shape = {"batch": 1, "heads": 32, "kv_heads": 2, "queries": 3, "keys": keys + 7, "head_dim": 16}
    tensors = {n: t.to(device) for n, t in qkv(**shape).items()}
    cut = {n: t if n == "q" else t[:, :, :keys] for n, t in tensors.items()}
    expected = attend(**{n: t.contiguous() for n, t in cut.items()})
    for name in ("k", "v"):
        tensors[name][:, :, keys:] = math.nan
    assert_rounding_only(attend(**cut), expected)
    stock_error = stock(**{n: t.cpu() for n, t in cut.items()})
    assert_accurate(expected, stock_error, float64(stock, cut), "o")


def test_mask_and_causality_combine(device, attend):
    tensors = {n: t.to(device) for n, t in qkv(1, 2, 2, 8, 8, 8).items()}
    mask = (torch.rand(8, 8) > 0.3).to(device)
    both = mask & torch.ones(8, 8, dtype=torch.bool, device=device).tril()
    assert_rounding_only(attend(**tensors, mask=mask, is_causal=True), attend(**tensors, mask=both))


def test_alignment_of_a_cache(device, attend):
    """With 6 keys before them, 4 queries are the last 4 of 10: lower right; torch's own is upper left."""
    tensors = {n: t.to(device) for n, t in qkv(1, 2, 2, 10, 10, 8).items()}
    whole = attend(**tensors, is_causal=True)
    last = {**tensors, "q": tensors["q"][:, :, 6:]}
    assert_rounding_only(attend(**last, is_causal=True, causal_alignment="lower_right"), whole[:, :, 6:])
    upper_left = torch.nn.functional.scaled_dot_product_attention(*last.values(), is_causal=True)
    assert_rounding_only(attend(**last, is_causal=True), upper_left)
    decode = {**tensors, "q": tensors["q"][:, :, 9:]}
    assert_rounding_only(attend(**decode), whole[:, :, 9:])


@pytest.mark.parametrize("empty", ["batch", "heads", "queries", "keys"])
def test_empty(empty, device, attend):
    shape = {"batch": 2, "heads": 2, "kv_heads": 2, "queries": 3, "keys": 4, "head_dim": 8, empty: 0}
    if empty == "heads":
        shape["kv_heads"] = 0
    tensors = {n: t.to(device) for n, t in qkv(**shape).items()}
    (o,), grads = run(attend, tensors, list(tensors))
    assert o.shape == (shape["batch"], shape["heads"], shape["queries"], 8)
    assert torch.equal(o, torch.zeros_like(o))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_scores_of_any_size(device, attend):
    """Maxima that grow from block to block, and scores from which exp would overflow by far."""
    tensors = {n: t.to(device) for n, t in qkv(1, 2, 1, 40, 100, 16).items()}
    tensors["k"] *= torch.linspace(0.1, 60, 100, device=device)[:, None]
    names = list(tensors)
    incoming = [torch.randn(1, 2, 40, 16)]
    (o,), grads = run(attend, tensors, names, incoming)
    (measure,), measure_grads = run(stock, {n: t.cpu() for n, t in tensors.items()}, names, incoming)
    (exact,), exact_grads = run(stock, {n: t.cpu().double() for n, t in tensors.items()}, names, [incoming[0].double()])
    # Backward makes the weights from lse, of some hundreds here: a rounding of it is in every weight of a row.
    for name, *triple in zip(("o", *names), (o, *grads), (measure, *measure_grads), (exact, *exact_grads), strict=True):
        assert_accurate(*triple, name, 8.0)


def test_one_score_above_all_others(device, attend):
    """Wherever it is: row i is value i, all others are 1,000 below. Relative to those its weight would be infinite."""
    tensors = {n: t.to(device) for n, t in qkv(1, 1, 1, 13, 13, 8).items()}
    bias = torch.full((13, 13), -1000.0).fill_diagonal_(0.0)
    assert_rounding_only(attend(**tensors, mask=bias.to(device)), tensors["v"])


@pytest.mark.parametrize("head_dim", [264, 320])
def test_wide_heads(head_dim, device):
    """Beyond what the tiled kernels take, auto is materialised."""
    tensors = {n: t.to(device) for n, t in qkv(1, 2, 1, 5, 7, head_dim).items()}
    names = list(tensors)
    incoming = [torch.randn(1, 2, 5, head_dim)]
    (o,), grads = run(functools.partial(ops.attention, is_causal=True), tensors, names, incoming)
    host = {n: t.cpu() for n, t in tensors.items()}
    definition = functools.partial(stock, is_causal=True)
    measure, measure_grads = run(definition, host, names, incoming)
    exact, exact_grads = run(definition, {n: t.double() for n, t in host.items()}, names, [incoming[0].double()])
    for name, *triple in zip(("o", *names), (o, *grads), measure + measure_grads, exact + exact_grads, strict=True):
        # Rows of one to five keys: see tests/test_attention_matrix.py for what is left of their gradients.
        assert_accurate(*triple, name, 8.0)
    if device.type == "mps":
        with pytest.raises(ValueError, match=r"attention.*'algorithm' is 'tiled'.*more than 256"):
            ops.attention(**tensors, algorithm="tiled")


@pytest.mark.parametrize("restriction", ["none", "causal", "window", "mask", "bias"])
@pytest.mark.parametrize("dims", [(40, 24), (128, 128), (136, 256)], ids=str)
def test_blocks_in_checked_mode(dims, restriction, checked_device):
    """Several blocks of rows and of keys, each way that a block can be left out or spoilt: no race, no access outside.

    The first of the keys that nobody may see are not finite, and lie where they share a block with others.
    """
    made = qkv(1, 2, 1, 37, 70, dims[0], dims[1])
    options = {
        "none": {},
        "causal": {"is_causal": True, "causal_alignment": "lower_right"},
        "window": {"is_causal": True, "sliding_window": 9, "softcap": 4.0},
        "mask": {"mask": torch.rand(37, 70) > 0.5},
        "bias": {"mask": torch.randn(1, 2, 37, 70)},
    }[restriction]
    if "mask" in options:
        hidden = torch.zeros(70, dtype=torch.bool)
        hidden[32:64] = hidden[5:9] = True  # a whole block too
        mask = options["mask"]
        options["mask"] = mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, -math.inf)
    definition = functools.partial(stock, **options)
    names, incoming = list(made), [torch.randn(1, 2, 37, dims[1])]
    measure, measure_grads = run(definition, made, names, incoming)
    exact, exact_grads = run(definition, {n: t.double() for n, t in made.items()}, names, [incoming[0].double()])
    tensors = {n: t.to(checked_device) for n, t in made.items()}
    if "mask" in options:
        options["mask"] = options["mask"].to(checked_device)
        for name in ("k", "v"):
            tensors[name][:, :, 5:7] = math.nan
    found, grads = run(functools.partial(ops.attention, algorithm="tiled", **options), tensors, names, incoming)
    for name, *triple in zip(("o", *names), found + grads, measure + measure_grads, exact + exact_grads, strict=True):
        assert_accurate(*triple, name, 8.0)  # as in tests/test_attention_matrix.py


@pytest.mark.parametrize("limit", [1, 3, 7])
def test_long_calls_take_several_dispatches(limit, device):
    """Cut after this many threadgroups of the forward kernel, results are the same bits."""
    if device.type == "cpu":
        pytest.skip("dispatches belong to the Metal kernels")
    tensors = {n: t.to(device) for n, t in qkv(2, 4, 2, 70, 70, 8).items()}
    function = functools.partial(ops.attention, is_causal=True, algorithm="tiled")
    (o,), grads = run(function, tensors, list(tensors))
    native = importlib.import_module("torch_metalk._C")
    before = native.limit_dispatches(limit * 2.0 * 32 * 70 * 16)
    try:
        (again,), grads_again = run(function, tensors, list(tensors))
    finally:
        native.limit_dispatches(before)
    assert all(torch.equal(a, b) for a, b in zip((o, *grads), (again, *grads_again), strict=True))


def test_blocks_of_rows_agree_with_one_block(device, monkeypatch):
    """The twin cuts long inputs into blocks of query rows; three rows at a time give what all of them give."""
    tensors = {n: t.to(device) for n, t in qkv(2, 4, 2, 10, 10, 8).items()}
    mask = additive_mask(2, 4, 10, 10).to(device)
    function = functools.partial(ops.attention, mask=mask, is_causal=True, softcap=3.0, sliding_window=5)
    expected = run(function, tensors, list(tensors))
    monkeypatch.setattr(sys.modules["torch_metalk.ops.attention"], "_BLOCK_SCORES", 3 * 2 * 4 * 10)
    results, grads = run(function, tensors, list(tensors))
    for a, b in zip([*results, *grads], [*expected[0], *expected[1]], strict=True):
        assert_rounding_only(a, b)


@pytest.mark.parametrize("order", [(0, 1, 3, 2), (3, 2, 1, 0), (0, 2, 1, 3)], ids=str)
def test_gradients_lie_as_their_tensors_do(order, device, attend):
    """Which is what the shape rule says, and a compiler counts on."""
    tensors = {
        n: t.permute(order).contiguous().permute(*torch.tensor(order).argsort()).to(device) for n, t in qkv().items()
    }
    _, grads = run(attend, tensors, list(tensors))
    for grad, t in zip(grads, tensors.values(), strict=True):
        assert grad.stride() == torch.empty_like(t).stride()


def test_heads_join_without_a_copy(device, attend):
    tensors = {n: t.to(device) for n, t in qkv().items()}
    for kwargs in ({}, {"softcap": 1.0}):
        o = attend(**tensors, **kwargs)
        assert o.transpose(1, 2).is_contiguous()


def test_scores_are_not_kept(device, attend):
    """2 MB of scores against 64 KB of q, k, v and o: what backward holds is counted where it is held."""
    tensors = {n: t.to(device).requires_grad_() for n, t in qkv(1, 2, 2, 512, 512, 8).items()}
    kept = {}

    def pack(t):
        kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    for kwargs in ({"is_causal": True}, {"is_causal": True, "softcap": 1.0}):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            o = attend(**tensors, **kwargs)
        assert sum(kept.values()) == 4 * (4 * 2 * 512 * 8 + 2 * 512)
        assert o.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, device):
    tensors = {n: t.to(device) for n, t in qkv().items()}
    with torch.autocast(device.type, dtype):
        o = ops.attention(**tensors, is_causal=True)
        mixed = ops.attention(tensors["q"], tensors["k"], tensors["v"].to(dtype), is_causal=True)
    expected = ops.attention(**{n: t.to(dtype) for n, t in tensors.items()}, is_causal=True)
    assert o.dtype == dtype
    assert torch.equal(o, expected)
    assert torch.equal(mixed, expected)


GOOD = {"q": torch.ones(2, 4, 5, 8), "k": torch.ones(2, 2, 6, 8), "v": torch.ones(2, 2, 6, 8)}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": torch.ones(4, 5, 8)}, ValueError, "'q' is a tensor of shape"),
        ({"k": torch.ones(2, 2, 6, 4)}, ValueError, "'k' is a tensor of shape"),
        ({"k": torch.ones(1, 2, 6, 8)}, ValueError, "'k'"),
        ({"v": torch.ones(2, 2, 5, 8)}, ValueError, "'v'"),
        ({"k": torch.ones(2, 3, 6, 8), "v": torch.ones(2, 3, 6, 8)}, ValueError, "'k' is of 3 heads"),
        ({"k": torch.ones(2, 0, 6, 8), "v": torch.ones(2, 0, 6, 8)}, ValueError, "'k' is of 0 heads"),
        ({"k": torch.ones(2, 2, 6, 8).half()}, TypeError, "'k' is of dtype torch.float16"),
        ({"q": torch.ones(2, 4, 5, 8).int()}, TypeError, "'q' is of dtype torch.int32"),
        ({"v": torch.ones(2, 2, 6, 8, device="meta")}, ValueError, "'v' is on meta"),
        ({"mask": torch.ones(2, 2, 5, 6, dtype=torch.bool)}, ValueError, "'mask' is a tensor of shape"),
        ({"mask": torch.ones(5, 5, dtype=torch.bool)}, ValueError, "'mask'"),
        ({"mask": torch.ones(2, 5, 6, dtype=torch.bool)}, ValueError, "'mask'"),
        ({"mask": torch.ones(5, 6, dtype=torch.int32)}, TypeError, "'mask' is of dtype torch.int32"),
        ({"mask": torch.ones(5, 6).requires_grad_()}, ValueError, "'mask' is a tensor that requires a gradient"),
        ({"mask": torch.ones(5, 6, device="meta")}, ValueError, "'mask' is on meta"),
        ({"sliding_window": 0}, ValueError, "'sliding_window' is 0"),
        ({"sliding_window": -3}, ValueError, "'sliding_window' is -3"),
        ({"sliding_window": 2.5}, TypeError, "'sliding_window' is 2.5"),
        ({"scale": "1"}, TypeError, "'scale' is '1'"),
        ({"softcap": 0.0}, ValueError, "'softcap' is 0.0"),
        ({"softcap": -1.0}, ValueError, "'softcap' is -1.0"),
        ({"softcap": 1e-50}, ValueError, "'softcap' is 1e-50"),
        ({"softcap": 1e39}, ValueError, "'softcap' is 1e"),
        ({"scale": float("nan")}, ValueError, "'scale' is nan"),
        ({"scale": 1e39}, ValueError, "'scale' is 1e"),
        ({"causal_alignment": "middle"}, ValueError, "'causal_alignment' is 'middle'"),
        ({"algorithm": "flash"}, ValueError, "'algorithm' is 'flash'"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=f"attention.*{message}"):
        ops.attention(**(GOOD | arguments))
