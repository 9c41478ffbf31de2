"""Every option of attention crossed with dtypes, head dimensions, lengths and layouts, against float64.

`make test` runs a selection in which every pair of settings occurs; `make conformance` runs every combination, and the
selection in checked mode.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests import matrices
from tests.matrices import Case
from tests.operators import assert_accurate, run
from tests.test_attention import stock
from torch_metalk import ops

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FACTORS: dict[str, Sequence] = {
    "algorithm": ("tiled", "materialised"),
    # Of queries and keys, and of values: each tiled kernel, its widest head and another.
    "dims": ((32, 32), (64, 40), (80, 128), (128, 128), (72, 136), (256, 256)),
    "dtype": tuple(DTYPES),
    "heads": ((2, 2), (6, 2)),
    "lengths": ((33, 33), (40, 7), (9, 70)),
    "causal": ("none", "upper_left", "lower_right"),
    "window": (None, 12),
    "softcap": (None, 3.0),
    "mask": ("none", "keys", "bool", "additive"),
    "layout": ("heads inside", "misaligned"),
}


def possible(case: Case) -> bool:
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case of the selection; of all cases, for each algorithm, head dimensions and dtype."""
    matrices.parametrize(metafunc, FACTORS, possible, ("algorithm", "dims", "dtype"))


def test_the_selection_has_every_pair():
    assert len(matrices.check_selection(FACTORS, possible)) < 40


def laid_out(t: Tensor, layout: str) -> Tensor:
    """The same values ``[B, H, N, D]`` as a projection leaves them, or behind an odd offset and with gaps."""
    if layout == "heads inside":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    return t.new_empty(*t.shape[:-1], t.shape[-1] + 3)[..., 1 : 1 + t.shape[-1]].copy_(t)


def make_mask(kind: str, heads: int, queries: int, keys: int) -> Tensor | None:
    if kind == "keys":
        return torch.rand(2, 1, 1, keys) > 0.3
    if kind == "bool":
        mask = torch.rand(2, heads, queries, keys) > 0.4
        mask[:, :, 1] = False  # a row that may attend to nothing
        return mask
    if kind == "additive":
        return torch.randn(queries, keys).masked_fill_(torch.rand(queries, keys) > 0.7, -math.inf)
    return None


def check(case: Case, device: torch.device | str) -> None:
    (heads, kv_heads), (queries, keys), (head_dim, value_dim) = case["heads"], case["lengths"], case["dims"]
    dtype = DTYPES[case["dtype"]]
    shapes = {
        "q": (2, heads, queries, head_dim),
        "k": (2, kv_heads, keys, head_dim),
        "v": (2, kv_heads, keys, value_dim),
    }
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    mask = make_mask(case["mask"], heads, queries, keys)
    options = {"is_causal": case["causal"] != "none", "sliding_window": case["window"], "softcap": case["softcap"]}
    if options["is_causal"]:
        options["causal_alignment"] = case["causal"]
    incoming = [torch.randn(2, heads, queries, value_dim).to(dtype)]
    names = list(tensors)

    ours = functools.partial(
        ops.attention, mask=None if mask is None else mask.to(device), algorithm=case["algorithm"], **options
    )
    on_device = {name: laid_out(t.to(device), case["layout"]) for name, t in tensors.items()}
    found, found_grads = run(ours, on_device, names, incoming)
    definition = functools.partial(stock, mask=mask, **options)
    measure, measure_grads = run(definition, tensors, names, incoming)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    exact, exact_grads = run(
        functools.partial(stock, mask=mask, **options), {n: t.double() for n, t in tensors.items()}, names, incoming
    )
    # Half precision rounds once, the definition after every step. In float32, backward subtracts sum(do * o) where the
    # definition has sum(dp * p): of a row that sees one key the difference is nothing, and what is left is rounding.
    # PyTorch's own kernel for the CPU, which the twin uses, has 12 times the definition's error there.
    factor = 16.0 if dtype == torch.float32 else 2.0
    results = zip(("o", *names), found + found_grads, measure + measure_grads, exact + exact_grads, strict=True)
    for name, *triple in results:
        assert_accurate(*triple, f"{name} of {dict(case)}", factor)


def test_values_and_gradients(cases: list[Case], device: torch.device) -> None:
    if device.type == "cpu" and cases[0]["algorithm"] != "tiled":
        pytest.skip("the CPU has one algorithm")
    for case in cases:
        check(case, device)


@functools.cache
def selection() -> list[Case]:
    return list(matrices.pairwise(FACTORS, possible))


def test_in_checked_mode(cases: list[Case], checked_device: torch.device, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--conformance", None) != "all":
        pytest.skip("compiles every kernel in its instrumented form; part of make conformance")
    for case in cases:
        if case in selection():
            check(case, checked_device)
