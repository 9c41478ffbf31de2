"""Threadgroup memory, barriers and atomics."""

import numpy as np
import pytest

from virtual_mps.executor import Library, MetalError

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"

REVERSE = """
kernel void reverse(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                    uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                    uint n [[threads_per_threadgroup]]) {
  threadgroup float tile[256];
  tile[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = tile[n - 1 - t];
}
"""


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 256])
def test_a_barrier_shows_what_others_wrote(size):
    x = np.arange(3 * size, dtype=np.float32)
    y = np.zeros_like(x)
    Library(HEADER + REVERSE).kernel("reverse")(x, y, threadgroups=(3,), threads_per_threadgroup=(size,))
    np.testing.assert_array_equal(y, x.reshape(3, size)[:, ::-1].ravel())


def test_variables_of_all_kinds_do_not_overlap():
    run = Library(
        HEADER
        + """
    struct Pair { half a; float b; };
    template <typename T, int N>
    [[kernel]] void k(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
      threadgroup float a[32], b[2][16];
      threadgroup T c[N];
      alignas(16) threadgroup uchar d[32];
      threadgroup Pair e[32];
      threadgroup float scalar;
      threadgroup atomic_uint count;
      threadgroup float* p = a;
      p[i] = i; b[i / 16][i % 16] = 100 + i; c[i] = T(200 + i); d[i] = i + 3; e[i].a = half(i); e[i].b = i * 2;
      if (i == 0) { scalar = 7; atomic_store_explicit(&count, 0, memory_order_relaxed); }
      if (i < 40) {
        threadgroup float inner[32];
        inner[i] = -1.0f * i;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        p[i] += inner[31 - i];
      }
      atomic_fetch_add_explicit(&count, 2, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      uint j = (i + 1) % 32;
      y[i] = a[j] + 1000 * b[j / 16][j % 16] + 2 * float(c[j]) + d[j] + float(e[j].a) + e[j].b + scalar
           + atomic_load_explicit(&count, memory_order_relaxed) + 0.5f * (ulong(&d[0]) % 16);
    }
    template [[host_name("k")]] [[kernel]] decltype(k<half, 32>) k<half, 32>;
    """
    ).kernel("k")
    y = np.zeros(32, np.float32)
    run(y, threadgroups=(1,), threads_per_threadgroup=(32,))
    j = (np.arange(32) + 1) % 32
    expected = (j - (31 - j)) + 1000 * (100 + j) + 2 * (200 + j) + (j + 3) + j + 2 * j + 7 + 64
    np.testing.assert_array_equal(y, expected)
    assert run.static_threadgroup_memory >= 128 + 128 + 64 + 32 + 256 + 4 + 4 + 128


@pytest.mark.usefixtures("plain_run")
def test_a_variable_may_be_uninitialised_and_then_is_nan():
    run = Library(
        HEADER
        + """
    kernel void k(device float* y [[buffer(0)]], threadgroup half* dynamic [[threadgroup(0)]],
                  uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
      threadgroup float fixed[32];
      y[2 * i] = fixed[t]; y[2 * i + 1] = dynamic[t];
      fixed[t] = 1; dynamic[t] = 1;
    }"""
    ).kernel("k")
    y = np.zeros(2 * 32 * 8, np.float32)
    run(y, threadgroups=(8,), threads_per_threadgroup=(32,), threadgroup_memory={0: 64})
    assert np.isnan(y).all()


def test_memory_set_by_the_host():
    run = Library(
        HEADER
        + """
    kernel void k(device float* y [[buffer(0)]], threadgroup float* a [[threadgroup(1)]],
                  threadgroup float4& b [[threadgroup(0)]], uint i [[thread_index_in_threadgroup]]) {
      a[i] = i;
      if (i == 3) b = float4(1, 2, 3, 4);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      y[i] = a[63 - i] + b.w + (ulong(a) % 16);
    }"""
    ).kernel("k")
    y = np.zeros(64, np.float32)
    run(y, threadgroups=(1,), threads_per_threadgroup=(64,), threadgroup_memory={0: 16, 1: 256})
    np.testing.assert_array_equal(y, 63 - np.arange(64) + 4)
    with pytest.raises(MetalError, match=r"kernel 'k': no length was set for 'a' at threadgroup\(1\)"):
        run(y, threadgroups=(1,), threads_per_threadgroup=(64,), threadgroup_memory={0: 16})


