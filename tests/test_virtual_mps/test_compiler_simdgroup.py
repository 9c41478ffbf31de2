"""Functions over simdgroups and quadgroups, converged and diverged."""

import numpy as np
import pytest

from virtual_mps.executor import Library

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
LANES = np.arange(32)
X = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5])


def by_quad(f):
    return lambda x: np.concatenate([f(x[i : i + 4]) for i in range(0, 32, 4)])


def all_same(f):
    return lambda x: np.full(len(x), f(x))


def exclusive(scan, first):
    return lambda x: np.concatenate([[first], scan(x)[:-1]])


def shifted(x, source, outside):
    return np.where((source >= 0) & (source < 32), x[source % 32], outside)


def filled(width, delta, up):
    group, inside = LANES // width * width, LANES % width
    moved = inside - delta if up else inside + delta
    fill = X + 100
    return np.where((moved >= 0) & (moved < width), X[group + moved % width], fill[group + moved % width])


# Metal expression of uint over x (the lane's value) and lane; its value in all 32 lanes.
EXPRESSIONS = [
    ("simd_sum(x)", all_same(np.sum)(X)),
    ("simd_product(x % 3 + 1)", all_same(np.prod)(X % 3 + 1) & 0xFFFFFFFF),
    ("simd_max(x)", all_same(np.max)(X)),
    ("simd_min(x)", all_same(np.min)(X)),
    ("simd_and(x | 16)", all_same(np.bitwise_and.reduce)(X | 16)),
    ("simd_or(x)", all_same(np.bitwise_or.reduce)(X)),
    ("simd_xor(x)", all_same(np.bitwise_xor.reduce)(X)),
    ("simd_prefix_inclusive_sum(x)", np.cumsum(X)),
    ("simd_prefix_exclusive_sum(x)", exclusive(np.cumsum, 0)(X)),
    ("simd_prefix_inclusive_product(x % 2 + 1)", np.cumprod(X % 2 + 1)),
    ("simd_prefix_exclusive_product(x % 2 + 1)", exclusive(np.cumprod, 1)(X % 2 + 1)),
    ("simd_broadcast(x, 5)", np.full(32, X[5])),
    ("simd_broadcast_first(x)", np.full(32, X[0])),
    ("simd_shuffle(x, ushort(31 - lane))", X[::-1]),
    ("simd_shuffle(x, ushort(lane * 7 % 32))", X[LANES * 7 % 32]),
    ("simd_shuffle_xor(x, 5)", X[LANES ^ 5]),
    ("simd_shuffle_up(x, 3)", shifted(X, LANES - 3, X)),
    ("simd_shuffle_down(x, 3)", shifted(X, LANES + 3, X)),
    ("simd_shuffle_rotate_up(x, 3)", np.roll(X, 3)),
    ("simd_shuffle_rotate_down(x, 3)", np.roll(X, -3)),
    ("simd_shuffle_and_fill_up(x, x + 100, 3)", filled(32, 3, True)),
    ("simd_shuffle_and_fill_down(x, x + 100, 3)", filled(32, 3, False)),
    ("simd_shuffle_and_fill_up(x, x + 100, 2, 8)", filled(8, 2, True)),
    ("simd_shuffle_and_fill_down(x, x + 100, 2, 8)", filled(8, 2, False)),
    ("simd_all(x > 0) + 2 * simd_all(x > 1) + 4 * simd_any(x > 8) + 8 * simd_any(x > 9)", np.full(32, 5)),
    ("uint(ulong(simd_ballot(x > 4)))", np.full(32, np.sum((X > 4) << LANES))),
    ("simd_ballot(x > 0).all() + 2 * simd_ballot(x > 9).any()", np.full(32, 1)),
    ("uint(ulong(simd_active_threads_mask()))", np.full(32, 0xFFFFFFFF)),
    ("simd_is_first()", LANES == 0),
    ("quad_sum(x)", by_quad(all_same(np.sum))(X)),
    ("quad_product(x)", by_quad(all_same(np.prod))(X)),
    ("quad_max(x)", by_quad(all_same(np.max))(X)),
    ("quad_min(x)", by_quad(all_same(np.min))(X)),
    ("quad_and(x)", by_quad(all_same(np.bitwise_and.reduce))(X)),
    ("quad_or(x)", by_quad(all_same(np.bitwise_or.reduce))(X)),
    ("quad_xor(x)", by_quad(all_same(np.bitwise_xor.reduce))(X)),
    ("quad_prefix_inclusive_sum(x)", by_quad(np.cumsum)(X)),
    ("quad_prefix_exclusive_sum(x)", by_quad(exclusive(np.cumsum, 0))(X)),
    ("quad_prefix_inclusive_product(x)", by_quad(np.cumprod)(X)),
    ("quad_prefix_exclusive_product(x)", by_quad(exclusive(np.cumprod, 1))(X)),
    ("quad_broadcast(x, 2)", by_quad(lambda q: np.full(4, q[2]))(X)),
    ("quad_broadcast_first(x)", by_quad(lambda q: np.full(4, q[0]))(X)),
    ("quad_shuffle(x, ushort(3 - lane % 4))", by_quad(lambda q: q[::-1])(X)),
    ("quad_shuffle_xor(x, 1)", X[LANES ^ 1]),
    ("quad_shuffle_up(x, 1)", by_quad(lambda q: q[[0, 0, 1, 2]])(X)),
    ("quad_shuffle_down(x, 1)", by_quad(lambda q: q[[1, 2, 3, 3]])(X)),
    ("quad_shuffle_rotate_up(x, 1)", by_quad(lambda q: np.roll(q, 1))(X)),
    ("quad_shuffle_rotate_down(x, 1)", by_quad(lambda q: np.roll(q, -1))(X)),
    ("quad_shuffle_and_fill_up(x, x + 100, 1)", filled(4, 1, True)),
    ("quad_shuffle_and_fill_down(x, x + 100, 1)", filled(4, 1, False)),
    ("quad_all(x > 1) + 2 * quad_any(x > 8)", by_quad(lambda q: np.full(4, (q > 1).all() + 2 * (q > 8).any()))(X)),
    ("uint(ushort(quad_ballot(x > 4)))", by_quad(lambda q: np.full(4, np.sum((q > 4) << np.arange(4))))(X)),
    ("quad_is_first()", LANES % 4 == 0),
]


