"""Metal as a language: what C++ lacks, and what differs from C++."""

import numpy as np
import pytest

from virtual_mps.executor import Library, MetalError

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"


def kernel(body: str, name: str = "k", constants=None, **options):
    return Library(HEADER + body, **options).kernel(name, constants)


def evaluate(expression: str, inputs: np.ndarray, output: str, dtype) -> np.ndarray:
    """Value of a Metal expression over `x[i]` for each element of a one-dimensional array."""
    kind = {"f4": "float", "f2": "half"}[inputs.dtype.str[1:]]
    run = kernel(
        f"kernel void k(const device {kind}* x [[buffer(0)]], device {output}* y [[buffer(1)]],"
        f" uint i [[thread_position_in_grid]]) {{ y[i] = {expression}; }}"
    )
    count = len(inputs)
    result = np.zeros(count, dtype)
    run(inputs, result, threads=(count,))
    return result


VECTOR_EXPRESSIONS = [  # of float4, over x = 1, 2, 3, 4
    ("float4(x[0], x[1], x[2], x[3]).wzyx", [4, 3, 2, 1]),
    ("float4(float2(x[0], x[1]), 7, 8)", [1, 2, 7, 8]),
    ("float4(x[0], float3(5, 6, 7).zyx)", [1, 7, 6, 5]),
    ("float4(3)", [3, 3, 3, 3]),
    ("float4{x[0], x[1], x[2], x[3]} * 2 + 1", [3, 5, 7, 9]),
    ("2 - float4(1, 2, 3, 4)", [1, 0, -1, -2]),
    ("float4(half4(1, 2, 3, 4))", [1, 2, 3, 4]),
    ("float4(int4(7, 8, 9, 10) / 2 % 4)", [3, 0, 0, 1]),
    ("float4(int4(1, 2, 4, 8) << 2 | 1)", [5, 9, 17, 33]),
    ("-float4(1, 2, 3, 4).rgba", [-1, -2, -3, -4]),
    ("select(float4(0), float4(1), float4(1, 5, 2, 7) > 3.0f)", [0, 1, 0, 1]),
    ("float4(float4(1, 2, 3, 4) == float4(1, 0, 3, 0))", [1, 0, 1, 0]),
    ("float4(!bool4(true, false, true, false))", [0, 1, 0, 1]),
    ("float4(packed_float3(float3(1, 2, 3)), packed_float3(4, 5, 6)[2])", [1, 2, 3, 6]),
    ("float4x4(2.0f) * float4(1, 2, 3, 4)", [2, 4, 6, 8]),
    ("float4(float2x2(float2(1, 2), float2(3, 4)) * float2(1, 10), float2(0))", [31, 42, 0, 0]),
    ("float4(float2(1, 10) * float2x2(1, 2, 3, 4), float2(0))", [21, 43, 0, 0]),
    ("transpose(float4x4(float4(1), float4(2), float4(3), float4(4)))[0]", [1, 2, 3, 4]),
]


def test_vectors():
    lines = "\n".join(f"y[{i}] = {expression};" for i, (expression, _) in enumerate(VECTOR_EXPRESSIONS))
    run = kernel(f"kernel void k(const device float* x [[buffer(0)]], device float4* y [[buffer(1)]]) {{ {lines} }}")
    y = np.zeros((len(VECTOR_EXPRESSIONS), 4), np.float32)
    run(np.arange(1, 5, dtype=np.float32), y, threads=(1,))
    for (expression, expected), row in zip(VECTOR_EXPRESSIONS, y, strict=True):
        np.testing.assert_array_equal(row, expected, err_msg=expression)


def test_swizzles_assign_components():
    run = kernel("""
    kernel void k(device float4* y [[buffer(0)]]) {
      float4 v = float4(1, 2, 3, 4);
      v.xy = v.yx;
      v.wz += float2(10, 20);
      y[0] = v;
      y[1] = float4(0);
      y[1].bgr = float3(1, 2, 3);
      y[1].w = y[0].a;
      v[2] = 9;
      thread float& second = v.y;
      second = -1;
      y[2] = v;
    }""")
    y = np.zeros((3, 4), np.float32)
    run(y, threads=(1,))
    np.testing.assert_array_equal(y, [[2, 1, 23, 14], [3, 2, 1, 14], [2, -1, 9, 14]])