def test_the_limit_of_threadgroup_memory():
    source = (
        HEADER
        + """
    kernel void k(device float* y [[buffer(0)]], threadgroup float* a [[threadgroup(0)]],
                  uint i [[thread_index_in_threadgroup]]) {
      threadgroup float fixed[4096];
      fixed[i] = a[0] = i;
      y[i] = fixed[i];
    }"""
    )
    run = Library(source).kernel("k")
    assert run.static_threadgroup_memory == 16384
    y = np.zeros(1, np.float32)
    run(y, threads=(1,), threadgroup_memory={0: 16384})
    with pytest.raises(MetalError, match="16384 bytes declared and 16400 set by the host: at most 32768"):
        run(y, threads=(1,), threadgroup_memory={0: 16400})


def test_variables_of_a_branch_that_a_function_constant_rules_out_take_no_memory():
    library = Library(
        HEADER
        + """
    constant bool big [[function_constant(0)]];
    kernel void k(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
      if (big) { threadgroup float a[7000]; a[i] = i; threadgroup_barrier(mem_flags::mem_none); y[i] = a[31 - i]; }
      else { threadgroup float a[32]; a[i] = i; threadgroup_barrier(mem_flags::mem_none); y[i] = a[i]; }
    }"""
    )
    assert library.kernel("k", {"big": np.bool_(True)}).static_threadgroup_memory == 28000
    assert library.kernel("k", {"big": np.bool_(False)}).static_threadgroup_memory == 128


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "if (i < 40) threadgroup_barrier(mem_flags::mem_none);",
            "24 of 64 threads returned without reaching the barrier",
        ),
        ("if (i == 5) return; threadgroup_barrier(mem_flags::mem_none);", "1 of 64 threads returned"),
        (
            "if (i < 32) threadgroup_barrier(mem_flags::mem_none);"
            " else threadgroup_barrier(mem_flags::mem_threadgroup);",
            "threads 0 and 32 wait at different barriers",
        ),
        ("for (uint n = 0; n < i % 2 + 1; n++) threadgroup_barrier(mem_flags::mem_none);", "threads returned"),
    ],
)
def test_a_barrier_that_not_all_reach(body, message):
    run = Library(
        HEADER
        + f"""
    kernel void diverge(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]],
                        uint g [[threadgroup_position_in_grid]]) {{
      if (g != 2) return;
      {body}
      y[i] = i;
    }}"""
    ).kernel("diverge")
    y = np.zeros(64, np.float32)
    with pytest.raises(
        MetalError, match=r"kernel 'diverge', threadgroup \(2, 0, 0\): threadgroup_barrier: .*" + message
    ):
        run(y, threadgroups=(4,), threads_per_threadgroup=(64,))
    # ... and the executor goes on as if nothing had been.
    x = np.arange(256, dtype=np.float32)
    reversed_x = np.zeros_like(x)
    Library(HEADER + REVERSE).kernel("reverse")(x, reversed_x, threadgroups=(1,), threads_per_threadgroup=(256,))
    np.testing.assert_array_equal(reversed_x, x[::-1])


