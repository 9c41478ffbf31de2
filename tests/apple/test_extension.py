"""The extension for a Mac, as far as Linux can make it.

clang compiles it for arm64-apple-macos14 against the headers of PyTorch's macOS wheel and the stand-in's Metal headers;
LLVM's linker finds every symbol in what Apple's libraries are known to export.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from . import cross, wheels
from .conftest import replace

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(file for file in (ROOT / "csrc").iterdir() if file.suffix in cross.LANGUAGE)


def compile_all(folder: Path, frameworks: Path, torch_version: str) -> list[Path]:
    flags = [*cross.system_flags(frameworks), *cross.torch_flags(torch_version)]
    objects = [folder / f"{source.stem}.o" for source in SOURCES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source, output: cross.compile_object(source, output, flags), SOURCES, objects))
    return objects


@pytest.fixture(scope="session", params=[wheels.TESTED_TORCH])
def torch_version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def objects(torch_version: str, frameworks: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return compile_all(tmp_path_factory.mktemp("objects"), frameworks, torch_version)


def test_links_with_every_symbol_found(objects: list[Path], torch_version: str, tmp_path: Path) -> None:
    cross.link(objects, tmp_path / "_C.so", torch_version)
    imported = cross.imports(tmp_path / "_C.so")
    origins = {origin for _, origin in imported}
    assert {"libc10", "libtorch_cpu", "Metal", "Foundation", "libobjc", "libc++", "libSystem"} <= origins
    assert "PyInit__C" in cross.exports(tmp_path / "_C.so")


def compile_one(tmp_path: Path, frameworks: Path, torch_version: str, body: str) -> Path:
    source = tmp_path / "planted.mm"
    source.write_text(body)
    flags = [*cross.system_flags(frameworks), *cross.torch_flags(torch_version)]
    cross.compile_object(source, tmp_path / "planted.o", flags)
    return tmp_path / "planted.o"


MISSING = {
    "torch": (
        "#include <ATen/mps/MPSStream.h>\nnamespace at::mps { void endKernel(int); }\n"
        "void planted() { at::mps::endKernel(1); }",
        "__ZN2at3mps9endKernelEi",
    ),
    "Metal": (
        '#import <Metal/Metal.h>\nextern "C" id MTLCreateDefaultDevice(void);\n'
        "id planted() { return MTLCreateDefaultDevice(); }",
        "_MTLCreateDefaultDevice",
    ),
    "a class": (
        "#import <Metal/Metal.h>\n@interface MTLCompileSettings : NSObject\n@end\n"
        "id planted() { return [MTLCompileSettings new]; }",
        "_OBJC_CLASS_$_MTLCompileSettings",
    ),
}


@pytest.mark.parametrize("library", MISSING)
def test_finds_a_missing_symbol_of(library: str, tmp_path: Path, frameworks: Path, torch_version: str) -> None:
    body, symbol = MISSING[library]
    planted = compile_one(tmp_path, frameworks, torch_version, body)
    with pytest.raises(AssertionError, match=rf"undefined symbol: {re.escape(symbol)}"):
        cross.link([planted], tmp_path / "planted.so", torch_version)


def test_finds_a_use_that_apples_headers_refuse(tmp_path: Path, planted: Path, torch_version: str) -> None:
    """csrc against headers in which a selector is missing does not compile."""
    replace(planted / "Metal/MTLCommandEncoder.h", "- (void)endEncoding;\n", "")
    body = "#import <Metal/Metal.h>\nvoid planted(id<MTLComputeCommandEncoder> e) { [e endEncoding]; }"
    with pytest.raises(AssertionError, match="endEncoding"):
        compile_one(tmp_path, planted, torch_version, body)
