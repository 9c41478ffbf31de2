"""The disk cache: filled once, whole or not at all, by any number of processes."""

import subprocess
import sys
import time

import numpy as np
import pytest

from virtual_mps.compiler import cache, runtime
from virtual_mps.executor import Library

SOURCE = """#include <metal_stdlib>
using namespace metal;
kernel void k(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = 41 + 1; }
"""


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A cache of its own, with the executor in it."""
    built = runtime.build_runtime()
    monkeypatch.setenv("VIRTUAL_MPS_CACHE", str(tmp_path))
    copy = tmp_path / runtime.compiler_id() / built.name
    copy.parent.mkdir()
    copy.write_bytes(built.read_bytes())
    return copy.parent


def test_the_second_time_nothing_is_compiled(folder, monkeypatch):
    Library(SOURCE).kernel("k")
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    assert sum(p.suffix == ".so" for p in before) == 2
    monkeypatch.setenv("VIRTUAL_MPS_CLANG", "no-such-clang")
    start = time.perf_counter()
    kernel = Library(SOURCE).kernel("k")
    assert (
        time.perf_counter() - start < 0.5
    )  # a call of the compiler, or of Python alone, is well above on a busy machine
    y = np.zeros(3, np.float32)
    kernel(y, threads=(3,))
    np.testing.assert_array_equal(y, 42)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_processes_that_compile_at_once(folder):
    code = (
        "import sys, numpy as np\n"
        "from virtual_mps.executor import Library\n"
        "y = np.zeros(3, np.float32)\n"
        "Library(sys.stdin.read()).kernel('k')(y, threads=(3,))\n"
        "print(y.tolist())\n"
    )
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:
        process.stdin.write(SOURCE)
        process.stdin.close()
    for process in processes:
        assert process.stdout.read() == "[42.0, 42.0, 42.0]\n", process.stderr.read()
        assert process.wait() == 0
        process.stdout.close()
        process.stderr.close()
    names = [p.name for p in folder.rglob("*")]
    assert not [n for n in names if n.startswith(".new-")]
    assert sum(n == "table.json" for n in names) == 1


def test_a_failure_leaves_nothing_behind(folder):
    with pytest.raises(RuntimeError):
        Library(SOURCE + "nonsense")
    assert sorted(p.suffix for p in folder.iterdir()) == [".pch", ".so"]


def test_new_file_appears_only_when_it_is_complete(tmp_path):
    target = tmp_path / "deep" / "file"
    with pytest.raises(ZeroDivisionError), cache.new_file(target) as scratch:
        scratch.write_text("half")
        1 / 0  # noqa: B018
    assert list(target.parent.iterdir()) == []
    with cache.new_file(target) as scratch:
        scratch.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    assert list(target.parent.iterdir()) == [target]


def test_new_directory_yields_to_a_faster_process(tmp_path):
    target = tmp_path / "library"
    with cache.new_directory(target) as slow:
        (slow / "who").write_text("slow")
        with cache.new_directory(target) as fast:
            (fast / "who").write_text("fast")
    assert (target / "who").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [target]


def test_everything_that_shapes_the_result_is_in_the_key(folder):
    Library(SOURCE)
    Library(SOURCE, fast_math=True)
    Library(SOURCE, defines=["A"])
    Library(SOURCE, defines=["A=1", "B"])
    Library(SOURCE, defines=["A=1B"])
    Library(SOURCE, language_version=310)
    Library(SOURCE + " ")
    assert len([p for p in folder.iterdir() if p.is_dir()]) == 7


def test_digest_tells_lists_of_parts_apart():
    assert cache.digest("ab", "c") != cache.digest("a", "bc")
    assert cache.digest("") != cache.digest()
