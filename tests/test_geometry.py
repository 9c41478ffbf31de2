"""Launch geometry: how many threadgroups and threads csrc asks for."""

from __future__ import annotations

import importlib

import pytest

from tests.conftest import DEVICES

pytestmark = pytest.mark.skipif("mps" not in DEVICES, reason="the extension is built where there is an mps device")


@pytest.mark.parametrize(
    ("columns", "vectors", "max_threads", "threads"),
    [
        # Vectors of four columns, and whole simdgroups of 32 threads.
        (1, 1, 1024, 32),
        (128, 1, 1024, 32),
        (129, 1, 1024, 64),
        (203, 1, 1024, 64),  # 51 threads have something to read
        (576, 1, 1024, 160),  # SmolLM2-135M: 144 threads
        (2048, 1, 1024, 512),
        # The longest row of one vector a thread, and of two; longer ones take the looped kernel.
        (4096, 1, 1024, 1024),
        (4097, 1, 1024, 0),
        (4097, 2, 1024, 544),
        (5632, 2, 1024, 704),
        (8192, 2, 1024, 1024),
        (8193, 2, 1024, 0),
        (2**31 - 1, 2, 1024, 0),
        # Pipelines that take fewer threads, as those that need many registers do: 1,000 are 31 simdgroups.
        (1024, 1, 256, 256),
        (1025, 1, 256, 0),
        (3968, 1, 1000, 992),
        (3969, 1, 1000, 0),
        (3969, 2, 1000, 512),
    ],
)
def test_a_row_to_a_threadgroup(columns, vectors, max_threads, threads):
    native = importlib.import_module("torch_metalk._C")
    assert native.row_threads(columns, vectors, max_threads) == threads


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


@pytest.mark.parametrize(
    ("sequences", "kv_heads", "rows", "keys", "value_dim", "large", "plan"),
    [
        # Rows of a threadgroup, blocks of them, chunks; vectors of a value and the lanes for them.
        (1, 8, 1, 511, 128, False, (8, 1, 1, 32, 32)),
        (1, 8, 1, 1024, 128, False, (8, 1, 2, 32, 32)),
        (1, 8, 4, 2**20, 128, False, (8, 1, 8, 32, 32)),
        (1, 8, 4, 2**20, 128, True, (8, 1, 32, 32, 32)),
        (1, 1, 8, 2**30, 64, False, (8, 1, 64, 16, 16)),
        (1, 1, 8, 2**30, 64, True, (8, 1, 64, 16, 16)),
        (64, 8, 8, 2**20, 256, False, (8, 1, 1, 64, 32)),
        (1, 1, 9, 100, 256, False, (32, 1, 1, 32, 32)),
        (1, 1, 32, 100, 64, False, (32, 1, 1, 8, 8)),
        (1, 1, 33, 100, 80, False, (32, 2, 1, 10, 16)),
        (1, 2, 256, 4096, 1, False, (32, 8, 4, 1, 1)),
        (1, 1, 1, 1, 1, False, (8, 1, 1, 1, 1)),
        (1, 1, 1, 1, 5, False, (8, 1, 1, 2, 2)),
    ],
)
def test_decoding(sequences, kv_heads, rows, keys, value_dim, large, plan):
    native = importlib.import_module("torch_metalk._C")
    assert native.plan_decode(sequences, kv_heads, rows, keys, value_dim, large) == plan
