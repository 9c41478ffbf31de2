"""Public sources that the suite tests against: fetched from PyPI once, pinned by version and hash, kept in a cache."""

import fcntl
import functools
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from virtual_mps.compiler import cache

TABLE = Path(__file__).parent / "sources.txt"
# The wheel that holds MLX's Metal headers is for a Mac; the others are source distributions.
PLATFORM = "macosx_14_0_arm64"


def _requirements() -> dict[str, str]:
    lines = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    return {re.split("[= ]", line)[0]: line for line in lines}


def version(name: str) -> str:
    return re.search(r"==(\S+)", _requirements()[name])[1]


def unpacked(name: str) -> Path:
    """The folder of a pinned distribution: a wheel's content, or the one folder of a source distribution.

    Skips the test where neither the cache nor PyPI has it.
    """
    folder, missing = _fetched(cache.root(), _requirements()[name])
    if missing:
        pytest.skip(missing)
    contents = list(folder.iterdir())
    return contents[0] if len(contents) == 1 else folder


class _Unreachable(Exception):
    pass


@functools.cache  # pip tries for ten seconds before it gives up
def _fetched(root: Path, requirement: str) -> tuple[Path, str]:
    """The folder in the cache, and why it is not there, if so."""
    folder = root / "conformance" / cache.digest(requirement)[:16]
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                try:
                    with cache.new_directory(folder) as scratch:
                        _download(requirement, scratch)
                except _Unreachable as reason:
                    return folder, str(reason)
    return folder, ""


def _download(requirement: str, folder: Path) -> None:
    (folder / "requirement.txt").write_text(requirement)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "--require-hashes"]
    command += ["--platform", PLATFORM, "-d", str(folder), "-r", str(folder / "requirement.txt")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        message = f"pip cannot fetch {requirement.split()[0]} from the package index: {result.stderr.strip()[-200:]}"
        if "No matching distribution found" in result.stderr or "Could not fetch" in result.stderr:
            raise _Unreachable(message)
        pytest.fail(message)
    (folder / "requirement.txt").unlink()
    (archive,) = folder.iterdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [n for n in wheel.namelist() if n.startswith("mlx/include/")])
    else:
        with tarfile.open(archive) as source:
            source.extractall(folder, filter="data")
    archive.unlink()
