"""Bad input: what the message says, and that it costs nothing but an exception."""

import os
import platform
import stat

import numpy as np
import pytest

from virtual_mps.compiler import CompileError, toolchain
from virtual_mps.compiler import preprocess as preprocess_module
from virtual_mps.compiler.__main__ import run as run_verb
from virtual_mps.executor import Library, MetalError

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
GOOD = HEADER + "kernel void good(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = 1; }"


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """Nothing compiled before may help."""
    monkeypatch.setenv("VIRTUAL_MPS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_no_clang(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("VIRTUAL_MPS_CLANG", raising=False)
    with pytest.raises(CompileError, match=r"needs clang 19.*clang\+\+-19 was not found: apt install clang-19"):
        toolchain.clang()


def test_no_clang_seen_through_the_c_interface(monkeypatch, empty_cache):
    Library(GOOD)  # the executor itself is built by now
    monkeypatch.setenv("VIRTUAL_MPS_CLANG", "no-such-clang")
    with pytest.raises(MetalError, match="no-such-clang was not found: apt install clang-19"):
        Library(GOOD + "\n")


def test_an_old_processor():
    new = "processor : 0\nflags : fpu avx avx2 bmi1 bmi2 f16c fma\n"
    toolchain.check_machine(new)
    if platform.machine() == "x86_64":
        with pytest.raises(CompileError, match="this processor lacks avx2, fma; x86-64-v3 is needed"):
            toolchain.check_machine(new.replace(" avx2", "").replace(" fma", ""))


def test_no_python(monkeypatch, empty_cache):
    from virtual_mps import executor

    api = executor.load()
    api.vmps_configure(b"/no/such/python", None, None)
    try:
        with pytest.raises(MetalError, match="cannot start the shader compiler: /no/such/python: No such file"):
            Library(GOOD, api=api)
    finally:
        executor.load()


def test_a_syntax_error_names_its_place():
    with pytest.raises(MetalError, match=r"^program_source:4:\d+: error: expected ';'"):
        Library(HEADER + "kernel void k(device float* y [[buffer(0)]]) {\n  y[0] = 1\n}")


def test_places_survive_macros_and_edits():
    """Lines are counted in the source as written, whatever the edits before the error insert or remove."""
    source = (
        HEADER
        + """
#define TWO_LINES(x) \\
  x; x
template <typename T>
[[kernel]] void t(device T* y [[buffer(0)]],
                  uint i [[thread_position_in_grid]]) { y[i] = 0.5; }
template [[host_name("a")]]
[[kernel]] decltype(t<float>)
  t<float>;
kernel void k(device float* y [[buffer(0)]]) {
  threadgroup float a[2],
    b[3];
  TWO_LINES(a[0] = 1.0);
  y[0] = true ? a[0] :
    b[0];
  y[1] = missing;
}
"""
    )
    line = source[: source.index("missing")].count("\n") + 1
    with pytest.raises(MetalError, match=rf"^program_source:{line}:\d+: error: use of undeclared identifier 'missing'"):
        Library(source)


def test_columns_survive_deleted_attributes():
    line = "kernel void k(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = missing; }"
    with pytest.raises(MetalError, match=rf"^program_source:3:{line.index('missing') + 1}: error: use of undeclared"):
        Library(HEADER + line)


def test_errors_speak_metal():
    with pytest.raises(MetalError) as error:
        Library(HEADER + "kernel void k(device float* y [[buffer(0)]]) { threadgroup float* p = y; }")
    assert "device float" in str(error.value)
    assert "threadgroup float" in str(error.value)
    assert "__global" not in str(error.value)


def test_an_error_in_an_instantiation_appears_when_its_kernel_is_asked_for():
    library = Library(
        HEADER
        + """
    template <typename T> [[kernel]] void t(device T* y [[buffer(0)]]) { y[0].nonsense = 1; }
    template [[host_name("t")]] [[kernel]] decltype(t<float>) t<float>;"""
    )
    with pytest.raises(MetalError, match=r"^program_source:4:\d+: error: member reference base type"):
        library.kernel("t")


def test_an_instantiation_that_fits_no_kernel():
    library = Library(
        HEADER
        + """
    template <typename T, int N> [[kernel]] void t(device T* y [[buffer(0)]]) { y[0] = N; }
    template [[host_name("made")]] [[kernel]] decltype(t<float>) t<float>;"""
    )
    with pytest.raises(MetalError, match=r"program_source:5:5: error: no kernel function for 'made' matches t<float>"):
        library.kernel("made")


def test_a_missing_kernel():
    library = Library(GOOD)
    with pytest.raises(MetalError, match="the library has no kernel 'goof'; it has good"):
        library.kernel("goof")


def test_strings_resolve_no_local_include(tmp_path, monkeypatch):
    (tmp_path / "local.h").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MetalError, match=r"program_source:1:10: fatal error: 'local.h' file not found"):
        Library('#include "local.h"\n' + GOOD)


