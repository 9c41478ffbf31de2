from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import DEVICES
from tests.operators import DTYPES, Case, OpTests, assert_accurate, on_device, run
from torch_metalk import ops

needs_mps = pytest.mark.skipif("mps" not in DEVICES, reason="the extension is built where there is an mps device")


def stock(a, b, transpose_a=False, transpose_b=False, bias=None):
    """torch's own, in the dtype that the operands promote to."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    dtype = dtype if bias is None else torch.promote_types(dtype, bias.dtype)
    a, b = a.to(dtype), b.to(dtype)
    y = torch.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b)
    return y if bias is None else y + bias


def make(a, b, bias=None):
    def tensors():
        made = {"a": torch.randn(a), "b": torch.randn(b)}
        return made if bias is None else made | {"bias": torch.randn(bias)}

    return tensors


def case(name, made, transpose_a=False, transpose_b=False, **options):
    ours, reference = (
        functools.partial(f, transpose_a=transpose_a, transpose_b=transpose_b) for f in (ops.matmul, stock)
    )
    return Case(name, made, ours, reference, saved=tuple(made()), **options)


class TestMatmul(OpTests):
    op = "matmul"
    cases = (
        case("nt, bias", make((2, 9, 40), (33, 40), 33), transpose_b=True),
        case("nn, batch", make((3, 8, 12), (3, 12, 36))),
        case("tn, broadcast", make((2, 1, 20, 8), (3, 20, 4)), transpose_a=True),
        case("tt, wide", make((12, 9), (36, 12)), transpose_a=True, transpose_b=True),
        # Few tiles and a long K: two chunks, the second of them shorter.
        case("split", make((2, 600), (600, 1), 1)),
        case("mixed dtypes", make((6, 24), (8, 24)), transpose_b=True, keep_dtype=("b",)),
    )

    @staticmethod
    def more_calls(device):
        # 512 columns and rows are enough for the larger tiles.
        for dtype in DTYPES:
            a = torch.ones(512, 512, device=device, dtype=dtype)
            yield functools.partial(run, ops.matmul, {"a": a, "b": a}, ["a", "b"])


@pytest.mark.parametrize("b", DTYPES, ids=str)
@pytest.mark.parametrize("a", DTYPES, ids=str)
def test_every_mix_of_dtypes(a, b, device):
    """The result has the dtype that both promote to, each gradient its operand's."""
    tensors = {n: t.to(device, dtype) for (n, t), dtype in zip(make((6, 24), (24, 8))().items(), (a, b), strict=True)}
    exact_tensors = {n: t.cpu().double() for n, t in tensors.items()}
    incoming = torch.randn(6, 8).to(torch.promote_types(a, b))
    (y,), grads = run(ops.matmul, tensors, ["a", "b"], [incoming])
    (exact,), exact_grads = run(stock, exact_tensors, ["a", "b"], [incoming])
    (plain,), plain_grads = run(stock, {n: t.cpu() for n, t in tensors.items()}, ["a", "b"], [incoming])
    assert_accurate(y, plain, exact, "y")
    for name, *triple in zip(("a", "b"), grads, plain_grads, exact_grads, strict=True):
        assert_accurate(*triple, name)
        assert triple[0].dtype == tensors[name].dtype