def test_all_lanes():
    lines = "\n".join(f"y[{32 * i} + lane] = {expression};" for i, (expression, _) in enumerate(EXPRESSIONS))
    run = Library(f"""{HEADER}
    kernel void k(const device uint* in [[buffer(0)]], device uint* y [[buffer(1)]],
                  uint lane [[thread_index_in_simdgroup]]) {{
      uint x = in[lane];
      {lines}
    }}""").kernel("k")
    assert run.waits
    y = np.zeros((len(EXPRESSIONS), 32), np.uint32)
    run(X.astype(np.uint32), y, threads=(32,))
    for (expression, expected), row in zip(EXPRESSIONS, y, strict=True):
        np.testing.assert_array_equal(row, np.asarray(expected).astype(np.uint32), err_msg=expression)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("float", np.float32), ("half", np.float16), ("int", np.int32), ("short", np.int16), ("uchar", np.uint8)],
)
def test_reductions_of_each_type(kind, dtype):
    run = Library(f"""{HEADER}
    kernel void k(const device {kind}* x [[buffer(0)]], device {kind}* y [[buffer(1)]],
                  uint i [[thread_index_in_simdgroup]]) {{
      y[i] = simd_sum(x[i]);
      y[32 + i] = simd_max(x[i]);
      y[64 + i] = simd_shuffle_xor(x[i], 1);
      y[96 + i] = simd_prefix_inclusive_sum(x[i]);
    }}""").kernel("k")
    y = np.zeros((4, 32), dtype)
    run(X.astype(dtype), y, threads=(32,))
    expected = [np.full(32, X.sum()), np.full(32, 9), X[LANES ^ 1], np.cumsum(X)]
    np.testing.assert_array_equal(y, np.array(expected).astype(dtype))


def test_vectors_travel_too():
    run = Library(
        HEADER
        + """
    kernel void k(device float4* y [[buffer(0)]], uint i [[thread_index_in_simdgroup]]) {
      y[i] = simd_sum(float4(1, i, 2 * i, 0)) + simd_shuffle_xor(float4(0, 0, 0, i), 1);
    }"""
    ).kernel("k")
    y = np.zeros((32, 4), np.float32)
    run(y, threads=(32,))
    np.testing.assert_array_equal(y, np.stack([np.full(32, 32), np.full(32, 496), np.full(32, 992), LANES ^ 1], 1))


