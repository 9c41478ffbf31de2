"""Programs that Apple's compiler refuses, each with a twin that is accepted and differs in nothing but the fault.

The sources of the rules: the Metal Shading Language specification 3.2 (its section in brackets) and, where that is
silent, what Apple's compiler is reported to say. The messages keep its words where they are known.
"""

import dataclasses

import numpy as np
import pytest

from virtual_mps import metallib
from virtual_mps.compiler import CompileError
from virtual_mps.compiler.compile import check
from virtual_mps.compiler.preprocess import preprocess
from virtual_mps.executor import Library, MetalError

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
METAL_31 = 310


@dataclasses.dataclass(frozen=True)
class Program:
    name: str
    refused: str
    accepted: str
    words: str  # in the message, behind its place
    line: int = 3  # of the place; the header takes two
    language: int = METAL_31
    instantiates: bool = False  # found when the kernel is made, as clang finds what only an instantiation shows


def in_kernel(name: str, refused: str, accepted: str, words: str, **others) -> Program:
    """Statements of a kernel with a buffer `x`, a constant `c`, threadgroup memory `s` and an index `i`."""
    frame = (
        "kernel void k(device float* x [[buffer(0)]], constant float& c [[buffer(1)]],\n"
        "  threadgroup float* s [[threadgroup(0)]], uint i [[thread_position_in_grid]]) {\n%s\nx[i] = 1; }"
    )
    return Program(name, frame % refused, frame % accepted, words, **{"line": 5} | others)


def with_helper(name: str, refused: str, accepted: str, words: str, body: str = "", **others) -> Program:
    """Declarations in front of a kernel that uses them."""
    frame = (
        "%s\nkernel void k(device float* x [[buffer(0)]], constant float& c [[buffer(1)]],\n"
        "  threadgroup float* s [[threadgroup(0)]], uint i [[thread_position_in_grid]]) { x[i] = 1; " + body + " }"
    )
    return Program(name, frame % refused, frame % accepted, words, **others)


def parameter(name: str, refused: str, accepted: str, words: str) -> Program:
    """A parameter of a kernel."""
    frame = "kernel void k(%s,\n  device int* out [[buffer(9)]]) { out[0] = 1; }"
    return Program(name, frame % refused, frame % accepted, words)


POINTER = "pointer type must have explicit address space qualifier"
REFERENCE = "reference type must have explicit address space qualifier"
PROGRAM_SCOPE = "program scope variable must reside in constant address space"

ADDRESS_SPACES = [  # [4]
    parameter("kernel_pointer", "float* x [[buffer(0)]]", "device float* x [[buffer(0)]]", POINTER),
    parameter("kernel_reference", "const float& x [[buffer(0)]]", "constant float& x [[buffer(0)]]", REFERENCE),
    with_helper(
        "helper_pointer", "float f(float* p) { return *p; }", "float f(thread float* p) { return *p; }", POINTER
    ),
    with_helper("helper_reference", "void f(float& v) { v = 1; }", "void f(thread float& v) { v = 1; }", REFERENCE),
    with_helper(
        "in_a_template",
        "template <typename T> void f(T* p) { *p = T(0); }",
        "template <typename T> void f(thread T* p) { *p = T(0); }",
        POINTER,
    ),
    with_helper("in_a_typedef", "typedef float* P;", "typedef device float* P;", POINTER),
    with_helper("in_an_alias", "using P = float*;", "using P = device float*;", POINTER),
    with_helper("in_a_member", "struct S { float* p; };", "struct S { device float* p; };", POINTER),
    with_helper("in_a_result", "float* f();", "device float* f();", POINTER),
    in_kernel("in_a_variable", "float* p = x;", "device float* p = x;", POINTER),
    in_kernel("in_a_cast", "uint b = *(uint*)x;", "uint b = *(device uint*)x;", POINTER),
    in_kernel(
        "in_a_reinterpret_cast",
        "uint b = *reinterpret_cast<uint*>(x);",
        "uint b = *reinterpret_cast<device uint*>(x);",
        POINTER,
    ),
    in_kernel("device_to_threadgroup", "threadgroup float* p = x;", "threadgroup float* p = s;", "'device float *'"),
    in_kernel("threadgroup_to_device", "device float* p = s;", "device float* p = x;", "'threadgroup float *'"),
    in_kernel(
        "cast_between",
        "device float* p = (device float*)s;",
        "device float* p = (device float*)x;",
        "'device float *' converts between mismatching address spaces",
    ),
    in_kernel(
        "device_to_thread",
        "thread float* p = x;",
        "float v = x[0]; thread float* p = &v;",
        "no implicit conversion from 'device float *' to 'thread float *'",
    ),
    with_helper(
        "device_argument_to_thread",
        "float f(thread const float* p) { return *p; }",
        "float f(device const float* p) { return *p; }",
        "no implicit conversion from 'const device float *' to 'thread const float *'",
        body="x[0] = f((device const float*)x);",
        line=5,
    ),
    with_helper(
        "constant_argument_to_thread",
        "float f(thread const float& v) { return v; }",
        "float f(constant float& v) { return v; }",
        "no implicit conversion from 'const constant float' to 'thread const float'",
        body="x[0] = f(c);",
        line=5,
    ),
    with_helper(
        "in_an_instantiation",
        "template <typename P> float f(P p) { thread const float* q = p; return *q; }",
        "template <typename P> float f(P p) { P q = p; return *q; }",
        "no implicit conversion from 'device float *' to 'thread const float *'",
        body="x[0] = f(x);",
    ),
    in_kernel(
        "thread_reference_to_constant", "thread float& v = c;", "constant float& v = c;", "'const constant float'"
    ),
    in_kernel("write_to_constant", "c = 1;", "x[1] = c;", "cannot assign to variable 'c' with const-qualified type"),
    with_helper(
        "member_function_of_a_constant",
        "struct P { float a; float twice() const { return 2 * a; } };",
        "struct P { float a; float twice() const constant { return 2 * a; } };",
        "member function 'twice' is not viable: its object is in address space 'constant'",
        body="constant P& p = *(constant P*)&c; x[0] = p.twice();",
        line=5,
    ),
]

