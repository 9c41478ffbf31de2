"""The stand-in for Apple's frameworks, as these tests see it: no other module here imports it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch.utils import cpp_extension

import virtual_mps
from virtual_mps.compiler import CompileError, kernels, runtime, strict, toolchain
from virtual_mps.compiler.preprocess import preprocess
from virtual_mps.compiler.rewrite import rewrite
from virtual_mps.compiler.source import Source
from virtual_mps.cpp_extension import compile_flags, link_flags

__all__ = ["CompileError", "Shader", "build_library", "copy_frameworks", "library_functions", "read_shader"]

INCLUDE = Path(virtual_mps.__file__).resolve().parent / "include"
# What makes clang read a shader, and the headers of Metal's library.
READ_FLAGS = toolchain.read_flags()
METAL_LIBRARY = "vmps/metal.h"
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

    def translation_unit(self, entry: str) -> str:
        """The C++ that it becomes, with `entry` behind it. It needs Metal's headers."""
        return f"{rewrite(self.source, self.offer, {}).apply().decode()}\n{entry}\n"

    def check(self) -> None:
        """Reads it as Apple's compiler does under -Werror, with every kernel that a template becomes.

        Raises:
            CompileError: what Apple's compiler would say.
        """
        strict.check_source(self.source, self.offer, LANGUAGE, instantiate=True, werror=True)

    def check_kernels(self, constants: Mapping[str, bool], entry: str) -> None:
        """Reads what the entry asks for, with these function constants and no others; raises as `check` does."""
        literals = {name: str(value).lower() for name, value in constants.items()}
        strict.check_kernel(self.source, self.offer, literals, entry, LANGUAGE)

    def syntax_tree(self, entry: str) -> dict:
        """clang's, of the source and the entry; what the headers of Metal declare is not in it."""
        command = [toolchain.clang(), *READ_FLAGS, "-include-pch", str(runtime.build_headers()), "-Wno-everything"]
        command += ["-fsyntax-only", "-Xclang", "-ast-dump=json", "-"]
        result = toolchain.run(command, input=self.translation_unit(entry))
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)


def read_shader(path: Path) -> Shader:
    source = Source(preprocess(path, language=LANGUAGE))
    return Shader(source, kernels.read(source))


# What the stand-in's compiler writes into a source, and what INFINITY and NAN are there.
_OWN_FUNCTIONS = {"value", "cast", "get", "__builtin_inff", "__builtin_nanf"}


def library_functions(tree: dict) -> set[tuple[str, str]]:
    """(name, type of the first argument) of each function of Metal's library that the source's own functions call.

    tree: of `Shader.syntax_tree`. Operators are not functions here.
    """
    declared, used = set(), {}
    pending = [tree]
    while pending:
        node = pending.pop()
        declared.add(node.get("id"))
        reference = node.get("referencedDecl") if node.get("kind") == "DeclRefExpr" else None
        if reference and reference["kind"] == "FunctionDecl":
            used[reference["id"]] = (reference["name"], reference["type"])
        pending += (child for child in node.get("inner", ()) if child)
    found = set()
    for identity, (name, kind) in used.items():
        if identity not in declared and name not in _OWN_FUNCTIONS and not name.startswith("operator"):
            signature = kind.get("desugaredQualType", kind["qualType"])
            found.add((name, _first_parameter(signature)))
    return found


def _first_parameter(signature: str) -> str:
    """`vec<float, 4>` of `float (vec<float, 4>, float)`."""
    parameters, depth = signature.partition("(")[2].rpartition(")")[0], 0
    for i, character in enumerate(parameters):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "," and depth == 0:
            return parameters[:i]
    return parameters
