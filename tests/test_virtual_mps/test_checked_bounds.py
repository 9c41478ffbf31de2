"""Accesses out of bounds, and misaligned ones."""

import numpy as np
import pytest

from tests.test_virtual_mps.checked import HEADER, Pair, pairs
from virtual_mps.executor import Library, MetalError, checked


@pairs(
    Pair(
        "read behind the end",
        "y[i] = x[i + 1];",
        "y[i] = i + 1 < 128 ? x[i + 1] : 0;",
        1,
        r"out-of-bounds read of 4 bytes.*byte 512 of buffer\(0\) 'x', which has 512 bytes;"
        r" thread \(63, 0, 0\) of threadgroup \(1, 0, 0\)",
    ),
    Pair(
        "write behind the end",
        "y[2 * i] = 1;",
        "y[i] = 1;",
        1,
        r"out-of-bounds write.*byte \d+ of buffer\(1\) 'y', which has 512 bytes",
    ),
    Pair(
        "before the start",
        "y[i] = x[int(i) - 1];",
        "y[i] = x[i];",
        1,
        r"byte -4 of buffer\(0\) 'x'",
    ),
    Pair(
        "constant",
        "y[i] = (&n)[1];",
        "y[i] = n;",
        1,
        r"out-of-bounds read.*byte 4 of buffer\(2\) 'n', which has 4 bytes",
    ),
    Pair(
        "last component of a vector",
        "device float3* v = (device float3*)x; y[i] = dot(v[i / 4], v[i / 4 + 1]);",
        "device float3* v = (device float3*)x; y[i] = v[i / 4].z;",
        1,
        r"out-of-bounds read of (4|8|12) bytes.*of buffer\(0\) 'x'",
    ),
    Pair(
        "half of a vector",
        "device half4* v = (device half4*)(x + 1); v[i / 2] = half4(1);",
        "device half4* v = (device half4*)x; if (i % 2 == 0) v[i / 2] = half4(i);",
        1,
        r"out-of-bounds write of 8 bytes.*byte 508 of buffer\(0\) 'x'",
    ),
    Pair(
        "a structure as a whole",
        "struct S { float v[12]; }; y[i] = 0; if (i == 0) *(device S*)(y + 120) = *(device S*)x;",
        "struct S { float v[12]; }; if (i == 0) *(device S*)y = *(device S*)x;",
        1,
        r"out-of-bounds write of 48 bytes.*byte 480 of buffer\(1\) 'y'",
    ),
    Pair(
        "threadgroup variable into its neighbour",
        "threadgroup float a[64], b[64]; a[t] = 1; b[t] = 2;\ny[i] = a[t + n / 2];",
        "threadgroup float a[64], b[64]; a[t] = 1; b[t] = 2;\ny[i] = a[t] + b[t];",
        2,
        r"out-of-bounds read of 4 bytes.*byte \d+ of threadgroup variable 'a', which has 256 bytes",
    ),
    Pair(
        "threadgroup memory that the host sets",
        "m[t + 1] = 1; y[i] = m[t + 1];",
        "m[t] = 1; y[i] = m[t];",
        1,
        r"out-of-bounds write of 4 bytes.*byte 256 of threadgroup\(0\) 'm', which has 256 bytes",
    ),
    Pair(
        "matrix load",
        "simdgroup_float8x8 a;\nsimdgroup_load(a, x + 72, 8);\nsimdgroup_store(a, y + 64 * g, 8);",
        "simdgroup_float8x8 a;\nsimdgroup_load(a, x + 64, 8);\nif (s == 0) simdgroup_store(a, y + 64 * g, 8);",
        2,
        r"out-of-bounds read of 32 bytes.*byte 512 of buffer\(0\) 'x'",
    ),
    Pair(
        "matrix store, transposed",
        "simdgroup_float8x8 a;\nsimdgroup_load(a, x);\nif (s == 0) simdgroup_store(a, y + 64 * g, 9, 0, true);",
        "simdgroup_float8x8 a;\nsimdgroup_load(a, x);\nif (s == 0) simdgroup_store(a, y + 64 * g, 8, 0, true);",
        3,
        r"out-of-bounds write of 16 bytes.*byte 508 of buffer\(1\) 'y'",
    ),
    Pair(
        "atomic operation",
        "atomic_fetch_add_explicit((device atomic_uint*)y + n * 2, 1u, memory_order_relaxed);",
        "atomic_fetch_add_explicit((device atomic_uint*)y, 1u, memory_order_relaxed);",
        1,
        r"out-of-bounds atomic (read|update) of 4 bytes.*byte 512 of buffer\(1\) 'y'",
    ),
    Pair(
        "vector at the alignment of its elements",
        "device float4* v = (device float4*)(x + 1); y[i] = v[i / 5].x + v[i / 5].w;",
        "device packed_float4* v = (device packed_float4*)(x + 1); y[i] = v[i / 5].x + v[i / 5].w;",
        1,
        r"misaligned read.*byte \d+ of buffer\(0\) 'x'.*multiple of 16",
    ),
    Pair(
        "scalar at an odd address",
        "y[i] = *(device float*)((device uchar*)x + 2 + i);",
        "y[i] = *(device float*)((device uchar*)x + i / 4 * 4);",
        1,
        r"misaligned read of 4 bytes.*byte \d+ of buffer\(0\) 'x'.*multiple of 4",
    ),
)
@pytest.mark.parametrize("seed", [0, 1])
def test_pair(check, seed):
    check(seed)


