"""virtual_mps.count(), against numbers worked out by hand."""

import json
import threading

import numpy as np
import pytest

from virtual_mps.executor import Library, MetalError, checked

HEADER = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"


def kernel(body: str, parameters: str = "", name: str = "k", **library):
    """A kernel on float x (slot 0) and y (slot 1), with thread indices i (grid), t (threadgroup) and lane."""
    source = f"""{HEADER}
    kernel void {name}(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], {parameters}
                       uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]], uint group [[threadgroup_position_in_grid]]) {{
      {body}
    }}"""
    return Library(source, **library).kernel(name)


def floats(count: int) -> np.ndarray:
    return np.linspace(0.5, 1.5, count, dtype=np.float32)


def flops_of(body: str, parameters: str = "", *buffers, threads: int = 1) -> int:
    import virtual_mps

    x, y = floats(64), floats(64)
    run = kernel(body, parameters)
    with virtual_mps.count() as c:
        run(x, y, *buffers, threads=(threads,))
    assert c.total.matrix_flops == 0
    return c.total.scalar_flops


@pytest.fixture
def count():
    import virtual_mps

    return virtual_mps.count


# ---- dispatches and device memory -----------------------------------------------------------------------------------


def test_elementwise(count):
    n = 1000
    run = kernel("y[i] = x[i] * 0.5f + 1.0f;")
    x, y = floats(n), floats(n)
    with count() as c:
        run(x, y, threads=(n,), threads_per_threadgroup=(256,))
    np.testing.assert_array_equal(y, x * np.float32(0.5) + 1)
    k = c["k"]
    assert list(c.kernels) == ["k"]
    assert (k.dispatches, k.threadgroups, k.threads) == (1, 4, n)
    assert (k.device_read, k.device_written) == (4 * n, 4 * n)
    assert (k.device_unique_read, k.device_unique_written) == (4 * n, 4 * n)
    assert (k.device_bytes, k.device_unique_bytes) == (8 * n, 8 * n)
    assert (k.threadgroup_memory, k.threadgroup_read, k.threadgroup_written) == (0, 0, 0)
    assert (k.threadgroup_barriers, k.simdgroup_barriers) == (0, 0)
    assert (k.scalar_flops, k.matrix_flops) == (2 * n, 0)  # a multiplication and an addition, fused or not


def test_a_tail_that_the_kernel_cuts_itself(count):
    """Whole threadgroups: threads behind the end read the length, and nothing else."""
    n = 1000
    run = kernel("if (i >= n) return; y[i] = x[i] + 1.0f;", "constant uint& n [[buffer(2)]],")
    with count() as c:
        run(floats(n), floats(n), np.uint32(n), threadgroups=(4,), threads_per_threadgroup=(256,))
    k = c["k"]
    assert (k.threadgroups, k.threads, k.scalar_flops) == (4, 1024, n)
    assert (k.device_read, k.device_written) == (4 * n, 4 * n)
    assert (k.constant_read, k.constant_unique_read) == (4 * 1024, 4)


def test_grids_of_three_dimensions(count):
    run = kernel("y[t] = x[t];")
    with count() as c:
        run(floats(64), floats(64), threads=(5, 6, 7), threads_per_threadgroup=(4, 4, 4))
        run(floats(64), floats(64), threadgroups=(2, 2, 2), threads_per_threadgroup=(4, 4, 4))
    assert (c.total.dispatches, c.total.threadgroups, c.total.threads) == (2, 2 * 2 * 2 + 8, 5 * 6 * 7 + 8 * 64)


def test_strided_reads_touch_what_they_read(count):
    n, stride = 100, 7
    run = kernel(f"y[i] = x[{stride} * i];")
    with count() as c:
        run(floats(stride * n), floats(n), threads=(n,))
    x, y = c["k"].buffers
    assert (x.slot, x.name, x.space, x.read, x.unique_read, x.written) == (0, "x", "device", 4 * n, 4 * n, 0)
    assert (y.slot, y.name, y.space, y.written, y.unique_written, y.read) == (1, "y", "device", 4 * n, 4 * n, 0)


def test_what_is_read_again_is_unique_once(count):
    n = 500
    run = kernel("y[i] = x[i] + x[i + 1] + x[i + 2];")
    with count() as c:
        run(floats(n + 2), floats(n), threads=(n,), threads_per_threadgroup=(96,))
    x = c["k"].buffer("x")
    assert (x.read, x.unique_read) == (3 * 4 * n, 4 * (n + 2))