def within_rounding(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Sums in float32 of K products and one rounding: |error| <= K eps32 sum |a b| + eps |y|, with K + 1 roundings at
    half an eps each in the first term (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1)."""
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    exact = a @ b
    bound = (a.shape[-1] + 1) * 2**-24 * (a.abs() @ b.abs()) + torch.finfo(y.dtype).eps * exact.abs() + 1e-30
    if y.dtype == torch.float16:
        bound += 2**-25  # half the distance between its smallest numbers
    return bool(((y.cpu().double() - exact).abs() <= bound).all())


sizes = st.integers(0, 200)
#: How an operand lies in memory: the order of its dimensions, what lies before it, and gaps between lines or elements.
layouts = st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from([0, 1, 3, 4]), st.sampled_from([1, 1, 1, 2]))


def laid_out(t: torch.Tensor, layout) -> torch.Tensor:
    transposed, offset, gap, step = layout
    rows, columns = t.shape[::-1] if transposed else t.shape
    line = columns * step + gap
    # NaN stands wherever the operand does not: what reads it shows.
    memory = t.new_full((offset + rows * line + 4,), math.nan)
    view = memory.as_strided((rows, columns), (line, step), offset)
    view = view.mT if transposed else view
    view.copy_(t)
    return view


def random_products(mode: str, examples: int):
    # The other mixes, of the two half precisions, are those of float32 after a copy.
    mixes = st.sampled_from([(a, b) for a in DTYPES for b in DTYPES if a == b or torch.float32 in (a, b)])

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(m=sizes, n=sizes, k=sizes, mix=mixes, a_layout=layouts, b_layout=layouts, seed=st.integers(0, 2**31))
    def check(m, n, k, mix, a_layout, b_layout, seed):
        generator = torch.Generator().manual_seed(seed)
        a = torch.randn(m, k, generator=generator).to(mode, mix[0])
        b = torch.randn(k, n, generator=generator).to(mode, mix[1])
        y = ops.matmul(laid_out(a, a_layout), laid_out(b, b_layout))
        assert y.shape == (m, n) and y.is_contiguous()
        assert within_rounding(y, a, b)

    return check


def test_random_products(device):
    random_products(device.type, 40)()


def test_random_products_in_checked_mode(checked_device):
    random_products(checked_device.type, 15)()


@pytest.mark.parametrize("transposes", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("rank", [1, 7, 8, 64])
def test_odd_sizes_have_exact_tails(rank, transposes, device):
    """K = 5633 in eight chunks, N = 33, and a few rows; NaN behind each operand's end."""
    for m, n, k in ((rank, 33, 61), (9, rank, 5633), (1, 33, rank)):
        a, b = torch.randn(m, k, device=device), torch.randn(k, n, device=device)
        y = ops.matmul(*(laid_out(t, (transpose, 1, 0, 1)) for t, transpose in zip((a, b), transposes, strict=True)))
        assert within_rounding(y, a, b)


@pytest.fixture
def large_chip() -> Iterator[None]:
    """The plans of a Max or Ultra chip, which takes the larger tiles for nt as well."""
    if "mps" not in DEVICES:
        yield
        return
    native = importlib.import_module("torch_metalk._C")
    before = native.set_large_chip(True)
    yield
    native.set_large_chip(before)


def check_large_tiles(device, transpose_a, transpose_b, dtype):
    """128 matrices are 128 of the larger tiles, however small: each of them ragged, with three steps along K."""
    a, b = torch.randn(128, 50, 43, device=device).to(dtype), torch.randn(128, 43, 36, device=device).to(dtype)
    # Once with lines that are aligned, and once with those that are not.
    for left, right in ((a, b), (a[:, :48, :40].contiguous(), b[:, :40].contiguous())):
        given = (t.mT.contiguous() if transpose else t for t, transpose in ((left, transpose_a), (right, transpose_b)))
        assert within_rounding(ops.matmul(*given, transpose_a, transpose_b), left, right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("transpose_a", "transpose_b"), list(itertools.product([False, True], repeat=2)))
def test_large_tiles(transpose_a, transpose_b, dtype, large_chip, device):
    check_large_tiles(device, transpose_a, transpose_b, dtype)


def test_large_tiles_in_checked_mode(large_chip, checked_device):
    check_large_tiles(checked_device, False, True, torch.float16)


@needs_mps
def test_many_small_matrices_take_large_tiles():
    assert plan(50, 36, 43, 128, nt=True, large_chip=True)[0] == 64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batches_of_any_strides(dtype, device):
    """Five batch dimensions that no two of which lie alike, some of them broadcast."""
    a = torch.randn(2, 3, 2, 3, 2, 5, 6, device=device).to(dtype).permute(4, 2, 0, 3, 1, 5, 6)
    b = torch.randn(3, 1, 2, 1, 2, 6, 4, device=device).to(dtype).transpose(0, 4)
    for left, right in ((a, b), (a, b[0, 0, 0, 0, 0]), (a[:, 0, 0, 0, 0], b[0, 0, 0, 0, :1])):
        expected = stock(left.cpu().double(), right.cpu().double())
        y = ops.matmul(left, right)
        assert y.shape == expected.shape
        # 4: sums of six numbers can be exact in stock's order.
        assert_accurate(y, stock(left.cpu(), right.cpu()), expected, "y", 4.0)


@pytest.mark.parametrize(
    ("a", "b"), [((7,), (7,)), ((7,), (7, 3)), ((4, 7), (7,)), ((2, 4, 7), (7,)), ((7,), (2, 7, 3))]
)
def test_vectors(a, b, device):
    tensors = {"a": torch.randn(a, device=device), "b": torch.randn(b, device=device)}
    (y,), grads = run(ops.matmul, tensors, ["a", "b"])
    exact_tensors = {n: t.cpu().double() for n, t in tensors.items()}
    (exact,), exact_grads = run(
        torch.matmul, {"input": exact_tensors["a"], "other": exact_tensors["b"]}, ["input", "other"]
    )
    assert y.shape == exact.shape
    for ours, reference in zip((y, *grads), (exact, *exact_grads), strict=True):
        torch.testing.assert_close(ours.cpu().double(), reference, rtol=1e-5, atol=1e-5)  # sums of 7 in float32


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
@pytest.mark.parametrize("batch", [(), (2,), (0,)], ids=str)
def test_zero_sizes(m, n, k, batch, device):
    tensors = {
        "a": torch.randn(*batch, m, k, device=device),
        "b": torch.randn(k, n, device=device),
        "bias": torch.randn(n, device=device),
    }
    (y,), grads = run(ops.matmul, tensors, list(tensors))
    assert torch.equal(y, tensors["bias"].expand(*batch, m, n))
    assert [g.shape for g in grads] == [t.shape for t in tensors.values()]
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads[:2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_are_float32(dtype, device):
    """4,096 products of 1 and one of 0.25: half precision would stop counting at 2,048 or 256."""
    a, b = torch.ones(1, 4097, device=device, dtype=dtype), torch.ones(4097, 1, device=device, dtype=dtype)
    a[0, -1] = 0.25
    y = ops.matmul(a.float(), b)
    assert y.item() == 4096.25
    assert ops.matmul(a, b).item() == torch.tensor(4096.25).to(dtype).item()


def test_not_a_number_stays_in_its_row(device):
    """The tails that a tile is filled up with are zeros, and no neighbour's NaN times zero."""
    a, b = torch.randn(40, 50, device=device), torch.randn(50, 45, device=device)
    a[3], b[:, 4] = math.nan, math.inf
    y = ops.matmul(a, b).cpu()
    clean = torch.ones(40, 45, dtype=torch.bool)
    clean[3], clean[:, 4] = False, False
    assert y[clean].isfinite().all() and not y[~clean].isfinite().any()


def test_more_rows_than_16_bits_count(device):
    """A convolution's input as a product of 720,907 rows: nothing is indexed with 16 bits."""
    x = torch.randn(65537, 11, 8, device=device)
    w = torch.randn(16, 8, device=device)
    y = ops.matmul(x, w, transpose_b=True)
    rows = torch.randint(0, 65537, (64,), generator=torch.Generator().manual_seed(2))
    rows[:2] = torch.tensor([65535, 65536])
    assert within_rounding(y[rows].flatten(0, 1), x[rows].flatten(0, 1), w.mT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype, device):
    a, b = torch.randn(4, 6, device=device, requires_grad=True), torch.randn(6, 5, device=device)
    with torch.autocast(device.type, dtype):
        y = ops.matmul(a, b)
    assert y.dtype == dtype
    (grad,) = torch.autograd.grad(y.float().sum(), a)
    assert grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"b": torch.ones(5, 3)}, ValueError, r"'b' is a tensor of shape \(5, 3\); accepted: \[..., 6, N\]"),
        ({"transpose_a": True}, ValueError, r"'b' is a tensor of shape \(6, 3\); accepted: \[..., 4, N\]"),
        ({"transpose_b": True}, ValueError, r"'b' is a tensor of shape \(6, 3\); accepted: \[..., N, 6\]"),
        ({"a": torch.ones(2, 4, 6), "b": torch.ones(3, 6, 3)}, ValueError, "'b'.*batch dimensions"),
        ({"a": torch.tensor(1.0)}, ValueError, "'a'.*at least one dimension"),
        ({"b": torch.tensor(1.0)}, ValueError, "'b'.*at least one dimension"),
        ({"a": torch.ones(6), "transpose_a": True}, ValueError, "'transpose_a' is True for a vector"),
        ({"bias": torch.ones(4)}, ValueError, r"'bias' is a tensor of shape \(4,\)"),
        ({"bias": torch.ones(1, 3)}, ValueError, "'bias'"),
        ({"b": torch.ones(6, 3, device="meta")}, ValueError, "'b' is on meta"),
        ({"a": torch.ones(4, 6, dtype=torch.int32)}, TypeError, "'a' is of dtype torch.int32"),
        ({"b": torch.ones(6, 3, dtype=torch.complex64)}, TypeError, "'b' is of dtype torch.complex64"),
        ({"b": torch.eye(6).to_sparse()}, TypeError, "'b' is of layout torch.sparse_coo"),
        ({"b": [1.0]}, TypeError, "'b' is a list"),
    ],
)
def test_bad_input(change, error, message, device):
    arguments = on_device({"a": torch.ones(4, 6), "b": torch.ones(6, 3)} | change, device)
    with pytest.raises(error, match=f"matmul.*{message}"):
        ops.matmul(**arguments)


