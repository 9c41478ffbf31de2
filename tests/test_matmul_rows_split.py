from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from pathlib import Path

import pytest
import torch

from tests.conftest import DEVICES, WITH_DEVICE
from tests.operators import DTYPES, HALF, Case, OpTests, assert_accurate, on_device, run
from tests.test_matmul import laid_out, make, within_rounding
from tests.test_matmul import stock as stock_product
from torch_metalk import ops
from torch_metalk.ops._cpu_share import balanced_share, split_rows

OP = torch.ops.torch_metalk.matmul_rows_split
needs_mps = pytest.mark.skipif("mps" not in DEVICES, reason="products are split where there is an mps device")


def stock(a, b, transpose_b=False, bias=None):
    return stock_product(a, b, transpose_b=transpose_b, bias=bias)


def case(name, made, cpu_share, transpose_b=False, **options):
    ours = functools.partial(ops.matmul_rows_split, transpose_b=transpose_b, cpu_share=cpu_share)
    reference = functools.partial(stock, transpose_b=transpose_b)
    return Case(name, made, ours, reference, **{"saved": tuple(made())} | options)


class TestMatmulRowsSplit(OpTests):
    op = "matmul_rows_split"
    cases = (
        # 32 of 50 rows on the CPU, of either half of the batch some; and of 40 rows.
        case("nt, bias, batch", make((2, 25, 24), (12, 24), 12), 0.5, transpose_b=True),
        case("nn", make((40, 9), (9, 33)), 0.7),
        case("frozen weight", make((40, 12), (20, 12), 20), 0.7, True, constant=("b", "bias"), saved=("b", "bias")),
        case("mixed dtypes", make((40, 24), (8, 24)), 0.7, transpose_b=True, keep_dtype=("b",)),
        case("all on the CPU", make((3, 7, 20), (20, 5), 5), 1),
        case("all on the GPU", make((37, 20), (20, 5), 5), 0.0),
    )


@contextlib.contextmanager
def private_buffers():
    """As on a device whose buffers the CPU cannot see: its rows are copied to and fro."""
    native = importlib.import_module("torch_metalk._C")
    before = native.share_buffers(False)
    try:
        yield
    finally:
        native.share_buffers(before)


def deferred():
    """Work runs when it is submitted, and not before, where the device can do that."""
    return importlib.import_module("virtual_mps").mode(deferred=True) if WITH_DEVICE else contextlib.nullcontext()


@pytest.fixture(params=["shared", "private"])
def mps(request):
    """An mps device with buffers that the CPU sees, and with such that it does not see."""
    if "mps" not in DEVICES:
        pytest.skip("products are split where there is an mps device")
    with private_buffers() if request.param == "private" else contextlib.nullcontext():
        yield torch.device("mps")


def operands(m, n, k, dtype=torch.float32, device="mps"):
    return torch.randn(m, k).to(device, dtype), torch.randn(k, n).to(device, dtype)


