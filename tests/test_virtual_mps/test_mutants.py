"""The mutation tool, on a toy shader with a header, in a project of its own."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from virtual_mps import mutants as tool
from virtual_mps.compiler import mutation
from virtual_mps.compiler.mutation import Mutant
from virtual_mps.compiler.preprocess import preprocess
from virtual_mps.compiler.source import Source
from virtual_mps.mutants import Child, Problem, limit_processor_time

HEADER = """
#pragma once
inline float sum_of(float v, threadgroup float* partial, uint lane, uint simdgroup) {
  v = metal::simd_sum(v);
  if (lane == 0) partial[simdgroup] = v;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  return partial[0] + partial[1];
}
"""
SHADER = """
#include <metal_stdlib>
#include "sums.h"
using namespace metal;
kernel void sums(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant uint& n [[buffer(2)]],
                 uint i [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                 uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[2];
  float sum = sum_of(i < n ? x[i] : 0.0f, partial, lane, simdgroup);
  if (i >= max(n, 1u)) return;
  y[i] = sum;
}
kernel void unused(device float* y [[buffer(0)]], constant uint& n [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  if (i < n) y[i] = 0;
}
"""
TESTS = """
from pathlib import Path
import torch

def sums(n, size=64):
    text = (Path(__file__).parent / "sums.metal").read_text()
    text = text.replace('#include "sums.h"', (Path(__file__).parent / "sums.h").read_text().replace("#pragma once", ""))
    y = torch.zeros(size, device="mps")
    x = torch.arange(1.0, size + 1, device="mps")
    torch.mps.compile_shader(text).sums(x, y, n, threads=64, group_size=64)
    return y

def test_a_part():
    y = sums(40)
    assert (y[:40] == 820).all() and (y[40:] == 0).all()
"""
UNUSED = 'shader = "sums.metal"\nfunction = "unused"\nfault = "%s"\ntext = "i < n"\nreason = "it is not used"\n'
REASONS = "".join(f"[[survivor]]\n{UNUSED % fault}" for fault in ("< -> <=", "bound check removed"))
NONE = '[[survivor]]\nshader = "sums.metal"\nfunction = "none"\nfault = "< -> <="\ntext = "i < n"\nreason = "gone"\n'


@pytest.fixture
def project(tmp_path):
    for name, text in (("sums.h", HEADER), ("sums.metal", SHADER), ("test_sums.py", TESTS), ("why.toml", REASONS)):
        (tmp_path / name).write_text(text)
    return tmp_path


def mutants(project: Path, *flags: str, tests: tuple[str, ...] = ("pytest", "test_sums.py")) -> tuple[int, str]:
    command = [sys.executable, "-m", "virtual_mps", "mutants", *flags, "sums.metal", *(["--", *tests] if tests else [])]
    environment = os.environ | {"VIRTUAL_MPS": "1"}
    result = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


def sites(text: str) -> list[tuple[str, str]]:
    """Each mutant, and what it makes of the text."""
    source = Source(text)
    return [(str(site.mutant), site.replacement.decode()) for site in mutation.sites(source)]


def test_what_is_changed():
    assert sites(preprocess(SHADER.replace('#include "sums.h"', HEADER))) == [
        ("sum_of: simd_sum dropped: metal::simd_sum(v)", "(v)"),
        ("sum_of: barrier removed: metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup)", "(void)0"),
        ("sums: < -> <=: i < n", "i <= n"),
        ("sums: bound check removed: i < n", "true"),
        ("sums: >= -> >: i >= max(n, 1u)", "i > max(n, 1u)"),
        ("sums: bound check removed: i >= max(n, 1u)", "false"),
        ("sums: max -> min: max(n, 1u)", "min(n, 1u)"),
        ("unused: < -> <=: i < n", "i <= n"),
        ("unused: bound check removed: i < n", "true"),
    ]


@pytest.mark.parametrize(
    ("statement", "unchecked"),
    [
        ("if (i < n) x[i] = 1;", "true"),
        ("if (i >= n) return;", "false"),
        ("if (i >= n) { return; }", "false"),
        ("if (i < n) return;", "false"),
        ("if (i >= n) return 0;", "false"),
        ("if (!(i < n)) return 0;", "true"),
        ("if (i < n) return x[i];", "true"),
        ("if (!(i >= n)) { return x[i]; }", "false"),
        ("if (!(i >= n)) x[i] = 1;", "false"),
        ("if (i >= n || n > 9) return;", "false"),
        ("x[i] = i < n ? 1 : 2;", "true"),
        ("bool inside = i < n; x[i] = inside;", "true"),
        ("bool inside; inside = i < n; x[i] = inside;", "true"),
        ("for (int k = 0; k != 4 && i < n; k++) x[i] = 1;", "true"),
        ("while (i < n && n != 9) x[i] = 1;", "true"),
        ("for (int k = 0; k < n; k++) x[i] = 1;", None),  # it would never end
        ("while (i < n) x[i] = 1;", None),
        ("x[i] = 2 * (i < n);", None),
    ],
)
def test_bound_checks(statement, unchecked):
    text = f"void f(device int* x, int i, int n) {{ {statement} }}"
    assert [to for name, to in sites(text) if "bound check" in name][:1] == ([unchecked] if unchecked else [])


def test_mutants_are_found_again_in_another_layout():
    name = Mutant("ns::f<int>", "< -> <=", "i < n", 2)
    text = "namespace ns { template <> int f<int>(int i, int n) { int a = i < n; return a + (i < n); } }"
    other = text.replace(" { ", "\n{\n// a comment\n").replace("i < n", "i   <\n n")
    for layout in (text, other):
        changed = mutation.apply(layout, name)
        assert "".join(changed.split()).endswith("returna+(i<=n);}}".replace(" ", ""))
        assert changed.count("<=") == 1
    assert mutation.apply(text.replace("ns", "other"), name) is None


def test_which_kernels_a_function_is_part_of():
    source = Source(preprocess(SHADER.replace('#include "sums.h"', HEADER)))
    assert mutation.kernels_that_reach(source, "sum_of") == {"sums"}
    assert mutation.kernels_that_reach(source, "unused") == {"unused"}


def test_functions_of_structures():
    operations = """
    struct Sum { static float of(float v) { return metal::simd_sum(v); } };
    struct Max { static float of(float v) { return metal::simd_max(v); } };
    struct Min { static float of(float v) { return metal::simd_min(v); } };
    template <typename Operation> float all(float v) { return Operation::of(v); }
    float sum_of_all(float v) { return all<Sum>(v); }
    kernel void sums(device float* x) { x[0] = sum_of_all(x[0]); }
    template <typename Operation> kernel void extremes(device float* x) { x[0] = all<Operation>(x[0]); }
    template [[host_name("max")]] kernel void extremes<Max>(device float*);
    """
    source = Source(preprocess("#include <metal_stdlib>\n" + operations))
    assert mutation.kernels_that_reach(source, "Sum::of") == {"sums"}
    assert "extremes" in mutation.kernels_that_reach(source, "Max::of")
    assert mutation.kernels_that_reach(source, "Min::of") == set()


def test_a_function_that_no_kernel_uses(project):
    header = (project / "sums.h").read_text()
    (project / "sums.h").write_text(header + "inline float unused_too(float v) { return v < 1 ? v : 1; }\n")
    status, told = mutants(project, "--reasons", "why.toml")
    assert status == 0, told
    assert "2 in no kernel, 7 killed, 2 survived with a reason" in told


def test_survivors(project):
    status, told = mutants(project, "--reasons", "why.toml")
    assert status == 0, told
    assert "9 mutants; 1 of 1 tests launch kernels, in " in told
    assert "7 killed, 2 survived with a reason" in told
    assert "sums.h:6  sum_of: barrier removed" in told
    assert "test_sums.py::test_a_part" in told


def test_a_survivor_without_a_reason(project):
    tests = (project / "test_sums.py").read_text()
    (project / "test_sums.py").write_text(tests.replace(" and (y[40:] == 0).all()", ""))
    status, told = mutants(project, "--reasons", "why.toml")
    assert status == 1
    assert 'function = "sums"\nfault = "bound check removed"\ntext = "i >= max(n, 1u)"\nreason = ""' in told
    assert 'function = "unused"' not in told


def test_a_limit_of_time(project):
    tests = (project / "test_sums.py").read_text().replace("    assert", "    _ =")
    (project / "test_sums.py").write_text(tests + tests[tests.index("def test_a_part") :].replace("part", "whole"))
    status, told = mutants(project, "--seconds", "0.01")
    assert status == 1
    # Checked mode notices the barrier, and nothing runs the other kernel.
    assert "1 killed, 8 survived" in told
    assert told.count("1 of 2 tests were run") == 6, told


@dataclass(frozen=True)
class Item:
    nodeid: str


def test_the_order_of_tests():
    runs = {
        "f[1]": tool.TestRun(3, frozenset({"k", "other"})),
        "f[2]": tool.TestRun(2, frozenset({"k", "other"})),
        "f[3]": tool.TestRun(4, frozenset({"k"})),
        "g[1]": tool.TestRun(1, frozenset({"k"})),
        "g[2]": tool.TestRun(1, frozenset({"other"})),
        "g[3]": tool.TestRun(5, frozenset({"k"})),
    }
    tests = tool.Tests(SimpleNamespace(items=[Item(name) for name in runs]), runs, seconds=None)
    assert [item.nodeid for item in tests.of({"k"})] == ["g[1]", "f[2]", "f[1]", "g[3]", "f[3]"]
    tests.killed_by("g[3]")
    tests.killed_by("g[2]")
    assert [item.nodeid for item in tests.of({"k"})] == ["g[3]", "g[1]", "f[2]", "f[1]", "f[3]"]


def test_a_reason_without_a_survivor(project):
    (project / "why.toml").write_text(REASONS + NONE)
    status, told = mutants(project, "--reasons", "why.toml")
    assert status == 1
    assert "A reason is recorded for a mutant that there is not: sums.metal: none: < -> <=: i < n" in told


def test_mutants_that_are_none(project):
    """One has the original's code, one no code at all."""
    (project / "sums.h").write_text("#pragma once\n")
    kernel = "kernel void sums(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],"
    kernel += " constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {"
    kernel += 'static_assert(2 < 3, ""); static_assert(!(3 < 3), ""); if (i != n && i - n > 23) y[i] = 820; }'
    (project / "sums.metal").write_text(f'#include <metal_stdlib>\n#include "sums.h"\n{kernel}')
    status, told = mutants(project)
    assert "1 does not compile" in told, told
    assert "static assertion failed" in told
    assert "1 equivalent" in told
    assert status == 0


def test_a_process_that_does_not_end():
    assert Child(lambda alive: time.sleep(60), {}, silence=0.2).answer() is None


def test_a_process_that_gives_signs_of_life():
    def compute(alive):
        for _ in range(4):
            time.sleep(0.5)
            alive()
        return {"mutant": "slow"}

    assert Child(compute, {}, silence=1.5).answer() == {"mutant": "slow"}


def test_a_process_that_loops():
    def compute(alive):
        limit_processor_time(0.1)
        while True:
            pass

    assert Child(compute, {}, silence=60).answer() is None


def test_a_process_that_dies():
    assert Child(lambda alive: os.kill(os.getpid(), signal.SIGKILL), {}, silence=60).answer() == {}


def test_a_process_with_an_answer():
    variable = {"VIRTUAL_MPS_MUTANT": "x"}
    answer = Child(lambda alive: {"mutant": os.environ["VIRTUAL_MPS_MUTANT"]}, variable, silence=60).answer()
    assert answer == {"mutant": "x"}
    assert "VIRTUAL_MPS_MUTANT" not in os.environ
    with pytest.raises(Problem, match="ZeroDivisionError"):
        Child(lambda alive: 1 // 0, {}, silence=60).answer()


def test_tests_that_fail_without_a_mutant(project):
    (project / "test_sums.py").write_text("def test_it():\n    assert 1 == 2\n")
    status, told = mutants(project)
    assert status == 1
    assert "a test fails without any mutant: test_sums.py::test_it: assert 1 == 2" in told


def test_the_list(project):
    status, told = mutants(project, "--list", tests=())
    assert status == 0
    assert told.splitlines()[0] == "sums.h:4  sum_of: simd_sum dropped: metal::simd_sum(v)"


def test_no_tests_named(project):
    status, told = mutants(project, tests=())
    assert status == 1
    assert "the command of the tests follows: -- pytest tests/test_my_op.py" in told
