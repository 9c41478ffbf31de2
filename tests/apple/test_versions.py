"""The other releases of PyTorch: `make check-versions`, on request, since each is a download of gigabytes.

For a Mac the extension is compiled and linked against each release's macOS wheel. For Linux each release is installed
in an environment of its own, with the stand-in and the extension built against it, and the operators' tests run there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import cross, wheels
from .test_extension import compile_all
from .test_packages import ROOT, copy_project

pytestmark = [pytest.mark.versions, pytest.mark.parametrize("version", wheels.OTHER_TORCH)]


def test_links_for_a_mac(version: str, frameworks: Path, tmp_path: Path) -> None:
    cross.link(compile_all(tmp_path, frameworks, version), tmp_path / "_C.so", version)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Gone after the test, unlike pytest's: PyTorch with CUDA has gigabytes."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def test_runs_on_linux(version: str, folder: Path) -> None:
    project = copy_project(folder / "project")
    python = folder / "venv/bin/python"
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull, "VIRTUAL_MPS": "1"}
    environment |= {"VIRTUAL_MPS_CACHE": str(folder / "cache"), "PYTHONWARNINGS": "ignore"}

    def run(*command: str) -> str:
        result = subprocess.run(
            command, cwd=project, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
        return result.stdout

    def install(*what: str) -> None:
        # Not constrained to the tested versions of torch and of what depends on it.
        run(str(python), "-m", "pip", "install", "-q", "--no-cache-dir", *what)

    run(sys.executable, "-m", "venv", str(folder / "venv"))
    install(f"torch=={version}", "numpy", "setuptools>=77", "wheel", "ninja", "pytest", "pytest-xdist", "expecttest")
    install("hypothesis", "tree-sitter", "tree-sitter-cpp")
    install("--no-build-isolation", "--no-deps", "-e", "./virtual_mps")
    run(str(python), "-m", "virtual_mps", "build")
    install("--no-build-isolation", "--no-deps", "-e", ".")
    assert version in run(str(python), "-m", "torch_metalk", "doctor")
    run(str(python), "-c", "import torch_metalk._extension as e; assert e.status.loaded, e.status.reason")
    # Programs get the device by VIRTUAL_MPS; tests bring it themselves.
    tests = [
        str(file.relative_to(ROOT)) for file in (ROOT / "tests").glob("test_*.py") if "OpTests" in file.read_text()
    ]
    chosen = "mps and test_matches_float64"
    summary = run(str(python), "-m", "pytest", "-q", "-n", "2", "-k", chosen, *tests)
    summary += run(str(python), "-m", "pytest", "-q", "-n", "2", "tests/test_virtual_mps/test_metal_framework.py")
    print(summary)
