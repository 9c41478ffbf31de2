"""The tools `xcrun metal` and `xcrun metallib`: from .metal files to a library that newLibraryWithURL loads.

`virtual_mps/bin/xcrun` runs this; with that folder on PATH a build that calls Apple's tools works unchanged. A library
made here holds preprocessed source, and compiles when a kernel is first asked for; metal/library.mm reads it.
"""

import os
import sys
from pathlib import Path

from .compiler import CompileError, cache
from .compiler.compile import check
from .compiler.preprocess import preprocess

BIN = Path(__file__).resolve().parent / "bin"

_MAGIC = b"virtual_mps metallib 1\n"
_VERSION = "Apple metal version 32023.619 (metalfe-32023.619) [virtual_mps]"
# Standards that Apple's compiler takes, as the --language number of the shader compiler.
_STANDARDS = {
    f"{prefix}{major}.{minor}": major * 100 + minor
    for prefix in ("metal", "macos-metal")
    for major, minor in ((2, 4), (3, 0), (3, 1), (3, 2))
}
_FLAGS_WITH_VALUE = ("-o", "-I", "-D", "-isysroot", "-target", "-MF", "-x", "-include")


def _split(arguments: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Input files, and options as (flag, value) pairs."""
    files, options = [], []
    rest = iter(arguments)
    for argument in rest:
        if argument in _FLAGS_WITH_VALUE:
            options.append((argument, next(rest, "")))
        elif argument.startswith(("-I", "-D")):
            options.append((argument[:2], argument[2:]))
        elif argument.startswith("-"):
            flag, _, value = argument.partition("=")
            options.append((flag, value))
        else:
            files.append(argument)
    return files, options


def metal(arguments: list[str]) -> None:
    """Preprocesses sources: into one intermediate file with -c, else into a library."""
    files, options = _split(arguments)
    if any(flag in ("--version", "-v") for flag, _ in options):
        print(_VERSION)
        return
    language, fast_math = 0, True
    for flag, value in options:
        if flag == "-std":
            if value not in _STANDARDS:
                raise CompileError(f"error: invalid value '{value}' in '-std={value}'")
            language = _STANDARDS[value]
        elif flag == "-fno-fast-math" or (flag == "-fmetal-math-mode" and value == "safe"):
            fast_math = False
    values = {name: [value for flag, value in options if flag == name] for name in ("-I", "-D", "-o")}
    if not files:
        raise CompileError("error: no input files")
    texts = [preprocess(Path(file), values["-D"], values["-I"], language, fast_math) for file in files]
    flags = {f"{flag}={value}" if value else flag for flag, value in options}
    for text in texts:
        _check(text, language, flags)
    compile_only = any(flag == "-c" for flag, _ in options)
    output = Path(
        values["-o"][-1] if values["-o"] else Path(files[0]).stem + ".air" if compile_only else "default.metallib"
    )
    if compile_only:
        _write(output, "".join(texts).encode())
    else:
        _write_library(output, texts)


def _check(text: str, language: int, flags: set[str]) -> None:
    """Prints warnings as Apple's compiler does, unless flags silence them or make them errors."""
    errors = []
    for line in check(text, language):
        group = line[line.rindex("[-W") + len("[-W") : -1]
        if flags & {"-w", f"-Wno-{group}"}:
            continue
        if flags & {"-Werror", f"-Werror={group}"}:
            errors.append(line.replace(": warning: ", ": error: ", 1))
        else:
            print(line, file=sys.stderr)
    if errors:
        raise CompileError("\n".join(errors))


def metallib(arguments: list[str]) -> None:
    """Joins intermediate files into a library."""
    files, options = _split(arguments)
    output = next((value for flag, value in options if flag == "-o"), "default.metallib")
    _write_library(Path(output), [Path(file).read_text() for file in files])


def _write_library(output: Path, texts: list[str]) -> None:
    parts = [text.encode() for text in texts]
    _write(output, _MAGIC + b"".join(b"%d\n%s" % (len(part), part) for part in parts))


def _write(output: Path, data: bytes) -> None:
    with cache.new_file(output) as scratch:
        scratch.write_bytes(data)


def xcrun(arguments: list[str]) -> int:
    rest = list(arguments)
    find = False
    while rest and rest[0].startswith("-"):
        flag = rest.pop(0)
        find |= flag in ("-f", "--find")
        if flag in ("-sdk", "--sdk") and rest:
            rest.pop(0)
    tools = {"metal": metal, "metallib": metallib}
    if not rest or rest[0] not in tools:
        print(
            f'xcrun: error: unable to find utility "{rest[0] if rest else ""}" (virtual_mps has {", ".join(tools)})',
            file=sys.stderr,
        )
        return 72
    if find:
        print(BIN / "xcrun")
        return 0
    try:
        tools[rest[0]](rest[1:])
    except (CompileError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def path_with_tools() -> str:
    """PATH with the stand-in for xcrun in front."""
    return f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"


if __name__ == "__main__":
    sys.exit(xcrun(sys.argv[1:]))
