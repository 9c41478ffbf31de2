"""Attention of a few new queries to the keys and values of a cache , read once for all heads that share them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_metalk.ops import _checks
from torch_metalk.ops._operator import compute_dtype, define
from torch_metalk.ops.attention import _check, _eager_options, _empty_like_output, _numbers, _Options

#: Queries of a sequence that the operator takes, and components of a head.
MOST_QUERIES, MOST_COMPONENTS = 8, 256


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    check: bool = False,
) -> Tensor:
    r"""Causal attention of the Q newest tokens of each sequence to a cache that already holds their keys and values.

    Query i of a sequence of length n is at position ``n - Q + i`` and attends to keys up to there; what the cache holds
    from n on has no influence, even where it is NaN. A query at a negative position, and one whose keys are all
    masked, gives zero. Statistics are float32. There is no gradient: `attention` has one.

    Args:
        q: ``[B, H, Q, D]``, Q at most 8 and D at most 256; float32, float16 or bfloat16 (float64 on the CPU).
        k: ``[B, Hkv, K, D]``, any strides; H is a multiple of Hkv, and query head h uses key head ``h // (H // Hkv)``.
        v: ``[B, Hkv, K, Dv]``, Dv at most 256.
        lengths: ``[B]``, int32 or int64 (which is converted), on q's device: the keys of each sequence, the Q newest
            included. None: all K. A length beyond K counts as K, a negative one as 0.
        mask: broadcastable to ``[B, H, Q, K]``, of rank 2 or 4: bool (True attends) or floating (added to the scores).
        scale, sliding_window, softcap: as in `attention`.
        check: raise where a length is not from 0 to K. This waits for the device, which a call otherwise does not.

    Returns:
        ``[B, H, Q, Dv]`` in q's dtype, laid out in memory as ``[B, Q, H, Dv]``.

    Raises:
        ValueError: more than 8 queries or 256 components, shapes that do not fit, and what `attention` refuses.
        TypeError: dtypes differ; lengths no int32 or int64.
    """
    scale, sliding_window = _numbers("decode_attention", q, scale, sliding_window, softcap)
    if check and lengths is not None:
        _checks.index_range("decode_attention", "lengths", lengths, 0, k.shape[2], "the room of the cache")
    return _decode_attention(q, k, v, lengths, mask, scale, sliding_window, softcap)[0]


def _check_queries(op: str, q: Tensor, v: Tensor, v_name: str = "v") -> None:
    if q.shape[2] > MOST_QUERIES:
        _checks.refuse(op, "q", f"of {q.shape[2]} queries", f"at most {MOST_QUERIES}; attention takes more")
    for name, t in (("q", q), (v_name, v)):
        if t.shape[-1] > MOST_COMPONENTS:
            _checks.refuse(op, name, f"of head dim {t.shape[-1]}", f"at most {MOST_COMPONENTS}")


def _check_decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, options: _Options) -> None:
    op = "decode_attention"
    _check(q, k, v, options, op)
    _check_queries(op, q, v)
    if lengths is not None:
        _checks.index(op, "lengths", lengths, (q.shape[0],), q)


def _attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, options: _Options, hidden: Tensor | None = None):
    """The twin of both forms of cache: attention with a mask that says what lengths, window and `hidden` keys
    ``[B, K]`` leave to be seen."""
    queries, keys = q.shape[2], k.shape[2]
    j = torch.arange(keys, device=q.device)
    if lengths is None:
        position = torch.full((1, 1, 1, 1), keys - queries, device=q.device)
    else:
        position = lengths.clamp(0, keys).view(-1, 1, 1, 1) - queries
    position = position + torch.arange(queries, device=q.device)[:, None]
    seen = j <= position
    if options.sliding_window is not None:
        seen = seen & (position - j < options.sliding_window)
    if hidden is not None:
        seen = seen & ~hidden[:, None, None]
    mask = seen
    if options.mask is not None and options.mask.dtype == torch.bool:
        mask = seen & options.mask
    elif options.mask is not None:
        mask = torch.where(seen, options.mask, -math.inf)
    return _eager_options(q, k, v, options._replace(mask=mask, is_causal=False, sliding_window=None))


def _options(mask: Tensor | None, scale: float, sliding_window: int | None, softcap: float | None) -> _Options:
    return _Options(mask, True, True, scale, sliding_window, softcap, "auto")


def _eager(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, *args):
    options = _options(*args)
    _check_decode(q, k, v, lengths, options)
    return _attend(q, k, v, lengths, options)


def _fake(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, *args):
    _check_decode(q, k, v, lengths, _options(*args))
    return _results(q, v)


def _results(q: Tensor, v: Tensor):
    return _empty_like_output(q, v), q.new_empty(q.shape[:-1], dtype=compute_dtype(q))


_decode_attention = define(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? mask, float scale, int? sliding_window,"
    " float? softcap) -> (Tensor o, Tensor lse)",
    eager=_eager,
    fake=_fake,
    no_gradient="it has none; use attention.",
)
