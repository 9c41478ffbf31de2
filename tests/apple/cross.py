"""Compiles and links the extension for a Mac on Linux: clang and LLVM's linker, Apple's symbols.

Which symbols there are to link against comes from what Apple's own linker bound: every name that a library of the
wheels imports from libobjc, libc++, Foundation or Metal is exported by them. PyTorch's libraries are in its wheel.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from . import wheels

LLVM = 19
TARGET = "arm64-apple-macos14.0"
HEADERS = Path(__file__).resolve().parent / "include"
CLANG = f"clang++-{LLVM}"
# C++20 is what PyTorch's BuildExtension asks for; the rest is setup.py's and what Apple's clang does by itself: no
# sized operator delete, no check of libc++'s own.
LANGUAGE = {
    ".mm": ["-x", "objective-c++", "-fobjc-arc", "-fblocks"],
    ".cpp": ["-x", "c++"],
}
FLAGS = ["-target", TARGET, "-std=c++20", "-O2", "-fPIC", "-Wall", "-Werror", "-fno-sized-deallocation"]
DEFINES = ["-D_LIBCPP_HARDENING_MODE=_LIBCPP_HARDENING_MODE_NONE", "-D_LIBCPP_ABI_VERSION=1"]
DEFINES += ["-D_LIBCPP_ABI_NAMESPACE=__1", "-D_LIBCPP_PSTL_BACKEND_SERIAL"]
EXTENSION_FLAGS = ["-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"]

# Exported or supplied on a Mac, though no library of the wheels asks for it by name.
ALSO_EXPORTED = {
    # Apple's clang links its runtime, libclang_rt.osx.a, which has what `@available` calls.
    "clang_rt": ["___isPlatformVersionAtLeast"],
    # libc++ instantiates basic_streambuf<char> explicitly, so all of its members are exported; others are imported.
    "libc++": [
        "__ZNSt3__115basic_streambufIcNS_11char_traitsIcEEEC2Ev",
        "__ZNSt3__115basic_streambufIcNS_11char_traitsIcEEED2Ev",
    ],
}
# Where the wheels' libraries are that Apple's linker made.
LINKED_BY_APPLE = {
    "mlx-metal==0.32.4": "mlx/lib/*.dylib",
    "pyobjc-core==13.0": "objc/*.so",
    "pyobjc-framework-Metal==12.2.2": "Metal/*.so",
    "pyobjc-framework-Cocoa==13.0": "*/*.so",
    "coremltools==9.0": "coremltools/*.so",
}


def torch_root(version: str) -> Path:
    return wheels.unpacked(f"torch=={version}") / "torch"


def system_flags(frameworks: Path) -> list[str]:
    """Flags that give the headers of a Mac. `frameworks` holds a folder for each of Apple's frameworks."""
    zig = wheels.unpacked("ziglang==0.14.1") / "ziglang/lib"
    clang = subprocess.run([CLANG, "-print-resource-dir"], capture_output=True, text=True, check=True).stdout.strip()
    folders = [zig / "libcxx/include", zig / "libcxxabi/include", Path(clang) / "include"]
    folders += [zig / "libc/include/any-macos-any", frameworks]
    return ["-nostdinc", *(word for folder in folders for word in ("-isystem", str(folder)))]


def torch_flags(version: str) -> list[str]:
    include = torch_root(version) / "include"
    folders = [include, include / "torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    return [word for folder in folders for word in ("-isystem", str(folder))]


def compile_object(source: Path, output: Path, flags: Sequence[str]) -> None:
    command = [
        CLANG,
        *LANGUAGE[source.suffix],
        *FLAGS,
        *DEFINES,
        *EXTENSION_FLAGS,
        *flags,
        "-c",
        str(source),
        "-o",
        str(output),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{source.name} does not compile for a Mac:\n{result.stderr}"


def _nm(*arguments: str | Path) -> str:
    command = [f"llvm-nm-{LLVM}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def imports(library: Path) -> list[tuple[str, str]]:
    """(name, library that it comes from) of each symbol that a linked library imports."""
    return re.findall(r" external (\S+) \(from ([^)]+)\)$", _nm("-m", "-u", library), re.MULTILINE)


def exports(library: Path) -> set[str]:
    return set(_nm("-g", "-U", "-j", library).replace("\n_", "\n").removeprefix("_").split())


@cache
def exported(torch_version: str) -> dict[str, frozenset[str]]:
    """The symbols of each system library that is known to export them."""
    libraries = [
        *torch_root(torch_version).glob("lib/*.dylib"),
        *(file for name, pattern in LINKED_BY_APPLE.items() for file in wheels.unpacked(name).glob(pattern)),
    ]
    found: dict[str, set[str]] = {name: set(symbols) for name, symbols in ALSO_EXPORTED.items()}
    for library in libraries:
        for symbol, origin in imports(library):
            found.setdefault(origin, set()).add(symbol)
    # Apple's C++ binding looks these classes up by name.
    bindings = wheels.unpacked("mlx-metal==0.32.4") / "mlx/include/metal_cpp"
    for name in re.findall(r"_MTL_PRIVATE_DEF_CLS\((\w+)\)", (bindings / "Metal/MTLHeaderBridge.hpp").read_text()):
        found["Metal"].add(f"_OBJC_CLASS_$_{name}")
    wanted = ("libobjc", "libc++", "clang_rt", "Foundation", "CoreFoundation", "Metal")
    return {name: frozenset(found[name]) for name in wanted}


def _write_stub(path: Path, symbols: Iterable[str]) -> None:
    """What the linker reads in the place of a library: its name and its symbols."""
    listed = ", ".join(f"'{symbol}'" for symbol in sorted(symbols))
    path.write_text(
        f"--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\ninstall-name: '{path.stem}'\n"
        f"exports:\n  - targets: [ arm64-macos ]\n    symbols: [ {listed} ]\n...\n"
    )


def _python_symbols(objects: Sequence[Path]) -> list[str]:
    """Of the names that start like Python's, those that Python has."""
    undefined = set(_nm("-u", "-j", *objects).split())
    return [s for s in undefined if re.match(r"__?Py", s) and hasattr(ctypes.pythonapi, s[1:])]


def link(objects: Sequence[Path], output: Path, torch_version: str) -> None:
    """Links a bundle as a Mac does, with the difference that every symbol must be found now.

    Raises:
        AssertionError: naming the symbols that nothing exports.
    """
    stubs = []
    for name, symbols in [*exported(torch_version).items(), ("python", _python_symbols(objects))]:
        stubs.append(output.parent / f"{name}.tbd")
        _write_stub(stubs[-1], symbols)
    libraries = torch_root(torch_version) / "lib"
    command = [f"ld64.lld-{LLVM}", "-arch", "arm64", "-platform_version", "macos", "14.0", "14.0", "-bundle"]
    command += ["--error-limit=0", "-o", str(output), *map(str, objects), *map(str, stubs)]
    command += [str(libraries / f"lib{name}.dylib") for name in ("c10", "torch", "torch_cpu", "torch_python")]
    command += [str(wheels.unpacked("ziglang==0.14.1") / "ziglang/lib/libc/darwin/libSystem.tbd")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"does not link for a Mac:\n{result.stderr}"
