"""What the machine must have, and the command that installs what it has not."""

import importlib.metadata
import sys
from pathlib import Path

from . import EnvironmentProblem
from .compiler import CompileError, toolchain

TORCH_VERSIONS = ((2, 12), (2, 15))  # oldest and newest supported

GNUSTEP_HEADERS = Path("/usr/include/GNUstep")


def check_platform() -> None:
    if sys.platform != "linux":
        raise EnvironmentProblem(
            f"virtual_mps stands in for Apple's frameworks on Linux; this is {sys.platform}. "
            "On a Mac use the real mps device."
        )


def check_torch() -> str:
    """The version of PyTorch, if it is one that the device supports."""
    oldest, newest = (".".join(map(str, version)) for version in TORCH_VERSIONS)
    command = f"pip install 'torch>={oldest},<{TORCH_VERSIONS[1][0]}.{TORCH_VERSIONS[1][1] + 1}'"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentProblem(f"virtual_mps needs PyTorch, which is not installed: {command}") from None
    if not TORCH_VERSIONS[0] <= tuple(int(part) for part in version.split(".")[:2]) <= TORCH_VERSIONS[1]:
        raise EnvironmentProblem(
            f"virtual_mps supports PyTorch {oldest} to {newest}, and {version} is installed: {command}"
        )
    return version


def clang() -> str:
    try:
        return toolchain.clang()
    except CompileError as error:
        raise EnvironmentProblem(str(error)) from None


def gnustep_headers() -> Path:
    if not (GNUSTEP_HEADERS / "Foundation/Foundation.h").exists():
        raise EnvironmentProblem(
            "virtual_mps needs GNUstep's Foundation, whose headers were not found in "
            f"{GNUSTEP_HEADERS}: apt install libgnustep-base-dev"
        )
    return GNUSTEP_HEADERS


def objc_headers() -> Path:
    """The folder of GCC's Objective-C headers; of several versions the newest."""
    found = sorted(Path("/usr/lib/gcc").glob("*/*/include/objc/runtime.h"), key=lambda path: int(path.parts[-4]))
    if not found:
        raise EnvironmentProblem("virtual_mps needs the Objective-C runtime's headers: apt install gobjc")
    return found[-1].parent
