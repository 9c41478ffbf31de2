"""torch.mps.compile_shader: Metal from Python strings."""

import time

import pytest
import torch

pytestmark = pytest.mark.usefixtures("mps", "validation")

SOURCE = """
#include <metal_stdlib>
using namespace metal;
kernel void full(device float* out, constant float& value, uint i [[thread_position_in_grid]]) { out[i] = value; }
kernel void axpy(device float* y, device const float* x, constant float& a, constant int& n,
                 uint i [[thread_position_in_grid]]) {
  if (int(i) < n) y[i] += a * x[i];
}
kernel void index_2d(device int* out, constant uint2& size, uint2 p [[thread_position_in_grid]],
                     uint2 group [[threadgroup_position_in_grid]]) {
  out[p.y * size.x + p.x] = int(p.x + 100 * p.y + 10000 * group.x);
}
kernel void sum(device float* out, device const float* x, uint i [[thread_position_in_grid]],
                uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                uint group [[threadgroup_position_in_grid]]) {
  threadgroup float partial[8];
  float v = simd_sum(x[i]);
  if (lane == 0) partial[simdgroup] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i % 256 == 0) {
    float total = 0;
    for (int k = 0; k < 8; k++) total += partial[k];
    out[group] = total;
  }
}
kernel void arrays(device float* out, constant float* c, constant int4& k, uint i [[thread_position_in_grid]]) {
  out[i] = c[i % 3] * k[i % 4];
}
kernel void casts(device float* out, constant half& h, constant bool& b, constant short& s, constant ulong& u,
                  constant bfloat& f) {
  out[0] = h; out[1] = b; out[2] = s; out[3] = u == 0xffffffffffffffff; out[4] = f;
}
"""


@pytest.fixture(scope="module")
def library(mps):
    return torch.mps.compile_shader(SOURCE)


def test_names(library):
    assert sorted(dir(library)) == ["arrays", "axpy", "casts", "full", "index_2d", "sum"]
    assert library.full.max_threads_per_threadgroup == 1024
    assert library.full.thread_execution_width == 32
    assert library.full.static_thread_group_memory_length == 0
    assert library.sum.static_thread_group_memory_length == 32


@pytest.mark.parametrize("n", [1, 16, 1024, 1025, 5000])
def test_threads_default_to_the_first_tensor(library, n):
    x = torch.zeros(n + 1, device="mps")
    library.full(x[:n], 3.25)
    assert torch.equal(x.cpu(), torch.cat([torch.full((n,), 3.25), torch.zeros(1)]))