def test_files_do(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "scale.h").write_text('#pragma once\n#define SCALE 3\n#include "../bias.h"\n')
    (tmp_path / "bias.h").write_text("constant float kBias = BIAS;\nfloat wrong() { return nothing; }\n")
    main = tmp_path / "main.metal"
    main.write_text(
        GOOD.replace("y[i] = 1", "y[i] = SCALE + kBias").replace("<metal_stdlib>", '<metal_stdlib>\n#include "scale.h"')
    )
    text = preprocess_module.preprocess(main, ["BIAS=0.5"], [str(tmp_path / "inner")])
    with pytest.raises(MetalError, match=r"bias.h:2:24: error: use of undeclared identifier 'nothing'"):
        Library(text, preprocessed=True)
    (tmp_path / "bias.h").write_text("constant float kBias = BIAS;\n")
    y = np.zeros(4, np.float32)
    text = preprocess_module.preprocess(main, ["BIAS=0.5"], [str(tmp_path / "inner")])
    Library(text, preprocessed=True).kernel("good")(y, threads=(4,))
    np.testing.assert_array_equal(y, 3.5)


def test_host_headers_and_macros_are_out_of_reach():
    with pytest.raises(MetalError, match="'cmath' file not found"):
        Library("#include <cmath>\n" + GOOD)
    Library(HEADER + "#if defined(__x86_64__) || defined(__linux__) || !defined(__METAL__)\n#error host\n#endif\n")


@pytest.mark.parametrize(("version", "expected"), [(0, 320), (301, 310), (310, 310), (300, 300), (400, 400)])
def test_language_versions(version, expected):
    source = (
        HEADER
        + f"""
    #if __METAL_VERSION__ != {expected}
    #error wrong version
    #endif
    """
    )
    Library(source, language_version=version)


def test_defines_are_part_of_the_source():
    source = GOOD.replace("y[i] = 1", "y[i] = VALUE")
    for value in (2, 3):
        y = np.zeros(4, np.float32)
        Library(source, defines=[f"VALUE={value}"]).kernel("good")(y, threads=(4,))
        np.testing.assert_array_equal(y, value)


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    if os.geteuid() == 0:
        target = tmp_path / "file"
        target.write_text("")  # root may write anywhere, but not below a file
    else:
        target = tmp_path
        target.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setenv("VIRTUAL_MPS_CACHE", str(target / "cache"))
    with pytest.raises(MetalError):
        Library(GOOD + "// not compiled before")


def test_the_verbs_report_what_the_compiler_says(tmp_path):
    import argparse

    source = tmp_path / "a.metal"
    source.write_text("kernel void k(")
    arguments = argparse.Namespace(
        verb="library",
        source=source,
        output=tmp_path / "lib",
        defines=[],
        fast_math=False,
        language=0,
        preprocessed=False,
    )
    with pytest.raises(CompileError, match="program_source:1"):
        run_verb(arguments)
    assert not (tmp_path / "lib").exists()