# ---- tiles, chunks and dispatches


def plan(m, n, k, matrices=1, nt=False, large_chip=False):
    return importlib.import_module("torch_metalk._C").plan_gemm(m, n, k, matrices, nt, large_chip)


@needs_mps
@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        # side, chunks, span. LoRA's projections are one column of tiles: split.
        ((512, 32, 5632), {}, (32, 8, 704)),
        ((512, 32, 2048), {}, (32, 8, 256)),
        ((512, 32, 2048), {"nt": True}, (32, 8, 256)),
        ((512, 8, 576), {}, (32, 2, 288)),
        ((32, 32, 511), {}, (32, 1, 512)),  # too short for two
        ((32, 32, 5633), {}, (32, 8, 736)),  # a shorter last chunk
        ((32, 32, 65536), {}, (32, 8, 8192)),
        # 32 tiles occupy 16 cores twice; a chip of 32 cores wants 64.
        ((1024, 32, 2048), {}, (32, 1, 2048)),
        ((1024, 32, 2048), {"large_chip": True}, (32, 8, 256)),
        # Large tiles where there are enough of them, and not for nt on small chips.
        ((512, 512, 512), {}, (64, 1, 512)),
        ((512, 512, 512), {"nt": True}, (32, 1, 512)),
        ((512, 511, 512), {"matrices": 3}, (64, 1, 512)),
        ((448, 512, 512), {}, (32, 1, 512)),
        ((2048, 2048, 2048), {"large_chip": True, "nt": True}, (64, 1, 2048)),
        # No K, and so long a one that one chunk of one tile would take too long.
        ((5, 5, 0), {}, (32, 1, 32)),
        ((2048, 2048, 2**25), {}, (64, 8, 2**22)),
        ((32, 32, 2**31 - 1), {}, (32, 512, 4194304)),
    ],
)
def test_plan(shape, options, expected):
    side, chunks, span = plan(*shape, **options)
    assert (side, chunks, span) == expected
    assert (chunks - 1) * span < max(shape[2], 1) <= chunks * span, "no chunk is empty, and all of K is in one"


