"""Launch geometry: how many threadgroups and threads csrc asks for."""

from __future__ import annotations

import importlib

import pytest

from tests.conftest import DEVICES

pytestmark = pytest.mark.skipif("mps" not in DEVICES, reason="the extension is built where there is an mps device")


@pytest.mark.parametrize(
    ("columns", "max_threads", "looped", "threads"),
    [
        # Four columns a thread, and whole simdgroups of 32 threads.
        (1, 1024, False, 32),
        (128, 1024, False, 32),
        (129, 1024, False, 64),
        (203, 1024, False, 64),  # 51 threads have something to read
        (576, 1024, False, 160),  # SmolLM2-135M: 144 threads
        (2048, 1024, False, 512),
        # The longest row of one pass, and the next.
        (4096, 1024, False, 1024),
        (4097, 1024, True, 1024),
        (2**32 - 1, 1024, True, 1024),
        # Pipelines that take fewer threads, as those that need many registers do: 1,000 are 31 simdgroups.
        (1024, 256, False, 256),
        (1025, 256, True, 256),
        (3968, 1000, False, 992),
        (3969, 1000, True, 992),
    ],
)
def test_a_row_to_a_threadgroup(columns, max_threads, looped, threads):
    native = importlib.import_module("torch_metalk._C")
    assert native.row_geometry(columns, 4, max_threads) == (looped, threads)


@pytest.mark.parametrize(
    ("keys", "max_threads", "looped", "threads"),
    [(1, 1024, False, 32), (8192, 1024, False, 1024), (8193, 1024, True, 1024), (5632, 1024, False, 704)],
)
def test_eight_columns_a_thread(keys, max_threads, looped, threads):
    native = importlib.import_module("torch_metalk._C")
    assert native.row_geometry(keys, 8, max_threads) == (looped, threads)


@pytest.mark.parametrize(
    ("needed", "max_threads", "groups", "threads"),
    [
        (1, 1024, 1, 32),
        (33, 1024, 1, 64),
        (256, 1024, 1, 256),
        (257, 1024, 2, 256),
        (2**31 - 1, 1024, 2**23, 256),
        # Pipelines that take fewer threads.
        (256, 100, 3, 96),
    ],
)
def test_independent_pieces(needed, max_threads, groups, threads):
    native = importlib.import_module("torch_metalk._C")
    assert native.elementwise_geometry(needed, max_threads) == (groups, threads)