VARIABLES = [  # [4.1 to 4.4]
    with_helper(
        "threadgroup_at_program_scope", "threadgroup float t[32];", "constant float t[2] = {1, 2};", PROGRAM_SCOPE
    ),
    with_helper(
        "threadgroup_in_a_helper",
        "float f() { threadgroup float t[32]; t[0] = 1; return t[0]; }",
        "float f(threadgroup float* t) { t[0] = 1; return t[0]; }",
        "automatic variable qualified with the threadgroup address space",
    ),
    with_helper(
        "threadgroup_member", "struct S { threadgroup float t; };", "struct S { float t; };", "field may not be"
    ),
    in_kernel("device_variable", "device float v;", "float v;", "automatic variable qualified with the device"),
    with_helper("global", "float g = 1;", "constant float g = 1;", PROGRAM_SCOPE),
    with_helper("global_const", "const float g = 1;", "constant float g = 1;", PROGRAM_SCOPE),
    with_helper("global_constexpr", "constexpr float g = 1;", "constant constexpr float g = 1;", PROGRAM_SCOPE),
    with_helper(
        "static_member",
        "struct S { static constexpr int n = 1; };",
        "struct S { static constant constexpr int n = 1; };",
        PROGRAM_SCOPE,
    ),
    in_kernel(
        "static_variable", "static int n = 0;", "int n = 0;", "variables in function scope cannot be declared static"
    ),
    in_kernel(
        "register_variable", "register int n = 0;", "int n = 0;", "does not support the 'register' storage class"
    ),
    in_kernel(
        "thread_local_variable", "thread_local int n = 0;", "int n = 0;", "'thread_local' is not supported in Metal"
    ),
]

