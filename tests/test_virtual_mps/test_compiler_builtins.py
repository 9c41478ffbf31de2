"""What a thread knows about its place: every attribute, in every type it may have."""

import numpy as np
import pytest

from virtual_mps.executor import Library, MetalError

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
VECTORS = [
    "thread_position_in_grid",
    "threadgroup_position_in_grid",
    "thread_position_in_threadgroup",
    "threads_per_grid",
    "threadgroups_per_grid",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
]
SCALARS = [
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "thread_index_in_quadgroup",
    "quadgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "quadgroups_per_threadgroup",
    "dispatch_quadgroups_per_threadgroup",
    "threads_per_simdgroup",
    "thread_execution_width",
]


def expected_of_grid(grid: np.ndarray, group: np.ndarray) -> dict[tuple[int, ...], dict]:
    """Values by position in the grid, x first."""
    groups = -(-grid // group)
    result = {}
    for z, y, x in np.ndindex(*grid[::-1]):
        position = np.array([x, y, z])
        at = position // group
        inside = position - at * group
        size = np.minimum(group, grid - at * group)
        index = inside[0] + size[0] * (inside[1] + size[1] * inside[2])
        count, full = size.prod(), group.prod()
        result[x, y, z] = {
            "thread_position_in_grid": position,
            "threadgroup_position_in_grid": at,
            "thread_position_in_threadgroup": inside,
            "threads_per_grid": grid,
            "threadgroups_per_grid": groups,
            "threads_per_threadgroup": size,
            "dispatch_threads_per_threadgroup": group,
            "thread_index_in_threadgroup": index,
            "thread_index_in_simdgroup": index % 32,
            "simdgroup_index_in_threadgroup": index // 32,
            "thread_index_in_quadgroup": index % 4,
            "quadgroup_index_in_threadgroup": index // 4,
            "simdgroups_per_threadgroup": -(-count // 32),
            "dispatch_simdgroups_per_threadgroup": -(-full // 32),
            "quadgroups_per_threadgroup": -(-count // 4),
            "dispatch_quadgroups_per_threadgroup": -(-full // 4),
            "threads_per_simdgroup": 32,
            "thread_execution_width": 32,
        }
    return result


@pytest.fixture(scope="module")
def library():
    def entry(name, scalar, waits):
        parameters = [f"{scalar}3 v{i} [[{a}]]" for i, a in enumerate(VECTORS)]
        parameters += [f"{scalar} s{i} [[{a}]]" for i, a in enumerate(SCALARS)]
        stores = [
            f"y[at + {3 * i}] = v{i}.x; y[at + {3 * i + 1}] = v{i}.y; y[at + {3 * i + 2}] = v{i}.z;" for i in range(7)
        ]
        stores += [f"y[at + {21 + i}] = s{i};" for i in range(len(SCALARS))]
        return f"""
        kernel void {name}(device uint* y [[buffer(0)]], {", ".join(parameters)}) {{
          {"threadgroup_barrier(mem_flags::mem_none);" if waits else ""}
          uint at = {21 + len(SCALARS)} * (uint(v0.x) + v3.x * (uint(v0.y) + v3.y * uint(v0.z)));
          {"".join(stores)}
        }}"""

    return Library(HEADER + entry("as_uint", "uint", False) + entry("as_ushort", "ushort", True))


@pytest.mark.parametrize("name", ["as_uint", "as_ushort"])
@pytest.mark.parametrize("grid", [(10, 6, 4), (7, 5, 3), (1, 1, 1)])
@pytest.mark.parametrize("group", [(5, 3, 2), (40, 1, 1)])
def test_every_attribute(library, name, grid, group):
    run = library.kernel(name)
    assert run.waits == (name == "as_ushort")
    width = 21 + len(SCALARS)
    y = np.full((grid[2], grid[1], grid[0], width), 12345, np.uint32)
    run(y, threads=grid, threads_per_threadgroup=group)
    for (px, py, pz), values in expected_of_grid(np.array(grid), np.array(group)).items():
        expected = [*np.concatenate([values[a] for a in VECTORS]), *[values[a] for a in SCALARS]]
        np.testing.assert_array_equal(y[pz, py, px], expected, err_msg=str((px, py, pz)))


def test_positions_of_fewer_dimensions():
    run = Library(
        HEADER
        + """
    kernel void k(device uint* y [[buffer(0)]], uint a [[thread_position_in_grid]],
                  ushort2 b [[thread_position_in_grid]], ushort c [[threadgroup_position_in_grid]],
                  uint2 d [[threads_per_grid]]) {
      device uint* at = y + 6 * (b.y * d.x + b.x);
      at[0] = a; at[1] = b.x; at[2] = b.y; at[3] = c; at[4] = d.x; at[5] = d.y;
    }"""
    ).kernel("k")
    y = np.zeros((3, 4, 6), np.uint32)
    run(y, threadgroups=(2, 3), threads_per_threadgroup=(2, 1))
    for row in range(3):
        for column in range(4):
            np.testing.assert_array_equal(y[row, column], [column, column, row, column // 2, 4, 3])


def test_whole_threadgroups_are_not_cut():
    run = Library(
        HEADER
        + """
    kernel void k(device atomic_uint* count [[buffer(0)]], uint n [[threads_per_grid]]) {
      atomic_fetch_add_explicit(count, n, memory_order_relaxed);
    }"""
    ).kernel("k")
    count = np.zeros(1, np.uint32)
    run(count, threadgroups=(3,), threads_per_threadgroup=(40,))
    assert count[0] == 120 * 120


def test_an_unknown_attribute_is_refused():
    with pytest.raises(MetalError, match=r"program_source:3:.*parameter 'i' of kernel 'k'"):
        Library(
            HEADER + "kernel void k(device uint* y [[buffer(0)]], uint i [[thread_position_in_space]]) { y[0] = i; }"
        )
