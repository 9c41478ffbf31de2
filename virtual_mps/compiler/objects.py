"""Compares compiled kernels."""

import shutil
import tempfile
from pathlib import Path

from . import toolchain

_SECTIONS = (".text", ".rodata", ".data", ".data.rel.ro", "vmps_threadgroup")


def same_code(one: Path, other: Path) -> bool:
    """Whether two shared objects hold the same code and data; line numbers may differ."""
    return _code(one) == _code(other)


def _code(path: Path) -> bytes:
    objcopy = shutil.which("objcopy")
    if objcopy is None:
        raise toolchain.CompileError("virtual_mps: objcopy was not found: apt install binutils")
    with tempfile.TemporaryDirectory() as folder:
        code = b""
        for section in _SECTIONS:
            target = Path(folder) / "section"
            toolchain.run([objcopy, "-O", "binary", f"--only-section={section}", str(path), str(target)])
            code += target.read_bytes() if target.exists() else b""
            target.unlink(missing_ok=True)
        return code