TYPES = [  # [2.1]
    in_kernel("double", "double v = 1;", "float v = 1;", "'double' is not supported in Metal"),
    in_kernel("long_double", "long double v = 1;", "float v = 1;", "'long double' is not supported in Metal"),
    in_kernel("long_double_literal", "float v = 1.5L;", "float v = 1.5f;", "'long double' is not supported in Metal"),
    in_kernel("long_long", "long long v = 1;", "long v = 1;", "'long long' is not supported in Metal"),
    in_kernel("double_vector", "double3 v;", "float3 v;", "'double3' is not supported in Metal"),
    in_kernel("double_matrix", "double3x3 m;", "float3x3 m;", "'double3x3' is not supported in Metal"),
    in_kernel("matrix_of_five", "float5x5 m;", "float4x4 m;", "unknown type name 'float5x5'"),
    in_kernel(
        "bfloat_initialised",
        "float v = c; bfloat b = v;",
        "float v = c; bfloat b = bfloat(v);",
        "no implicit conversion from 'float' to 'bfloat'",
    ),
    in_kernel("bfloat_literal", "bfloat b = 1.0;", "bfloat b = bfloat(1.0);", "from 'float' to 'bfloat'"),
    in_kernel(
        "half_to_bfloat",
        "half h = 1; bfloat b = h;",
        "half h = 1; float b = h;",
        "cannot initialize a variable of type 'bfloat'",
    ),
    in_kernel(
        "bfloat_to_half",
        "bfloat b = 1; half h = b;",
        "bfloat b = 1; half h = static_cast<half>(b);",
        "cannot initialize a variable of type 'half'",
    ),
    in_kernel("bfloat_assigned", "bfloat b; b = c;", "bfloat b; b = bfloat(c);", "from 'float' to 'bfloat'"),
    in_kernel("bfloat_sum", "bfloat b = 1; b = b + c;", "bfloat b = 1; float f = b + c;", "from 'float' to 'bfloat'"),
    in_kernel(
        "bfloat_compound", "bfloat b = 1; b *= 2.0f;", "bfloat b = 1; b *= bfloat(2);", "from 'float' to 'bfloat'"
    ),
    with_helper(
        "bfloat_result",
        "bfloat f(float v) { return v; }",
        "bfloat f(float v) { return bfloat(v); }",
        "no implicit conversion from 'float' to 'bfloat'",
    ),
    with_helper(
        "bfloat_argument",
        "bfloat f(bfloat v) { return v; }",
        "float f(float v) { return v; }",
        "no implicit conversion from 'float' to 'bfloat'",
        body="x[0] = f(c);",
        line=5,
    ),
    Program(
        "bfloat_in_an_instantiation",
        "template <typename T> [[kernel]] void k(device T* x [[buffer(0)]]) {\nx[0] = 0.5f; }\n"
        'template [[host_name("k")]] [[kernel]] decltype(k<bfloat>) k<bfloat>;',
        "template <typename T> [[kernel]] void k(device T* x [[buffer(0)]]) {\nx[0] = 0.5f; }\n"
        'template [[host_name("k")]] [[kernel]] decltype(k<half>) k<half>;',
        "no implicit conversion from 'float' to 'bfloat'",
        line=4,
        instantiates=True,
    ),
]

LANGUAGE = [  # [1.5.4]
    in_kernel("goto", "goto end;\nend: x[1] = 1;", "x[1] = 1;", "'goto' is not supported in Metal"),
    in_kernel("throw", "throw 1;", "return;", "'throw' is not supported in Metal"),
    in_kernel("try", "try { x[1] = 1; } catch (...) {}", "{ x[1] = 1; }", "'try' is not supported in Metal"),
    in_kernel("new", "thread float* p = new float(1);", "float v = 1; thread float* p = &v;", "'new' is not supported"),
    in_kernel("delete", "device float* p = x; delete p;", "device float* p = x;", "'delete' is not supported in Metal"),
    in_kernel("typeid", "typeid(i);", "sizeof(i);", "'typeid' is not supported in Metal"),
    with_helper(
        "dynamic_cast",
        "struct B {}; struct D : B {}; thread D* f(thread B* b) { return dynamic_cast<thread D*>(b); }",
        "struct B {}; struct D : B {}; thread D* f(thread B* b) { return static_cast<thread D*>(b); }",
        "'dynamic_cast' is not supported in Metal",
    ),
    with_helper(
        "virtual",
        "struct S { virtual float f() { return 1; } };",
        "struct S { float f() { return 1; } };",
        "virtual functions are not supported in Metal",
    ),
    in_kernel("asm", 'asm("nop");', "", "illegal asm statement"),
    in_kernel(
        "lambda_before_3_2",
        "auto f = [](float v) { return 2 * v; };",
        "float f = 2;",
        "lambda expressions are not supported in Metal",
    ),
    in_kernel(
        "parenthesised_aggregate",
        "struct S { int a, b; }; S v(1, 2);",
        "struct S { int a, b; }; S v{1, 2};",
        "no matching constructor for initialization of 'S'",
    ),
    with_helper(
        "deduced_class_arguments",
        "template <typename T> struct S { T v; S(T a) : v(a) {} }; float f() { S v(1.0f); return v.v; }",
        "template <typename T> struct S { T v; S(T a) : v(a) {} }; float f() { S<float> v(1.0f); return v.v; }",
        "class template argument deduction: C++17, and Metal 3 is C++14",
    ),
    with_helper(
        "concept",
        "template <typename T> concept Small = sizeof(T) < 4;",
        "template <typename T> struct Small { enum { value = sizeof(T) < 4 }; };",
        "concepts are C++20, Metal 3 is C++14",
    ),
    with_helper(
        "requires",
        "template <typename T> requires(sizeof(T) < 4) T f(T v) { return v; }",
        "template <typename T, typename = enable_if_t<(sizeof(T) < 4)>> T f(T v) { return v; }",
        "concepts are C++20, Metal 3 is C++14",
    ),
    with_helper(
        "auto_parameter",
        "float f(auto v) { return v; }",
        "template <typename T> float f(T v) { return v; }",
        "'auto' not allowed in function prototype",
    ),
    with_helper(
        "auto_template_parameter",
        "template <auto N> int f() { return N; }",
        "template <int N> int f() { return N; }",
        "'auto' not allowed in template parameter",
    ),
]

