"""What is in the source distribution and in a wheel: all that belongs there, and nothing else.

The wheel is built from the source distribution, on Linux: with the stand-in's libraries and tools in the place of
Apple's, so its files are those of a Mac's wheel, with another machine's name and code in them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import WITH_DEVICE

from .conftest import replace

ROOT = Path(__file__).resolve().parents[2]
SHADERS = sorted(file.stem for file in (ROOT / "shaders").glob("*.metal"))


def tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).exists()]


def modules() -> set[str]:
    return {name for name in tracked() if name.startswith("torch_metalk/")}


def copy_project(folder: Path) -> Path:
    """The files under version control; what builds have left in the working tree is not among them."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def build_sdist(project: Path, folder: Path) -> Path:
    command = [sys.executable, "-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"]
    subprocess.run(command, cwd=project, capture_output=True, check=True)
    return next(folder.glob("*.tar.gz"))


def build_wheel(source: Path, folder: Path, environment: dict[str, str]) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}"]
    given = {**os.environ, "VIRTUAL_MPS": "0", **environment}
    result = subprocess.run([*command, str(source)], env=given, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return next(folder.glob("*.whl"))


def sdist_names(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}


def sdist_problems(names: set[str]) -> set[str]:
    """Names that are missing from a source distribution (-) or do not belong in it (+)."""
    sources = {n for n in tracked() if n.startswith(("csrc/", "shaders/"))} | modules()
    made = {"PKG-INFO", "setup.cfg"}
    expected = sources | made | {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    found = {n for n in names if not n.startswith("torch_metalk.egg-info/")}
    return {f"-{n}" for n in expected - found} | {f"+{n}" for n in found - expected}


def wheel_problems(names: set[str], extension: set[str]) -> set[str]:
    """The same of a wheel; `extension` is what it has beside the Python modules."""
    expected = modules() | extension
    found = {n for n in names if ".dist-info/" not in n}
    return {f"-{n}" for n in expected - found} | {f"+{n}" for n in found - expected}


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = copy_project(tmp_path_factory.mktemp("project"))
    return build_sdist(project, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # -O0: what is looked at are files, and optimising them takes a minute.
    environment = {**WITH_DEVICE, "CFLAGS": "-O0", "CXXFLAGS": "-O0", "MAX_JOBS": "2"}
    return build_wheel(sdist, tmp_path_factory.mktemp("wheel"), environment)


def test_sdist_has_sources_and_nothing_else(sdist: Path) -> None:
    assert sdist_problems(sdist_names(sdist)) == set()


def test_wheel_has_extension_and_shaders_and_nothing_else(wheel: Path) -> None:
    extension = {f"torch_metalk/_C{sysconfig.get_config_var('EXT_SUFFIX')}"}
    extension |= {f"torch_metalk/_shaders/{name}.{suffix}" for name in SHADERS for suffix in ("metal", "metallib")}
    with zipfile.ZipFile(wheel) as archive:
        assert wheel_problems(set(archive.namelist()), extension) == set()
        metadata = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        assert b"virtual_mps" not in b"".join(
            line for line in archive.read(metadata).splitlines() if line.startswith(b"Requires-Dist")
        )


def test_shaders_in_a_wheel_include_nothing_of_ours(wheel: Path) -> None:
    """Metal's runtime compiler finds no header but Metal's own."""
    with zipfile.ZipFile(wheel) as archive:
        for name in SHADERS:
            text = archive.read(f"torch_metalk/_shaders/{name}.metal").decode()
            assert '#include "' not in text and "#pragma once" not in text
            assert "host_name" in text and "#include <metal_stdlib>" in text


def test_wheel_without_an_extension_is_pure(sdist: Path, tmp_path: Path) -> None:
    built = build_wheel(sdist, tmp_path, {})
    assert built.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(built) as archive:
        assert wheel_problems(set(archive.namelist()), set()) == set()


FAULTS = {
    "a shader left out": (
        "recursive-include shaders *.h *.metal",
        "recursive-include shaders *.h",
        "-shaders/rms_norm.metal",
    ),
    "tests taken along": ("prune tests", "graft tests", "+tests/operators.py"),
    "the stand-in taken along": ("prune tests", "prune tests\ngraft virtual_mps", "+virtual_mps/__init__.py"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_finds_in_an_sdist(fault: str, tmp_path: Path) -> None:
    old, new, expected = FAULTS[fault]
    project = copy_project(tmp_path / "project")
    replace(project / "MANIFEST.in", old, new)
    assert expected in sdist_problems(sdist_names(build_sdist(project, tmp_path / "dist")))


def test_finds_a_stray_file_in_a_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    stray = {"torch_metalk/_shaders/rms_norm.air", "virtual_mps/__init__.py"}
    assert {f"+{name}" for name in stray} <= wheel_problems(names | stray, set())
