"""Kernels that do what checked mode reports, each beside a twin that does it right."""

import functools
from dataclasses import dataclass

import numpy as np
import pytest

from virtual_mps.executor import Library, MetalError, checked

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
ARGUMENTS = """device float* x, device float* y, constant uint& n, threadgroup float* m [[threadgroup(0)]],
    uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint s [[simdgroup_index_in_threadgroup]]"""


@dataclass(frozen=True)
class Pair:
    """Bodies of kernels, which have ARGUMENTS. x and y have 128 elements, m 64, and n is 64; two threadgroups of 64
    threads run."""

    name: str
    faulty: str
    right: str
    line: int  # of the report, in the faulty body
    message: str  # a regular expression


def pairs(*all_pairs: Pair):
    """Parametrises a test with `check`: check(seed) runs both kernels of a pair and gives the report."""

    @functools.cache
    def library() -> Library:
        """One for all: reading a source takes as long as compiling a kernel."""
        source = HEADER
        for number, pair in enumerate(all_pairs):
            for variant, body in (("right", pair.right), ("faulty", pair.faulty)):
                # The compiler then names the pair where it would name the file.
                source += f'kernel void {variant}_{number}({ARGUMENTS}) {{\n#line 1 "{pair.name}"\n{body}\n}}\n'
        return Library(source)

    def run(name: str, seed: int) -> None:
        x, y = np.arange(128, dtype=np.float32), np.full(128, -1, np.float32)
        with checked(seed):
            library().kernel(name)(
                x, y, np.uint32(64), threadgroups=(2,), threads_per_threadgroup=(64,), threadgroup_memory={0: 256}
            )

    def check(number: int, seed: int = 0) -> str:
        pair = all_pairs[number]
        run(f"right_{number}", seed)
        with pytest.raises(MetalError, match=pair.message) as caught:
            run(f"faulty_{number}", seed)
        report = str(caught.value)
        assert report.startswith(f"kernel 'faulty_{number}', ")
        assert f"{pair.name}:{pair.line}" in report
        assert "threadgroup (" in report
        assert ("(in the order of seed " in report) == bool(seed)
        return report

    checks = [functools.partial(check, number) for number in range(len(all_pairs))]
    return pytest.mark.parametrize("check", checks, ids=[pair.name for pair in all_pairs])