@needs_mps
@pytest.mark.parametrize(
    "shape",
    [
        (2048, 2048, 2048, 1),
        (32768, 32768, 4096, 1),  # rows of tiles are cut
        (64, 2**31 - 1, 4096, 1),  # a row of tiles alone is too long
        (2048, 2048, 2048, 64),  # matrices are cut
        (32, 32, 2**31 - 1, 3),  # and chunks
        (0, 5, 5, 1),
    ],
    ids=str,
)
def test_no_dispatch_is_long(shape):
    """At most 100 GFLOP in one dispatch, and together they are the product, each tile once."""
    m, n, k, matrices = shape
    side, chunks, span = plan(m, n, k, matrices)
    parts = importlib.import_module("torch_metalk._C").gemm_dispatches((side, chunks, span), m, n, matrices)
    for _, count in parts:
        assert math.prod(count) * 2 * side * side * span <= 100e9
        assert max(count) < 2**32
    grid = (-(-n // side), -(-m // side), matrices * chunks)
    assert sum(math.prod(count) for _, count in parts) == math.prod(grid)
    for (first, count), (following, _) in itertools.pairwise(parts):
        assert all(f + c <= g for f, c, g in zip(first, count, grid, strict=True))
        assert following[::-1] > first[::-1], "in order, so that none comes twice"


@needs_mps
@pytest.mark.parametrize("limit", [1, 5, 9, 40])
def test_several_dispatches_are_one_product(limit):
    """With a low limit a small product takes many: of single tiles, parts of rows of tiles, rows, and matrices."""
    a, b = torch.randn(3, 130, 70, device="mps"), torch.randn(3, 70, 90, device="mps")
    thin, wide = torch.randn(40, 1100, device="mps"), torch.randn(1100, 33, device="mps")
    expected = ops.matmul(a, b), ops.matmul(thin, wide)
    native = importlib.import_module("torch_metalk._C")
    tile_flops = 2 * 32 * 32 * plan(130, 90, 70, 3)[2]
    before = native.limit_dispatches(limit * tile_flops)
    try:
        results = ops.matmul(a, b), ops.matmul(thin, wide)
    finally:
        native.limit_dispatches(before)
    assert all(torch.equal(ours, whole) for ours, whole in zip(results, expected, strict=True))