@pytest.mark.parametrize("cpu_rows", [0, 1, 32, 64, 96, 97])
@pytest.mark.parametrize("transpose_b", [False, True], ids=["nn", "nt"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_rows(dtype, transpose_b, cpu_rows, mps):
    """Odd sizes, gaps and an offset, NaN wherever the operands are not."""
    a, b = operands(97, 33, 61, dtype)
    for layout in ((False, 0, 0, 1), (False, 3, 5, 1), (True, 1, 0, 1), (False, 2, 1, 2)):
        left, right = laid_out(a, layout), laid_out(b.mT if transpose_b else b, layout)
        y = OP(left, right, transpose_b, None, None, None, cpu_rows, 0)
        assert y.dtype == dtype and y.is_contiguous()
        assert within_rounding(y, a, b)


@pytest.mark.parametrize("a", DTYPES, ids=str)
@pytest.mark.parametrize("b", DTYPES, ids=str)
def test_every_mix_of_dtypes(a, b, mps):
    """With a bias, and gradients that are split too."""
    dtypes = {"a": a, "b": b, "bias": b}
    tensors = {n: t.to(mps, dtypes[n]) for n, t in make((2, 40, 24), (24, 8), 8)().items()}
    ours = functools.partial(ops.matmul_rows_split, cpu_share=0.5)
    incoming = [torch.randn(2, 40, 8).to(torch.promote_types(a, b))]
    names = list(tensors)
    (y,), grads = run(ours, tensors, names, incoming)
    (plain,), plain_grads = run(stock, {n: t.cpu() for n, t in tensors.items()}, names, incoming)
    (exact,), exact_grads = run(stock, {n: t.cpu().double() for n, t in tensors.items()}, names, incoming)
    for name, *triple in zip(("y", *names), (y, *grads), (plain, *plain_grads), (exact, *exact_grads), strict=True):
        assert_accurate(*triple, name)


@pytest.mark.parametrize("shape", [(0, 3, 4), (40, 0, 4), (40, 3, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_zero_sizes(shape, share, device):
    m, n, k = shape
    tensors = {"a": torch.randn(2, m, k), "b": torch.randn(n, k), "bias": torch.randn(n)}
    tensors = {name: t.to(device) for name, t in tensors.items()}
    ours = functools.partial(ops.matmul_rows_split, transpose_b=True, cpu_share=share)
    (y,), grads = run(ours, tensors, list(tensors))
    assert torch.equal(y, tensors["bias"].expand(2, m, n))
    assert [g.shape for g in grads] == [t.shape for t in tensors.values()]
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads[:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_between_operators_of_the_gpu(dtype, mps):
    """Its operands are the results of work that nobody has waited for, and its result is read by more of it."""
    a, b = operands(70, 40, 50, dtype)
    with deferred():
        for share in (0.5, 1):
            a_, b_ = ops.swiglu(a, a), ops.swiglu(b, b)
            bias = ops.rms_norm(b_[0])
            y = ops.matmul_rows_split(a_, b_, bias=bias, cpu_share=share)
            after = ops.rms_norm(y)
            # 4: the sums of a norm's row in another order.
            exact = stock(*(t.cpu().double() for t in (a_, b_)), bias=bias.cpu().double())
            assert_accurate(y, stock(*(t.cpu() for t in (a_, b_)), bias=bias.cpu()), exact, "y", 4)
            assert torch.equal(after, ops.rms_norm(y.clone()))


def test_runs_are_bit_identical(mps):
    a, b = operands(150, 70, 90, torch.float16)
    expected = ops.matmul_rows_split(a, b, cpu_share=0.4)
    assert all(torch.equal(ops.matmul_rows_split(a, b, cpu_share=0.4), expected) for _ in range(9))


def test_two_threads(mps):
    a, b = operands(70, 40, 50, torch.float16)
    expected = ops.rms_norm(ops.matmul_rows_split(ops.swiglu(a, a), b, cpu_share=0.5)).cpu()
    wrong = []

    def work():
        for _ in range(100):
            y = ops.rms_norm(ops.matmul_rows_split(ops.swiglu(a, a), b, cpu_share=0.5)).cpu()
            if not torch.equal(y, expected):
                wrong.append(y)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_checked_mode_of_private_buffers(checked_device):
    with private_buffers():
        test_any_number_of_rows(torch.float16, True, 64, checked_device)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_twins_are_what_the_cpu_reads(dtype, mps):
    """Twins of other values show in the CPU's rows, and in no others."""
    a, b = operands(40, 20, 24, dtype)
    a.requires_grad_()
    zero_a, zero_b = torch.zeros(40, 24, device=mps), torch.zeros(24, 20)
    call = functools.partial(ops.matmul_rows_split, a, b, cpu_share=0.7)
    whole = call()
    for y in (call(a_float32=zero_a), call(b_float32=zero_b)):
        assert torch.equal(y[:8], whole[:8]) and not y[8:].any()
    dy = torch.randn(40, 20, device=mps).to(dtype)
    (expected,) = torch.autograd.grad(whole, a, dy)
    (da,) = torch.autograd.grad(y, a, dy)
    assert torch.equal(da[:8], expected[:8]) and not da[8:].any() and expected[8:].any()
    assert torch.equal(call(a_float32=a.detach().float(), b_float32=b.cpu().float()), whole)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast(dtype, device):
    """In the autocast dtype, of which float32 twins of float32 tensors are none; sums stay float32."""
    a, b = torch.randn(40, 600, device=device, requires_grad=True), torch.randn(600, 5, device=device)
    twins = {"a_float32": a.detach(), "b_float32": b.cpu()}
    with torch.autocast(device.type, dtype):
        y = ops.matmul_rows_split(a, b, cpu_share=0.7, **twins)
    assert y.dtype == dtype
    assert within_rounding(y, a.to(dtype), b.to(dtype))
    (grad,) = torch.autograd.grad(y.float().sum(), a)
    assert grad.dtype == torch.float32


@needs_mps
def test_the_cpus_autocast_is_not_that_of_the_operands():
    a, b = operands(40, 600, 5)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.matmul_rows_split(a, b, cpu_share=0.7, b_float32=b.cpu())
    assert y.dtype == torch.float32 and within_rounding(y, a, b)


@needs_mps
def test_only_the_gpus_rows_are_dispatched(counted_device):
    import virtual_mps

    a, b = operands(128, 64, 64)
    with virtual_mps.count() as counted:
        ops.matmul_rows_split(a, b, cpu_share=0.75)
    assert counted.total.matrix_flops == 2 * 32 * 64 * 64
    with virtual_mps.count() as counted:
        ops.matmul_rows_split(a, b, cpu_share=1)
    assert counted.total.dispatches == 0


@pytest.mark.parametrize("share", ["auto", 0.5])
def test_compiles_for_any_number_of_rows(share, device):
    ours = functools.partial(ops.matmul_rows_split, cpu_share=share)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    b = torch.randn(24, 12, device=device)
    for rows in (50, 70, 90):
        a = torch.randn(rows, 24, device=device)
        assert torch.equal(compiled(a, b), ours(a, b))


def test_no_other_operator_commits():
    callers = [p.name for p in Path(__file__).parent.parent.glob("csrc/*.mm") if " commit(" in p.read_text()]
    assert sorted(callers) == ["matmul_rows_split.mm", "metal.mm"]


TWIN = torch.ones(4, 6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"b": torch.ones(5, 3)}, ValueError, r"'b' is a tensor of shape \(5, 3\); accepted: \[..., 6, N\]"),
        ({"b": torch.ones(2, 6, 3)}, ValueError, r"'b' is a tensor of shape \(2, 6, 3\); accepted: two dimensions"),
        ({"a": torch.ones(6)}, ValueError, "'a'.*at least two dimensions"),
        ({"a": torch.ones(4, 6, dtype=torch.int32)}, TypeError, "'a' is of dtype torch.int32"),
        ({"a": None}, TypeError, "'a' is a NoneType"),
        ({"b": torch.ones(6, 3, device="meta")}, ValueError, "'b' is on meta"),
        ({"bias": torch.ones(4)}, ValueError, r"'bias' is a tensor of shape \(4,\)"),
        ({"cpu_share": 1.01}, ValueError, "'cpu_share' is 1.01; accepted: a number from 0 to 1, or 'auto'"),
        ({"cpu_share": -0.1}, ValueError, "'cpu_share' is -0.1"),
        ({"cpu_share": float("nan")}, ValueError, "'cpu_share' is nan"),
        ({"cpu_share": "all"}, ValueError, "'cpu_share' is 'all'"),
        ({"cpu_share": None}, TypeError, "'cpu_share' is None"),
        ({"cpu_share": True}, TypeError, "'cpu_share' is True"),
        ({"a_float32": torch.ones(6, 4)}, ValueError, r"'a_float32' is a tensor of shape \(6, 4\); .* \(4, 6\)"),
        ({"a_float32": TWIN.half()}, TypeError, "'a_float32' is of dtype torch.float16; accepted: torch.float32"),
        ({"a_float32": TWIN.to("meta")}, ValueError, "'a_float32' is on meta"),
        ({"a_float32": TWIN.to_sparse()}, TypeError, "'a_float32' is of layout torch.sparse_coo"),
        ({"a_float32": TWIN.clone().requires_grad_()}, ValueError, "'a_float32' is a tensor that requires a gradient"),
    ],
)
def test_bad_input(change, error, message, device):
    arguments = on_device({"a": torch.ones(4, 6), "b": torch.ones(6, 3)} | change, device)
    with pytest.raises(error, match=f"matmul_rows_split.*{message}"):
        ops.matmul_rows_split(**arguments)


@pytest.mark.parametrize(
    ("twin", "error", "message"),
    [
        (torch.ones(3, 6), ValueError, r"a tensor of shape \(3, 6\); accepted: the shape of its original, \(6, 3\)"),
        (torch.ones(6, 3).half(), TypeError, "of dtype torch.float16; accepted: torch.float32"),
        (torch.ones(6, 3, device="meta"), ValueError, "on meta; accepted: cpu"),
        (torch.ones(6, 3, requires_grad=True), ValueError, "a tensor that requires a gradient; accepted: constants"),
    ],
    ids=["shape", "dtype", "device", "gradient"],
)
def test_bad_twin_of_the_weight(twin, error, message, device):
    with pytest.raises(error, match=message):
        ops.matmul_rows_split(torch.ones(4, 6, device=device), torch.ones(6, 3, device=device), b_float32=twin)


@pytest.mark.parametrize("rows", [-1, 41])
def test_bad_number_of_rows(rows, device):
    a, b = torch.ones(40, 6, device=device), torch.ones(6, 3, device=device)
    with pytest.raises(ValueError, match=f"'cpu_rows' is {rows}; accepted: 0 to 40, the rows there are"):
        OP(a, b, False, None, None, None, rows, 0)
    with pytest.raises(ValueError, match=f"'backward_cpu_rows' is {rows}"):
        OP(a, b, False, None, None, None, 0, rows)


# ---- shares


def test_balanced_share():
    """KRNL's numbers: 4.3 and 4.46 ms of other work, and none inside of one operator."""
    assert round(balanced_share(6.73, 4.0, 4.3), 2) == 0.77
    assert round(balanced_share(9.70, 3.5, 4.46), 2) == 0.60
    assert round(balanced_share(6.73, 4.0), 2) == 0.37
    assert balanced_share(1.0, 1.0, 5.0) == 1.0
    t_cpu, t_gpu, other = 7.0, 3.0, 1.5
    p = balanced_share(t_cpu, t_gpu, other)
    assert p * t_cpu == pytest.approx(other + (1 - p) * t_gpu), "both finish together"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "'t_cpu' is 0; accepted: a finite number above 0"),
        ((1, -1), "'t_gpu' is -1"),
        ((1, float("nan")), "'t_gpu' is nan"),
        ((1, 1, -0.5), "'other' is -0.5; accepted: a finite number that is not negative"),
        ((float("inf"), 1), "'t_cpu' is inf"),
    ],
)
def test_bad_times(arguments, message):
    with pytest.raises(ValueError, match=message):
        balanced_share(*arguments)


@pytest.mark.parametrize(
    ("rows", "share", "expected"),
    [
        (512, 0.37, 192),
        (512, 0.77, 384),
        (512, 0.60, 320),
        (512, 0, 0),
        (512, 1, 512),
        (500, 1, 500),
        (500, 0.995, 500),  # the nearest number of tiles is more than there are
        (40, 0.7, 32),
        (31, 0.4, 0),
        (0, 0.5, 0),
    ],
)
def test_rows_are_whole_tiles(rows, share, expected):
    assert split_rows(rows, share) == expected
