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


OWN_COMMAND = """
import platform
import sys
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from torch.utils.cpp_extension import include_paths, library_paths

assert (sys.platform, platform.system(), platform.machine()) == ("darwin", "Darwin", "arm64")

class ObjCppBuildExt(build_ext):
    def build_extensions(self):
        assert sys.platform == "darwin"
        self.compiler.src_extensions.append(".mm")
        for e in self.extensions:
            e.include_dirs += include_paths()
            e.library_dirs += library_paths()
            e.libraries += ["c10", "torch", "torch_cpu", "torch_python"]
        super().build_extensions()

setup(
    name="plain",
    ext_modules=[Extension("plain", ["plain.mm"], extra_compile_args=["-std=c++20", "-O0"],
                           extra_link_args=["-framework", "Metal", "-framework", "Foundation"])],
    cmdclass={"build_ext": ObjCppBuildExt},
)
"""

PLAIN = """
#import <Metal/Metal.h>
#include <torch/extension.h>
PYBIND11_MODULE(plain, m) {
  m.def("device", [] { return std::string([[MTLCreateSystemDefaultDevice() name] UTF8String]); });
}
"""


def test_a_setup_py_with_a_build_command_of_its_own(mps, tmp_path):
    (tmp_path / "setup.py").write_text(OWN_COMMAND)
    (tmp_path / "plain.mm").write_text(PLAIN)
    result = _run("-m", "virtual_mps", "run", "setup.py", "build_ext", "--inplace", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    result = _run("-c", "import torch, plain; print(plain.device())", cwd=tmp_path, VIRTUAL_MPS="1")
    assert result.stdout.strip(), result.stderr


def test_a_package_that_asks_for_a_mac(mps, tmp_path):
    text = "import sys\nfrom platform import machine\n\ndef found():\n    import platform\n"
    text += "    return sys.platform, platform.system(), machine(), sys.version_info.major\n"
    for name in ("picky", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    code = "import torch, picky, other; print(picky.found(), other.found()[0])"
    result = _run("-c", code, cwd=tmp_path, VIRTUAL_MPS="1", VIRTUAL_MPS_DARWIN="picky,third")
    assert result.stdout == "('darwin', 'Darwin', 'arm64', 3) linux\n", result.stderr


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
