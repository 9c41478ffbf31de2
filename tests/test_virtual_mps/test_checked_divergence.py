"""Barriers, simdgroup functions and matrix operations that not all threads come to."""

import numpy as np
import pytest

from tests.test_virtual_mps.checked import HEADER, Pair, pairs
from virtual_mps.executor import Library, MetalError, checked

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@pairs(
    Pair(
        "barrier in a branch",
        f"if (x[i] > 5) {{\n{BARRIER} y[i] = 1; }}",
        f"{BARRIER} if (x[i] > 5) y[i] = 1;",
        2,
        "threadgroup_barrier: 6 of 64 threads returned without reaching the barrier",
    ),
    Pair(
        "two barriers",
        f"if (t < 32)\n{BARRIER}\nelse\n{BARRIER}",
        f"{BARRIER} y[i] = 1;",
        4,
        "threads 0 and 32 wait at different barriers, at two barriers:2 and at two barriers:4",
    ),
    Pair(
        "sum in a branch",
        "y[i] = 0;\nif (t % 2) y[i] = simd_sum(x[i]);\ny[i] += simd_max(x[i]);",
        "const float sum = simd_sum(x[i]);\ny[i] = t % 2 ? sum : 0;",
        2,
        r"simdgroup function in diverged control flow at sum in a branch:2: 16 of 32 lanes of simdgroup [01] take part,"
        r" thread \((1|33), 0, 0\) but not thread \((0|32), 0, 0\); threadgroup \([01], 0, 0\)",
    ),
    Pair(
        "shuffle while others wait at a barrier",
        f"if (lane < 4) {{\ny[i] = simd_shuffle_xor(x[i], 1); }}\n{BARRIER}",
        f"y[i] = simd_shuffle_xor(x[i], 1);\n{BARRIER}",
        2,
        "simdgroup function in diverged control flow.*4 of 32 lanes",
    ),
    Pair(
        "shuffle that depends on x and one that does not",
        "y[i] = x[i] > 10 ? simd_shuffle_xor(x[i], 1)\n: simd_shuffle_xor(x[i], 2);",
        "y[i] = simd_shuffle_xor(x[i], 1) + simd_shuffle_xor(x[i], 2);",
        1,
        "simdgroup function in diverged control flow",
    ),
    Pair(
        "barrier of the simdgroup in a branch",
        "if (lane > 3)\nsimdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = simd_sum(x[i]);",
        "if (s > 0)\nsimdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = simd_sum(x[i]);",
        2,
        "simdgroup_barrier in diverged control flow.*28 of 32 lanes",
    ),
    Pair(
        "part of a quadgroup",
        "y[i] = 0; if (lane < 6)\ny[i] = quad_sum(x[i]);\ny[i] += simd_sum(x[i]);",
        "y[i] = 0; if (lane < 8)\ny[i] = quad_sum(x[i]);\ny[i] += simd_sum(x[i]);",
        2,
        "quadgroup function in diverged control flow.*6 of 8 lanes",
    ),
    Pair(
        "matrix multiplication in a branch",
        "simdgroup_float8x8 a(1.0f), b(2.0f), c(0.0f); if (lane < 16)\nsimdgroup_multiply(c, a, b);\n"
        "if (s == 0) simdgroup_store(c, y + 64 * g);",
        "simdgroup_float8x8 a(1.0f), b(2.0f), c(0.0f); if (s == 0)\nsimdgroup_multiply(c, a, b);\n"
        "if (s == 0) simdgroup_store(c, y + 64 * g);",
        2,
        "simdgroup_multiply in diverged control flow.*16 of 32 lanes",
    ),
    Pair(
        "matrix load in a branch",
        "simdgroup_float8x8 a(1.0f); if (lane < 16)\nsimdgroup_load(a, x);\ny[i] = simd_sum(x[i]);",
        "simdgroup_float8x8 a(1.0f); if (s == 0)\nsimdgroup_load(a, x);\ny[i] = 1;",
        2,
        "simdgroup_load in diverged control flow.*16 of 32 lanes",
    ),
    Pair(
        "sum after some lanes left the loop",
        "float v = 0; for (uint k = 0; k < lane % 3; k++)\nv += simd_max(x[i]);\ny[i] = simd_sum(v);",
        "float v = 0; for (uint k = 0; k < n % 5; k++)\nv += simd_max(x[i]);\ny[i] = simd_sum(v);",
        2,
        "simdgroup function in diverged control flow",
    ),
)
@pytest.mark.parametrize("seed", [0, 3])
def test_pair(check, seed):
    check(seed)


def test_lanes_that_returned_are_not_missed():
    source = f"""{HEADER}
kernel void k(const device float* x, device float* y, constant uint& n, uint i [[thread_position_in_grid]]) {{
  if (i >= n) return;
  y[i] = simd_sum(x[i]);
}}"""
    y = np.zeros(64, np.float32)
    with checked():
        Library(source).kernel("k")(
            np.ones(64, np.float32), y, np.uint32(40), threadgroups=(1,), threads_per_threadgroup=(64,)
        )
    assert y.tolist() == [32.0] * 32 + [8.0] * 8 + [0.0] * 24


def test_votes_may_be_taken_by_some():
    source = f"""{HEADER}
kernel void k(device float* y, uint i [[thread_position_in_grid]]) {{
  if (i % 3 == 0) y[i] = simd_is_first() + 2 * simd_any(i > 5) + popcount(uint(ulong(simd_active_threads_mask())));
  threadgroup_barrier(mem_flags::mem_none);
}}"""
    y = np.zeros(32, np.float32)
    with checked():
        Library(source).kernel("k")(y, threads=(32,))
    assert y[0] == 1 + 2 + 11 and y[3] == 2 + 11


C10 = f"""{HEADER}
namespace c10 {{ namespace metal {{
inline float sum_of_some(float v) {{ return simd_sum(v); }}
}} }}
namespace other {{
inline float sum_of_some(float v) {{ return simd_sum(v); }}
}}
kernel void k(device float* y, uint i [[thread_position_in_grid]]) {{
  if (i < 4) y[i] = NAMESPACE::sum_of_some(1.0f);
  y[i] += simd_max(1.0f);
}}"""


def test_functions_of_pytorchs_headers_may_diverge():
    y = np.zeros(32, np.float32)
    with checked():
        Library(C10.replace("NAMESPACE", "c10::metal")).kernel("k")(y, threads=(32,))
        assert y[3] == 5
        with pytest.raises(MetalError, match=r"simdgroup function in diverged control flow.*4 of 32 lanes"):
            Library(C10.replace("NAMESPACE", "other")).kernel("k")(y, threads=(32,))


def test_a_fault_beside_a_divergent_barrier_is_told_too():
    source = f"""{HEADER}
kernel void k(device float* y, uint i [[thread_position_in_grid]]) {{
  y[i + 1000] = 1;
  if (i < 5) threadgroup_barrier(mem_flags::mem_none);
}}"""
    with checked(), pytest.raises(MetalError, match=r"threadgroup_barrier: 27 of 32(.|\n)*out-of-bounds write"):
        Library(source).kernel("k")(np.zeros(8, np.float32), threads=(32,))
