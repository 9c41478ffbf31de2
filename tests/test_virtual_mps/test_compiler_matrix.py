"""simdgroup matrices: whole, spread over the lanes, and changing between the two."""

import numpy as np
import pytest

from virtual_mps.executor import Library, MetalError

HEADER = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
RNG = np.random.default_rng(0)
TYPES = {"float": np.float32, "half": np.float16, "bfloat": None}


def to_bfloat(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def encode(x: np.ndarray, kind: str) -> np.ndarray:
    return to_bfloat(x) if kind == "bfloat" else x.astype(TYPES[kind])


def decode(x: np.ndarray, kind: str) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32) if kind == "bfloat" else x.astype(np.float32)


def lane_map() -> tuple[np.ndarray, np.ndarray]:
    """Row and column of the 64 elements, by lane and element: Apple's published map."""
    lane = np.arange(32)
    row = (lane >> 4 & 1) * 4 + (lane >> 1 & 3)
    column = (lane >> 3 & 1) * 4 + (lane & 1) * 2
    return np.stack([row, row], 1), np.stack([column, column + 1], 1)


@pytest.mark.parametrize("kind", TYPES)
def test_thread_elements_follow_apples_map(kind):
    run = Library(f"""{HEADER}
    kernel void k(const device {kind}* x [[buffer(0)]], device {kind}2* y [[buffer(1)]],
                  device {kind}* z [[buffer(2)]], uint i [[thread_index_in_simdgroup]]) {{
      simdgroup_matrix<{kind}, 8, 8> m;
      simdgroup_load(m, x);
      y[i] = m.thread_elements();
      m.thread_elements()[1] = {kind}(i);
      simdgroup_store(m, z);
    }}""").kernel("k")
    x = encode(np.arange(64).reshape(8, 8), kind)
    y, z = np.zeros((32, 2), x.dtype), np.zeros((8, 8), x.dtype)
    run(x, y, z, threads=(32,))
    rows, columns = lane_map()
    np.testing.assert_array_equal(y, x[rows, columns])
    changed = x.copy()
    changed[rows[:, 1], columns[:, 1]] = encode(np.arange(32), kind)
    np.testing.assert_array_equal(z, changed)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("space", ["device", "threadgroup"])
def test_load_and_store_with_stride_origin_and_transpose(space, transpose):
    flag = str(transpose).lower()
    copy = (
        "threadgroup half t[20 * 24]; for (uint n = i; n < 480; n += 32) t[n] = x[n]; "
        if space == "threadgroup"
        else ""
    )
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);" if copy else ""
    run = Library(f"""{HEADER}
    kernel void k(const device half* x [[buffer(0)]], device half* y [[buffer(1)]],
                  uint i [[thread_index_in_simdgroup]]) {{
      {copy} {barrier}
      simdgroup_half8x8 m;
      simdgroup_load(m, {"t" if copy else "x"}, 24, ulong2(3, 5), {flag});
      simdgroup_store(m, y, 12, ulong2(2, 1));
      simdgroup_store(m, y + 120, 12, ulong2(2, 1), {flag});
    }}""").kernel("k")
    x = np.arange(480).reshape(20, 24).astype(np.float16)
    y = np.zeros((2, 10, 12), np.float16)
    run(x, y, threads=(32,))
    tile = x[5:13, 3:11]
    expected = np.zeros_like(y)
    expected[0, 1:9, 2:10] = tile.T if transpose else tile
    expected[1, 1:9, 2:10] = tile
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_multiply_accumulate(kind, spread):
    touch = "a.thread_elements() *= 1; c.thread_elements() *= 1;" if spread else ""
    run = Library(f"""{HEADER}
    kernel void k(const device {kind}* x [[buffer(0)]], const device {kind}* w [[buffer(1)]],
                  const device float* v [[buffer(2)]], device float* y [[buffer(3)]]) {{
      simdgroup_matrix<{kind}, 8, 8> a, b;
      simdgroup_float8x8 c, d;
      simdgroup_load(a, x); simdgroup_load(b, w); simdgroup_load(c, v);
      {touch}
      simdgroup_multiply_accumulate(d, a, b, c);
      simdgroup_store(d, y);
      simdgroup_multiply(d, a, b);
      simdgroup_store(d, y + 64);
      simdgroup_multiply_accumulate(c, a, b, c);
      simdgroup_store(c, y + 128);
    }}""").kernel("k")
    x, w = (encode(RNG.standard_normal((8, 8)), kind) for _ in range(2))
    v = RNG.standard_normal((8, 8)).astype(np.float32)
    y = np.zeros((3, 8, 8), np.float32)
    run(x, w, v, y, threads=(32,))
    product = decode(x, kind).astype(np.float64) @ decode(w, kind).astype(np.float64)
    np.testing.assert_allclose(y, [product + v, product, product + v], rtol=1e-5, atol=1e-5)


