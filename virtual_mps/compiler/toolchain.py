"""clang, and the flags that make it read Metal."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
HEADERS = PACKAGE / "include"
EXECUTOR = PACKAGE.parent / "executor"

CLANG_VERSION = 19
INSTALL = f"apt install clang-{CLANG_VERSION}"


class CompileError(Exception):
    """What the user did wrong, or what is missing on the machine; the message is all they see."""


def clang() -> str:
    """Path of the C++ compiler: $VIRTUAL_MPS_CLANG, else clang++-19 on the path."""
    name = os.environ.get("VIRTUAL_MPS_CLANG") or f"clang++-{CLANG_VERSION}"
    path = shutil.which(name)
    if path is None:
        raise CompileError(
            f"virtual_mps: the shader compiler needs clang {CLANG_VERSION}, and {name} was not found: {INSTALL}"
        )
    return path


def machine_flags() -> list[str]:
    # Half precision in hardware (F16C), FMA, vectors of 256 bits: what x86-64 machines have had for ten years.
    return ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []


def check_machine(cpuinfo: str) -> None:
    """cpuinfo: the content of /proc/cpuinfo."""
    if platform.machine() != "x86_64":
        return
    flags = next((line.split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])
    if missing := [name for name in ("avx2", "bmi2", "f16c", "fma") if name not in flags]:
        raise CompileError(f"virtual_mps: this processor lacks {', '.join(missing)}; x86-64-v3 is needed")


def target_triple() -> str:
    return f"{platform.machine()}-unknown-linux-gnu"


def read_flags() -> list[str]:
    """Language flags: C++ with address spaces (see include/vmps/address_spaces.h), and no header but ours."""
    return [
        "-x",
        "c++",
        "-std=c++20",
        "-Xclang",
        "-fsycl-is-device",
        "-Xclang",
        "-aux-triple",
        "-Xclang",
        target_triple(),
        "-fdeclspec",
        "-fno-exceptions",
        "-fno-rtti",
        "-nostdinc",
        f"-I{HEADERS}",
        f"-I{EXECUTOR}",
    ]


def code_flags(fast_math: bool) -> list[str]:
    """Code generation flags. Arithmetic in half and bfloat rounds at each step, as on the GPU."""
    return [
        *machine_flags(),
        "-O2",
        "-gline-tables-only",
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-stack-protector",
        "-fno-convergent-functions",
        "-ffp-contract=on",
        "-Xclang",
        "-ffloat16-excess-precision=none",
        "-Xclang",
        "-fbfloat16-excess-precision=none",
        # Asked for it, Apple's compiler may assume that there is no NaN or infinity. That it does so in a given place
        # is not something to imitate, and shaders that count on masks of -INFINITY do work there.
        *(["-ffast-math", "-fno-finite-math-only"] if fast_math else []),
    ]


def run(command: list[str], **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, **kwargs)