def test_unique_is_each_dispatch_anew(count):
    run = kernel("y[i] += x[i];")
    with count() as c:
        for _ in range(3):
            run(floats(64), floats(64), threads=(64,))
    k = c["k"]
    assert (k.dispatches, k.device_unique_read, k.device_unique_written) == (3, 3 * 2 * 4 * 64, 3 * 4 * 64)


@pytest.mark.parametrize(("kind", "width"), [("float", 2), ("float", 3), ("float", 4), ("half", 4), ("bfloat", 4)])
def test_vectors(count, kind, width):
    n = 40
    vector = f"{kind}{width}"
    source = f"""{HEADER}
    kernel void k(device const {vector}* x [[buffer(0)]], device {vector}* y [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {{ y[i] = x[i] * x[i]; }}"""
    run = Library(source).kernel("k")
    x = np.zeros(n * 4, np.float32)
    with count() as c:
        run(x, x.copy(), threads=(n,))
    element = 4 if kind == "float" else 2
    # A vector of three takes the room of four; whether its padding is copied is the compiler's choice.
    least, most = n * width * element, n * (4 if width == 3 else width) * element
    assert c["k"].device_read == c["k"].device_unique_read == least
    assert least <= c["k"].device_written <= most
    assert c["k"].scalar_flops == n * width


def test_buffers_that_overlap(count):
    """Halves of one array, read in place: each slot has its own, the kernel has what lies in both once."""
    n = 37
    run = kernel(
        "y[i] = x[2 * n * (i / n) + i % n] + z[2 * n * (i / n) + i % n] + x[0];",
        "device const float* z [[buffer(2)]], constant uint& n [[buffer(3)]],",
    )
    both = np.ascontiguousarray(floats(4 * n).reshape(2, 2 * n))
    x, z = both.reshape(-1), both.reshape(-1)[n:]
    with count() as c:
        run(x, floats(2 * n), z, np.uint32(n), threads=(2 * n,))
        run(x, floats(2 * n), x, np.uint32(n), threads=(2 * n,))
    k = c["k"]
    assert k.buffer("x").unique_read == k.buffer("z").unique_read == 2 * 4 * 2 * n
    assert k.device_unique_read == 4 * 4 * n + 4 * 2 * n


def test_in_place(count):
    n = 64
    x = floats(n)
    run = kernel("y[i] = x[i] * 2.0f;")
    with count() as c:
        run(x, x, threads=(n,))
    k = c["k"]
    assert (k.buffer(0).read, k.buffer(0).written, k.buffer(1).read, k.buffer(1).written) == (4 * n, 0, 0, 4 * n)
    assert (k.device_unique_read, k.device_unique_written) == (4 * n, 4 * n)


def test_constant_memory_is_apart(count):
    table = floats(8)
    run = kernel("y[i] = x[i] + table[i % 8];", "constant float* table [[buffer(2)]],")
    with count() as c:
        run(floats(64), floats(64), table, threads=(64,))
    k = c["k"]
    assert (k.device_read, k.constant_read, k.constant_unique_read) == (4 * 64, 4 * 64, 4 * 8)
    assert k.buffer("table").space == "constant"
    with pytest.raises(KeyError, match=r"'k' had no buffer 'z' bound; it had 0 \(x\), 1 \(y\), 2 \(table\)"):
        k.buffer("z")


@pytest.mark.parametrize("kind", ["float", "uint"])
def test_atomics_count_once_however_often_they_are_tried(count, kind):
    """Threads on all cores add to one number."""
    n = 20_000
    run = kernel(
        "atomic_fetch_add_explicit(sum, 1, memory_order_relaxed);", f"device atomic_{kind}* sum [[buffer(2)]],"
    )
    total = np.zeros(1, np.float32 if kind == "float" else np.uint32)
    with count() as c:
        run(floats(1), floats(1), total, threads=(n,), threads_per_threadgroup=(32,))
    assert total[0] == n
    k = c["k"]
    assert (k.device_read, k.device_written) == (4 * n, 4 * n)
    assert (k.device_unique_read, k.device_unique_written) == (4, 4)
    assert k.scalar_flops == (n if kind == "float" else 0)


# ---- threadgroups ---------------------------------------------------------------------------------------------------