def test_barriers_in_uniform_loops_and_branches():
    """Copies of one barrier that the optimiser makes must not look like different barriers."""
    run = Library(
        HEADER
        + """
    kernel void k(device uint* y [[buffer(0)]], constant uint& n [[buffer(1)]],
                  uint i [[thread_index_in_threadgroup]]) {
      threadgroup uint t[64];
      t[i] = i;
      for (uint stride = 1; stride < n; stride *= 2) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint other = i >= stride ? t[i - stride] : 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        t[i] += other;
        if (i % 2 == 0) y[i] = 0; else y[i] = 1;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      y[i] = t[i];
    }"""
    ).kernel("k")
    y = np.zeros(64, np.uint32)
    run(y, np.uint32(64), threadgroups=(1,), threads_per_threadgroup=(64,))
    np.testing.assert_array_equal(y, np.cumsum(np.arange(64)))


ATOMIC_OPERATIONS = {
    "add": sum,
    "sub": lambda v: -sum(v),
    "min": min,
    "max": max,
    "and": lambda v: np.bitwise_and.reduce(v),
    "or": lambda v: np.bitwise_or.reduce(v),
    "xor": lambda v: np.bitwise_xor.reduce(v),
}


@pytest.mark.parametrize("kind", ["int", "uint"])
def test_atomics_on_device_and_threadgroup_memory(kind):
    dtype = np.dtype({"int": np.int32, "uint": np.uint32}[kind])
    updates = "\n".join(
        f"atomic_fetch_{name}_explicit(y + {n}, v, memory_order_relaxed);"
        f"atomic_fetch_{name}_explicit(t + {n}, v, memory_order_relaxed);"
        for n, name in enumerate(ATOMIC_OPERATIONS)
    )
    run = Library(f"""{HEADER}
    kernel void k(const device {kind}* x [[buffer(0)]], device atomic_{kind}* y [[buffer(1)]],
                  device {kind}* z [[buffer(2)]], const device {kind}* start [[buffer(3)]],
                  uint i [[thread_position_in_grid]], uint n [[thread_index_in_threadgroup]]) {{
      threadgroup atomic_{kind} t[7];
      if (n < 7) atomic_store_explicit(&t[n], start[n], memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      {kind} v = x[i];
      {updates}
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (n < 7) z[i / 64 * 7 + n] = atomic_load_explicit(t + n, memory_order_relaxed);
    }}""").kernel("k")
    x = np.random.default_rng(1).integers(0, 1000, 512).astype(dtype)
    start = np.array([0, 0, 1000, 0, 0x3FF, 0, 0], dtype)
    y, z = start.copy(), np.zeros((8, 7), dtype)
    run(x, y, z, start, threads=(512,), threads_per_threadgroup=(64,))

    def expected(values):
        results = [f([int(v) for v in values]) for f in ATOMIC_OPERATIONS.values()]
        return np.array(results, np.int64).astype(dtype)

    np.testing.assert_array_equal(y, expected(x))
    np.testing.assert_array_equal(z, [expected(part) for part in x.reshape(8, 64)])


def test_atomics_of_other_types():
    run = Library(
        HEADER
        + """
    kernel void k(device atomic_float* f [[buffer(0)]], device atomic_ulong* u [[buffer(1)]],
                  device atomic_bool* b [[buffer(2)]], volatile device atomic_uint* v [[buffer(3)]],
                  device uint* won [[buffer(4)]], uint i [[thread_position_in_grid]]) {
      atomic_fetch_add_explicit(f, 0.5f, memory_order_relaxed);
      atomic_max_explicit(u, ulong(i) << 40, memory_order_relaxed);
      atomic_store_explicit(b, true, memory_order_relaxed);
      uint expected = 0;
      if (atomic_compare_exchange_weak_explicit(v, &expected, i + 1, memory_order_relaxed, memory_order_relaxed))
        won[0] = atomic_exchange_explicit(v, 77, memory_order_relaxed);
    }"""
    ).kernel("k")
    f, u, b, v, won = (np.zeros(2, t) for t in (np.float32, np.uint64, np.uint32, np.uint32, np.uint32))
    run(f, u, b, v, won, threads=(300,))
    assert (f[0], u[0], b[0] & 0xFF, v[0]) == (150, 299 << 40, 1, 77)
    assert 1 <= won[0] <= 300
