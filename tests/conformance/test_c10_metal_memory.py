"""PyTorch's headers for Metal that move memory: atomics, reductions, indexing of strided tensors, error messages."""

import functools

import pytest
import torch

THREADS = 1000

# Metal's names, and whether the device adds to them atomically.
ATOMICS = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat": torch.bfloat16,
    "int": torch.int32,
    "short": torch.int16,
    "char": torch.int8,
    "uchar": torch.uint8,
    "long": torch.int64,
    "float2": torch.complex64,
    "half2": torch.complex32,
}


@functools.cache
def _atomics(mode: str):
    return torch.mps.compile_shader(
        "#include <c10/metal/atomic.h>\nusing namespace c10::metal;\n"
        + "".join(
            f"""
kernel void add_{t}(device AtomicType_t<{t}>* out, constant {t}* x, constant long* where,
                    uint i [[thread_position_in_grid]]) {{
  AtomicType<{t}>::atomic_add(out, where[i], x[i]);
}}"""
            for t in ATOMICS
        )
        + """
static float larger(float a, float b) { return a > b ? a : b; }
static half larger_half(half a, half b) { return a > b ? a : b; }
kernel void max_float(device AtomicType_t<float>* out, constant float* x, constant long* where,
                      uint i [[thread_position_in_grid]]) {
  AtomicType<float>::atomic_binary_op(out, where[i], x[i], larger);
}
kernel void max_half(device AtomicType_t<half>* out, constant half* x, constant long* where,
                     uint i [[thread_position_in_grid]]) {
  AtomicType<half>::atomic_binary_op(out, where[i], x[i], larger_half);
}
"""
    )


def _bins() -> torch.Tensor:
    return torch.arange(THREADS) * 7 % 12


@pytest.mark.parametrize("name", ATOMICS)
def test_atomic_add(name, mode):
    """Small integers, of which every partial sum is exact."""
    dtype = ATOMICS[name]
    x = torch.randint(0, 2, (THREADS,)).to(torch.complex64 if dtype is torch.complex32 else dtype)
    expected = torch.zeros(12, dtype=x.dtype).index_add_(0, _bins(), x)
    out = torch.zeros(12, dtype=dtype, device="mps")
    getattr(_atomics(mode), f"add_{name}")(out, x.to(dtype).to("mps"), _bins().to("mps"), threads=THREADS)
    assert out.cpu().to(x.dtype).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["float", "half"])
def test_atomic_binary_op(name, mode):
    x = torch.randn(THREADS).to(ATOMICS[name])
    expected = torch.zeros(12, dtype=x.dtype).index_reduce_(0, _bins(), x, "amax")
    out = torch.zeros(12, dtype=x.dtype, device="mps")
    getattr(_atomics(mode), f"max_{name}")(out, x.to("mps"), _bins().to("mps"), threads=THREADS)
    assert out.tolist() == expected.tolist()


REDUCTIONS = {
    "sum": (lambda x: x.sum(), "threadgroup_sum(shared, x[i], i, n)"),
    "prod": (lambda x: x.prod(), "threadgroup_prod(shared, x[i], i, n)"),
    "max": (lambda x: x.max(), "threadgroup_max(shared, x[i], i, n)"),
    "min": (lambda x: x.min(), "threadgroup_min(shared, x[i], i, n)"),
    "argmax": (lambda x: x.argmax(), "float(threadgroup_argmax(shared, indices, x[i], i, i, n))"),
    "argmin": (lambda x: x.argmin(), "float(threadgroup_argmin(shared, indices, x[i], i, i, n))"),
}
SIZES = (1, 2, 31, 32, 33, 64, 100, 255, 512, 1000, 1024)


@functools.cache
def _reductions(mode: str):
    return torch.mps.compile_shader(
        "#include <c10/metal/reduction_utils.h>\nusing namespace c10::metal;\n"
        + "".join(
            f"""
kernel void run_{name}(device float* out, constant float* x, constant uint& n,
                       uint i [[thread_position_in_threadgroup]]) {{
  threadgroup float shared[32];
  threadgroup uint indices[32];
  if (i < 32) {{
    shared[i] = 0;
    indices[i] = 0;
  }}
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  out[i] = {expression};
}}"""
            for name, (_, expression) in REDUCTIONS.items()
        )
        + """
kernel void simd_long(device long* sums, device long* largest, device long* smallest, constant long* x,
                      uint i [[thread_position_in_grid]]) {
  sums[i] = c10::metal::simd_sum(x[i]);
  largest[i] = c10::metal::simd_max(x[i]);
  smallest[i] = c10::metal::simd_min(x[i]);
}
kernel void welford(device float3* out, constant float* x, constant uint& n,
                    uint i [[thread_position_in_threadgroup]]) {
  threadgroup float shared[1024];
  shared[i] = x[i];
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  float3 result = threadgroup_welford_reduce(shared, n);
  if (i == 0) out[0] = result;
}
"""
    )