def test_reduction_in_threadgroup_memory(count):
    groups, size = 3, 64
    run = kernel(f"""
      threadgroup float tile[{size}];
      tile[t] = x[i];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint n = {size} / 2; n > 0; n /= 2) {{
        if (t < n) tile[t] += tile[t + n];
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }}
      if (t == 0) y[group] = tile[0];""")
    x, y = floats(groups * size), floats(groups)
    with count() as c:
        run(x, y, threadgroups=(groups,), threads_per_threadgroup=(size,))
    np.testing.assert_allclose(y, x.reshape(groups, size).sum(1), rtol=1e-6)
    k = c["k"]
    assert k.threadgroup_memory == 4 * size
    assert k.threadgroup_written == groups * 4 * (size + size - 1)
    assert k.threadgroup_read == groups * 4 * (2 * (size - 1) + 1)
    assert k.threadgroup_barriers == groups * (1 + 6)
    assert k.scalar_flops == groups * (size - 1)
    assert (k.device_read, k.device_written) == (4 * groups * size, 4 * groups)


def test_threadgroup_memory_set_by_the_host(count):
    run = kernel(
        "threadgroup float own[8]; own[t % 8] = x[i]; shared[t] = x[i];"
        "threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = shared[63 - t] + own[0];",
        "threadgroup float* shared [[threadgroup(0)]],",
    )
    with count() as c:
        for length in (256, 512):
            run(floats(64), floats(64), threads=(64,), threads_per_threadgroup=(64,), threadgroup_memory={0: length})
    assert c["k"].threadgroup_memory == 32 + 512  # of the dispatch that has most
    assert (c["k"].threadgroup_written, c["k"].threadgroup_read) == (2 * 2 * 4 * 64, 2 * 2 * 4 * 64)


def test_simdgroup_barriers(count):
    run = kernel("for (int n = 0; n < 3; n++) simdgroup_barrier(mem_flags::mem_none); y[i] = simd_sum(x[i]);")
    with count() as c:
        run(floats(80), floats(80), threads=(80,), threads_per_threadgroup=(80,))  # 32 + 32 + 16 threads
    assert (c["k"].simdgroup_barriers, c["k"].threadgroup_barriers) == (3 * 3, 0)


# ---- FLOPs ----------------------------------------------------------------------------------------------------------

EXPRESSIONS = {  # floating-point operations of one thread; a, b and c are float
    "a": 0,
    "a + b": 1,
    "a - b * c": 2,
    "a / b": 1,
    "-a": 0,
    "a < b ? a : b": 0,
    "a < 0 ? a * b : a": 0,  # a > 0: not executed
    "a > 0 ? a * b : a": 1,
    "max(min(a, b), c)": 0,
    "clamp(a, b, c) + abs(a) + floor(b)": 2,
    "fma(a, b, c)": 2,
    "float(int(a) + 1)": 0,
    "exp(a)": 1,
    "fast::sin(a) * precise::rsqrt(b)": 3,
    "sinpi(a) + cospi(b) + tanpi(c)": 5,
    "pow(a, b) + tanh(c)": 3,
    "sqrt(a) + fract(b)": 3,
    "dot(float4(a), float4(b))": 7,
    "length(float2(a, b))": 4,
    "(float4(a) + b).x": 4,
    "mix(a, b, c)": 3,
    "float(half(a) + half(b))": 1,
    "float(half(a) * half(b) + half(c))": 2,
    "float(fma(half(a), half(b), half(c)))": 2,
    "float(exp(half(a)))": 1,
    "float(bfloat(a) * bfloat(b) - bfloat(c))": 2,
    "float(exp(bfloat(a)))": 1,
    "(half4(a) * half4(b) + half4(c)).x": 8,
    "(bfloat2(bfloat(a)) / bfloat2(bfloat(b))).y": 2,
    "exp(float4(a)).x": 4,
    "a + (i + 1) * 2": 1,  # the rest is integers
}


def counted_flops(expressions, threads: int) -> dict[str, int]:
    """Of each expression alone, in one kernel that does all: as many dispatches, but compiled once."""
    import virtual_mps

    cases = "".join(f"case {n}: y[i] = {expression}; break;\n" for n, expression in enumerate(expressions))
    run = kernel(
        f"float a = x[0], b = x[1], c = x[2]; switch (which) {{ {cases} }}", "constant int& which [[buffer(2)]],"
    )
    counted = {}
    for n, expression in enumerate(expressions):
        with virtual_mps.count() as c:
            run(floats(3), floats(threads), np.int32(n), threads=(threads,), threads_per_threadgroup=(threads,))
        counted[expression] = c["k"].scalar_flops
    return counted


