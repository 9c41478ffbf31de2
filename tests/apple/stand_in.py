"""The stand-in for Apple's frameworks, as these tests see it; nothing else in this folder names it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import virtual_mps
from torch.utils import cpp_extension
from virtual_mps.compiler import compile, kernels, toolchain
from virtual_mps.compiler.preprocess import preprocess
from virtual_mps.compiler.source import Source, captures, query
from virtual_mps.cpp_extension import compile_flags, link_flags

INCLUDE = Path(virtual_mps.__file__).resolve().parent / "include"
LANGUAGE = 310  # Metal 3.1, which csrc asks for
FRAMEWORKS = ("Metal", "MetalPerformanceShaders", "MetalPerformanceShadersGraph", "CoreFoundation")
# Foundation is GNUstep's there, which does not compile for a Mac. A declaration of ours takes its place.
FOUNDATION = Path(__file__).resolve().parent / "include/Foundation"


def copy_frameworks(folder: Path) -> Path:
    """A folder with the headers of each framework, for an include path."""
    for name in FRAMEWORKS:
        shutil.copytree(INCLUDE / name, folder / name)
    shutil.copytree(FOUNDATION, folder / "Foundation")
    for name in ("log.h", "signpost.h"):
        (folder / "os").mkdir(exist_ok=True)
        shutil.copy(INCLUDE / "os" / name, folder / "os")
    return folder


def build_library(sources: list[Path], folder: Path) -> Path:
    """A library of operators from .mm files, built for this machine; importing it is left to another process."""
    objects = []
    include = cpp_extension.include_paths("cpu")
    flags = [*compile_flags(["-fobjc-arc"]), *(word for path in include for word in ("-isystem", path))]
    flags += ["-isystem", sysconfig.get_path("include"), "-std=c++20", "-fPIC", "-O0", "-w"]
    commands = []
    for source in sources:
        objects.append(folder / f"{source.stem}.o")
        commands.append([toolchain.clang(), *flags, "-c", str(source), "-o", str(objects[-1])])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    output = folder / "library.so"
    libraries = [f"-L{path}" for path in cpp_extension.library_paths("cpu")] + ["-lc10", "-ltorch", "-ltorch_cpu"]
    _run([toolchain.clang(), "-shared", *map(str, objects), "-o", str(output), *libraries, *link_flags()])
    return output


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command[-3]} does not compile:\n{result.stderr}"


@dataclass
class Shader:
    """A shader as the compiler of the stand-in reads it."""

    source: Source
    offer: kernels.Offer

    @property
    def kernels(self) -> list[kernels.Kernel]:
        return list(self.offer.kernels.values())

    @property
    def constants(self) -> list[kernels.FunctionConstant]:
        return list(self.offer.function_constants.values())

    @property
    def flags(self) -> list[str]:
        return toolchain.read_flags()

    def translation_unit(self, entry: str) -> str:
        """The C++ that it becomes, with `entry` behind it."""
        return compile._translation_unit(self.source, self.offer, {}, entry)

    def constants_of(self, kernel: kernels.Kernel) -> set[str]:
        """Function constants that the code of a kernel may read: it names them, or names a function that may."""
        found = captures(_FUNCTIONS, self.source.root)
        words: dict[str, set[str]] = {}
        for node in found.get("function", []):
            body = node.child_by_field_name("body")
            name = node.child_by_field_name("declarator")
            while name.child_by_field_name("declarator"):
                name = name.child_by_field_name("declarator")
            inside = captures(_WORDS, body).get("word", []) if body else []
            own = self.source.of(name).decode().rpartition("::")[2]
            words.setdefault(own, set()).update(self.source.of(w).decode() for w in inside)
        reached, pending = set(), re.findall(r"\w+", kernel.expression)
        while pending:
            name = pending.pop()
            if name not in reached:
                reached.add(name)
                pending += words.get(name, ())
        return reached & set(self.offer.function_constants)


_FUNCTIONS = query("(function_definition) @function")
_WORDS = query("[(identifier) (type_identifier) (field_identifier)] @word")


def read_shader(path: Path) -> Shader:
    source = Source(preprocess(path, language=LANGUAGE))
    return Shader(source, kernels.read(source))
