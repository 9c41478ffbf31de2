"""The first step: macros and includes. What comes out is all later steps ever see."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import toolchain

NEWEST_LANGUAGE = 320  # Metal 3.2
# Metal is C++14 up to 3.2.
CPLUSPLUS = "201402L"


def preprocess(
    source: str | Path,
    defines: Sequence[str] = (),
    include_dirs: Sequence[str] = (),
    language: int = 0,
    fast_math: bool = False,
) -> str:
    """Expands a source. A string is read as Metal's runtime compiler does: named program_source, no local includes.

    language: 310 or 301 for Metal 3.1; 0 for the newest.
    """
    predefined = {
        "__METAL__": "1",
        "__METAL_MACOS__": "1",
        "__METAL_VERSION__": str(_version(language)),
        "__METAL_FAST_MATH__": "1",
        "__METAL_PRECISE_MATH__": "0",
        "__METAL_MAYBE_FAST_MATH__": "1" if fast_math else "0",
        "__HAVE_BFLOAT__": "1",
        "__cplusplus": CPLUSPLUS,
        "__clang__": "1",
        "__AIR64__": "1",
    }
    command = [
        toolchain.clang(),
        *("-E", "-x", "c++", "-std=c++20", "-undef", "-nostdinc", "-Wno-builtin-macro-redefined"),
        *("-isystem", str(toolchain.HEADERS / "metal")),
        *(f"-I{directory}" for directory in include_dirs),
        *(f"-D{name}={value}" for name, value in predefined.items()),
        *(f"-D{define}" for define in defines),
    ]
    if isinstance(source, Path):
        result = toolchain.run([*command, str(source)])
    else:
        # Read from stdin, quoted includes are looked for in the working folder: let there be nothing.
        with tempfile.TemporaryDirectory() as empty:
            result = toolchain.run([*command, "-"], input=f'#line 1 "program_source"\n{source}', cwd=empty)
    if result.returncode:
        raise toolchain.CompileError(result.stderr.strip())
    return result.stdout


def _version(language: int) -> int:
    if not language:
        return NEWEST_LANGUAGE
    major, minor = divmod(language, 100)
    return language if minor >= 10 or minor == 0 else major * 100 + minor * 10