def test_expressions():
    expected = {expression: 3 * flops for expression, flops in EXPRESSIONS.items()}
    assert counted_flops(EXPRESSIONS, threads=3) == expected


def test_loops_count_each_time_round():
    body = "float s = 0; for (uint n = 0; n <= i; n++) s += x[n] * x[n]; y[i] = s;"
    assert flops_of(body, threads=10) == 2 * sum(range(1, 11))


def test_branches_count_what_is_taken():
    """x is above 1 in half of the threads."""
    body = "float v; if (x[i] > 1.0f) { v = x[i] * 2.0f; } else { v = x[i] * 3.0f + 1.0f; } y[i] = v;"
    assert flops_of(body, threads=64) == 32 * 1 + 32 * 2


def test_what_an_optimiser_would_share_or_drop_counts():
    assert flops_of("y[i] = (x[0] + 1.0f) * (x[0] + 1.0f); float unused = x[0] * 3.0f; (void)unused;") == 4


def test_functions_that_are_called_several_times():
    source = f"""{HEADER}
    inline float f(float v) {{ return v * v + 1.0f; }}
    template <typename T> T twice(T v) {{ return v + v; }}
    kernel void k(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {{
      y[i] = f(f(y[i])) + twice(y[i]) + float(twice(half(y[i])));
    }}"""
    import virtual_mps

    run = Library(source).kernel("k")
    with virtual_mps.count() as c:
        run(floats(4), threads=(4,))
    assert c["k"].scalar_flops == 4 * (2 * 2 + 1 + 1 + 2)


@pytest.mark.parametrize("fast_math", [False, True])
def test_fast_math_counts_alike(count, fast_math):
    run = kernel("y[i] = x[i] / 3.0f + x[i] * 2.0f - fast::exp(x[i]);", fast_math=fast_math)
    with count() as c:
        run(floats(4), floats(4), threads=(4,))
    assert c["k"].scalar_flops == 4 * 5


def test_function_constants_leave_out_what_they_rule_out(count):
    source = f"""{HEADER}
    constant bool scaled [[function_constant(0)]];
    kernel void k(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {{
      if (scaled) y[i] *= 3.0f;
      y[i] += 1.0f;
    }}"""
    library = Library(source)
    for value, flops in ((False, 1), (True, 2)):
        run = library.kernel("k", {0: np.bool_(value)})
        with count() as c:
            run(floats(8), threads=(8,))
        assert c["k"].scalar_flops == 8 * flops


def test_simdgroup_functions():
    """80 threads are two simdgroups of 32 and one of 16. A sum over n lanes takes n - 1 additions, as a tree does; a
    prefix sum one a lane."""
    sums = 31 + 31 + 15
    expected = {
        "simd_sum(a)": sums,
        "simd_product(a)": sums,
        "simd_max(a)": 0,
        "simd_shuffle_xor(a, 1)": 0,
        "simd_broadcast_first(a)": 0,
        "simd_prefix_inclusive_sum(a)": 80,
        "quad_sum(a)": 20 * 3,
        "float(simd_sum(half(a)))": sums,
        "simd_sum(int(a))": 0,
        "simd_sum(a + b) * c": 80 + sums + 80,
    }
    assert counted_flops(expected, threads=80) == expected


@pytest.mark.parametrize("kind", ["float", "half", "bfloat"])
@pytest.mark.parametrize("spread", [False, True], ids=["whole", "spread"])
def test_matrices(count, kind, spread):
    """d = a b + a b b: a row of a float matrix is 32 bytes, which one instruction may move."""
    source = f"""{HEADER}
    kernel void k(device const {kind}* a [[buffer(0)]], device const {kind}* b [[buffer(1)]],
                  device float* d [[buffer(2)]], uint simd [[simdgroup_index_in_threadgroup]]) {{
      simdgroup_matrix<{kind}, 8, 8> ma, mb;
      simdgroup_float8x8 product, sum;
      simdgroup_load(ma, a);
      simdgroup_load(mb, b);
      simdgroup_multiply(product, ma, mb);
      {"product.thread_elements()[0] *= 2.0f;" if spread else ""}
      simdgroup_multiply_accumulate(sum, product, mb, product);
      simdgroup_store(sum, d + 64 * simd);
    }}"""
    size = 4 if kind == "float" else 2
    run = Library(source).kernel("k")
    a, d = np.zeros(64, np.float32 if kind == "float" else np.uint16), np.zeros(128, np.float32)
    with count() as c:
        run(a, a.copy(), d, threads=(64,), threads_per_threadgroup=(64,))
    k = c["k"]
    assert k.matrix_flops == 2 * 2 * 2 * 8**3
    assert k.scalar_flops == (64 if spread else 0)
    assert (k.device_read, k.device_written) == (2 * 2 * 64 * size, 2 * 64 * 4)
    assert (k.device_unique_read, k.device_unique_written) == (2 * 64 * size, 2 * 64 * 4)


