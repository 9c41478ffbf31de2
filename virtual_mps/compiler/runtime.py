"""Builds libvmps_executor.so, and the precompiled headers, once for each state of their sources."""

import platform
from pathlib import Path

from . import cache, toolchain


def compiler_id() -> str:
    """Names the part of the cache that belongs to this state of the compiler, its headers, the executor and clang."""
    files = [
        *toolchain.PACKAGE.glob("*.py"),
        *toolchain.HEADERS.rglob("*"),
        *toolchain.EXECUTOR.glob("*.h"),
        *toolchain.EXECUTOR.glob("*.cpp"),
    ]
    clang = Path(toolchain.clang()).resolve()
    stamp = clang.stat()
    parts: list[bytes | str] = [platform.machine(), str(clang), f"{stamp.st_size} {stamp.st_mtime_ns}"]
    for file in sorted(f for f in files if f.is_file()):
        parts += [file.name, file.read_bytes()]
    return cache.digest(*parts)[:16]


def build_headers() -> Path:
    """Path of what Metal sources may use, precompiled for a reading without code generation."""
    identity = compiler_id()
    # clang notes where the headers are, and their times unless told not to.
    target = cache.root() / identity / f"headers-{cache.digest(str(toolchain.HEADERS))[:8]}.pch"
    if target.exists():
        return target
    with cache.new_file(target) as output:
        command = [toolchain.clang(), *toolchain.read_flags(), "-Wno-everything", "-Xclang", "-fno-pch-timestamp"]
        header = toolchain.HEADERS / "vmps" / "metal.h"
        result = toolchain.run([*command, "-x", "c++-header", str(header), "-o", str(output)])
        if result.returncode:
            raise toolchain.CompileError(f"virtual_mps: cannot precompile the headers:\n{result.stderr.strip()}")
    return target


def build_runtime(boost_fibres: bool = False) -> Path:
    """Path of libvmps_executor.so, built now if the cache has none for the present sources.

    boost_fibres: switch stacks with Boost.Context, as on machines other than x86-64, where it is the only way.
    """
    boost_fibres = boost_fibres or platform.machine() != "x86_64"
    identity = compiler_id()
    folder = cache.root() / identity / ("boost" if boost_fibres else "")
    library = folder / "libvmps_executor.so"
    if library.exists():
        return library
    toolchain.check_machine(Path("/proc/cpuinfo").read_text())
    with cache.new_file(library) as output:
        command = [
            toolchain.clang(),
            "-std=c++20",
            *toolchain.machine_flags(),
            "-O2",
            "-fPIC",
            "-shared",
            "-pthread",
            "-fvisibility=hidden",
            f'-DVMPS_COMPILER_ID="{identity}"',
            *(["-DVMPS_BOOST_FIBRES"] if boost_fibres else []),
            *(str(source) for source in sorted(toolchain.EXECUTOR.glob("*.cpp"))),
            "-o",
            str(output),
            # Kernels ask for this name, and get whichever of the two variants their process has loaded.
            "-Wl,-soname,libvmps_executor.so",
            *(["-lboost_context"] if boost_fibres else []),
        ]
        result = toolchain.run(command)
        if result.returncode:
            hint = " (apt install libboost-context-dev)" if "boost/" in result.stderr else ""
            raise toolchain.CompileError(f"virtual_mps: cannot build the executor{hint}:\n{result.stderr.strip()}")
    return library