FUNCTIONS = [  # [6]
    in_kernel("printf", 'printf("%d", i);', "", "use of undeclared identifier 'printf'"),
    in_kernel("std", "float v = std::sqrt(c);", "float v = metal::sqrt(c);", "use of undeclared identifier 'std'"),
    in_kernel("erf", "float v = erf(c);", "float v = exp(c);", "use of undeclared identifier 'erf'"),
    in_kernel("c_name", "float v = sqrtf(c);", "float v = sqrt(c);", "use of undeclared identifier 'sqrtf'"),
    in_kernel("malloc", "thread void* p = malloc(4);", "", "use of undeclared identifier 'malloc'"),
    in_kernel(
        "simd_sum_long",
        "long v = simd_sum(long(i));",
        "int v = simd_sum(int(i));",
        "no matching function for call to 'simd_sum'",
    ),
    in_kernel("simd_max_ulong", "ulong v = simd_max(ulong(i));", "uint v = simd_max(i);", "call to 'simd_max'"),
    in_kernel(
        "simd_shuffle_bool",
        "bool v = simd_shuffle(i > 1, 0);",
        "ushort v = simd_shuffle(ushort(i > 1), 0);",
        "call to 'simd_shuffle'",
    ),
    in_kernel("atomic_half", "atomic<half> a;", "atomic<int> a;", "atomic types are int, uint, bool, float and ulong"),
    in_kernel(
        "atomic_add_ulong",
        "atomic_fetch_add_explicit((device atomic_ulong*)x, 1ul, memory_order_relaxed);",
        "atomic_fetch_add_explicit((device atomic_uint*)x, 1u, memory_order_relaxed);",
        "no matching function for call to 'atomic_fetch_add_explicit'",
    ),
    in_kernel(
        "atomic_max_float",
        "atomic_fetch_max_explicit((device atomic_float*)x, 1.0f, memory_order_relaxed);",
        "atomic_fetch_max_explicit((device atomic_int*)x, 1, memory_order_relaxed);",
        "no matching function for call to 'atomic_fetch_max_explicit'",
    ),
    in_kernel(
        "simdgroup_matrix_of_16",
        "simdgroup_matrix<float, 16, 16> m;",
        "simdgroup_matrix<float, 8, 8> m;",
        "simdgroup matrices are 8x8",
    ),
]

