"""The stand-in for Apple's frameworks, as these tests see it; nothing else in this folder names it."""

from __future__ import annotations

import shutil
from pathlib import Path

import virtual_mps

INCLUDE = Path(virtual_mps.__file__).resolve().parent / "include"
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
