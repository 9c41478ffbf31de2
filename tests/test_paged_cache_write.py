from __future__ import annotations

import pytest
import torch

from tests.operators import DTYPES, Case, ForwardOpTests, on_device
from torch_metalk import ops


def written(k, v, k_pages, v_pages, slots):
    """Copies of the pages, as the operator changes them."""
    k_pages, v_pages = k_pages.clone(), v_pages.clone()
    ops.paged_cache_write(k, v, k_pages, v_pages, slots)
    return k_pages, v_pages


def stock(k, v, k_pages, v_pages, slots):
    k_pages, v_pages = k_pages.clone(), v_pages.clone()
    for t, slot in enumerate(slots.tolist()):
        if 0 <= slot < k_pages.shape[0] * k_pages.shape[1]:
            page, place = divmod(slot, k_pages.shape[1])
            k_pages[page, place] = k[t]
            v_pages[page, place] = v[t]
    return k_pages, v_pages


def tensors(slots, page_size=8, heads=2, head_dim=8, value_dim=12, dtype=torch.int32):
    slots = torch.tensor(slots, dtype=dtype)
    return {
        "k": torch.randn(len(slots), heads, head_dim),
        "v": torch.randn(len(slots), heads, value_dim),
        "k_pages": torch.randn(3, page_size, heads, head_dim),
        "v_pages": torch.randn(3, page_size, heads, value_dim),
        "slots": slots,
    }


def case(name, *args, **shape):
    constant = ("k", "v", "k_pages", "v_pages")
    return Case(name, lambda: tensors(*args, **shape), written, stock, saved=(), constant=constant)


class TestPagedCacheWrite(ForwardOpTests):
    op = "paged_cache_write"
    cases = (
        case("one token", [5]),
        case("several, some of them left out", [9, -1, 2, 23, 24, 3], value_dim=8),
        case("int64, odd widths", [9, -1, 2, 2**40], dtype=torch.int64, page_size=16, head_dim=3, value_dim=5),
    )


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("page_size", [8, 32])
def test_copies_bit_for_bit(page_size, index, dtype, device):
    if dtype == torch.float64 and device.type != "cpu":
        pytest.skip("mps has no float64")
    given = tensors([3, 0, 17, -5, 23], page_size, 3, 64, 40, index)
    given = {n: t.to(device, dtype) if t.is_floating_point() else t.to(device) for n, t in given.items()}
    expected = stock(**given)
    for got, want in zip(written(**given), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("layout", ["both", "heads first", "transposed"])
def test_writes_into_strided_pages(layout, device):
    """A view of a larger tensor is written in place, and nothing beside it."""
    given = {n: t.to(device) for n, t in tensors([4, 22, 1], value_dim=8).items()}
    expected = stock(**given)
    if layout == "both":
        whole = torch.stack([given["k_pages"], given["v_pages"]], 1)
        k_pages, v_pages = whole[:, 0], whole[:, 1]
    else:
        dims = (1, 2) if layout == "heads first" else (1, 3)
        k_pages, v_pages = (given[n].transpose(*dims).contiguous().transpose(*dims) for n in ("k_pages", "v_pages"))
    before = k_pages._version
    ops.paged_cache_write(given["k"], given["v"], k_pages, v_pages, given["slots"])
    assert torch.equal(k_pages, expected[0])
    assert torch.equal(v_pages, expected[1])
    assert k_pages._version > before, "autograd has to notice"


def test_in_inference_mode(device):
    with torch.inference_mode():
        given = {n: t.to(device) for n, t in tensors([4, 22, 1]).items()}
        assert torch.equal(written(**given)[1], stock(**given)[1])


def test_slots_are_checked_on_request(device):
    given = {n: t.to(device) for n, t in tensors([-1, 23]).items()}
    ops.paged_cache_write(**given, check=True)
    given["slots"][0] = 24
    with pytest.raises(ValueError, match="'slots' is up to 24; accepted: at most 23, the last slot"):
        ops.paged_cache_write(**given, check=True)


@pytest.mark.parametrize("empty", ["tokens", "pages", "heads", "value_dim"])
def test_empty(empty, device):
    shape = {"heads": 0} if empty == "heads" else {"value_dim": 0} if empty == "value_dim" else {}
    given = {n: t.to(device) for n, t in tensors([] if empty == "tokens" else [1, 2], **shape).items()}
    if empty == "pages":
        given |= {n: given[n][:0] for n in ("k_pages", "v_pages")}
    for got, want in zip(written(**given), stock(**given), strict=True):
        assert torch.equal(got, want)


def test_refuses_to_lose_a_gradient(device):
    given = {n: t.to(device) for n, t in tensors([1]).items()}
    given["v"].requires_grad_()
    with pytest.raises(ValueError, match="'v' is a tensor that requires a gradient"):
        ops.paged_cache_write(**given)
    with torch.no_grad():
        ops.paged_cache_write(**given)


GOOD = tensors([0, 1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": torch.ones(2, 16)}, ValueError, "'k' is a tensor of shape"),
        ({"k": torch.ones(2, 2, 8).half()}, TypeError, "'v' is of dtype torch.float32; accepted: the dtype of 'k'"),
        ({"k_pages": torch.ones(3, 8, 2, 8).bfloat16()}, TypeError, "'k_pages' is of dtype torch.bfloat16"),
        ({"v": torch.ones(1, 2, 12)}, ValueError, "'v' is a tensor of shape"),
        ({"v": torch.ones(2, 2, 8)}, ValueError, "'v_pages'"),
        ({"k": torch.ones(2, 3, 8), "v": torch.ones(2, 3, 12)}, ValueError, "'k_pages' is a tensor of shape"),
        ({"k_pages": torch.ones(3, 12, 2, 8)}, ValueError, "'k_pages' is of page size 12"),
        ({"slots": torch.ones(2)}, TypeError, "'slots' is of dtype torch.float32"),
        ({"slots": torch.ones(3, dtype=torch.int32)}, ValueError, "'slots' is a tensor of shape"),
        ({"slots": torch.ones(2, dtype=torch.int64, device="meta")}, ValueError, "'slots' is on meta"),
    ],
)
def test_bad_input(arguments, error, message, device):
    with pytest.raises(error, match=f"paged_cache_write.*{message}"):
        ops.paged_cache_write(**on_device(GOOD | arguments, device))
