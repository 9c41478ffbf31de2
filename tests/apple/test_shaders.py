"""Every shader as Apple's compiler reads it, for every kernel and every set of function constants that csrc asks for.

And no function of Metal's library that is not known to be there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from . import air, recording, stand_in
from .conftest import replace

ROOT = Path(__file__).resolve().parents[2]
COPIES = {"paged_cache_write"}  # do nothing but load and store
SHADERS = sorted((ROOT / "shaders").glob("*.metal"))


def instantiate(shader: stand_in.Shader, names: set[str] | None = None) -> str:
    """C++ that asks for the kernels of these names, or for all."""
    wanted = [kernel for kernel in shader.kernels if names is None or kernel.name in names]
    return "\n".join(f"auto metalk_kernel_{i} = {kernel.expression};" for i, kernel in enumerate(wanted))


def by_constants(shader: stand_in.Shader, asked: list[recording.Launch]) -> dict[tuple[bool, ...], set[str]]:
    """Set of function constants -> the kernels that csrc asks for with them."""
    found: dict[tuple[bool, ...], set[str]] = {}
    for launch in asked:
        found.setdefault(launch.constants, set()).add(launch.kernel)
    return found


@pytest.mark.parametrize("path", SHADERS, ids=lambda path: path.stem)
def test_apples_compiler_has_no_objection(path: Path, recorded: list[recording.Launch]) -> None:
    shader = stand_in.read_shader(path)
    shader.check()
    names = {constant.index: constant.name for constant in shader.constants}
    checked = set()
    for values, kernels in by_constants(shader, [a for a in recorded if a.library == path.stem]).items():
        constants = {names[i]: value for i, value in enumerate(values) if i in names}
        shader.check_kernels(constants, instantiate(shader, kernels))
        checked |= kernels
    assert checked == {kernel.name for kernel in shader.kernels}


def unknown_functions(path: Path) -> list[str]:
    shader = stand_in.read_shader(path)
    used = stand_in.library_functions(shader.syntax_tree(instantiate(shader)))
    assert used or path.stem in COPIES, "every kernel that calculates uses some function of Metal's library"
    calls = {(name, air.element_type(argument)) for name, argument in used}
    return sorted(f"{name}({element})" for name, element in calls if air.proof(name, element) is None)


@pytest.mark.parametrize("path", SHADERS, ids=lambda path: path.stem)
def test_functions_are_known_to_be_there(path: Path) -> None:
    assert unknown_functions(path) == []


def test_intrinsics_are_in_libraries_that_apples_compiler_made() -> None:
    found = set().union(*map(air.intrinsics, air.libraries()))
    assert found == air.listed()


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "shaders", tmp_path / "shaders"))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("dweight[column] = W(sum);", "double precise_sum = sum;\n  dweight[column] = W(precise_sum);", "double"),
        ("dweight[column] = W(sum);", "if constexpr (sizeof(W) == 4) {\n  dweight[column] = W(sum);\n}", "constexpr"),
        ("dweight[column] = W(sum);", "device W* to = dweight;\n  to[column] = sum;", "no implicit conversion"),
        ("  float sum = 0.0f;\n  for (uint group", "  static float sum;\n  for (uint group", "static"),
        ("dweight[column] = W(sum);", "dweight[column] = W(float(simd_sum(ulong(groups))));", "simd_sum"),
    ],
    ids=["double", "C++17", "a conversion to bfloat", "a static variable", "a 64-bit simd reduction"],
)
def test_finds_what_apples_compiler_refuses(old: str, new: str, expected: str, planted: Path) -> None:
    replace(planted / "rms_norm.metal", old, new)
    with pytest.raises(stand_in.CompileError, match=expected):
        stand_in.read_shader(planted / "rms_norm.metal").check()


def test_finds_a_function_constant_that_csrc_does_not_set() -> None:
    shader = stand_in.read_shader(ROOT / "shaders/rms_norm.metal")
    with pytest.raises(stand_in.CompileError, match="function constant 'wants_dweight' at index 4 has no value"):
        constants = {constant.name: True for constant in shader.constants if constant.index < 4}
        shader.check_kernels(constants, instantiate(shader, {"rms_norm_backward_looped_half_half_half"}))


def test_finds_a_function_that_metal_has_not(planted: Path) -> None:
    """Apple's exp is for float and half; the stand-in's takes a bfloat as well."""
    replace(planted / "rms_norm.metal", "dweight[column] = W(sum);", "dweight[column] = W(float(exp(bfloat(sum))));")
    assert unknown_functions(planted / "rms_norm.metal") == ["exp(bfloat)"]


@pytest.mark.parametrize(
    ("function", "argument", "proof"),
    [
        ("simd_sum", "float", "air.simd_sum.f32"),
        ("simd_sum", "_Float16", "air.simd_sum.f16"),
        ("simd_max", "vec<unsigned char, 2>", "air.simd_max.u.i8"),
        ("simdgroup_load", "simdgroup_matrix<__bf16, 8, 8> &", "air.simdgroup_matrix_8x8_load.v64bf16.p3bf16"),
        ("simdgroup_store", "const simdgroup_matrix<float, 8, 8> &", "air.simdgroup_matrix_8x8_store.v64f32.p1f32"),
        ("threadgroup_barrier", "mem_flags", "air.wg.barrier"),
        ("min", "long", "air.min.s.i64"),
        ("popcount", "uint", "Integer Functions"),
        ("simd_sum", "long", None),
        ("erf", "float", None),
    ],
)
def test_proof_is_of_the_function_and_the_type(function: str, argument: str, proof: str | None) -> None:
    assert air.proof(function, air.element_type(argument)) == proof