def test_a_swizzle_with_a_repeated_component_is_not_assignable():
    with pytest.raises(MetalError, match="program_source:3"):
        kernel("kernel void k(device float4* y [[buffer(0)]]) { y[0].xx = float2(1); }")


LAYOUTS = {
    "float2": (8, 8),
    "float3": (16, 16),
    "float4": (16, 16),
    "half3": (8, 8),
    "bfloat4": (8, 8),
    "packed_float3": (12, 4),
    "packed_half2": (4, 2),
    "char3": (4, 4),
    "ulong2": (16, 16),
    "bool": (1, 1),
    "long": (8, 8),
    "float3x3": (48, 16),
    "atomic_uint": (4, 4),
}


def test_sizes_and_alignments():
    lines = "".join(f"y[{i}] = uint2(sizeof({kind}), alignof({kind}));" for i, kind in enumerate(LAYOUTS))
    run = kernel(f"kernel void k(device uint2* y [[buffer(0)]]) {{ {lines} }}")
    y = np.zeros((len(LAYOUTS), 2), np.uint32)
    run(y, threads=(1,))
    assert {kind: tuple(row) for kind, row in zip(LAYOUTS, y.tolist(), strict=True)} == LAYOUTS


def test_structs_in_a_constant_buffer_have_metals_layout():
    run = kernel("""
    struct Params { uint n; float3 scale; half h; packed_float3 shift; long stride; };
    kernel void k(constant Params& p [[buffer(0)]], device float* y [[buffer(1)]]) {
      y[0] = p.n; y[1] = p.scale.z; y[2] = p.h; y[3] = p.shift[1]; y[4] = p.stride; y[5] = sizeof(Params);
    }""")
    layout = np.dtype(
        {
            "names": ["n", "scale", "h", "shift", "stride"],
            "formats": [np.uint32, (np.float32, 3), np.float16, (np.float32, 3), np.int64],
            "offsets": [0, 16, 32, 36, 48],
            "itemsize": 64,
        }
    )
    params = np.zeros(1, layout)
    params["n"], params["scale"], params["h"], params["shift"], params["stride"] = 7, (1, 2, 3), 0.5, (4, 5, 6), -9
    y = np.zeros(6, np.float32)
    run(params, y, threads=(1,))
    np.testing.assert_array_equal(y, [7, 3, 0.5, 5, -9, 64])


def test_half_arithmetic_rounds_at_each_step():
    x = np.array([1.0, 0.1, 3.14159, 1000.0], np.float16)
    result = evaluate("(x[i] + 0.0009765625h) * 3.0h - x[i]", x, "half", np.float16)
    step = np.float16(x + np.float16(0.0009765625))
    np.testing.assert_array_equal(result, np.float16(np.float16(step * np.float16(3)) - x))


def test_bfloat_rounds_to_nearest_even():
    x = np.array([1.00390625, 1.01171875, 3.0e38, np.inf, -np.inf, 1e-40, 0.3], np.float32)
    bits = evaluate("as_type<ushort>(bfloat(x[i]))", x, "ushort", np.uint16)
    wide = x.view(np.uint32).astype(np.uint64)
    np.testing.assert_array_equal(bits, ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16))
    nan = evaluate("as_type<ushort>(bfloat(x[i]))", np.array([np.nan], np.float32), "ushort", np.uint16)
    assert nan[0] & 0x7FC0 == 0x7FC0