def test_float_sums_round_at_each_step_of_a_tree():
    """A tree keeps what adding one after the other would lose."""
    run = Library(
        HEADER
        + """
    kernel void k(const device half* x [[buffer(0)]], device half* y [[buffer(1)]],
                  uint i [[thread_index_in_simdgroup]]) {
      half sum = simd_sum(x[i]);
      if (i == 0) y[0] = sum;
    }"""
    ).kernel("k")
    x = np.ones(32, np.float16)
    x[0] = 2048  # the next half is 2050
    tree = x.copy()
    while len(tree) > 1:
        tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
    one_by_one = np.float16(0)
    for value in x:
        one_by_one += value
    y = np.zeros(1, np.float16)
    run(x, y, threads=(32,))
    assert y[0] == tree[0]
    assert y[0] != one_by_one


def test_a_partial_simdgroup():
    run = Library(
        HEADER
        + """
    kernel void k(device uint* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
      y[i] = simd_sum(i) + 1000 * simd_max(i) + 100000 * simd_all(true);
    }"""
    ).kernel("k")
    y = np.zeros(40, np.uint32)
    run(y, threads=(40,), threads_per_threadgroup=(64,))
    np.testing.assert_array_equal(y[:32], np.full(32, 496 + 31000 + 100000))
    np.testing.assert_array_equal(y[32:], np.full(8, sum(range(32, 40)) + 39000 + 100000))


@pytest.mark.usefixtures("plain_run")
def test_diverged_lanes_reduce_among_themselves():
    run = Library(
        HEADER
        + """
    kernel void k(device uint* y [[buffer(0)]], uint i [[thread_index_in_simdgroup]]) {
      uint v = 0;
      if (i % 4 == 0) v = simd_sum(i);
      else if (i % 4 == 1) v = simd_max(i);
      y[i] = v;
      y[32 + i] = simd_sum(1u);
    }"""
    ).kernel("k")
    y = np.zeros((2, 32), np.uint32)
    run(y, threads=(32,))
    expected = np.select([LANES % 4 == 0, LANES % 4 == 1], [LANES[::4].sum(), 29], 0)
    np.testing.assert_array_equal(y, [expected, np.full(32, 32)])


def test_lanes_that_returned_take_no_part():
    run = Library(
        HEADER
        + """
    kernel void k(device uint* y [[buffer(0)]], uint i [[thread_index_in_simdgroup]]) {
      if (i >= 20) return;
      y[i] = simd_sum(1u) + 100 * uint(ulong(simd_active_threads_mask()) == 0xFFFFF);
    }"""
    ).kernel("k")
    y = np.zeros(32, np.uint32)
    run(y, threads=(32,))
    np.testing.assert_array_equal(y, np.where(LANES < 20, 120, 0))


def test_a_loop_whose_count_differs_by_lane():
    run = Library(
        HEADER
        + """
    kernel void k(device uint* y [[buffer(0)]], uint i [[thread_index_in_simdgroup]]) {
      uint total = 0;
      for (uint n = 0; n <= i; n++) total += simd_sum(1u);
      y[i] = total;
    }"""
    ).kernel("k")
    y = np.zeros(32, np.uint32)
    run(y, threads=(32,))
    np.testing.assert_array_equal(y, np.cumsum(32 - LANES))


def test_reading_from_an_inactive_lane_gives_nan():
    run = Library(
        HEADER
        + """
    kernel void k(device float* y [[buffer(0)]], uint i [[thread_index_in_simdgroup]]) {
      y[i] = 0;
      if (i < 16) y[i] = simd_shuffle_xor(float(i), 16);
    }"""
    ).kernel("k")
    y = np.zeros(32, np.float32)
    run(y, threads=(32,))
    assert np.isnan(y[:16]).all()
    assert not np.isnan(y[16:]).any()


def test_simdgroup_barrier_orders_memory():
    run = Library(
        HEADER
        + """
    kernel void k(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
      threadgroup float t[64];
      t[i] = i;
      simdgroup_barrier(mem_flags::mem_threadgroup);
      y[i] = t[i ^ 31];
    }"""
    ).kernel("k")
    y = np.zeros(64, np.float32)
    run(y, threadgroups=(1,), threads_per_threadgroup=(64,))
    np.testing.assert_array_equal(y, np.arange(64) ^ 31)
