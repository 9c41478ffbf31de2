"""Puts the keys and values of new tokens into a cache in pages, in place."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from torch_metalk.ops import _checks
from torch_metalk.ops._operator import define
from torch_metalk.ops.paged_attention import check_pages


def paged_cache_write(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, *, check: bool = False
) -> None:
    """``k_pages[slot // page_size, slot % page_size] = k[t]`` with ``slot = slots[t]``, and so for v.

    Args:
        k: ``[T, Hkv, D]``, v: ``[T, Hkv, Dv]``; float32, float16 or bfloat16 (float64 on the CPU), any strides.
        k_pages: ``[pages, page_size, Hkv, D]``, v_pages: ``[pages, page_size, Hkv, Dv]``: written in place, any
            strides; page_size 8, 16 or 32.
        slots: ``[T]``, int32 or int64, on k's device, no slot twice. A token with a negative slot is left out, and so
            is one whose slot is behind the last page.
        check: raise where a slot is behind the last page. This waits for the device, which a call otherwise does not.

    Raises:
        ValueError: shapes that do not fit, another page size, a tensor that requires a gradient while gradients are
            recorded.
        TypeError: dtypes differ; slots no int32 or int64.
    """
    if check:
        last = k_pages.shape[0] * k_pages.shape[1] - 1
        _checks.index_range("paged_cache_write", "slots", slots, None, last, "the last slot")
    _paged_cache_write(k, v, k_pages, v_pages, slots)


def _check(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    op = "paged_cache_write"
    _checks.floating(op, k=k, v=v, k_pages=k_pages, v_pages=v_pages)
    _checks.same_dtype(op, k=k, v=v, k_pages=k_pages, v_pages=v_pages)
    _checks.rank(op, "k", k, (3,))
    tokens, heads, head_dim = k.shape
    if v.dim() != 3 or v.shape[:2] != k.shape[:2]:
        _checks.refuse(op, "v", _checks.shape_of(v), f"[{tokens}, {heads}, Dv], from k")
    check_pages(op, k_pages, v_pages)
    if k_pages.shape[2:] != k.shape[1:]:
        accepted = f"[pages, page_size, {heads}, {head_dim}], from k"
        _checks.refuse(op, "k_pages", _checks.shape_of(k_pages), accepted)
    if v_pages.shape[3] != v.shape[2]:
        _checks.refuse(op, "v_pages", _checks.shape_of(v_pages), f"as many components as v, {v.shape[2]}")
    _checks.index(op, "slots", slots, (tokens,), k)


def _eager(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    _check(k, v, k_pages, v_pages, slots)
    page_size = k_pages.shape[1]
    there = (slots >= 0) & (slots < k_pages.shape[0] * page_size)
    slots = slots[there].long()
    for new, pages in ((k, k_pages), (v, v_pages)):
        pages[slots // page_size, slots % page_size] = new[there]


def _refuse(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> NoReturn:
    tensors = {"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages}
    name = next(name for name, t in tensors.items() if t.requires_grad)
    accepted = "constants, for the cache has no gradient; call it under torch.no_grad"
    _checks.refuse("paged_cache_write", name, "a tensor that requires a gradient", accepted)


_paged_cache_write = define(
    "paged_cache_write(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor slots) -> ()",
    eager=_eager,
    fake=_check,
    autograd=_refuse,
)