def test_literals():
    run = kernel("""
    kernel void k(device float* y [[buffer(0)]]) {
      y[0] = 0.1 * 3;                 // no double: 0.1f * 3
      y[1] = 0.5h + 1h;
      y[2] = float(0.25bf);
      y[3] = sizeof(0.5);
      y[4] = 1e-2;
      y[5] = 0x1.8p1f;
      y[6] = .5;
      y[7] = 0xE + 1.f;
    }""")
    y = np.zeros(8, np.float32)
    run(y, threads=(1,))
    expected = [np.float32(0.1) * np.float32(3), 1.5, 0.25, 4, 0.01, 3, 0.5, 15]
    np.testing.assert_array_equal(y, np.array(expected, np.float32))


def test_literals_of_templates_are_floats_too():
    run = kernel("""
    template <typename T> float size_of_half() { return sizeof(T(1) * 0.5); }
    kernel void k(device float* y [[buffer(0)]]) { y[0] = size_of_half<float>(); }""")
    y = np.zeros(1, np.float32)
    run(y, threads=(1,))
    assert y[0] == 4


def test_ternary_operands_in_different_address_spaces():
    run = kernel("""
    kernel void k(const device float4* x [[buffer(0)]], device float4* y [[buffer(1)]],
                  constant float4& c [[buffer(2)]], constant uint& n [[buffer(3)]],
                  uint i [[thread_index_in_threadgroup]]) {
      threadgroup float4 t[4];
      t[i] = i < n ? x[i] : float4(0);
      y[i] = i == 0 ? t[i] : (i > 2 ? x[0] : (i == 2 ? c : float4(1, 2, float2(3))));
    }""")
    x = np.arange(16, dtype=np.float32).reshape(4, 4) + 1
    y = np.zeros((4, 4), np.float32)
    run(x, y, np.full(4, 5, np.float32), np.uint32(2), threadgroups=(1,), threads_per_threadgroup=(4,))
    np.testing.assert_array_equal(y, [[1, 2, 3, 4], [1, 2, 3, 3], [5, 5, 5, 5], [1, 2, 3, 4]])


def test_ternaries_of_calls_that_return_nothing():
    run = kernel("""
    void set(device float* y, float v) { *y = v; }
    void nothing() {}
    kernel void k(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
      i % 2 ? set(y + i, 1) : nothing();
    }""")
    y = np.zeros(4, np.float32)
    run(y, threads=(4,))
    np.testing.assert_array_equal(y, [0, 1, 0, 1])


def test_members_qualified_by_address_space():
    run = kernel("""
    struct Complex {
      float re, im;
      Complex() thread = default;
      Complex(float r, float i) thread : re(r), im(i) {}
      Complex(float r, float i) threadgroup : re(r), im(i) {}
      template <typename T> explicit operator T() const thread { return static_cast<T>(re); }
      template <typename T> explicit operator T() const device { return static_cast<T>(re); }
      float norm() const thread { return re * re + im * im; }
      float norm() const device { return re * re + im * im; }
      float norm() const constant { return re * re + im * im; }
      thread Complex& operator+=(Complex o) thread { re += o.re; im += o.im; return *this; }
    };
    kernel void k(const device Complex* x [[buffer(0)]], constant Complex& c [[buffer(1)]],
                  device float* y [[buffer(2)]]) {
      Complex sum(1, 1);
      sum += x[0];
      y[0] = x[0].norm(); y[1] = c.norm(); y[2] = sum.norm(); y[3] = float(x[0]);
    }""")
    y = np.zeros(4, np.float32)
    run(np.array([3, 4], np.float32), np.array([1, 2], np.float32), y, threads=(1,))
    np.testing.assert_array_equal(y, [25, 5, 41, 3])


def test_constants_at_program_scope():
    run = kernel("""
    constant float table[4] = {1, 10, 100, 1000};
    constant constexpr int kOffset = 1;
    constexpr constant float kScale = 0.5;
    struct Traits { static constexpr constant int width = 3; };
    kernel void k(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
      y[i] = table[(i + kOffset) % 4] * kScale + Traits::width;
    }""")
    y = np.zeros(4, np.float32)
    run(y, threads=(4,))
    np.testing.assert_array_equal(y, [8, 53, 503, 3.5])


