from __future__ import annotations

import functools
import math

import pytest
import torch

from tests import test_attention, test_decode_attention
from tests.operators import DTYPES, Case, ForwardOpTests, assert_accurate, assert_rounding_only, on_device
from torch_metalk import ops


def gathered(q, k_pages, v_pages, block_tables, context_lens):
    """The arguments of attention to the same cache without pages."""
    k, v = (pages[block_tables.long()].flatten(1, 2).transpose(1, 2) for pages in (k_pages, v_pages))
    return {"q": q, "k": k, "v": v, "lengths": context_lens}


def stock(**given):
    kwargs = {n: given.pop(n) for n in ("scale", "sliding_window", "softcap") if n in given}
    return test_decode_attention.stock(**gathered(**given), **kwargs)


def tensors(queries=1, page_size=8, lengths=(13, 24), heads=4, kv_heads=2, head_dim=16, value_dim=None):
    """Pages in any order, none used twice, and some that are not used."""
    pages = -(-max(lengths) // page_size)
    room = len(lengths) * pages + 2
    made = test_attention.qkv(room, heads, kv_heads, queries, page_size, head_dim, value_dim)
    return {
        "q": made["q"][: len(lengths)],
        "k_pages": made["k"].transpose(1, 2).contiguous(),
        "v_pages": made["v"].transpose(1, 2).contiguous(),
        "block_tables": torch.randperm(room)[: len(lengths) * pages].view(len(lengths), pages).int(),
        "context_lens": torch.tensor(lengths, dtype=torch.int32),
    }


def moved(given, device, dtype=torch.float32):
    return {n: t.to(device, dtype if t.is_floating_point() else None) for n, t in given.items()}


def case(name, shape=None, **kwargs):
    return Case(
        name,
        functools.partial(tensors, **(shape or {})),
        functools.partial(ops.paged_attention, **kwargs),
        functools.partial(stock, **kwargs),
        saved=(),
        constant=("q", "k_pages", "v_pages"),
        factor=4.0,
    )


class TestPagedAttention(ForwardOpTests):
    op = "paged_attention"
    cases = (
        case("pages of 8", scale=0.3),
        case("pages of 16", {"queries": 2, "page_size": 16, "lengths": (0, 1, 33)}, sliding_window=9, softcap=2.0),
        case("pages of 32", {"queries": 8, "page_size": 32, "heads": 8, "head_dim": 7, "value_dim": 10}),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize(("heads", "queries"), [(1, 1), (12, 1), (4, 8)])
def test_matches_a_cache_without_pages(heads, queries, page_size, dtype, device):
    """Bit for bit on mps: the same keys in the same order."""
    lengths = (0, 1, 31, 32, 33, 129, 200)
    given = moved(tensors(queries, page_size, lengths, heads, 1, 32), device, dtype)
    o = ops.paged_attention(**given)
    assert_rounding_only(o, ops.decode_attention(**gathered(**given)))
    exact = {n: t.cpu().double() if t.is_floating_point() else t.cpu() for n, t in given.items()}
    assert_accurate(o, stock(**{n: t.cpu() for n, t in given.items()}), stock(**exact), "o", 4.0)


@pytest.mark.parametrize("rows", [1, 12])
def test_chunks_are_joined(rows, device):
    """Long contexts in two passes over the keys."""
    given = moved(tensors(1, 16, (1100, 300), rows, 1, 8), device)
    o = ops.paged_attention(**given)
    assert_rounding_only(o, ops.decode_attention(**gathered(**given)))
    assert torch.equal(ops.paged_attention(**given), o)


@pytest.mark.parametrize("rows", [1, 12])
def test_shared_pages(rows, device):
    """A common prompt: sequences with the same pages, one of them behind another query."""
    given = moved(tensors(1, 8, (20, 20), rows, 1), device)
    given["block_tables"][1] = given["block_tables"][0]
    assert_rounding_only(ops.paged_attention(**given), ops.decode_attention(**gathered(**given)))
    given["q"][1] = given["q"][0]
    o = ops.paged_attention(**given)
    assert torch.equal(o[0], o[1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("rows", [1, 12])
def test_pages_that_do_not_exist_are_hidden(rows, dtype, device):
    given = moved(tensors(1, 8, (24, 24), rows, 1), device)
    given["block_tables"] = given["block_tables"].to(dtype)
    pages = given["k_pages"].shape[0]
    last = given["block_tables"][1, 2].item()
    given["block_tables"][0] = torch.tensor([-1, pages, -(2**31)])
    given["block_tables"][1, :2] = torch.tensor([2**31 - 1, 2**40 + 1 if dtype == torch.int64 else pages])
    o = ops.paged_attention(**given)
    assert torch.equal(o[0], torch.zeros_like(o[0]))
    alone = {n: given[n][last : last + 1].transpose(1, 2) for n in ("k_pages", "v_pages")}
    assert_rounding_only(o[1:], ops.decode_attention(given["q"][1:], alone["k_pages"], alone["v_pages"]))


def test_pages_beyond_a_length_are_not_used(device):
    given = moved(tensors(1, 8, (8, 24)), device)
    expected = ops.paged_attention(**given, check=True)
    given["block_tables"][0, 1:] = 10**6
    given["k_pages"][given["block_tables"][0, 0], 7] = math.nan
    given["context_lens"][0] = 7
    o = ops.paged_attention(**given, check=True)
    assert_rounding_only(o[1], expected[1])
    assert o[0].isfinite().all()


def test_indices_are_checked_on_request(device):
    given = moved(tensors(), device)
    ops.paged_attention(**given, check=True)
    for name, bad, message in (
        ("context_lens", 25, "'context_lens' is up to 25; accepted: at most 24"),
        ("context_lens", -1, "'context_lens' is down to -1"),
        ("block_tables", 8, "'block_tables' is up to 8; accepted: at most 7"),
        ("block_tables", -1, "'block_tables' is down to -1"),
    ):
        spoiled = given | {name: given[name].clone()}
        spoiled[name].view(-1)[0] = bad
        with pytest.raises(ValueError, match=message):
            ops.paged_attention(**spoiled, check=True)
        ops.paged_attention(**spoiled)


@pytest.mark.parametrize("empty", ["sequences", "pages", "table", "head_dim"])
def test_empty(empty, device):
    given = moved(tensors(), device)
    if empty == "sequences":
        given |= {n: given[n][:0] for n in ("q", "block_tables", "context_lens")}
    elif empty == "pages":
        given |= {n: given[n][:0] for n in ("k_pages", "v_pages")}
    elif empty == "table":
        given["block_tables"] = given["block_tables"][:, :0]
    else:
        given |= {n: given[n][..., :0] for n in ("q", "k_pages", "v_pages")}
    o = ops.paged_attention(**given)
    assert torch.equal(o, torch.zeros_like(o))


def test_strided_pages(device):
    """Keys and values of a layer within one tensor of both, and pages whose heads come before their slots."""
    given = moved(tensors(), device)
    expected = ops.paged_attention(**given)
    both = torch.stack([given["k_pages"], given["v_pages"]], 1)
    o = ops.paged_attention(**given | {"k_pages": both[:, 0], "v_pages": both[:, 1]})
    assert_rounding_only(o, expected)
    heads_first = {n: given[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("k_pages", "v_pages")}
    assert_rounding_only(ops.paged_attention(**given | heads_first), expected)


@pytest.mark.parametrize("rows", [1, 12])
def test_checked_mode_with_bad_indices(rows, checked_device):
    """Nothing outside of the pages is read, whatever tables and lengths say."""
    given = moved(tensors(1, 8, (24, 600, 1200), rows, 1, 20), checked_device)
    given["block_tables"][:2, ::2] = torch.tensor([[10**6], [-5]])
    given["context_lens"][2] = 10**6
    o = ops.paged_attention(**given)
    assert o.isfinite().all()


def test_it_has_no_gradient(device):
    given = moved(tensors(), device)
    o = ops.paged_attention(**given | {"q": given["q"].requires_grad_()})
    with pytest.raises(RuntimeError, match="paged_attention was asked for a gradient: it has none"):
        o.sum().backward()


GOOD = {
    "q": torch.ones(2, 4, 1, 8),
    "k_pages": torch.ones(3, 8, 2, 8),
    "v_pages": torch.ones(3, 8, 2, 6),
    "block_tables": torch.zeros(2, 2, dtype=torch.int32),
    "context_lens": torch.ones(2, dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": torch.ones(2, 4, 9, 8)}, ValueError, "'q' is of 9 queries; accepted: at most 8"),
        ({"q": torch.ones(4, 1, 8)}, ValueError, "'q' is a tensor of shape"),
        ({"q": torch.ones(2, 4, 1, 6)}, ValueError, "'k_pages' is of head dim 8; accepted: that of q, 6"),
        ({"q": torch.ones(2, 3, 1, 8)}, ValueError, "'k_pages' is of 2 heads"),
        ({"v_pages": torch.ones(3, 8, 2, 257)}, ValueError, "'v_pages' is of head dim 257"),
        ({"k_pages": torch.ones(3, 12, 2, 8)}, ValueError, "'k_pages' is of page size 12; accepted: 8, 16, 32"),
        ({"k_pages": torch.ones(3, 8, 8)}, ValueError, "'k_pages' is a tensor of shape"),
        ({"v_pages": torch.ones(3, 16, 2, 6)}, ValueError, "'v_pages' is a tensor of shape"),
        ({"v_pages": torch.ones(3, 8, 2, 6).half()}, TypeError, "'v_pages' is of dtype torch.float16"),
        ({"block_tables": torch.zeros(2, 2)}, TypeError, "'block_tables' is of dtype torch.float32"),
        ({"block_tables": torch.zeros(2, dtype=torch.int32)}, ValueError, "'block_tables' is a tensor of shape"),
        ({"block_tables": torch.zeros(3, 2, dtype=torch.int32)}, ValueError, "'block_tables' is a tensor of shape"),
        ({"context_lens": torch.ones(3, dtype=torch.int32)}, ValueError, "'context_lens' is a tensor of shape"),
        ({"context_lens": torch.ones(2, dtype=torch.int16)}, TypeError, "'context_lens' is of dtype torch.int16"),
        ({"sliding_window": 0}, ValueError, "'sliding_window' is 0"),
        ({"softcap": -1.0}, ValueError, "'softcap' is -1"),
    ],
)
def test_bad_input(arguments, error, message, device):
    with pytest.raises(error, match=f"paged_attention.*{message}"):
        ops.paged_attention(**on_device(GOOD | arguments, device))