# ---- blocks ---------------------------------------------------------------------------------------------------------


def test_counts_do_not_depend_on_who_runs_what(count):
    """More work than one thread of the pool does."""
    n = 1 << 16
    run = kernel("""
      threadgroup float tile[64];
      tile[t] = x[i] + x[(i * 7919) % 65536];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      y[i] = tile[(t + 1) % 64] * simd_sum(x[i / 3]);""")
    results = []
    for _ in range(5):
        with count() as c:
            run(floats(n), floats(n), threads=(n,), threads_per_threadgroup=(64,))
        results.append(c.to_json())
    assert len(set(results)) == 1
    assert c["k"].scalar_flops == n * 2 + n // 32 * 31


def test_blocks_nest(count):
    run = kernel("y[i] = x[i];")
    with count() as outer:
        run(floats(8), floats(8), threads=(8,))
        with count() as inner:
            run(floats(8), floats(8), threads=(8,))
        run(floats(8), floats(8), threads=(8,))
    run(floats(8), floats(8), threads=(8,))
    assert (outer["k"].dispatches, inner["k"].dispatches) == (3, 1)
    with count() as none:
        pass
    assert none.kernels == {} and none.total.dispatches == 0 and none.total.threadgroup_memory == 0
    assert str(none).startswith("                       total\ndispatches                 0\n")


def test_exceptions_end_a_block(count):
    run = kernel("y[i] = x[i];")
    with pytest.raises(ZeroDivisionError), count() as c:
        run(floats(8), floats(8), threads=(8,))
        raise ZeroDivisionError
    run(floats(8), floats(8), threads=(8,))
    assert c["k"].dispatches == 1


def test_a_dispatch_that_fails_is_not_counted(count):
    run = kernel("if (t < 5) threadgroup_barrier(mem_flags::mem_none); y[i] = x[i];")
    other = kernel("y[i] = x[i] * 2.0f;", name="other")
    with count() as c:
        with pytest.raises(MetalError, match="threadgroup_barrier"):
            run(floats(8), floats(8), threads=(8,))
        other(floats(8), floats(8), threads=(8,))
    assert list(c.kernels) == ["other"]
    assert c["other"].scalar_flops == 8


def test_kernels_are_as_ever_outside_of_blocks(count):
    """Instrumented kernels do not write behind a buffer; it is how they are told from plain ones here."""
    both = np.zeros(16, np.float32)
    run = kernel("y[i + 8] = x[i]; y[i] = x[i];")
    with count() as c:
        run(floats(8), both[:8], threads=(8,))
    assert both[:8].all() and not both[8:].any()
    assert (c["k"].device_written, c["k"].device_read) == (4 * 8, 4 * 8)
    run(floats(8), both[:8], threads=(8,))
    assert both.all()


def test_checked_mode_may_be_on_as_well(count):
    run = kernel(
        "threadgroup float tile[32]; tile[t] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup);"
        "y[i] = tile[31 - t] + 1.0f;"
    )
    wrong = kernel("y[i + 1] = x[i];", name="wrong")
    with count() as plain:
        run(floats(64), floats(64), threads=(64,), threads_per_threadgroup=(32,))
    with count() as c, checked(seed=7):
        run(floats(64), floats(64), threads=(64,), threads_per_threadgroup=(32,))
        with pytest.raises(MetalError, match="out-of-bounds write"):
            wrong(floats(64), floats(64), threads=(64,))
    assert c.to_dict() == plain.to_dict()


def test_all_threads_of_the_process_are_counted(count):
    run = kernel("y[i] = x[i] + 1.0f;")
    inner = []

    def work():
        with count() as c:
            for _ in range(20):
                run(floats(64), floats(64), threads=(64,))
        inner.append(c)

    with count() as outer:
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert outer["k"].dispatches == 80
    assert outer["k"].scalar_flops == 80 * 64
    for c in inner:
        assert 20 <= c["k"].dispatches <= 80
        assert c["k"].scalar_flops == c["k"].dispatches * 64