@pytest.mark.parametrize("name", REDUCTIONS)
def test_threadgroup_reduction(name, mode):
    reference, _ = REDUCTIONS[name]
    for n in SIZES:
        x = torch.randn(n)
        x = x.sign() * (1 + x.abs() / 100) if name == "prod" else x
        out = torch.full((n,), torch.nan, device="mps")
        kernel = getattr(_reductions(mode), f"run_{name}")
        kernel(out, x.to("mps"), torch.tensor([n], dtype=torch.int32, device="mps"), threads=n, group_size=n)
        # A product of 1,024 factors has as many roundings.
        expected = reference(x.double()).float().expand(n)
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-4 if name == "prod" else 1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["max", "min"])
def test_nan_wins(name, mode):
    x = torch.randn(1000)
    x[70] = torch.nan
    out = torch.zeros(1000, device="mps")
    size = torch.tensor([1000], dtype=torch.int32, device="mps")
    getattr(_reductions(mode), f"run_{name}")(out, x.to("mps"), size, threads=1000, group_size=1000)
    assert out.isnan().all()


def test_simd_reductions_of_64_bits(mode: str):
    x = torch.randint(-(2**62), 2**62, (64,)) // 64
    out = torch.zeros(3, 64, dtype=torch.int64, device="mps")
    _reductions(mode).simd_long(*out, x.to("mps"), threads=64, group_size=64)
    rows = x.view(2, 32)
    for found, expected in zip(out.cpu(), (rows.sum(1), rows.amax(1), rows.amin(1)), strict=True):
        assert found.tolist() == expected.repeat_interleave(32).tolist()


@pytest.mark.parametrize("n", [1, 5, 32, 100, 1024])
def test_welford(n, mode):
    x = torch.randn(n) + 100
    out = torch.zeros(4, device="mps")
    size = torch.tensor([n], dtype=torch.int32, device="mps")
    _reductions(mode).welford(out, x.to("mps"), size, threads=n, group_size=n)
    mean, m2, count = out[:3].tolist()
    x = x.double()
    assert count == n
    assert mean == pytest.approx(x.mean().item(), rel=1e-6)
    assert m2 == pytest.approx((x - x.mean()).square().sum().item(), rel=1e-3, abs=1e-4)


@functools.cache
def _indexing(mode: str):
    return torch.mps.compile_shader("""
#include <c10/metal/indexing.h>
using namespace c10::metal;
struct halve_functor {
  template <typename T>
  inline T operator()(const T x) { return x / T(2); }
};
struct minus_functor {
  template <typename T>
  inline T operator()(const T a, const T b) { return a - b; }
};
REGISTER_UNARY_OP(halve, float, float);
REGISTER_UNARY_OP(halve, half, half);
REGISTER_UNARY_OP(halve, int, int);
REGISTER_BINARY_OP(minus, float, float);
REGISTER_BINARY_OP(minus, int, int);
""")


UNARY = {"float": torch.float32, "half": torch.float16, "int": torch.int32}


def _integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="mps")


def _longs(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="mps")


@pytest.mark.parametrize("name", UNARY)
def test_unary_kernels(name, mode):
    library = _indexing(mode)
    x = (torch.randn(6, 7, 5) * 50).to(UNARY[name])
    expected = x // 2 if name == "int" else x / 2
    expected = torch.div(x, 2, rounding_mode="trunc") if name == "int" else expected
    dense = x.to("mps")
    for kernel, arguments, threads in (
        (f"halve_dense_scalar_{name}_{name}", (), x.numel()),
        (f"halve_dense_{name}_{name}", (_integers(x.numel()),), -(-x.numel() // 4)),
    ):
        out = torch.zeros_like(dense)
        getattr(library, kernel)(out, dense, *arguments, threads=threads)
        assert torch.equal(out.cpu(), expected)
    # Sizes and strides in bytes, the innermost dimension first.
    view = dense.permute(2, 0, 1)[::2]
    out = torch.zeros_like(view, memory_format=torch.contiguous_format)
    strides = [_longs(s * t.element_size() for s in reversed(t.stride())) for t in (view, out)]
    getattr(library, f"halve_strided_{name}_{name}")(
        *(out, view, _longs(reversed(view.shape)), *strides, _integers(3)),
        threads=(view.shape[-1], view.numel() // view.shape[-1]),
    )
    assert torch.equal(out.cpu(), expected.permute(2, 0, 1)[::2])


def test_error_messages(mode: str):
    """What a kernel reports, in the fields of c10::metal::ErrorMessages."""
    library = torch.mps.compile_shader("""
#include <c10/metal/error.h>
kernel void check(device c10::metal::ErrorMessages* errors, constant int* x, uint i [[thread_position_in_grid]]) {
  if (x[i] < 0) TORCH_REPORT_ERROR(errors, "element ", long(i), " is ", long(x[i]));
}
""")
    errors = torch.zeros(4 + 30 * 512, dtype=torch.uint8, device="mps")
    library.check(errors, torch.tensor([1, -20, 3, -4], dtype=torch.int32, device="mps"), threads=4)
    raw = bytes(errors.tolist())
    assert raw[0] == 2
    messages = [raw[4 + 512 * i : 4 + 512 * (i + 1)] for i in range(2)]
    texts = {m[256:506].split(b"\0")[0] for m in messages}
    assert texts == {b"element 1 is -20", b"element 3 is -4"}
    assert all(m[128:256].split(b"\0")[0] == b"check" for m in messages)
    assert all(int.from_bytes(m[508:512], "little") > 0 for m in messages)