def test_array_parameters_in_an_address_space():
    run = kernel("""
    void fill(threadgroup float a[4], threadgroup float b[2][4], uint i) { a[i] = i; b[1][i] = a[i] * 2; }
    kernel void k(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
      threadgroup float a[4], b[2][4];
      fill(a, b, i);
      y[i] = a[i] + b[1][i];
    }""")
    y = np.zeros(4, np.float32)
    run(y, threadgroups=(1,), threads_per_threadgroup=(4,))
    np.testing.assert_array_equal(y, [0, 3, 6, 9])


def test_casts_between_the_two_kinds_of_half():
    x = np.array([1.5, -2.25, 1.00390625], np.float16)
    result = evaluate("static_cast<half>(static_cast<bfloat>(x[i]))", x, "half", np.float16)
    np.testing.assert_array_equal(result, np.array([1.5, -2.25, 1.0], np.float16))


def test_as_type_reinterprets():
    x = np.array([1.0, -0.0, np.inf], np.float32)
    np.testing.assert_array_equal(evaluate("as_type<uint>(x[i])", x, "uint", np.uint32), x.view(np.uint32))
    halves = evaluate("as_type<half2>(x[i]).y", x, "half", np.float16)
    np.testing.assert_array_equal(halves, x.view(np.float16)[1::2])
    with pytest.raises(MetalError, match="differ in size"):
        evaluate("as_type<ushort>(x[i])", x, "ushort", np.uint16)


INSTANTIATIONS = """
template <typename T, int N = 1>
[[kernel]] void scale(const device T* x [[buffer(0)]], device T* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  y[i] = x[i] * T(N);
}
#define instantiate(name, type, n) \\
  template [[host_name("scale_" #name "_" #n)]] [[kernel]] decltype(scale<type, n>) scale<type, n>;
instantiate(half, half, 2) instantiate(float, float, 3)
template [[host_name("scale_int_args")]] [[kernel]] void scale<int, 4>(
    const device int* x [[buffer(0)]], device int* y [[buffer(1)]], uint i [[thread_position_in_grid]]);
typedef decltype(scale<float, 5>) scale_float;
template [[host_name("scale_typedef")]] kernel scale_float scale<float, 5>;

template <typename T>
kernel void negate(const device T* x [[buffer(0)]], device T* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  y[i] = -x[i];
}
template [[host_name("negate_deduced")]] kernel void negate(
    const device float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]]);

namespace inner {
[[host_name("renamed")]] kernel void divide(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                              uint i [[thread_position_in_grid]]) { y[i] = x[i] + 1; }
}
"""


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("scale_half_2", np.float16, [2, 4, 6]),
        ("scale_float_3", np.float32, [3, 6, 9]),
        ("scale_int_args", np.int32, [4, 8, 12]),
        ("scale_typedef", np.float32, [5, 10, 15]),
        ("negate_deduced", np.float32, [-1, -2, -3]),
        ("renamed", np.float32, [2, 3, 4]),
    ],
)
def test_instantiations_with_host_names(name, dtype, expected):
    library = Library(HEADER + INSTANTIATIONS)
    y = np.zeros(3, dtype)
    library.kernel(name)(np.array([1, 2, 3], dtype), y, threads=(3,))
    np.testing.assert_array_equal(y, expected)


def test_the_table_lists_kernels_not_templates():
    table = Library(HEADER + INSTANTIATIONS).table
    assert sorted(table["kernels"]) == [
        "negate_deduced", "renamed", "scale_float_3", "scale_half_2", "scale_int_args", "scale_typedef",
    ]  # fmt: skip
    assert table["kernels"]["scale_half_2"]["parameters"] == [
        {"kind": "buffer", "name": "x", "index": 0, "address_space": "device"},
        {"kind": "buffer", "name": "y", "index": 1, "address_space": "device"},
        {"kind": "builtin", "name": "i", "index": 0, "attribute": "thread_position_in_grid"},
    ]


