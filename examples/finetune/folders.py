"""Where checkpoints lie in an adapter path. Free of torch, so that options can be checked quickly."""

import json
import re
from pathlib import Path

from . import UserError

RUN_FILE = "run.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_folder(adapter_path: Path, iteration: int) -> Path:
    return adapter_path / f"checkpoint-{iteration:07d}"


def newest_checkpoint(path: Path) -> Path:
    """`path` itself if it is a checkpoint, else the one with the most iterations in it."""
    if (path / RUN_FILE).is_file():
        return path
    numbered = [(int(match[1]), child) for child in _children(path) if (match := _NAME.fullmatch(child.name))]
    if not numbered:
        raise UserError(f"no checkpoint in {path}: expected {RUN_FILE} or folders named checkpoint-N")
    return max(numbered)[1]


def read_run(checkpoint: Path) -> dict:
    """What `save` got as `run`."""
    try:
        return json.loads((checkpoint / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{checkpoint / RUN_FILE}: {error}") from error


def _children(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() else []


def set_aside_old_run(adapter_path: Path) -> Path | None:
    """Renames a folder that holds another run's checkpoints: a new run neither overwrites nor mixes with them."""
    if not any(_NAME.fullmatch(child.name) for child in _children(adapter_path)):
        return None
    number = 1
    while (aside := adapter_path.with_name(f"{adapter_path.name}.{number}")).exists():
        number += 1
    adapter_path.rename(aside)
    return aside
