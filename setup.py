"""Builds the compiled extension where there is an mps device for it; everything static is in pyproject.toml.

Without one, `pip install .` needs no compiler and gives the package with its eager twins. On Linux, `VIRTUAL_MPS=1`
builds the same sources on the stand-in for Apple's frameworks.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SHADERS = ROOT / "shaders"


def joined(source: Path, seen: set[Path]) -> str:
    """A shader with its headers in one text: Metal's runtime compiler resolves no local #include."""
    if source in seen:
        return ""
    seen.add(source)
    text = re.sub(r"^#pragma once\n", "", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return re.sub(r'^#include "([^"]+)"\n', lambda m: joined(source.parent / m[1], seen), text, flags=re.MULTILINE)


def make_shaders(folder: Path) -> None:
    """Each `.metal` as one text, and as a metallib too where Apple's compiler is at hand."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for source in sorted(SHADERS.glob("*.metal")):
        (folder / source.name).write_text(joined(source, set()), encoding="utf-8")
        if shutil.which("xcrun") and subprocess.run(["xcrun", "-f", "metal"], capture_output=True).returncode == 0:
            compiler = ["xcrun", "metal", "-std=metal3.1", "-fno-fast-math", "-mmacosx-version-min=14.0"]
            target = folder / f"{source.stem}.metallib"
            subprocess.run([*compiler, str(source), "-o", str(target)], check=True)


def extension() -> dict:
    """The arguments for `setup` that build the extension; none where it cannot be built."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        return {}
    if os.environ.get("VIRTUAL_MPS", "0") not in ("", "0") and sys.platform == "linux":
        from virtual_mps import cpp_extension
    elif not torch.backends.mps.is_built():
        return {}

    class BuildExtension(cpp_extension.BuildExtension):
        def run(self) -> None:
            super().run()
            package = ROOT if self.inplace else Path(self.build_lib)
            make_shaders(package / "torch_metalk" / "_shaders")

    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("*") if p.suffix in (".cpp", ".mm"))
    module = cpp_extension.CppExtension(
        "torch_metalk._C",
        sources,
        depends=[str(p.relative_to(ROOT)) for p in (*ROOT.glob("csrc/*.h"), *SHADERS.glob("*.h"))],
        extra_compile_args=["-fobjc-arc", "-Wall"],
        extra_link_args=["-framework", "Metal", "-framework", "Foundation"],
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": BuildExtension}}


setup(**extension())