# ---- the device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deferred", [False, True], ids=["immediate", "deferred"])
def test_compile_shader(mps, deferred):
    import torch

    library = torch.mps.compile_shader(
        "kernel void scale(device float* x, constant float& a, uint i [[thread_position_in_grid]]) { x[i] *= a; }"
    )
    x = torch.ones(100, device="mps")
    with mps.mode(deferred=deferred):
        library.scale(x, 2.0)  # encoded before: not counted, though deferred work may run later
        with mps.count() as c:
            library.scale(x, 3.0)
            (x + x).sum()  # stock operators are no kernels
        library.scale(x, 4.0)
        torch.mps.synchronize()
    assert list(c.kernels) == ["scale"]
    assert (c["scale"].dispatches, c["scale"].threads, c["scale"].scalar_flops) == (1, 100, 100)
    assert (c["scale"].buffer("x").read, c["scale"].buffer("a").space) == (400, "constant")
    assert x[0] == 24


@pytest.mark.parametrize("way", ["stream", "command_buffer", "set_args", "kernel_function"])
@pytest.mark.parametrize("deferred", [False, True], ids=["immediate", "deferred"])
def test_extensions(mps, axpy, way, deferred):
    import torch

    x, y = torch.ones(100, device="mps"), torch.ones(100, device="mps")
    with mps.mode(deferred=deferred), mps.count() as c:
        getattr(axpy, way)(x, y, 2.0)
    assert (c["axpy"].dispatches, c["axpy"].scalar_flops) == (1, 200)
    assert (c["axpy"].device_unique_read, c["axpy"].device_unique_written) == (800, 400)


def test_views_are_counted_where_they_are_bound(mps):
    import torch

    library = torch.mps.compile_shader(
        "kernel void copy(device const half* x, device half* y, uint i [[thread_position_in_grid]]) { y[i] = x[i]; }"
    )
    both = torch.zeros(100, dtype=torch.half, device="mps")
    with mps.count() as c:
        library.copy(both[10:], both[60:], threads=20)
    assert (c["copy"].device_unique_read, c["copy"].device_unique_written) == (40, 40)


def test_backward_on_autograds_own_thread(mps):
    import torch

    library = torch.mps.compile_shader(
        "kernel void copy(device const float* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = x[i]; }"
    )

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, dy):
            dx = torch.empty_like(dy)
            library.copy(dy.contiguous(), dx)
            return dx

    x = torch.ones(8, device="mps", requires_grad=True)
    y = Copy.apply(x).sum()
    with mps.count() as c:
        y.backward()
    assert c.total.dispatches == 1


# ---- what comes out -------------------------------------------------------------------------------------------------

TABLE = """\
                           k  total
dispatches                 1      1
threadgroups               2      2
threads                1,024  1,024
device_read            4,096  4,096
device_written         4,096  4,096
device_unique_read     4,096  4,096
device_unique_written  4,096  4,096
constant_read          4,096  4,096
constant_unique_read       4      4
threadgroup_memory         0      0
threadgroup_read           0      0
threadgroup_written        0      0
threadgroup_barriers       0      0
simdgroup_barriers         0      0
matrix_flops               0      0
scalar_flops           1,024  1,024

kernel  slot  buffer  space      read  unique  written  unique
k       0     x       device    4,096   4,096        0       0
k       1     y       device        0       0    4,096   4,096
k       2     a       constant  4,096       4        0       0"""


def test_table_and_json(count):
    run = kernel("y[i] = x[i] * a;", "constant float& a [[buffer(2)]],")
    with count() as c:
        assert c.kernels == {}
        run(floats(1024), floats(1024), np.float32(2), threads=(1024,), threads_per_threadgroup=(512,))
    assert str(c) == TABLE
    assert json.loads(c.to_json(indent=1)) == c.to_dict()
    assert c.to_dict()["total"]["device_read"] == 4096
    traffic = {"read": 4096, "written": 0, "unique_read": 4, "unique_written": 0}
    assert c.to_dict()["kernels"]["k"]["buffers"][2] == {"slot": 2, "name": "a", "space": "constant", **traffic}


def test_fixture(count_kernels):
    """Of the pytest plugin, which needs no import."""
    import torch

    library = torch.mps.compile_shader("kernel void one(device float* x) { x[0] = 1; }")
    x = torch.zeros(1, device="mps")
    with count_kernels() as c:
        library.one(x, threads=1)
    assert c.total.device_bytes == x.nbytes
