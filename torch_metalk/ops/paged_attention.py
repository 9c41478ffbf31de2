"""Attention of a few new queries to a cache in pages (Kwon et al., "PagedAttention", arXiv:2309.06180)."""

from __future__ import annotations

from torch import Tensor

from torch_metalk.ops import _checks
from torch_metalk.ops._operator import define
from torch_metalk.ops.attention import _check_scoring, _numbers
from torch_metalk.ops.decode_attention import _attend, _check_queries, _options, _results

PAGE_SIZES = (8, 16, 32)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    check: bool = False,
) -> Tensor:
    r"""`decode_attention` where key j of sequence b is in slot ``j % page_size`` of page ``block_tables[b, j //
    page_size]``. Sequences may share pages.

    Args:
        q: ``[B, H, Q, D]``, Q at most 8 and D at most 256; float32, float16 or bfloat16 (float64 on the CPU).
        k_pages: ``[pages, page_size, Hkv, D]``, page_size 8, 16 or 32; any strides. H is a multiple of Hkv.
        v_pages: ``[pages, page_size, Hkv, Dv]``, Dv at most 256.
        block_tables: ``[B, pages of a sequence]``, int32 or int64 (which is converted), on q's device. Entries behind a
            sequence's length are not used. A page that does not exist is not read: its keys are hidden.
        context_lens: ``[B]``, int32 or int64: the keys of each sequence, the Q newest included. A length beyond
            the table counts as its room, and a negative length as 0.
        scale, sliding_window, softcap: as in `attention`.
        check: raise where a length is beyond the table, or a page that is used does not exist. This waits for the
            device, which a call otherwise does not.

    Returns:
        ``[B, H, Q, Dv]`` in q's dtype, laid out in memory as ``[B, Q, H, Dv]``.

    Raises:
        ValueError: more than 8 queries or 256 components, another page size, shapes that do not fit.
        TypeError: dtypes differ; tables or lengths no int32 or int64.
    """
    op = "paged_attention"
    scale, sliding_window = _numbers(op, q, scale, sliding_window, softcap)
    if check:
        pages, page_size = k_pages.shape[:2]
        room = block_tables.shape[1] * page_size
        _checks.index_range(op, "context_lens", context_lens, 0, room, "the room of the table")
        used = block_tables.new_tensor(range(0, room, page_size)) < context_lens[:, None]
        _checks.index_range(op, "block_tables", block_tables[used], 0, pages - 1, "the last page")
    return _paged_attention(q, k_pages, v_pages, block_tables, context_lens, scale, sliding_window, softcap)[0]


def check_pages(op: str, k_pages: Tensor, v_pages: Tensor) -> None:
    _checks.rank(op, "k_pages", k_pages, (4,))
    page_size = k_pages.shape[1]
    if page_size not in PAGE_SIZES:
        _checks.refuse(op, "k_pages", f"of page size {page_size}", ", ".join(map(str, PAGE_SIZES)))
    if v_pages.dim() != 4 or v_pages.shape[:3] != k_pages.shape[:3]:
        accepted = f"[{k_pages.shape[0]}, {page_size}, {k_pages.shape[2]}, Dv], from k_pages"
        _checks.refuse(op, "v_pages", _checks.shape_of(v_pages), accepted)


def _check(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, context_lens: Tensor, *args) -> None:
    op = "paged_attention"
    _checks.floating(op, q=q, k_pages=k_pages, v_pages=v_pages)
    _checks.same_dtype(op, q=q, k_pages=k_pages, v_pages=v_pages)
    _checks.rank(op, "q", q, (4,))
    check_pages(op, k_pages, v_pages)
    if k_pages.shape[3] != q.shape[3]:
        _checks.refuse(op, "k_pages", f"of head dim {k_pages.shape[3]}", f"that of q, {q.shape[3]}")
    _check_queries(op, q, v_pages, "v_pages")
    heads, kv_heads = q.shape[1], k_pages.shape[2]
    if heads and (kv_heads == 0 or heads % kv_heads):
        _checks.refuse(op, "k_pages", f"of {kv_heads} heads", f"a number that divides the {heads} heads of q")
    _checks.rank(op, "block_tables", block_tables, (2,))
    _checks.index(op, "block_tables", block_tables, (q.shape[0], block_tables.shape[1]), q)
    _checks.index(op, "context_lens", context_lens, (q.shape[0],), q)
    _check_scoring(op, _options(None, *args))


def _eager(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, context_lens: Tensor, *args):
    _check(q, k_pages, v_pages, block_tables, context_lens, *args)
    pages, page_size = k_pages.shape[:2]
    absent = (block_tables < 0) | (block_tables >= pages)
    if pages == 0:  # nothing that an index could point at
        k_pages, v_pages = (t.new_zeros(1, *t.shape[1:]) for t in (k_pages, v_pages))
    ids = block_tables.masked_fill(absent, 0).long()
    k, v = (t[ids].flatten(1, 2).transpose(1, 2) for t in (k_pages, v_pages))
    hidden = absent.repeat_interleave(page_size, 1)
    return _attend(q, k, v, context_lens, _options(None, *args), hidden)


def _fake(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, context_lens: Tensor, *args):
    _check(q, k_pages, v_pages, block_tables, context_lens, *args)
    return _results(q, v_pages)


_paged_attention = define(
    "paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_tables, Tensor context_lens, float scale,"
    " int? sliding_window, float? softcap) -> (Tensor o, Tensor lse)",
    eager=_eager,
    fake=_fake,
    no_gradient="it has none; use attention.",
)
