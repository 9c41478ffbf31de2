"""Index arithmetic that wraps round in 32 bits, and other arithmetic that may."""

import numpy as np
import pytest

from tests.test_virtual_mps.checked import HEADER, Pair, pairs
from virtual_mps.compiler import instrument, toolchain
from virtual_mps.executor import Library, MetalError, checked

# n is 64: n << 26 is 2^32.
STRIDE = "const uint stride = n << 25;  // 2^31\n"


@pairs(
    Pair(
        "row times stride",
        STRIDE + "y[i] = x[i * stride % 128 + 2 * i * stride];",
        STRIDE + "y[i] = x[(ulong(i) * stride) % 128];",
        2,
        r"overflowed read of 4 bytes.*byte \d+ of buffer\(0\) 'x'.*"
        r"whose index wraps round in the 32 bits of the arithmetic at row times stride:2",
    ),
    Pair(
        "signed",
        "const int stride = int(n) << 24;\nint k = int(i) * stride * 4;\ny[i] = x[k];",
        "const int stride = int(n);\nint k = int(i) * stride / 64;\ny[i] = x[k];",
        3,
        r"overflowed read.*buffer\(0\) 'x'.*wraps round in the 32 bits of the arithmetic at signed:2",
    ),
    Pair(
        "in a pointer that a loop moves",
        "device float* row = x + i * (n << 26);\nfor (int k = 0; k < 4; k++, row++)\ny[i] += *row;",
        "device float* row = x + i / 2;\nfor (int k = 0; k < 4; k++, row++)\ny[i] += *row;",
        3,
        r"overflowed read.*buffer\(0\) 'x'.*at in a pointer that a loop moves:1",
    ),
    Pair(
        "below zero",
        "const uint before = i - n;\ny[i] = ((device uchar*)x)[before % 512] + x[before + 0x80000000u + 0x80000000u];",
        "const uint before = i - n;\ny[i] = before < 128 ? x[before] : 0;",
        2,
        r"(overflowed|out-of-bounds) read.*buffer\(0\) 'x'",
    ),
    Pair(
        "in what a write goes to",
        "y[i + (n << 26) * (i % 3) * (i % 5) + n * 0x4000000u * i] = 1;",
        "y[i] = 1;",
        1,
        r"overflowed write of 4 bytes.*buffer\(1\) 'y'",
    ),
    Pair(
        "atomic",
        "atomic_fetch_add_explicit((device atomic_uint*)y + i * (n << 26), 1u, memory_order_relaxed);",
        "atomic_fetch_add_explicit((device atomic_uint*)y + i, 1u, memory_order_relaxed);",
        1,
        r"overflowed atomic (read|update).*buffer\(1\) 'y'",
    ),
)
def test_pair(check):
    check()


RIGHT = {
    "hash": "uint h = i * 2654435761u; h ^= h >> 15; h *= 2246822519u; y[i] = x[h & 127] + x[h % 128] + x[h >> 25];",
    "random numbers": """
      uint4 c = uint4(i, 0, 0, 0); uint2 k = uint2(1234567u, 89101112u);  // Philox, 10 rounds
      for (int round = 0; round < 10; round++, k.x += 0x9E3779B9u, k.y += 0xBB67AE85u) {
        const uint4 p = uint4(mulhi(0xD2511F53u, c.x), 0xD2511F53u * c.x, mulhi(0xCD9E8D57u, c.z), 0xCD9E8D57u * c.z);
        c = uint4(p.z ^ c.y ^ k.x, p.w, p.x ^ c.w ^ k.y, p.y);
      }
      y[i] = x[c.x % 128] + float(c.y);""",
    "an index that is not used": "const uint before = i - 1; y[i] = i > 0 ? x[before] : 0;",
    "a difference that is put right": "y[i] = x[i - n + 64] + x[(i - 100) + 100] + x[127 - i];",
    "a negative offset": "const int offset = -int(n); y[i] = i >= n ? x[i + offset] : x[int(i) - offset];",
    "a difference modulo 2^32": "const uint older = 4294967290u, age = i - older; y[i] = age < 128 ? x[age] : 0;",
    # clang calls what it makes of the index here %.pre-phi.
    "an index of two branches": """
      if (n % 2) { for (uint k = 0; k < n; ++k) y[k] = simd_sum(x[2 * i]); }
      threadgroup_barrier(mem_flags::mem_device);
      for (uint k = 2 * i; k < n; k += 256) y[k] = 1;""",
    "narrow numbers": "const uchar k = uchar(i * 3); y[i] = x[k & 127]; y[i] += ushort(i * n * 77);",
}


@pytest.fixture(scope="module")
def right():
    kernels = "".join(
        f"kernel void k{number}(device float* x, device float* y, constant uint& n,"
        f" uint i [[thread_position_in_grid]]) {{ {body} }}\n"
        for number, body in enumerate(RIGHT.values())
    )
    return Library(HEADER + kernels)


@pytest.mark.parametrize("number", range(len(RIGHT)), ids=list(RIGHT))
def test_right(right, number):
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    with checked():
        right.kernel(f"k{number}")(x, y, np.uint32(64), threads=(128,))


def test_the_twin_in_64_bits_of_a_product_that_wraps():
    """The fault this is for: right for small tensors, and for large ones wrong in bounds."""
    source = f"""{HEADER}
kernel void k(const device uchar* x, device uint* y, constant uint& stride, uint row [[thread_position_in_grid]]) {{
  y[row] = x[INDEX];
}}"""
    x, y = np.zeros(64, np.uint8), np.zeros(3, np.uint32)
    launch = {"threads": (3,), "threads_per_threadgroup": (3,)}
    with checked():
        with pytest.raises(MetalError) as caught:
            Library(source.replace("INDEX", "row * stride")).kernel("k")(x, y, np.uint32(1 << 31), **launch)
        assert "overflowed read of 1 bytes at program_source:5: byte 0 of" in str(caught.value)
        with pytest.raises(MetalError, match="out-of-bounds read of 1 bytes") as caught:
            Library(source.replace("INDEX", "ulong(row) * stride")).kernel("k")(x, y, np.uint32(1 << 31), **launch)
        assert "overflowed" not in str(caught.value)


def test_names_with_a_hyphen():
    """clang gives such names to values that it computes on one of two ways to a place only."""
    module = """
define void @f(ptr %p, i32 %n, i1 %more) {
  br i1 %more, label %one-more, label %start
one-more:
  %next = add i32 %n, 1
  br label %start
start:
  %.pre-phi = phi i32 [ %next, %one-more ], [ %n, %0 ]
  br label %loop
loop:
  %i = phi i32 [ %.pre-phi, %start ], [ %j, %loop ]
  %wide = zext i32 %i to i64
  %in-p = getelementptr float, ptr %p, i64 %wide
  store float 0.0, ptr %in-p, align 4
  %j = add i32 %i, 4
  %again = icmp ult i32 %j, 64
  br i1 %again, label %loop, label %end
end:
  ret void
}
"""
    code = instrument.instrument(module)
    assert "call ptr @vmps.access(ptr %in-p, " in code
    assert "call void @vmps.index(" in code
    command = [toolchain.clang(), "-x", "ir", "-Wno-everything", "-S", "-o", "-", "-"]
    result = toolchain.run(command, input=code)
    assert result.returncode == 0, result.stderr
