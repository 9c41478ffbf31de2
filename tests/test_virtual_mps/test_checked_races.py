"""Data races, and threadgroup memory that is read before it is written."""

import numpy as np
import pytest

from tests.test_virtual_mps.checked import HEADER, Pair, pairs
from virtual_mps.executor import Library, MetalError, checked

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@pairs(
    Pair(
        "no barrier",
        "threadgroup float a[64]; a[t] = x[i];\n\ny[i] = a[63 - t];",
        f"threadgroup float a[64]; a[t] = x[i];\n{BARRIER}\ny[i] = a[63 - t];",
        3,
        "unordered read of 4 bytes.*threadgroup variable 'a'.*after a write by thread.*of the same threadgroup"
        "|uninitialised read",
    ),
    Pair(
        "memory used again",
        f"threadgroup float a[64]; for (int k = 0; k < 2; k++) {{\na[t] = x[i];\n{BARRIER}\ny[i] += a[63 - t]; }}",
        "threadgroup float a[64]; for (int k = 0; k < 2; k++) {\n"
        f"a[t] = x[i];\n{BARRIER}\ny[i] += a[63 - t]; {BARRIER} }}",
        2,
        r"unordered write.*after a read by thread \(\d+, 0, 0\) of the same threadgroup at memory used again:4",
    ),
    Pair(
        "write after several readers",
        f"threadgroup float a; if (t == 0) a = x[i];\n{BARRIER}\ny[i] = a;\nif (t == 63) a = 1;",
        f"threadgroup float a; if (t == 0) a = x[i];\n{BARRIER}\ny[i] = a;\n{BARRIER} if (t == 63) a = 1;",
        4,
        r"unordered write.*after a read by thread \(\d+, 0, 0\) of the same threadgroup"
        r"|unordered read.*after a write by thread \(63, 0, 0\)",
    ),
    Pair(
        "barrier for no memory",
        "threadgroup float a[64]; a[t] = x[i];\nthreadgroup_barrier(mem_flags::mem_none);\ny[i] = a[63 - t];",
        f"threadgroup float a[64]; a[t] = x[i];\n{BARRIER}\ny[i] = a[63 - t];",
        3,
        "unordered read of 4 bytes.*threadgroup variable 'a'",
    ),
    Pair(
        "barrier for the other memory",
        f"y[i] = x[i];\n{BARRIER}\nx[i] = y[64 * g + 63 - t];",
        "y[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_device);\nx[i] = y[64 * g + 63 - t];",
        3,
        r"unordered read of 4 bytes.*buffer\(1\) 'y'.*after a write",
    ),
    Pair(
        "barrier of the simdgroup alone",
        "threadgroup float a[64]; a[t] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "y[i] = a[(t + 32) % 64];",
        "threadgroup float a[64]; a[t] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "y[i] = a[t / 32 * 32 + (t + 1) % 32];",
        3,
        "unordered read of 4 bytes.*threadgroup variable 'a'|uninitialised read",
    ),
    Pair(
        "simdgroup without its barrier",
        "threadgroup float a[64]; a[t] = x[i];\n\ny[i] = a[t ^ 1];",
        "threadgroup float a[64]; a[t] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = a[t ^ 1];",
        3,
        "unordered read of 4 bytes.*threadgroup variable 'a'|uninitialised read",
    ),
    Pair(
        "simdgroup barrier for the other memory",
        "threadgroup float a[64]; a[t] = x[i];\nsimdgroup_barrier(mem_flags::mem_device);\ny[i] = a[t ^ 1];",
        "threadgroup float a[64]; a[t] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = a[t ^ 1];",
        3,
        "unordered read of 4 bytes.*threadgroup variable 'a'",
    ),
    Pair(
        "threadgroups write to one place",
        "y[t] = x[i];",
        "y[i] = x[i];",
        1,
        r"unordered write.*buffer\(1\) 'y'.*after a write by a thread of threadgroup \((0|1), 0, 0\)",
    ),
    Pair(
        "a threadgroup reads what another writes",
        "y[i] = x[i] + y[(i + 64) % 128];",
        "y[i] = x[i] + x[(i + 64) % 128];",
        1,
        r"unordered (read|write).*buffer\(1\) 'y'.*by a thread of threadgroup \((0|1), 0, 0\)",
    ),
    Pair(
        "a barrier does not order threadgroups",
        "y[i] = x[i]; threadgroup_barrier(mem_flags::mem_device);\nx[i] = y[127 - i];",
        "y[i] = x[i]; threadgroup_barrier(mem_flags::mem_device);\nx[i] = y[64 * g + 63 - t];",
        2,
        r"unordered (read|write)",
    ),
    Pair(
        "sum without atomics",
        "y[0] += x[i];",
        "atomic_fetch_add_explicit((device atomic_float*)y, x[i], memory_order_relaxed);",
        1,
        r"unordered (read|write).*buffer\(1\) 'y'",
    ),
    Pair(
        "plain read beside atomic operations",
        "atomic_fetch_add_explicit((device atomic_uint*)y, 1u, memory_order_relaxed);\nx[i] = y[0];",
        "atomic_fetch_add_explicit((device atomic_uint*)y, 1u, memory_order_relaxed);\n"
        "x[i] = atomic_load_explicit((device atomic_uint*)y, memory_order_relaxed);",
        2,
        r"unordered (read|atomic)",
    ),
    Pair(
        "bytes of one word",
        "((device uchar*)y)[i / 2] = i;",
        "((device uchar*)y)[i] = i;",
        1,
        r"unordered write of 1 bytes.*buffer\(1\) 'y'",
    ),
    Pair(
        "different values to one place",
        "threadgroup float a; a = float(t);\n\ny[i] = 1;",
        f"threadgroup float a; a = 5;\n{BARRIER}\ny[i] = a;",
        1,
        "unordered write of 4 bytes.*threadgroup variable 'a'",
    ),
    Pair(
        "matrix store",
        "threadgroup float a[128]; simdgroup_float8x8 b(2.0f); simdgroup_store(b, a + 64 * s);\n\ny[i] = a[127 - t];",
        "threadgroup float a[128]; simdgroup_float8x8 b(2.0f); simdgroup_store(b, a + 64 * s);\n"
        f"{BARRIER}\ny[i] = a[127 - t];",
        3,
        "unordered read of 4 bytes.*threadgroup variable 'a'|uninitialised read",
    ),
    Pair(
        "never written",
        "threadgroup float a[64]; if (t < 63) a[t] = 1;\n" + f"{BARRIER}\ny[i] = a[t];",
        "threadgroup float a[64]; a[t] = 1;\n" + f"{BARRIER}\ny[i] = a[t];",
        3,
        "uninitialised read of 4 bytes.*byte 252 of threadgroup variable 'a'",
    ),
    Pair(
        "structure with padding",
        "struct S { half a; float b; }; threadgroup S c[64]; if (t < n / 2) { c[t].a = t; c[t].b = i; }\n"
        + f"{BARRIER}\nif (g == 0) ((device S*)y)[t] = c[63 - t];",
        "struct S { half a; float b; }; threadgroup S c[64]; { c[t].a = t; c[t].b = i; }\n"
        + f"{BARRIER}\nif (g == 0) ((device S*)y)[t] = c[63 - t];",
        3,
        r"uninitialised read.*of threadgroup variable 'c', which has 512 bytes",
    ),
    Pair(
        "written by the threadgroup before",
        "if (g == 0) m[t] = 1;\n" + f"{BARRIER}\ny[i] = m[t];",
        "m[t] = 1;\n" + f"{BARRIER}\ny[i] = m[t];",
        3,
        r"uninitialised read of 4 bytes.*of threadgroup\(0\) 'm'",
    ),
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pair(check, seed):
    check(seed)


ALIAS = f"""{HEADER}
kernel void shift(const device float* x, device float* y, uint i [[thread_position_in_grid]]) {{ y[i] = x[i]; }}
"""


def test_a_buffer_bound_twice_is_one_memory():
    memory = np.arange(65, dtype=np.float32)
    kernel = Library(ALIAS).kernel("shift")
    with checked():
        kernel(memory, memory, threads=(64,))
        with pytest.raises(MetalError, match=r"unordered (read|write).*buffer\(\d\) '[xy]'"):
            kernel(memory[1:], memory, threads=(64,))


def test_launches_are_ordered():
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    kernel = Library(ALIAS).kernel("shift")
    with checked():
        for _ in range(3):
            kernel(x, y, threads=(64,))
            kernel(y, x, threads=(64,))


LAST = f"""{HEADER}
// The last threadgroup to arrive adds up what all of them wrote.
kernel void total(const device float* x, device float* partial, device float* y, device atomic_uint* arrived,
                  uint i [[thread_position_in_grid]], uint g [[threadgroup_position_in_grid]],
                  uint n [[threadgroups_per_grid]]) {{
  const float sum = simd_sum(x[i]);
  if (simd_is_first()) {{
    partial[g] = sum;
    FENCE;
    if (atomic_fetch_add_explicit(arrived, 1, memory_order_relaxed) == n - 1) {{
      FENCE;
      float all = 0;
      for (uint k = 0; k < n; k++) all += partial[k];
      *y = all;
    }}
  }}
}}"""


def test_fences_order_threadgroups():
    def run(fence):
        x, y = np.arange(128, dtype=np.float32), np.zeros(1, np.float32)
        with checked():
            kernel = Library(LAST.replace("FENCE", fence)).kernel("total")
            kernel(x, np.zeros(4, np.float32), y, np.zeros(1, np.uint32), threads=(128,))
        assert y == x.sum()

    run("atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device)")
    with pytest.raises(MetalError, match=r"unordered read.*buffer\(1\) 'partial'"):
        run("")