KERNELS = [  # [5.1, 5.2]
    Program(
        "result",
        "kernel int k(device int* out [[buffer(0)]]) { return out[0]; }",
        "kernel void k(device int* out [[buffer(0)]]) { out[1] = out[0]; }",
        "invalid return type 'int' for kernel function",
    ),
    Program(
        "member",
        "struct S { kernel void k(device int* out [[buffer(0)]]) { out[0] = 1; } };",
        "kernel void k(device int* out [[buffer(0)]]) { out[0] = 1; }",
        "kernel function cannot be a member function",
    ),
    Program(
        "called",
        "kernel void k(device int* out [[buffer(0)]]) { out[0] = 1; }\n"
        "kernel void l(device int* out [[buffer(0)]]) { k(out); }",
        "void k(device int* out) { out[0] = 1; }\nkernel void l(device int* out [[buffer(0)]]) { k(out); }",
        "kernel function 'k' cannot be called",
        line=4,
    ),
    Program(
        "two_of_a_name",
        '[[host_name("same")]] kernel void k(device int* out [[buffer(0)]]) { out[0] = 1; }\n'
        '[[host_name("same")]] kernel void l(device int* out [[buffer(0)]]) { out[0] = 1; }',
        '[[host_name("one")]] kernel void k(device int* out [[buffer(0)]]) { out[0] = 1; }\n'
        '[[host_name("other")]] kernel void l(device int* out [[buffer(0)]]) { out[0] = 1; }',
        "a kernel with the name 'same' is at program_source:3:1 already",
        line=4,
    ),
    Program(
        "same_index",
        "kernel void k(device int* a [[buffer(9)]],\n  device int* out [[buffer(9)]]) { out[0] = 1; }",
        "kernel void k(device int* a [[buffer(8)]],\n  device int* out [[buffer(9)]]) { out[0] = 1; }",
        "cannot reserve 'buffer' resource location at index 9",
        line=4,
    ),
    parameter(
        "index_of_31", "device int* a [[buffer(31)]]", "device int* a [[buffer(30)]]", "must be between 0 and 30"
    ),
    parameter(
        "scalar_in_a_buffer",
        "uint n [[buffer(0)]]",
        "constant uint& n [[buffer(0)]]",
        "not valid for attribute 'buffer'",
    ),
    parameter(
        "threadgroup_in_a_buffer",
        "threadgroup float* a [[buffer(0)]]",
        "threadgroup float* a [[threadgroup(0)]]",
        "invalid address space qualification for buffer pointee type 'threadgroup float'",
    ),
    parameter("thread_in_a_buffer", "thread float* a [[buffer(0)]]", "device float* a [[buffer(0)]]", "'thread float'"),
    parameter(
        "device_in_threadgroup_memory",
        "device float* a [[threadgroup(0)]]",
        "threadgroup float* a [[threadgroup(0)]]",
        "valid address space qualifications are threadgroup",
    ),
    parameter(
        "position_as_float",
        "float i [[thread_position_in_grid]]",
        "uint i [[thread_position_in_grid]]",
        "type 'float' is not valid for attribute 'thread_position_in_grid'",
    ),
    parameter("position_as_int", "int i [[thread_position_in_grid]]", "ushort i [[thread_position_in_grid]]", "'int'"),
    parameter(
        "position_of_four", "uint4 i [[thread_position_in_grid]]", "uint3 i [[thread_position_in_grid]]", "'uint4'"
    ),
    parameter(
        "lane_of_three", "uint3 i [[thread_index_in_simdgroup]]", "uint i [[thread_index_in_simdgroup]]", "'uint3'"
    ),
    parameter("no_attribute", "uint n", "constant uint& n", "has no attribute that says what it is bound to"),
]

PROGRAMS = [*ADDRESS_SPACES, *VARIABLES, *TYPES, *LANGUAGE, *FUNCTIONS, *KERNELS]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_refused(program):
    with pytest.raises(MetalError) as error:
        library = Library(HEADER + program.refused, language_version=program.language)
        if program.instantiates:
            library.kernel("k")
    message = str(error.value)
    assert program.words in message
    place = next(line for line in message.splitlines() if program.words in line)
    assert place.startswith(f"program_source:{program.line}:"), message


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_the_twin_is_accepted(program):
    library = Library(HEADER + program.accepted, language_version=program.language)
    if program.instantiates:
        library.kernel("k")


# Newer than C++14, and no more than a warning of Apple's compiler: MLX's kernels, which it compiles, are full of
# `if constexpr`. Under -Werror it refuses them.
EXTENSIONS = {
    "if_constexpr": ("if constexpr (sizeof(int) == 4) x[i] = 2;", "constexpr if"),
    "if_initialiser": ("if (uint n = i; n > 2) x[i] = n;", "if initialization statements"),
    "structured_binding": (
        "struct S { int a, b; }; auto [a, b] = S{1, 2}; x[i] = a + b;",
        "decomposition declarations",
    ),
    "fold_expression": ("x[i] = sum(1, 2);", "pack fold expression"),
    "nested_namespace": ("x[i] = a::b::two;", "nested namespace definition"),
    "inline_variable": ("x[i] = three;", "inline variables"),
}
FRAME = """
namespace a::b { constant int two = 2; }
inline constant constexpr int three = 3;
template <typename... T> int sum(T... v) { return (v + ...); }
kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
%s
}
"""


