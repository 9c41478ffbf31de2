"""What csrc asks Metal for: every operator is called in every way that its tests know, and each launch written down.

A copy of csrc is built for that, in which `dispatch` records in the place of encoding. It runs in a process of its own:
`python -m tests.apple.recording LIBRARY FILE [OPERATOR]`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
# Threads that a pipeline takes: with few, a row that is wider than those of the tests needs the kernels that loop.
THREADS = (1024, 32)
WIDER = 41


@dataclass(frozen=True)
class Argument:
    """A tensor of a dtype, plain bytes of a C++ type, or an absent optional."""

    dtype: str | None = None
    type: str | None = None
    bytes: int = 0


@dataclass(frozen=True)
class Launch:
    library: str
    kernel: str
    threads: int
    threadgroup_bytes: int
    constants: tuple[bool, ...]
    arguments: tuple[Argument, ...]


def copy_sources(folder: Path) -> Path:
    """A copy of csrc that records, and of what it includes."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    shutil.copytree(ROOT / "shaders", folder / "shaders")
    shutil.copy(Path(__file__).parent / "include/recorder.h", folder / "csrc")
    _insert(folder / "csrc/metal.h", r"(?=namespace torch_metalk \{)", '#include "recorder.h"\n\n')
    text = (folder / "csrc/metal.h").read_text()
    assert "sizeof(T)" in text, "metal.h takes the size of an argument in another way"
    (folder / "csrc/metal.h").write_text(text.replace("sizeof(T)", "recorder::size_of<T>()"))
    _insert(folder / "csrc/metal.mm", r"\nvoid dispatch\(.*\) \{\n", "  return recorder::record(launch, arguments);\n")
    _insert(folder / "csrc/metal.mm", r"\nuint32_t max_threads\(.*\) \{\n", "  return recorder::max_threads();\n")
    return folder / "csrc"


def _insert(path: Path, after: str, line: str) -> None:
    text, count = re.subn(after, lambda m: m[0] + line, path.read_text())
    assert count == 1, f"{path.name} has {count} places that match {after!r}"
    path.write_text(text)


def record(library: Path, output: Path, *operators: str) -> list[Launch]:
    """The launches, without repetitions, of the operators' kernels in a library built from a recording copy."""
    command = [sys.executable, "-m", "tests.apple.recording", str(library), str(output), *operators]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"the operators do not run with a recorder:\n{result.stderr}"
    launches = set()
    for line in output.read_text().splitlines():
        launch = json.loads(line)
        launch["constants"] = tuple(launch["constants"])
        launch["arguments"] = tuple(Argument(**argument) for argument in launch["arguments"])
        launches.add(Launch(**launch))
    return sorted(launches, key=repr)


def main(library: str, output: str, *operators: str) -> None:
    # In the place of the extension, so that its kernels are the only ones.
    sys.modules["torch_metalk._C"] = ModuleType("torch_metalk._C")
    sys.modules["torch_metalk._C"].__spec__ = importlib.machinery.ModuleSpec("torch_metalk._C", None)

    import torch

    from tests import conftest  # noqa: F401 - gives the mps device

    torch.ops.load_library(library)
    Path(output).touch()
    os.environ["METALK_RECORDER_FILE"] = output
    for threads in THREADS:
        os.environ["METALK_RECORDER_THREADS"] = str(threads)
        for call in _calls(operators):
            call()


def _calls(operators: tuple[str, ...]) -> Iterator[Callable[[], object]]:
    """Every case of the tests of every operator that has a kernel: each dtype, layout and choice of gradients, and each
    tensor by itself in float32, where the operator takes that."""
    import torch

    from tests.operators import DTYPES, OpTests, run, strided_copies

    for file in sorted((ROOT / "tests").glob("test_*.py")):
        if "OpTests" not in file.read_text():
            continue
        for tests in vars(importlib.import_module(f"tests.{file.stem}")).values():
            if not (isinstance(tests, type) and issubclass(tests, OpTests) and tests.op):
                continue
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"torch_metalk::{tests.op}", "MPS"):
                continue
            if operators and tests.op not in operators:
                continue
            yield from tests.more_calls("mps")
            for case, dtype in itertools.product(tests.cases, DTYPES):
                tensors = case.tensors(dtype, "mps")
                names = case.differentiable(tensors)
                for given in (
                    tensors,
                    *(tensors | {n: copy} for n, t in tensors.items() for copy in strided_copies(t).values()),
                ):
                    yield partial(run, case.ours, given, names)
                wide = {n: t.repeat(*[1] * (t.dim() - 1), WIDER) for n, t in tensors.items()}
                for some in (tensors, wide):
                    yield partial(_try, case.ours, some, names)
                    for name in names:
                        yield partial(_try, case.ours, some, [name])
                        yield partial(_try, case.ours, some | {name: some[name].float()}, names)


def _try(function: Callable, tensors: dict, names: list[str]) -> None:
    """Calls an operator in a way that it may refuse."""
    from tests.operators import run

    with contextlib.suppress(TypeError, ValueError):
        run(function, tensors, names)


if __name__ == "__main__":
    main(*sys.argv[1:])
