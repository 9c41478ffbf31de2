"""`torch.utils.cpp_extension` for Metal extensions on Linux: same names, same arguments, `.mm` sources.

    from virtual_mps.cpp_extension import BuildExtension, load, load_inline

Compiler and linker flags may be those for a Mac: frameworks and deployment targets are left out. The library that
results is linked to nothing of this package, so it loads only where the device is active.
"""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator

import torch.utils.cpp_extension as torch_extension
from setuptools import Extension
from setuptools.command.build_ext import build_ext
from torch.utils.cpp_extension import CppExtension, include_paths, library_paths

from . import _build, _environment, activate

__all__ = ["BuildExtension", "CppExtension", "include_paths", "library_paths", "load", "load_inline"]

# Flags for Apple's tools that mean nothing here; the first group takes its value from the next word.
_MAC_PAIRS = ("-framework", "-weak_framework", "-arch", "-undefined", "-isysroot", "-install_name")
_MAC_FLAGS = (
    "-mmacosx-version-min",
    "-mmacos-version-min",
    "-mcpu=apple",
    "-stdlib=libc++",
    "-Wl,-framework",
    "-Wl,-undefined",
    "-Wl,-dead_strip",
    "-Wl,-install_name",
    "-ObjC",
)


def _on_linux(flags: list[str]) -> list[str]:
    kept, skip = [], False
    for flag in flags:
        if skip:
            skip = False
        elif flag in _MAC_PAIRS:
            skip = True
        elif not flag.startswith(_MAC_FLAGS) or flag == "-ObjC++":
            kept.append(flag.replace("@loader_path", "$ORIGIN"))
    return kept


def compile_flags(flags: list[str] | None = None) -> list[str]:
    """What to compile a source with that includes Apple's headers, given the flags for a Mac."""
    return [*_build.include_flags(_build.native()), *_build.OBJC_FLAGS, *_on_linux(list(flags or []))]


def link_flags(flags: list[str] | None = None) -> list[str]:
    """What to link such code with, given the flags for a Mac."""
    return [*_on_linux(list(flags or [])), str(_build.native() / "module.o"), *_build.OBJC_LIBRARIES]


@contextlib.contextmanager
def _clang() -> Iterator[None]:
    before = os.environ.get("CXX")
    os.environ["CXX"] = _environment.clang()
    try:
        yield
    finally:
        if before is None:
            del os.environ["CXX"]
        else:
            os.environ["CXX"] = before


def _just_in_time(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def build_and_load(*args, **kwargs):
        activate()
        given = signature.bind(*args, **kwargs)
        given.arguments["extra_cflags"] = compile_flags(given.arguments.get("extra_cflags"))
        given.arguments["extra_ldflags"] = link_flags(given.arguments.get("extra_ldflags"))
        with _clang():
            return original(*given.args, **given.kwargs)

    return build_and_load


load = _just_in_time(torch_extension.load)
load_inline = _just_in_time(torch_extension.load_inline)


def _prepare(command: build_ext) -> None:
    """Makes a `build_ext` command compile with clang, and for Apple's frameworks."""
    for extension in command.extensions:
        flags = extension.extra_compile_args
        if isinstance(flags, dict):
            flags["cxx"] = compile_flags(flags.get("cxx"))
        else:
            extension.extra_compile_args = compile_flags(flags)
        extension.extra_link_args = link_flags(extension.extra_link_args)
    command.compiler.src_extensions += [".mm"]
    compiler = _environment.clang()
    # Each of these is a command line of which the first word is the compiler.
    for name in ("compiler_so", "compiler_cxx", "compiler_so_cxx"):
        if words := getattr(command.compiler, name, None):
            command.compiler.set_executable(name, [compiler, *words[1:]])


class BuildExtension(torch_extension.BuildExtension):
    """The `build_ext` command for a setup.py that lists `.mm` files."""

    def build_extensions(self) -> None:
        with _clang():
            _prepare(self)
            super().build_extensions()


def install() -> None:
    """Puts these in the place of PyTorch's own, for scripts that import from torch.utils.cpp_extension.

    A script with a `build_ext` command of its own, which owes PyTorch nothing, reaches setuptools' command in the end.
    """
    torch_extension.BuildExtension = BuildExtension
    torch_extension.load = load
    torch_extension.load_inline = load_inline
    plain = build_ext.build_extensions

    def build_extensions(self: build_ext) -> None:
        if not isinstance(self, BuildExtension) and any(_is_objective_cpp(e) for e in self.extensions):
            _prepare(self)
        plain(self)

    build_ext.build_extensions = build_extensions


def _is_objective_cpp(extension: Extension) -> bool:
    return any(str(source).endswith(".mm") for source in extension.sources)