@pytest.mark.parametrize("name", EXTENSIONS)
def test_extensions_are_warned_of(name):
    statement, words = EXTENSIONS[name]
    text = preprocess(HEADER + FRAME % statement, language=METAL_31)
    warning = next(line for line in check(text, METAL_31) if words in line)
    assert ": warning: " in warning
    assert warning.endswith("-extensions]")
    with pytest.raises(CompileError, match=f"program_source:[0-9:]+ error: .*{words}"):
        check(text, METAL_31, werror=True)
    assert check(preprocess(HEADER + FRAME % "x[i] = 1;", language=400), 400) == []


@pytest.mark.parametrize(
    ("flags", "ends"),
    [
        ([], 0),
        (["-Werror"], 1),
        (["-Werror=c++17-extensions"], 1),
        (["-Werror", "-Wno-c++17-extensions"], 0),
        (["-Werror=c++20-extensions"], 0),
    ],
)
def test_xcrun_metal_says_so_when_it_compiles(flags, ends, tmp_path, capsys):
    source = tmp_path / "a.metal"
    source.write_text(HEADER + "kernel void k(device float* x [[buffer(0)]]) { if constexpr (true) x[0] = 1; }")
    arguments = ["-sdk", "macosx", "metal", "-std=metal3.1", *flags, "-c", str(source), "-o", str(tmp_path / "a.air")]
    assert metallib.xcrun(arguments) == ends
    told = capsys.readouterr().err
    assert ("a.metal:3:" in told) == ("-Wno-c++17-extensions" not in flags)
    assert (" error: " in told) == bool(ends)


def test_xcrun_metal_refuses(tmp_path, capsys):
    source = tmp_path / "a.metal"
    source.write_text(HEADER + "kernel void k(device float* x [[buffer(0)]]) { double v = 1; x[0] = v; }")
    assert metallib.xcrun(["metal", "-c", str(source), "-o", str(tmp_path / "a.air")]) == 1
    assert "a.metal:3:48: error: 'double' is not supported in Metal" in capsys.readouterr().err
    assert not (tmp_path / "a.air").exists()


def test_lambdas_are_from_metal_3_2_on():
    Library(HEADER + next(p for p in LANGUAGE if p.name == "lambda_before_3_2").refused, language_version=320)


def test_all_instantiations_can_be_read_at_once():
    text = preprocess(HEADER + next(p for p in TYPES if p.instantiates).refused)
    assert check(text) == []
    with pytest.raises(
        CompileError, match="program_source:4:8: error: no implicit conversion from 'float' to 'bfloat'"
    ):
        check(text, instantiate=True)


def test_too_much_threadgroup_memory():
    source = HEADER + "kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) {"
    source += "threadgroup float t[%d]; t[i] = i; x[i] = t[i]; }"
    Library(source % 8192).kernel("k")
    words = r"Threadgroup memory size \(32772\) exceeds the maximum threadgroup memory allowed \(32768\)"
    with pytest.raises(MetalError, match=words):
        Library(source % 8193).kernel("k")


CONSTANTS = """
constant int n [[function_constant(3)]];
constant int twice = 2 * n;
int f() { return %s; }
kernel void k(device float* x [[buffer(0)]]) { x[0] = f(); }
kernel void other(device float* x [[buffer(0)]]) { x[0] = 1; }
"""


@pytest.mark.parametrize("use", ["n", "twice"])
def test_a_missing_function_constant(use):
    library = Library(HEADER + CONSTANTS % use)
    library.kernel("k", {"n": np.int32(1)})
    library.kernel("other")
    with pytest.raises(MetalError, match="program_source:4:1: error: function constant 'n' at index 3 has no value"):
        library.kernel("k")


def test_a_function_constant_that_may_be_missing():
    Library(HEADER + CONSTANTS % "is_function_constant_defined(n) ? n : 1").kernel("k")


def test_a_template_without_instantiations_is_no_kernel():
    library = Library(
        HEADER
        + "template <typename T> [[kernel]] void t(device T* x [[buffer(0)]]) { x[0] = 1; }"
        + "kernel void k(device float* x [[buffer(0)]]) { x[0] = 1; }"
    )
    with pytest.raises(MetalError, match="the library has no kernel 't'; it has k"):
        library.kernel("t")
