"""The standard library's arithmetic, against NumPy in float64."""

import math

import numpy as np
import pytest

from virtual_mps.executor import Library, MetalError

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"

X = np.array([0.0, 0.25, 0.5, 0.9, 1.0, 1.5, 2.5, 3.0, 7.25, 20.0, -0.3, -1.5, -2.5, -8.0], np.float32)
UNIT = np.array([-1.0, -0.7, 0.0, 0.3, 0.99], np.float32)
POSITIVE = np.array([0.001, 0.5, 1.0, 1.5, 42.0, 1e10], np.float32)
ABOVE_ONE = np.array([1.0, 1.5, 30.0], np.float32)


def fract(x):
    return x - np.floor(x)


def round_half_away(x):
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


UNARY = {
    "acos": (np.arccos, UNIT),
    "acosh": (np.arccosh, ABOVE_ONE),
    "asin": (np.arcsin, UNIT),
    "asinh": (np.arcsinh, X),
    "atan": (np.arctan, X),
    "atanh": (np.arctanh, UNIT[1:]),
    "ceil": (np.ceil, X),
    "cos": (np.cos, X),
    "cosh": (np.cosh, X),
    "cospi": (lambda x: np.cos(np.pi * x), X),
    "exp": (np.exp, X),
    "exp2": (np.exp2, X),
    "exp10": (lambda x: 10.0**x, X),
    "fabs": (np.abs, X),
    "floor": (np.floor, X),
    "fract": (fract, X),
    "log": (np.log, POSITIVE),
    "log2": (np.log2, POSITIVE),
    "log10": (np.log10, POSITIVE),
    "rint": (np.rint, X),
    "round": (round_half_away, X),
    "rsqrt": (lambda x: 1 / np.sqrt(x), POSITIVE),
    "saturate": (lambda x: np.clip(x, 0, 1), X),
    "sign": (np.sign, X),
    "sin": (np.sin, X),
    "sinh": (np.sinh, X),
    "sinpi": (lambda x: np.sin(np.pi * x), X),
    "sqrt": (np.sqrt, POSITIVE),
    "tan": (np.tan, X),
    "tanh": (np.tanh, X),
    "tanpi": (lambda x: np.tan(np.pi * x), np.array([0.0, 0.25, -0.3, 1.75], np.float32)),
    "trunc": (np.trunc, X),
}
BINARY = {
    "atan2": np.arctan2,
    "copysign": np.copysign,
    "divide": np.divide,
    "fdim": lambda a, b: np.maximum(a - b, 0),
    "fmax": np.maximum,
    "fmin": np.minimum,
    "fmod": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "powr": np.power,
    "step": lambda edge, x: np.where(x < edge, 0, 1),
}
A = np.array([0.5, 1.25, 7.5, 3.0, 2.0, 1e4], np.float32)
B = np.array([2.0, -3.0, 0.7, 3.0, 0.1, 1.5], np.float32)


@pytest.fixture(scope="module")
def kernels():
    """Three kernels a function, over float, half and float4; in one library, so that each is compiled on its own."""
    lines = []
    for name in UNARY:
        lines.append(f"""
        kernel void {name}_float(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                 uint i [[thread_position_in_grid]]) {{
          float4 v = {name}(float4(x[i], 1, 1, x[i]));
          y[4 * i] = {name}(x[i]);
          y[4 * i + 1] = precise::{name}(x[i]);
          y[4 * i + 2] = fast::{name}(x[i]);
          y[4 * i + 3] = v.w;
        }}
        kernel void {name}_half(const device half* x [[buffer(0)]], device half* y [[buffer(1)]],
                                uint i [[thread_position_in_grid]]) {{ y[i] = {name}(x[i]); }}""")
    for name in BINARY:
        lines.append(f"""
        kernel void {name}_float(const device float* a [[buffer(0)]], const device float* b [[buffer(1)]],
                                 device float* y [[buffer(2)]], uint i [[thread_position_in_grid]]) {{
          y[3 * i] = {name}(a[i], b[i]);
          y[3 * i + 1] = {name}(float2(a[i]), float2(0, b[i])).y;
          y[3 * i + 2] = {name}(float3(a[i]), b[i]).z;
        }}""")
    return Library(HEADER + "\n".join(lines))


