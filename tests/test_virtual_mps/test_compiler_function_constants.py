"""Function constants: one compiled kernel for each set of values."""

import numpy as np
import pytest

from virtual_mps.executor import Library, MetalError

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"

SOURCE = (
    HEADER
    + """
constant bool has_w [[function_constant(20)]];
constant int count [[function_constant(21)]];
constant float scale [[function_constant(10 + 12)]];
constant half h [[function_constant(23)]];
constant ushort2 pair [[function_constant(24)]];
constant bfloat b [[function_constant(25)]];
constant long big [[function_constant(26)]];
constant bool use_scale = is_function_constant_defined(scale) && has_w;
constant int rows = count * 2;

kernel void k(const device float* x [[buffer(0)]], const device float* w [[buffer(1), function_constant(has_w)]],
              device float* y [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  float v = x[i];
  if (has_w) v *= w[i];
  if (use_scale) v *= scale;
  for (int n = 0; n < rows; n++) v += 1;
  y[i] = v;
}
kernel void values(device float* y [[buffer(0)]], device long* z [[buffer(1)]]) {
  y[0] = scale; y[1] = h; y[2] = pair.x; y[3] = pair.y; y[4] = float(b); y[5] = rows;
  y[6] = metal::is_function_constant_defined(pair); y[7] = is_function_constant_defined(h);
  z[0] = big;
}
template <bool W> [[kernel]] void barrier(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (has_w) threadgroup_barrier(mem_flags::mem_none);
  y[i] = W;
}
template [[host_name("barrier")]] [[kernel]] decltype(barrier<true>) barrier<true>;
"""
)


@pytest.fixture(scope="module")
def library():
    return Library(SOURCE)


def test_the_table(library):
    assert library.table["function_constants"] == {
        "has_w": {"index": 20, "type": "bool"},
        "count": {"index": 21, "type": "int"},
        "scale": {"index": 22, "type": "float"},
        "h": {"index": 23, "type": "half"},
        "pair": {"index": 24, "type": "ushort2"},
        "b": {"index": 25, "type": "bfloat"},
        "big": {"index": 26, "type": "long"},
    }
    assert library.table["kernels"]["k"]["parameters"][1] == {
        "kind": "buffer", "name": "w", "index": 1, "address_space": "device", "function_constant": "has_w",
    }  # fmt: skip


@pytest.mark.parametrize("by_index", [False, True])
def test_each_set_is_a_kernel_of_its_own(library, by_index):
    def key(name):
        return library.table["function_constants"][name]["index"] if by_index else name

    x, w = np.arange(8, dtype=np.float32), np.full(8, 3, np.float32)
    plain, y = np.zeros(8, np.float32), np.zeros(8, np.float32)
    without = library.kernel("k", {key("has_w"): np.bool_(False), key("count"): np.int32(2)})
    with_w = library.kernel(
        "k", {key("has_w"): np.bool_(True), key("count"): np.int32(-1), key("scale"): np.float32(0.5)}
    )
    assert [p[2] for p in without.parameters] == ["x", "y"]
    assert [p[2] for p in with_w.parameters] == ["x", "w", "y"]
    without(x, None, plain, threads=(8,))
    with_w(x, w, y, threads=(8,))
    np.testing.assert_array_equal(plain, x + 4)
    np.testing.assert_array_equal(y, x * 3 * 0.5)


def test_values_of_every_type_arrive(library):
    constants = {
        "count": np.int32(3),
        "scale": np.float32(0.1),
        "h": np.float16(-2.5),
        "pair": np.array([7, 65535], np.uint16),
        "b": np.uint16(0x3FC0),
        "big": np.int64(-(2**63)),
        "unknown": np.int32(1),
    }
    y, z = np.zeros(8, np.float32), np.zeros(1, np.int64)
    library.kernel("values", constants)(y, z, threads=(1,))
    np.testing.assert_array_equal(y, np.array([0.1, -2.5, 7, 65535, 1.5, 6, 1, 1], np.float32))
    assert z[0] == -(2**63)
    # Of h and pair the source asks whether they are defined.
    constants = {name: constants[name] for name in ("b", "big")} | {"count": np.int32(1), "scale": np.float32(np.inf)}
    library.kernel("values", constants)(y, z, threads=(1,))
    np.testing.assert_array_equal(y, np.array([np.inf, 0, 0, 0, 1.5, 2, 0, 0], np.float32))


def test_a_dead_branch_is_gone(library):
    """The barrier in it too, so that the kernel runs as a plain loop."""
    assert library.kernel("barrier", {"has_w": np.bool_(True)}).waits
    assert not library.kernel("barrier", {"has_w": np.bool_(False)}).waits


def test_too_few_bytes(library):
    with pytest.raises(MetalError, match="'count' is a int of 4 bytes, 1 were given"):
        library.kernel("values", {"count": np.uint8(1)})