def test_explicit_geometry(library):
    y, x = torch.ones(100, device="mps"), torch.arange(100.0, device="mps")
    library.axpy(y, x, 2.0, 90, threads=100, group_size=32, arg_casts={3: "int32"})
    expected = 1 + 2 * torch.arange(100.0)
    expected[90:] = 1
    assert torch.equal(y.cpu(), expected)
    out = torch.zeros(6, 10, dtype=torch.int32, device="mps")
    library.index_2d(out, [10, 6], threads=(10, 6), group_size=(4, 2), arg_casts={1: "int32"})
    columns, rows = torch.arange(10).view(1, 10), torch.arange(6).view(6, 1)
    assert torch.equal(out.cpu(), (columns + 100 * rows + 10000 * (columns // 4)).int())


def test_reduction(library):
    x, out = torch.randn(1024, device="mps"), torch.zeros(4, device="mps")
    library.sum(out, x, threads=1024, group_size=256)
    torch.testing.assert_close(out.cpu().double(), x.cpu().double().view(4, 256).sum(1), atol=1e-4, rtol=1e-5)


def test_scalars_lists_and_casts(library):
    out = torch.zeros(12, device="mps")
    library.arrays(out, (1.0, 2.0, 3.0), [1, 10, 100, 1000], arg_casts={2: "int32"})
    assert out.tolist() == [(1.0, 2.0, 3.0)[i % 3] * (1, 10, 100, 1000)[i % 4] for i in range(12)]
    out = torch.zeros(5, device="mps")
    casts = {1: "fp16", 3: "int16", 4: "uint64", 5: "bf16"}
    library.casts(out, 1.5, True, -7, 2**64 - 1, 0.25, threads=1, arg_casts=casts)
    assert out.tolist() == [1.5, 1, -7, 1, 0.25]


WRONG = {
    "cpu_tensor": (RuntimeError, "must be on MPS", lambda lib, x: lib.full(x.cpu(), 1.0)),
    "no_such_kernel": (RuntimeError, "Failed to create function state object for: nope", lambda lib, x: lib.nope),
    "four_dimensions": (RuntimeError, "1 to 3", lambda lib, x: lib.full(x, 1.0, threads=(1, 2, 3, 4))),
    "ranks_differ": (RuntimeError, "same dimension", lambda lib, x: lib.full(x, 1.0, threads=(1, 2), group_size=1)),
    "group_too_large": (RuntimeError, "1..1024", lambda lib, x: lib.full(x, 1.0, threads=4096, group_size=2048)),
    "no_arguments": (RuntimeError, "At least one argument", lambda lib, x: lib.full()),
    "bad_type": (RuntimeError, "Unsupported kernel argument type", lambda lib, x: lib.full(x, "text")),
    "bad_cast": (RuntimeError, "Unsupported cast", lambda lib, x: lib.full(x, 1.0, arg_casts={1: "fp8"})),
    "empty_list": (RuntimeError, "Empty list", lambda lib, x: lib.full(x, [])),
    "missing_argument": (RuntimeError, "missing Buffer binding at index 1 for value", lambda lib, x: lib.full(x)),
}


@pytest.mark.parametrize(("kind", "message", "call"), WRONG.values(), ids=WRONG)
def test_wrong_calls(library, kind, message, call):
    # A library of its own each time: bindings of earlier launches stay on the shared encoder.
    torch.mps.synchronize()
    x = torch.zeros(4, device="mps")
    with pytest.raises(kind, match=message):
        call(library, x)
    library.full(x, 2.0)
    assert x.tolist() == [2] * 4


def test_a_shader_that_does_not_compile():
    with pytest.raises(RuntimeError, match=r"program_source:2:\d+.*nonsense"):
        library = torch.mps.compile_shader(
            "#include <metal_stdlib>\nkernel void f(device float* x) { x[0] = nonsense; }"
        )
        library.f(torch.zeros(1, device="mps"))


def test_an_unbound_argument_in_a_plain_run(mps):
    """A GPU page fault on a Mac, which ends the command buffer with an error; at any rate not the process."""
    library = torch.mps.compile_shader(SOURCE)
    with mps.mode(validation=False):
        torch.mps.synchronize()
        x = torch.zeros(4, device="mps")
        with pytest.raises(RuntimeError, match="full"):
            library.full(x)
        library.full(x, 2.0)
        assert x.tolist() == [2] * 4


def test_a_barrier_that_not_all_reach(mps):
    library = torch.mps.compile_shader(
        "#include <metal_stdlib>\nusing namespace metal;\n"
        "kernel void lonely(device float* x, uint i [[thread_position_in_grid]]) {"
        " if (i < 3) threadgroup_barrier(mem_flags::mem_threadgroup); x[i] = 1; }"
    )
    x = torch.zeros(64, device="mps")
    with pytest.raises(RuntimeError, match="lonely"):
        library.lonely(x, threads=64, group_size=64)
    with mps.mode(deferred=True):
        library.lonely(x, threads=64, group_size=64)
        with pytest.raises(RuntimeError, match="lonely"):
            torch.mps.synchronize()
    assert (x + 1).is_mps


def test_load_metallib(tmp_path, mps):
    from virtual_mps.metallib import metal

    if not hasattr(torch.mps, "load_metallib"):
        pytest.skip("this PyTorch has no torch.mps.load_metallib")
    source, output = tmp_path / "s.metal", tmp_path / "s.metallib"
    source.write_text(SOURCE)
    metal([str(source), "-o", str(output)])
    for given in (output, output.read_bytes()):
        x = torch.zeros(3, device="mps")
        torch.mps.load_metallib(given).full(x, 4.0)
        assert x.tolist() == [4] * 3


def test_stock_ops_inside_the_streams_block_are_refused(axpy):
    # On a Mac this deadlocks: a stock op waits for the queue that the block occupies.
    x = torch.ones(4, device="mps")
    with pytest.raises(RuntimeError, match="deadlock"):
        axpy.stock_op_inside_block(x)


def test_trivial_kernel_is_cheap(library):
    """Five microseconds on an idle machine (measured: 2.5); a factor of eight here is for machines that are not."""
    x = torch.zeros(1, device="mps")
    kernel = library.full
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(500):
            kernel(x, 1.0)
        best = min(best, (time.perf_counter() - start) / 500)
    assert best < 40e-6


def test_torch_compile_generates_metal(mps):
    """Inductor's MPS backend writes Metal kernels and runs them through torch.mps.compile_shader."""

    def f(x, y):
        return (x.sin() + y * 2).softmax(-1)

    compiled = torch.compile(f)
    x, y = torch.randn(4, 33, device="mps"), torch.randn(4, 33, device="mps")
    result = compiled(x, y)
    torch.testing.assert_close(result.cpu().double(), f(x.cpu().double(), y.cpu().double()), atol=1e-6, rtol=1e-5)
    before = mps.stock_op_calls()
    compiled(x, y)
    assert mps.stock_op_calls() == before, "nothing but kernels of its own"