COPY = (
    HEADER
    + """
kernel void copy(const device float* x, device float* y, constant uint& shift, uint i [[thread_position_in_grid]]) {
  y[i] = x[i + shift];
}
kernel void through_both(device float* x, device float* y, uint i [[thread_position_in_grid]]) {
  x[i] = 1;
  y[i] = 2;
}
"""
)


def test_an_access_that_lands_in_another_live_buffer_is_out_of_bounds():
    memory = np.arange(128, dtype=np.float32)
    x, y = memory[:64], memory[64:]
    with (
        checked(),
        pytest.raises(MetalError, match=r"byte 256 of buffer\(0\) 'x', which has 256 bytes.*\(64 times\)"),
    ):
        Library(COPY).kernel("copy")(x, y, np.uint32(64), threads=(64,))


def test_a_write_out_of_bounds_is_not_carried_out_and_the_next_launch_is_fine():
    memory = np.zeros(128, np.float32)
    kernel = Library(COPY).kernel("copy")
    x, y = np.ones(128, np.float32), memory[:64]
    with checked():
        with pytest.raises(MetalError, match="out-of-bounds write"):
            kernel(x, y, np.uint32(0), threads=(128,))
        assert y.all() and not memory[64:].any()
        kernel(x, y, np.uint32(0), threads=(64,))


def test_an_unbound_slot_is_named():
    y = np.zeros(64, np.float32)
    with checked(), pytest.raises(MetalError, match=r"byte 0 of buffer\(0\) 'x', to which nothing is bound"):
        Library(COPY).kernel("copy")(None, y, np.uint32(0), threads=(64,))


def test_a_stack_that_does_not_fit_is_refused():
    source = f"""{HEADER}
kernel void k(device float* y, uint i [[thread_position_in_grid]]) {{
  float a[20000];
  for (int n = 0; n < 20000; n++) a[n] = y[(n * i) % 7];
  y[i] = a[i * 777 % 20000];
}}"""
    with (
        checked(),
        pytest.raises(MetalError, match="program_source:4:1: error: the local variables of kernel 'k' take"),
    ):
        Library(source).kernel("k")


def test_findings_of_several_kinds_are_told_together():
    small = np.zeros(8, np.float32)
    with checked(), pytest.raises(MetalError) as caught:
        Library(COPY).kernel("through_both")(small, np.zeros(4, np.float32), threads=(16,))
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    told = sorted(line[line.index("buffer") :] for line in lines[1:])
    assert told[0].startswith("buffer(0) 'x', which has 32 bytes") and told[0].endswith("(8 times)")
    assert told[1].startswith("buffer(1) 'y', which has 16 bytes") and told[1].endswith("(12 times)")


def test_at_most_eight_findings_are_told_in_full():
    body = "\n".join(f"  x[i + {100 + k}] = {k};" for k in range(12))
    source = f"{HEADER}kernel void many(device float* x, uint i [[thread_position_in_grid]]) {{\n{body}\n}}"
    with checked(), pytest.raises(MetalError) as caught:
        Library(source).kernel("many")(np.zeros(8, np.float32), threads=(1,), threads_per_threadgroup=(1,))
    lines = str(caught.value).splitlines()
    assert len(lines) == 10 and lines[-1].strip() == "and 4 more kinds of findings"


def test_inlined_code_is_placed_in_its_callers_too():
    source = f"""{HEADER}
inline float last(const device float* x, uint n) {{
  return x[n];
}}
kernel void k(const device float* x, device float* y, constant uint& n, uint i [[thread_position_in_grid]]) {{
  y[i] = last(x, n);
}}"""
    with checked(), pytest.raises(MetalError, match="at program_source:5, called at program_source:8:"):
        Library(source).kernel("k")(np.zeros(4, np.float32), np.zeros(4, np.float32), np.uint32(4), threads=(4,))