@pytest.mark.parametrize("name", UNARY)
def test_unary(kernels, name):
    reference, x = UNARY[name]
    y = np.zeros((len(x), 4), np.float32)
    kernels.kernel(f"{name}_float")(x, y, threads=(len(x),))
    expected = reference(x.astype(np.float64))
    # 2e-7: two roundings of fp32; the absolute part is for results near a zero of the function.
    np.testing.assert_allclose(y, np.tile(expected[:, None], 4), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", ["exp", "rsqrt", "tanh", "sin", "round"])
def test_half_is_computed_in_float_and_rounded_once(kernels, name):
    reference, x = UNARY[name]
    x = x[np.abs(x) < 10].astype(np.float16)
    y = np.zeros(len(x), np.float16)
    kernels.kernel(f"{name}_half")(x, y, threads=(len(x),))
    np.testing.assert_array_equal(y, reference(x.astype(np.float64)).astype(np.float32).astype(np.float16))


@pytest.mark.parametrize("name", BINARY)
def test_binary(kernels, name):
    y = np.zeros((len(A), 3), np.float32)
    kernels.kernel(f"{name}_float")(A, B, y, threads=(len(A),))
    expected = BINARY[name](A.astype(np.float64), B.astype(np.float64))
    np.testing.assert_allclose(y, np.tile(expected[:, None], 3), rtol=2e-6, atol=1e-7)


# Each entry: a Metal expression of float, and its value. `n` is NaN, `inf` infinity, `d` 3.5.
FLOAT_EXPRESSIONS = [
    ("max(n, 1.0f)", 1.0),
    ("min(1.0f, n)", 1.0),
    ("fmax(n, n)", math.nan),
    ("clamp(d, 0.0f, 2.0f)", 2.0),
    ("clamp(n, 0.0f, 2.0f)", 0.0),
    ("max3(1.0f, d, 2.0f)", 3.5),
    ("min3(1.0f, d, 2.0f)", 1.0),
    ("median3(1.0f, d, 2.0f)", 2.0),
    ("fma(d, 2.0f, 1.0f)", 8.0),
    ("fma(float4(d), float4(2), float4(1)).w", 8.0),
    ("mix(1.0f, d, 0.5f)", 2.25),
    ("mix(float2(1), float2(d), 0.5f).y", 2.25),
    ("smoothstep(0.0f, 7.0f, d)", 0.5),
    ("isnan(n) + 2 * isnan(d) + 4 * isinf(inf) + 8 * isinf(n)", 5.0),
    ("isfinite(d) + 2 * isfinite(inf) + 4 * isnormal(d) + 8 * isnormal(1e-40f)", 5.0),
    ("signbit(-d) + 2 * signbit(d) + 4 * isunordered(n, d) + 8 * isordered(d, d)", 13.0),
    ("all(float2(d, 1) > 0.5f) + 2 * any(float2(d, 1) > 3) + 4 * all(float2(d, 1) > 3)", 3.0),
    ("any(isnan(float4(1, n, 1, 1)))", 1.0),
    ("dot(float3(1, 2, 3), float3(d, 1, 1))", 8.5),
    ("length(float2(3, 4)) + length_squared(float2(3, 4))", 30.0),
    ("distance(float2(1, 1), float2(4, 5)) + distance_squared(float2(1, 1), float2(4, 5))", 30.0),
    ("normalize(float2(3, 4)).y", 0.8),
    ("cross(float3(1, 0, 0), float3(0, 1, 0)).z", 1.0),
    ("ldexp(d, 3)", 28.0),
    ("ilogb(d)", 1.0),
    ("fract(-1e-10f)", 1 - 2**-24),
    ("sign(n)", 0.0),
    ("powr(-1.0f, 2.0f)", math.nan),
    ("sinpi(1e6f)", 0.0),
    ("cospi(0.5f)", 0.0),
    ("nextafter(1.0f, 2.0f)", 1 + 2**-23),
    ("abs(-d) + abs(float2(-d)).y", 7.0),
    ("float(abs(-3)) + float(abs(int2(-4)).x)", 7.0),
    ("float(numeric_limits<half>::max()) - HALF_MAX", 0.0),
    ("numeric_limits<float>::infinity() - 0", math.inf),
    ("float(numeric_limits<short>::lowest())", -32768.0),
    ("float(numeric_limits<uint>::max() == UINT_MAX) + float(numeric_limits<bool>::max())", 2.0),
    ("M_PI_F - float(M_PI_H)", math.pi - float(np.float16(math.pi))),
]
INTEGER_EXPRESSIONS = [  # of long
    ("popcount(0xF0F0u)", 8),
    ("popcount(char(-1))", 8),
    ("clz(1)", 31),
    ("clz(ushort(1))", 15),
    ("clz(0u)", 32),
    ("ctz(8)", 3),
    ("ctz(0u)", 32),
    ("reverse_bits(1u)", 1 << 31),
    ("reverse_bits(uchar(1))", 128),
    ("rotate(0x80000001u, 1u)", 3),
    ("extract_bits(0xABCDu, 4, 8)", 0xBC),
    ("extract_bits(int(0xF0), 4, 4)", -1),
    ("insert_bits(0u, 0xFu, 4, 4)", 0xF0),
    ("mulhi(0x80000000u, 4u)", 2),
    ("mulhi(-2147483647 - 1, 4)", -2),
    ("mulhi(1ul << 63, 4ul)", 2),
    ("madhi(0x80000000u, 4u, 5u)", 7),
    ("absdiff(-5, 7)", 12),
    ("absdiff(3u, 5u)", 2),
    ("addsat(2147483647, 1)", 2147483647),
    ("addsat(uchar(250), uchar(10))", 255),
    ("subsat(3u, 5u)", 0),
    ("subsat(-2147483647, 5)", -2147483648),
    ("hadd(3u, 4u)", 3),
    ("rhadd(3u, 4u)", 4),
    ("mul24(1000, 1000)", 1000000),
    ("mad24(1000, 1000, 1)", 1000001),
    ("max(3, 5) + min(-3, 5)", 2),
    ("clamp(7, 0, 5)", 5),
    ("clz(uint2(1, 2)).y", 30),
    ("max(int4(1, 2, 3, 4), 3).x", 3),
    ("select(1, 2, true)", 2),
    ("int(half(-1.75h))", -1),
    ("as_type<int>(uint2(1, 2).y)", 2),
]


def test_expressions_of_float():
    lines = "\n".join(f"y[{i}] = {expression};" for i, (expression, _) in enumerate(FLOAT_EXPRESSIONS))
    run = Library(f"""{HEADER}
    kernel void k(const device float* x [[buffer(0)]], device float* y [[buffer(1)]]) {{
      float n = x[0], inf = x[1], d = x[2];
      {lines}
    }}""").kernel("k")
    y = np.zeros(len(FLOAT_EXPRESSIONS), np.float32)
    run(np.array([np.nan, np.inf, 3.5], np.float32), y, threads=(1,))
    for (expression, expected), value in zip(FLOAT_EXPRESSIONS, y, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-7, err_msg=expression)


def test_expressions_of_integers():
    lines = "\n".join(f"y[{i}] = {expression};" for i, (expression, _) in enumerate(INTEGER_EXPRESSIONS))
    run = Library(f"{HEADER}\nkernel void k(device long* y [[buffer(0)]]) {{ {lines} }}").kernel("k")
    y = np.zeros(len(INTEGER_EXPRESSIONS), np.int64)
    run(y, threads=(1,))
    for (expression, expected), value in zip(INTEGER_EXPRESSIONS, y, strict=True):
        assert value == expected, expression


def test_functions_with_two_results():
    run = Library(f"""{HEADER}
    kernel void k(const device float* x [[buffer(0)]], device float* y [[buffer(1)]]) {{
      float c, whole; int e; float2 cosines;
      y[0] = sincos(x[0], c); y[1] = c;
      y[2] = modf(x[1], whole); y[3] = whole;
      y[4] = frexp(x[2], e); y[5] = e;
      y[6] = sincos(float2(0, x[0]), cosines).y; y[7] = cosines.y;
    }}""").kernel("k")
    y = np.zeros(8, np.float32)
    run(np.array([0.7, -2.25, 48.0], np.float32), y, threads=(1,))
    sine, cosine = math.sin(0.7), math.cos(0.7)
    np.testing.assert_allclose(y, [sine, cosine, -0.25, -2, 0.75, 6, sine, cosine], rtol=1e-6)


def test_safe_math_unless_asked():
    """What fast math may assume away: NaN tests, and the order of a sum."""
    source = f"""{HEADER}
    kernel void k(const device float* x [[buffer(0)]], device float* y [[buffer(1)]]) {{
      y[0] = isnan(x[0]) ? 1 : 0;
      y[1] = (x[1] + x[2]) - x[1];
      y[2] = x[3] * 0.0f;
    }}"""
    x = np.array([np.nan, 1e8, 1.0, np.inf], np.float32)
    safe, fast = np.zeros(3, np.float32), np.zeros(3, np.float32)
    Library(source).kernel("k")(x, safe, threads=(1,))
    Library(source, fast_math=True).kernel("k")(x, fast, threads=(1,))
    np.testing.assert_array_equal(safe, [1, 0, np.nan])
    assert fast[1] == 1  # reassociated: the option reaches the compiler


@pytest.mark.parametrize("expression", ["max(1, 2.0f)", "min(x[0], 1.0h)", "exp(1)", "clamp(x[0], 0, 1)"])
def test_mixed_arguments_are_ambiguous(expression):
    with pytest.raises(MetalError, match="ambiguous"):
        Library(f"{HEADER}\nkernel void k(device float* x [[buffer(0)]]) {{ x[0] = {expression}; }}")


def test_a_template_of_the_same_name_loses_against_the_library():
    run = Library(f"""{HEADER}
    namespace other {{ template <typename T, typename U> float pow(T, U) {{ return -1; }} }}
    using namespace other;
    kernel void k(device float* y [[buffer(0)]]) {{ y[0] = pow(2.0f, 3.0f); y[1] = pow(2.0f, 3); }}""").kernel("k")
    y = np.zeros(2, np.float32)
    run(y, threads=(1,))
    np.testing.assert_array_equal(y, [8, -1])


def test_sources_may_bring_overloads_for_bfloat():
    run = Library(f"""{HEADER}
    namespace metal {{ inline bfloat exp(bfloat) {{ return bfloat(-1.0f); }} }}
    kernel void k(device float* y [[buffer(0)]]) {{ y[0] = float(exp(bfloat(1.0f))); y[1] = float(log(bfloat(1.0f))); }}
    """).kernel("k")
    y = np.ones(2, np.float32)
    run(y, threads=(1,))
    np.testing.assert_array_equal(y, [-1, 0])
