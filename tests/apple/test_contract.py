"""Host and shaders agree: every kernel that csrc asks for is there, with the buffers, struct layouts and function
constants that csrc binds; generated from a recording of csrc and a reading of the shaders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from . import contract, recording, shaders, stand_in
from .conftest import replace
from .shaders import Library

ROOT = Path(__file__).resolve().parents[2]


def read_all(folder: Path) -> dict[str, Library]:
    return {file.stem: shaders.read(file) for file in sorted(folder.glob("*.metal"))}


def test_csrc_asks_for_what_the_shaders_offer(recorded: list[recording.Launch]) -> None:
    libraries = read_all(ROOT / "shaders")
    assert contract.breaches(recorded, libraries) == []
    kernels = {(library.name, kernel) for library in libraries.values() for kernel in library.kernels}
    assert {(launch.library, launch.kernel) for launch in recorded} == kernels


def test_structs_lie_alike_on_both_sides(frameworks: Path) -> None:
    host = contract.host_structs(ROOT / "shaders/params.h", frameworks)
    offered = {name: s for library in read_all(ROOT / "shaders").values() for name, s in library.structs.items()}
    assert contract.layout_differences(host, offered) == []
    assert "RMSNormParams" in offered


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "shaders", tmp_path / "shaders"))


IN_SHADERS = {
    "a misspelt host_name": (
        'host_name("rms_norm_dweight_" #W)',
        'host_name("rms_norm_dwieght_" #W)',
        "rms_norm_dweight_half: rms_norm.metal has no such kernel",
    ),
    "an instantiation that nobody asks for": (
        "INSTANTIATE(half, half, half)\n",
        "INSTANTIATE(half, half, half)\nINSTANTIATE(half, half, float)\n",
        "rms_norm_looped_half_half_float: no launch of csrc was seen that asks for it",
    ),
    "an instantiation too few": (
        "INSTANTIATE(bfloat, float, float)\n",
        "",
        "rms_norm_single_row_bfloat_float_float: rms_norm.metal has no such kernel",
    ),
    "a buffer more": (
        "constant uint& groups [[buffer(3)]],",
        "constant uint& groups [[buffer(3)]], device float* more [[buffer(4)]],",
        "rms_norm_dweight_float: 4 arguments, its buffers are 0, 1, 2, 3, 4",
    ),
    "buffers exchanged": (
        "device W* dweight [[buffer(1)]],                    // [columns]\n"
        "                                 constant uint& columns [[buffer(2)]],",
        "device W* dweight [[buffer(2)]],\n constant uint& columns [[buffer(1)]],",
        "rms_norm_dweight_float: buffer(1), columns: a tensor or nothing, declared constant uint32&",
    ),
    "the type of a buffer": (
        "rms_norm_dweight(device const float* partial_dweight",
        "rms_norm_dweight(device const half* partial_dweight",
        "rms_norm_dweight_float: buffer(0), partial_dweight: a tensor of Float, declared device float16*",
    ),
    "the type of a constant": (
        "constant uint& groups",
        "constant ulong& groups",
        "rms_norm_dweight_float: buffer(3), groups: a uint32, declared constant uint64&",
    ),
    "the index of a function constant": (
        "wants_dweight [[function_constant(4)]]",
        "wants_dweight [[function_constant(5)]]",
        "function constant 4 is set, and the shader has none of that index",
    ),
    "the type of a function constant": (
        "constant bool vectorized [[function_constant(2)]]",
        "constant uint vectorized [[function_constant(2)]]",
        "function constant 2 is set to a bool, vectorized is a uint",
    ),
    "the threads that a kernel takes": (
        "#define INSTANTIATE_DWEIGHT(W) \\\n  template [[host_name",
        "#define INSTANTIATE_DWEIGHT(W) \\\n  template [[max_total_threads_per_threadgroup(64), host_name",
        "rms_norm_dweight_float: 256 threads, it takes 64",
    ),
}


@pytest.mark.parametrize("fault", IN_SHADERS)
def test_finds_in_a_shader(fault: str, planted: Path, recorded: list[recording.Launch]) -> None:
    old, new, expected = IN_SHADERS[fault]
    replace(planted / "rms_norm.metal", old, new)
    asked = [launch for launch in recorded if launch.library == "rms_norm"]
    breaches = contract.breaches(asked, {"rms_norm": shaders.read(planted / "rms_norm.metal")})
    assert [line for line in breaches if expected in line], breaches


LAYOUTS = {
    "a shifted field": ("uint32_t rows;\n  uint32_t columns;", "uint32_t columns;\n  uint32_t rows;", "rows at 20"),
    "a wider field": ("uint64_t x_stride;   // elements", "uint32_t x_stride;   // elements", "uint32 x_stride at 0"),
    "a field too many": ("  float eps;", "  float eps, more;", "9 members, on the host 8"),
}


@pytest.mark.parametrize("fault", LAYOUTS)
def test_finds_in_a_struct(fault: str, planted: Path, frameworks: Path) -> None:
    """The shader includes another params.h than csrc."""
    old, new, expected = LAYOUTS[fault]
    text = (planted / "params.h").read_text()
    first = text.index("struct RMSNormParams")
    (planted / "params.h").write_text(text[:first] + text[first:].replace(old, new, 1))
    host = contract.host_structs(ROOT / "shaders/params.h", frameworks)
    found = contract.layout_differences(host, shaders.read(planted / "rms_norm.metal").structs)
    assert [line for line in found if line.startswith("RMSNormParams") and expected in line], found


def test_finds_a_misspelt_kernel_in_csrc(tmp_path: Path) -> None:
    copy = recording.copy_sources(tmp_path)
    replace(copy / "rms_norm.mm", 'std::string("rms_norm_dweight_")', 'std::string("rms_norm_dwieght_")')
    library = stand_in.build_library([copy / "metal.mm", copy / "rms_norm.mm"], tmp_path)
    asked = recording.record(library, tmp_path / "launches", "rms_norm")
    breaches = contract.breaches(asked, {"rms_norm": shaders.read(ROOT / "shaders/rms_norm.metal")})
    assert "rms_norm_dwieght_half: rms_norm.metal has no such kernel" in breaches