def test_half_accumulators_are_rounded():
    run = Library(
        HEADER
        + """
    kernel void k(const device half* x [[buffer(0)]], device half* y [[buffer(1)]]) {
      simdgroup_half8x8 a, c = make_filled_simdgroup_matrix<half, 8, 8>(1.0h);
      simdgroup_load(a, x);
      for (int i = 0; i < 3; i++) simdgroup_multiply_accumulate(c, a, a, c);
      simdgroup_store(c, y);
    }"""
    ).kernel("k")
    x = RNG.standard_normal((8, 8)).astype(np.float16)
    y = np.zeros((8, 8), np.float16)
    run(x, y, threads=(32,))
    wide, c = x.astype(np.float32), np.ones((8, 8), np.float16)
    for _ in range(3):
        c = (wide @ wide + c.astype(np.float32)).astype(np.float16)
    # The order of the fp32 sums may differ by an ulp before the rounding.
    np.testing.assert_allclose(y.astype(np.float32), c.astype(np.float32), rtol=2**-10)
    assert np.mean(y == c) > 0.9


def test_construction():
    run = Library(
        HEADER
        + """
    kernel void k(device float* y [[buffer(0)]]) {
      simdgroup_float8x8 zero(0), diagonal = make_diagonal_simdgroup_matrix<float, 8, 8>(3.0f);
      auto filled = make_filled_simdgroup_matrix<float, 8, 8>(2.0f);
      simdgroup_store(zero, y); simdgroup_store(diagonal, y + 64); simdgroup_store(filled, y + 128);
      simdgroup_store(diagonal * filled, y + 192);
      simdgroup_float8x8 copy = filled;
      copy.thread_elements() += 1;
      simdgroup_store(copy, y + 256); simdgroup_store(filled, y + 320);
    }"""
    ).kernel("k")
    y = np.full((6, 8, 8), -1, np.float32)
    run(y, threads=(32,))
    ones = np.ones((8, 8))
    np.testing.assert_array_equal(y, [0 * ones, 3 * np.eye(8), 2 * ones, 6 * ones, 3 * ones, 2 * ones])


def test_only_8x8():
    with pytest.raises(MetalError, match="8x8"):
        Library(HEADER + "kernel void k(device float* y [[buffer(0)]]) { simdgroup_matrix<float, 4, 4> m; y[0] = 0; }")


GEMM = """
template <typename T>
[[kernel]] void gemm(const device T* A [[buffer(0)]], const device T* B [[buffer(1)]], device float* D [[buffer(2)]],
                     constant uint3& mnk [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  // Two simdgroups share tiles of A and B in threadgroup memory; each computes 8 rows of 16 columns.
  threadgroup T a[16 * 8], b[8 * 16];
  uint row = group.y * 16, column = group.x * 16, thread_index = simdgroup * 32 + lane;
  simdgroup_float8x8 sum[2] = {simdgroup_float8x8(0), simdgroup_float8x8(0)};
  for (uint k = 0; k < mnk.z; k += 8) {
    for (uint i = thread_index; i < 128; i += 64) {
      a[i] = A[(row + i / 8) * mnk.z + k + i % 8];
      b[i] = B[(k + i / 16) * mnk.y + column + i % 16];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<T, 8, 8> x, y;
    simdgroup_load(x, a + simdgroup * 64, 8);
    for (int n = 0; n < 2; n++) {
      simdgroup_load(y, b + n * 8, 16);
      simdgroup_multiply_accumulate(sum[n], x, y, sum[n]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int n = 0; n < 2; n++) simdgroup_store(sum[n], D + (row + simdgroup * 8) * mnk.y + column + n * 8, mnk.y);
}
template [[host_name("gemm_half")]] [[kernel]] decltype(gemm<half>) gemm<half>;
template [[host_name("gemm_bfloat")]] [[kernel]] decltype(gemm<bfloat>) gemm<bfloat>;
template [[host_name("gemm_float")]] [[kernel]] decltype(gemm<float>) gemm<float>;
"""


@pytest.mark.parametrize("kind", TYPES)
def test_gemm_through_threadgroup_memory(kind):
    m, n, k = 32, 48, 40
    a, b = encode(RNG.standard_normal((m, k)), kind), encode(RNG.standard_normal((k, n)), kind)
    d = np.zeros((m, n), np.float32)
    run = Library(HEADER + GEMM).kernel(f"gemm_{kind}")
    assert run.static_threadgroup_memory == 256 * a.itemsize
    run(a, b, d, np.array([m, n, k, 0], np.uint32), threadgroups=(n // 16, m // 16), threads_per_threadgroup=(64,))
    expected = decode(a, kind).astype(np.float64) @ decode(b, kind).astype(np.float64)
    np.testing.assert_allclose(d, expected, rtol=1e-4, atol=1e-5)
