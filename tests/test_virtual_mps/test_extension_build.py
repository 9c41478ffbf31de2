"""Building extensions: just in time, inline, through setup.py, and what goes wrong."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parent / "extensions" / "project"
REPOSITORY = Path(__file__).resolve().parents[2]

SHADER = "kernel void fill(device float* x, constant float& v, uint i [[thread_position_in_grid]]) { x[i] = v; }"


def _run(*arguments, cwd, **environment):
    import os

    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def project(mps, tmp_path_factory):
    """The project, built by its own setup.py, which was written for a Mac."""
    folder = tmp_path_factory.mktemp("project") / "project"
    shutil.copytree(PROJECT, folder)
    result = _run("-m", "virtual_mps", "run", "setup.py", "build_ext", "--inplace", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


USE = """
import torch, virtual_mps
virtual_mps.activate(validation=True)
import square_project
for dtype in (torch.float32, torch.float16):
    x = torch.arange(6., device="mps", dtype=dtype)[1:]
    assert torch.ops.square_project.square(x).tolist() == [1, 4, 9, 16, 25]
print("ran")
"""


def test_setup_py_written_for_a_mac(project):
    result = _run("-c", USE, cwd=project)
    assert result.stdout == "ran\n", result.stderr


def test_without_the_device_the_import_fails_cleanly(project):
    result = _run("-c", "import torch, square_project", cwd=project)
    assert result.returncode == 1 and "ImportError" in result.stderr and "undefined symbol" in result.stderr


def test_load_inline(mps, tmp_path):
    from virtual_mps.cpp_extension import load_inline

    source = f"""
    #import <Foundation/Foundation.h>
    #import <Metal/Metal.h>
    #include <ATen/native/mps/OperationUtils.h>
    static at::native::mps::MetalShaderLibrary lib(R"({SHADER})");
    void fill(at::Tensor x, double value) {{
      auto kernel = lib.getKernelFunction("fill");
      kernel->runCommandBlock([&] {{
        kernel->startEncoding();
        kernel->setArg(0, x);
        kernel->setArg(1, static_cast<float>(value));
        kernel->dispatch(x.numel());
      }});
    }}
    TORCH_LIBRARY(inline_test, m) {{ m.def("fill(Tensor(a!) x, float value) -> ()", &fill); }}
    """
    load_inline(
        "inline_test",
        source,
        extra_cflags=["-x", "objective-c++", "-O0"],
        build_directory=str(tmp_path),
        is_python_module=False,
        no_implicit_headers=True,
    )
    x = torch.zeros(5, device="mps")
    torch.ops.inline_test.fill(x, 7.5)
    assert x.tolist() == [7.5] * 5


def test_a_source_that_does_not_compile(mps, tmp_path):
    from virtual_mps.cpp_extension import load

    source = tmp_path / "broken.mm"
    source.write_text(
        "#import <Metal/Metal.h>\nvoid f(id<MTLDevice> d) { [d newTextureWithDescriptor:nil]; }\nint x = y;\n"
    )
    with pytest.raises(RuntimeError, match="Error building extension 'broken'"):
        load("broken", [str(source)], build_directory=str(tmp_path), is_python_module=False)


def test_flags_for_a_mac_are_left_out():
    from virtual_mps.cpp_extension import _on_linux

    flags = ["-O2", "-framework", "Metal", "-mmacosx-version-min=14.0", "-fobjc-arc", "-arch", "arm64", "-DX=1"]
    assert _on_linux(flags) == ["-O2", "-fobjc-arc", "-DX=1"]
    assert _on_linux(["-Wl,-rpath,@loader_path/lib", "-undefined", "dynamic_lookup", "-lfoo"]) == [
        "-Wl,-rpath,$ORIGIN/lib",
        "-lfoo",
    ]
