"""Files that appear in the disk cache whole or not at all, whoever else writes them at the same time."""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def root() -> Path:
    """$VIRTUAL_MPS_CACHE, else virtual_mps in the user's cache folder."""
    if folder := os.environ.get("VIRTUAL_MPS_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "virtual_mps"


def digest(*parts: bytes | str) -> str:
    """Hash of the parts with their lengths, so that no two lists of parts collide."""
    result = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        result.update(b"%d:" % len(data) + data)
    return result.hexdigest()


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` at the end, unless another process was faster."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=".new-"))
    try:
        yield scratch
        scratch.chmod(0o755)
        try:
            scratch.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file name to write to, which becomes `path` at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=".new-"))
    try:
        yield scratch / path.name
        (scratch / path.name).replace(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