def test_parameters_without_an_index_take_the_free_slots_in_order():
    library = Library(
        HEADER
        + """
    kernel void k(device float* a, device float* b [[buffer(0)]], constant float& c,
                  uint i [[thread_position_in_grid]]) {
      a[i] = b[i] + c;
    }"""
    )
    assert [(p["name"], p["index"]) for p in library.table["kernels"]["k"]["parameters"][:3]] == [
        ("a", 1), ("b", 0), ("c", 2),
    ]  # fmt: skip
    a = np.zeros(2, np.float32)
    library.kernel("k")(np.ones(2, np.float32), a, np.float32(4), threads=(2,))
    np.testing.assert_array_equal(a, [5, 5])


def test_unroll_pragmas():
    run = kernel("""
    #define COUNT 4
    kernel void k(device int* y [[buffer(0)]]) {
      int sum = 0;
      #pragma unroll(COUNT)
      for (int i = 0; i < COUNT; i++) sum += i;
      _Pragma("clang loop unroll(full)")
      for (int i = 0; i < COUNT; i++) sum += i;
      if (sum > 0)
        #pragma clang loop unroll(full)
        for (int i = 0; i < 2; i++) sum += i;
      y[0] = sum;
    }""")
    y = np.zeros(1, np.int32)
    run(y, threads=(1,))
    assert y[0] == 13


def test_attributes_in_front_of_a_definition():
    library = Library(
        HEADER
        + """
    [[kernel, max_total_threads_per_threadgroup(2 * 64)]] void a(device float* y [[buffer(0)]]) { y[0] = 1; }
    template <typename T>
    [[max_total_threads_per_threadgroup(256)]] kernel void b(device T* y [[buffer(0)]]) { y[0] = 1; }
    template [[host_name("b")]] kernel void b<float>(device float* y [[buffer(0)]]);
    template <typename T, int M, int N = 3>
    [[kernel, max_total_threads_per_threadgroup(M * N * 32)]] void c(device T* y [[buffer(0)]]) { y[0] = 1; }
    template [[host_name("c")]] [[kernel]] decltype(c<float, 2>) c<float, 2>;
    """
    )
    assert library.table["kernels"]["a"]["max_total_threads_per_threadgroup"] == 128
    assert library.kernel("a").max_threads == 128
    assert library.kernel("b").max_threads == 256
    assert library.kernel("c").max_threads == 192


def test_words_of_metal_in_strings_and_other_names():
    run = kernel("""
    constant char text[] = "device float";
    struct Device { float device_value, thread_count; };
    kernel void k(device float* y [[buffer(0)]]) {
      Device constants = {1, 2};
      y[0] = constants.device_value + constants.thread_count + sizeof(text);
    }""")
    y = np.zeros(1, np.float32)
    run(y, threads=(1,))
    assert y[0] == 16


WRITE = "void f(device float* p) { p[0] = 1; }\n"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "void f(threadgroup float* p) {}\nkernel void k(device float* x [[buffer(0)]]) { f(x); }",
            "program_source:4:",
        ),
        ("kernel void k(device float* x [[buffer(0)]]) { threadgroup float t[4]; x = t; }", "program_source:3:"),
        ("kernel void k(constant float* x [[buffer(0)]]) { x[0] = 1; }", "program_source:3:"),
        (WRITE + "kernel void k(const device float* x [[buffer(0)]]) { f(x); }", "program_source:4:"),
        (WRITE + "kernel void k(device float* x [[buffer(0)]]) { float l; f(&l); }", "program_source:4:"),
        (
            "kernel void k(device float4* x [[buffer(0)]], device half4* y [[buffer(1)]]) { *x = *y; }",
            "program_source:3:",
        ),
        ("kernel void k(device float4* x [[buffer(0)]]) { x[0] = float4(1, 2); }", "program_source:3:"),
        ("kernel void k(device float* x [[buffer(0)]]) { x[0] = metal::nosuch(1.0f); }", "nosuch"),
        ("kernel void k(device float* x [[buffer(0)]], uint n) { x[0] = n; }", "parameter 'n' of kernel 'k'"),
        ("kernel void k(device float* x [[buffer(31)]]) { x[0] = 1; }", "out of bounds: must be between 0 and 30"),
    ],
)
def test_refused(program, message):
    with pytest.raises(MetalError, match=message):
        kernel(program)


def test_overloads_on_address_spaces():
    run = kernel("""
    int where(device float*) { return 1; }
    int where(threadgroup float*) { return 2; }
    template <typename T> struct space { static constant constexpr int value = 0; };
    template <typename T> struct space<const device T*> { static constant constexpr int value = 3; };
    template <typename T> struct space<threadgroup T*> { static constant constexpr int value = 4; };
    kernel void k(device float* x [[buffer(0)]], device int* y [[buffer(1)]]) {
      threadgroup float t[1];
      y[0] = where(x); y[1] = where(t); y[2] = space<const device float*>::value; y[3] = space<threadgroup int*>::value;
    }""")
    y = np.zeros(4, np.int32)
    run(np.zeros(1, np.float32), y, threads=(1,))
    np.testing.assert_array_equal(y, [1, 2, 3, 4])


def test_packed_vectors():
    run = kernel("""
    struct Vertex { packed_float3 position; packed_half2 uv; };
    kernel void k(const device Vertex* x [[buffer(0)]], device packed_float3* y [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
      packed_float3 p = x[i].position;
      p.x += 10;
      p[1] *= 2;
      y[i] = p + float3(half2(x[i].uv).y);
    }""")
    vertices = np.zeros(3, np.dtype([("position", np.float32, 3), ("uv", np.float16, 2)]))
    vertices["position"] = np.arange(9).reshape(3, 3)
    vertices["uv"][:, 1] = [0.5, 1, 2]
    y = np.zeros((3, 3), np.float32)
    run(vertices, y, threads=(3,))
    expected = vertices["position"] * [1, 2, 1] + [10, 0, 0] + vertices["uv"][:, 1:]
    np.testing.assert_array_equal(y, expected)
    with pytest.raises(MetalError, match="program_source:3"):
        kernel("kernel void k(device packed_float2* y [[buffer(0)]]) { y[0].z = 1; }")


@pytest.mark.usefixtures("plain_run")
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_vectors_at_the_alignment_of_their_elements(offset):
    run = kernel("""
    kernel void k(device float* x [[buffer(0)]], device float* y [[buffer(1)]]) {
      device float4* p = (device float4*)x;
      device float4* q = (device float4*)y;
      for (int i = 0; i < 4; i++) { q[i] = p[i] * 2.0f; q[i] += float4(1); }
    }""")
    x = np.arange(32, dtype=np.float32)
    y = np.zeros(32, np.float32)
    run(x[offset:], y[offset:], threads=(1,))
    np.testing.assert_array_equal(y[offset : offset + 16], x[offset : offset + 16] * 2 + 1)


def test_strings_are_constant():
    """They lie in the constant address space wherever they are values, and initialise arrays as in C++."""
    run = kernel("""
constant char name[] = "abc";
static_assert(sizeof(name) == 4, "a message");
inline uint length(constant const char* s) {
  uint n = 0;
  while (s[n]) n++;
  return n;
}
template <typename T>
uint length_of(T s) {
  return length(s);
}
constant const char* given() { return "four"; }
inline void write(device uint* y, constant char* a, constant const char* function) {
  y[0] = length(a);
  y[1] = length(function);
  y[2] = length_of("x" "yz");
  constant const char* p = "q";
  p = "longer";
  y[3] = length(p);
  y[4] = length(given());
  y[5] = length(name);
}
kernel void k(device uint* y [[buffer(0)]]) { write(y, "hello", __func__); }
""")
    result = np.zeros(6, np.uint32)
    run(result, threads=(1,))
    assert result.tolist() == [5, 1, 3, 6, 4, 3]
