"""Scaled dot product attention that keeps no scores (Dao et al., "FlashAttention", arXiv:2205.14135)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_metalk.ops import _checks
from torch_metalk.ops._operator import cast, compute_dtype, define

_ALIGNMENT = ("upper_left", "lower_right")
_ALGORITHMS = ("auto", "tiled", "materialised")
# What auto becomes where backward is to follow: scores have to be made there as they were in forward, to the last bit.
_AUTO_WITH_BACKWARD = "auto_with_backward"
# Kernels have them in float32, and other units.
_SMALLEST, _LARGEST = 1e-30, 1e30
# Scores of one block of query rows that the twin holds at a time: 64 MiB in float32.
_BLOCK_SCORES = 2**24


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    causal_alignment: str = "upper_left",
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    algorithm: str = "auto",
) -> Tensor:
    r"""``softmax(softcap(scale * q @ k.T) + mask) @ v``, with statistics in float32.

    A key that a query may not attend to (mask False or -inf, causal, outside of the window) has no influence on its
    row, even where k or v hold NaN or infinity there. A row that may attend to nothing is zero, and so are its
    gradients; `torch.finfo(dtype).min` in an additive mask is a number like any other.

    Args:
        q: ``[B, H, Q, D]``, float32, float16 or bfloat16 (float64 on the CPU), any strides.
        k: ``[B, Hkv, K, D]`` with H a multiple of Hkv: query head h uses key head ``h // (H // Hkv)``.
        v: ``[B, Hkv, K, Dv]``.
        mask: broadcastable to ``[B, H, Q, K]``, of rank 2 or 4: bool (True attends) or floating (added to the scores).
            Combined with the other restrictions.
        is_causal: query i attends to keys up to i, by `causal_alignment`.
        causal_alignment: where Q and K differ: ``"upper_left"`` puts query 0 at key 0 (as torch does),
            ``"lower_right"`` puts the last query at the last key (a cache before it). Sliding windows follow it too.
        scale: ``1 / sqrt(D)`` where None.
        sliding_window: query i attends to keys j with ``i - j < sliding_window`` only, and where not causal also with
            ``j - i < sliding_window``; at least 1.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before the mask (Gemma 2); positive.
        algorithm: of the Metal kernels; the eager twin has one of its own. ``"tiled"`` passes blocks of keys by blocks
            of queries, never holds all scores, and skips what is hidden; heads of up to 256 numbers. ``"materialised"``
            holds the scores of one head at a time, for products of whole matrices. ``"auto"`` chooses, by the table in
            csrc/geometry.h, and where no gradient is needed takes `decode_attention`'s kernel for up to 8 queries.

    Returns:
        ``[B, H, Q, Dv]`` in q's dtype, laid out in memory as ``[B, Q, H, Dv]``, so that heads join without a copy.
        Backward keeps q, k, v, the output and one float32 per row, and the caller's mask where there is one.

    Raises:
        ValueError: ranks or sizes that do not fit, head counts that do not divide, a mask that requires a gradient or
            has a wrong shape, a window below 1, a softcap that is not positive, scale not finite, an unknown alignment
            or algorithm, tiled on mps with heads of more than 256 numbers.
        TypeError: dtypes differ, an integer tensor; scale or softcap no number, sliding_window no int.
    """
    _checks.one_of("attention", "causal_alignment", causal_alignment, _ALIGNMENT)
    _checks.one_of("attention", "algorithm", algorithm, _ALGORITHMS)
    scale, sliding_window = _numbers("attention", q, scale, sliding_window, softcap)
    lower_right = causal_alignment == "lower_right"
    return _attention(q, k, v, mask, is_causal, lower_right, scale, sliding_window, softcap, algorithm)[0]


def _numbers(
    op: str, q: Tensor, scale: float | None, sliding_window: int | None, softcap: float | None
) -> tuple[float, int | None]:
    """Scale and window as the operators take them."""
    for name, value, kinds in (
        ("scale", scale, (int, float)),
        ("softcap", softcap, (int, float)),
        ("sliding_window", sliding_window, (int,)),
    ):
        if value is not None:
            _checks.number(op, name, value, kinds)
    if sliding_window is not None:
        # A window wider than any sequence restricts nothing; the operator's schema has 64 bits for it.
        sliding_window = min(sliding_window, 2**62)
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0
    return scale, sliding_window


class _Options(NamedTuple):
    """What decides which key a query may see, and how a score is made: the operator's arguments behind v, in order."""

    mask: Tensor | None
    is_causal: bool
    lower_right: bool
    scale: float
    sliding_window: int | None
    softcap: float | None
    algorithm: str

    @property
    def restricts(self) -> bool:
        return self.mask is not None or self.is_causal or self.sliding_window is not None

    def allowed(self, queries: slice, q_len: int, k_len: int, device: torch.device) -> Tensor | None:
        """``[rows, K]``, True where position alone lets a query attend; None where it always does."""
        if not self.is_causal and self.sliding_window is None:
            return None
        shift = k_len - q_len if self.lower_right else 0
        i = torch.arange(queries.start + shift, queries.stop + shift, device=device)[:, None]
        j = torch.arange(k_len, device=device)
        allowed = j <= i if self.is_causal else torch.ones((), dtype=torch.bool, device=device)
        if self.sliding_window is not None:
            allowed = allowed & (i - j < self.sliding_window)
            if not self.is_causal:
                allowed = allowed & (j - i < self.sliding_window)
        return allowed


def _check(q: Tensor, k: Tensor, v: Tensor, options: _Options, op: str = "attention") -> None:
    mask = options.mask
    if not (_checks.alike(q, k, v) and q.dim() == k.dim() == v.dim() == 4):
        _checks.floating(op, q=q, k=k, v=v)
        _checks.same_dtype(op, q=q, k=k, v=v)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            _checks.rank(op, name, tensor, (4,))
    batch, heads, queries, head_dim = q.shape
    k_batch, kv_heads, keys, k_dim = k.shape
    if k_batch != batch or k_dim != head_dim:
        _checks.refuse(op, "k", _checks.shape_of(k), f"[{batch}, Hkv, K, {head_dim}], from q")
    if v.shape[:3] != k.shape[:3]:
        _checks.refuse(op, "v", _checks.shape_of(v), f"[{batch}, {kv_heads}, {keys}, Dv], from k")
    if heads and (kv_heads == 0 or heads % kv_heads):
        _checks.refuse(op, "k", f"of {kv_heads} heads", f"a number that divides the {heads} heads of q")
    if mask is not None:
        _checks.same_device(op, q=q, mask=mask)
        if mask.dtype != torch.bool:
            if not mask.is_floating_point():
                _checks.refuse(op, "mask", f"of dtype {mask.dtype}", "bool, or a floating dtype to be added", TypeError)
            _checks.floating(op, mask=mask)
        full = (batch, heads, queries, keys)
        if mask.dim() not in (2, 4) or any(m not in (1, f) for m, f in zip(mask.shape[::-1], full[::-1], strict=False)):
            _checks.refuse(
                op, "mask", _checks.shape_of(mask), f"[Q, K], [B, 1, Q, K] or [B, H, Q, K] for {full}, or 1 for a size"
            )
        if mask.requires_grad:
            _checks.refuse(op, "mask", "a tensor that requires a gradient", "a constant; detach it")
    _check_scoring(op, options)


def _check_scoring(op: str, options: _Options) -> None:
    if not abs(options.scale) <= _LARGEST:
        _checks.refuse(op, "scale", options.scale, f"a finite number, at most {_LARGEST:g}")
    sliding_window, softcap = options.sliding_window, options.softcap
    if sliding_window is not None and sliding_window < 1:
        _checks.refuse(op, "sliding_window", sliding_window, "None or at least 1")
    if softcap is not None and not _SMALLEST <= softcap <= _LARGEST:
        _checks.refuse(op, "softcap", softcap, f"None or a positive number, {_SMALLEST:g} to {_LARGEST:g}")


def _mask_rows(mask: Tensor, rows: slice, kv_heads: int, group: int) -> Tensor:
    """The rows of a mask, shaped to broadcast over ``[B, Hkv, group, rows, K]``."""
    if mask.dim() == 2:
        mask = mask[None, None]
    if mask.shape[2] != 1:
        mask = mask[:, :, rows]
    return mask.unflatten(1, (kv_heads, group)) if mask.shape[1] != 1 else mask.unsqueeze(1)


# ---- the twin in plain PyTorch: a block of query rows at a time, the scores of a block are recomputed in backward


class _Block(NamedTuple):
    rows: slice
    q: Tensor  # [B, Hkv, group * rows, D]
    p: Tensor  # [B, Hkv, group * rows, K]: probabilities
    slope: Tensor | float  # d softcap(s) / d s, of p's shape
    hidden: Tensor | None  # broadcastable to [B, Hkv, group, rows, K]: True where a query may not attend
    lse: Tensor  # [B, H, rows]


class _Blocks:
    """Iterates over blocks of query rows with their probabilities; k and v are made finite first where hidden keys
    may hold NaN, since 0 * NaN in a product would reach rows that never attend to them."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: _Options):
        self.options = options
        self.dtype = compute_dtype(q)
        self.q, self.k, self.v = q, k.to(self.dtype), v.to(self.dtype)
        self.bad_k = self.bad_v = None
        if options.restricts:
            self.k, bad_k = _finite(self.k)
            self.v, self.bad_v = _finite(self.v)
            self.bad_k = None if bad_k is None else bad_k.any(-1)  # [B, Hkv, K]: one bad component spoils a score
        self.batch, self.heads, self.q_len, _ = q.shape
        self.kv_heads, self.k_len = k.shape[1:3]
        self.group = self.heads // self.kv_heads if self.kv_heads else 1
        per_row = max(1, self.batch * self.heads * self.k_len)
        self.rows_per_block = max(1, _BLOCK_SCORES // per_row)

    def fold(self, t: Tensor, rows: slice) -> Tensor:
        """Rows of ``[B, H, Q, E]`` as ``[B, Hkv, group * rows, E]``: one product serves all heads of a group."""
        t = t[:, :, rows].to(self.dtype)
        return t.reshape(self.batch, self.kv_heads, self.group * t.shape[2], t.shape[3])

    def unfold(self, t: Tensor) -> Tensor:
        return t.reshape(self.batch, self.heads, t.shape[2] // self.group, t.shape[-1])

    def __iter__(self):
        for start in range(0, self.q_len, self.rows_per_block):
            yield self._block(slice(start, min(self.q_len, start + self.rows_per_block)))

    def _block(self, rows: slice) -> _Block:
        options = self.options
        q = self.fold(self.q, rows)
        s = (q @ self.k.mT).mul_(options.scale)
        slope: Tensor | float = 1.0
        if options.softcap is not None:
            s = s.div_(options.softcap).tanh_()
            slope = 1 - s * s
            s = s.mul_(options.softcap)
        grid = s.view(self.batch, self.kv_heads, self.group, rows.stop - rows.start, self.k_len)
        allowed = options.allowed(rows, self.q_len, self.k_len, s.device)
        hidden = None if allowed is None else ~allowed
        if options.mask is not None:
            mask = _mask_rows(options.mask, rows, self.kv_heads, self.group)
            if mask.dtype == torch.bool:
                masked = ~mask
            else:
                masked = mask == -math.inf
                grid += mask.masked_fill(masked, 0)
            hidden = masked if hidden is None else hidden | masked
        if self.bad_k is not None:
            grid.masked_fill_(self.bad_k[:, :, None, None], math.nan)
        if hidden is not None:
            grid.masked_fill_(hidden, -math.inf)
        top = s.amax(-1, keepdim=True) if self.k_len else s.new_full((*s.shape[:-1], 1), -math.inf)
        top = top.masked_fill(top == -math.inf, 0)
        p = s.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        empty = total == 0
        lse = total.log().add_(top).masked_fill_(empty, 0)
        p /= total.masked_fill_(empty, 1)
        if hidden is not None and not total.sum().isfinite():
            p.view_as(grid).masked_fill_(hidden, 0)  # of a row that is NaN, what it does not see would be so too
        return _Block(rows, q, p, slope, hidden, self.unfold(lse).squeeze(-1))

    def spoil(self, p: Tensor, bad: Tensor, hidden: Tensor) -> Tensor:
        """p with NaN where a bad row ``[B, Hkv, group * rows]`` attends."""
        seen = (~hidden).expand(self.batch, self.kv_heads, self.group, -1, self.k_len)
        return p.masked_fill(bad[..., None] & seen.reshape(p.shape), math.nan)

    def spread_bad_values(self, o: Tensor, hidden: Tensor | None) -> None:
        """Give NaN to the rows of o ``[B, Hkv, group, rows, Dv]`` that attend to a value that is not finite."""
        if self.bad_v is not None:
            attends = torch.ones((), dtype=torch.bool, device=o.device) if hidden is None else ~hidden
            attends = attends.expand(*o.shape[:-1], self.k_len).to(self.dtype)
            o.masked_fill_((attends @ self.bad_v[:, :, None].to(self.dtype)) > 0, math.nan)


def _finite(t: Tensor) -> tuple[Tensor, Tensor | None]:
    """t with zeros where it is not finite, and where that is (None if nowhere)."""
    if t.sum().isfinite():
        return t, None
    finite = t.isfinite()
    return t.masked_fill(~finite, 0), ~finite


def _empty_like_output(q: Tensor, v: Tensor) -> Tensor:
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)


def _blockwise(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    blocks = _Blocks(q, k, v, options)
    o = _empty_like_output(q, v)
    lse = q.new_empty(q.shape[:-1], dtype=blocks.dtype)
    for block in blocks:
        part = (block.p @ blocks.v).unflatten(2, (blocks.group, block.rows.stop - block.rows.start))
        blocks.spread_bad_values(part, block.hidden)
        o[:, :, block.rows] = part.flatten(1, 2)
        lse[:, :, block.rows] = block.lse
    return o, lse


def _blockwise_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, options: _Options):
    # Probabilities are made again from the scores and not as exp(s - lse): where a whole row holds finfo.min, lse
    # absorbs the logarithm of the number of keys, and exp(s - lse) would be 1 instead of 1 / K.
    blocks = _Blocks(q, k, v, options)
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(blocks.k), torch.zeros_like(blocks.v)
    for block in blocks:
        do_, o_ = blocks.fold(do, block.rows), blocks.fold(o, block.rows)
        ds = do_ @ blocks.v.mT
        q_, p = block.q, block.p
        if block.hidden is not None:
            # What a query does not see, it must not spoil either: 0 * NaN in the products behind.
            q_ = _finite(q_)[0]
            finite_do, bad_do = _finite(do_)
            if bad_do is not None:
                p = blocks.spoil(p, bad_do.any(-1), block.hidden)
        else:
            finite_do = do_
        dv += p.mT @ finite_do
        if blocks.bad_v is not None:
            bad_rows = blocks.bad_v.any(-1)[:, :, None]
            ds = ds.masked_fill(bad_rows, math.nan)
        ds = ds.sub_((do_ * o_).sum(-1, keepdim=True)).mul_(block.p).mul_(block.slope)
        if block.hidden is not None:
            rows = block.rows.stop - block.rows.start
            ds.view(blocks.batch, blocks.kv_heads, blocks.group, rows, blocks.k_len).masked_fill_(block.hidden, 0)
        ds = ds.mul_(options.scale)
        dq[:, :, block.rows] = blocks.unfold(ds @ blocks.k)
        dk += ds.mT @ q_
    return dq, dk, dv


# ---- the CPU's fused kernel, where it has the same meaning


def _fused_serves(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> bool:
    return (
        q.device.type == "cpu"
        and options.softcap is None
        and v.shape[-1] == q.shape[-1]
        and 0 not in q.shape
        and k.shape[2] != 0
        and (options.mask is None or options.mask.dtype == torch.bool)
    )


def _fused_bias(q: Tensor, k: Tensor, options: _Options) -> Tensor | None:
    """The additive mask for torch's kernel, or None where its own causality says it all."""
    q_len, k_len = q.shape[2], k.shape[2]
    if options.mask is None and options.sliding_window is None and (not options.lower_right or q_len == k_len):
        return None
    allowed = options.allowed(slice(0, q_len), q_len, k_len, q.device)
    if options.mask is not None:
        mask = options.mask if options.mask.dim() == 4 else options.mask[None, None]
        allowed = mask if allowed is None else mask & allowed
    if allowed is None:  # a shift of nothing
        return None
    bias = torch.zeros((), dtype=q.dtype).masked_fill(~allowed, -math.inf)
    return _dense_rows(bias.expand(*(bias.shape[:2] if bias.dim() == 4 else ()), q_len, k_len))


def _dense_rows(t: Tensor) -> Tensor:
    """torch's fused kernel takes any stride but that of the last dimension, which it believes to be 1."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _finite_sum(t: Tensor) -> bool:
    """False where t holds NaN or infinity; may be False too where a sum of large numbers overflows."""
    return math.isfinite(t.sum(dtype=compute_dtype(t)).item())


def _fused(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> tuple[Tensor, Tensor] | None:
    """Output and lse by torch's kernel; None where hidden keys or values that are not finite got into the output."""
    bias = _fused_bias(q, k, options)
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        *map(_dense_rows, (q, k, v)), 0.0, options.is_causal and bias is None, attn_mask=bias, scale=options.scale
    )
    if options.restricts and not _finite_sum(o):
        return None
    return o, lse


def _fused_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, options: _Options):
    """Gradients by torch's kernel; None where hidden keys or values that are not finite may have got into them."""
    # A value that is not finite was noticed in forward, a key may show in q's gradient only, and a query or an incoming
    # gradient in those of keys that the query does not see.
    if options.restricts and not all(map(_finite_sum, (q, k, v, do))):
        return None
    bias = _fused_bias(q, k, options)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        *map(_dense_rows, (cast(do, q.dtype), q, k, v, o)),
        lse,
        0.0,
        options.is_causal and bias is None,
        attn_mask=bias,
        scale=options.scale,
    )


def _eager(q: Tensor, k: Tensor, v: Tensor, *args):
    options = _Options(*args)
    _check(q, k, v, options)
    return _eager_options(q, k, v, options)


def _eager_options(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    result = _fused(q, k, v, options) if _fused_serves(q, k, v, options) else None
    if result is None:
        return _blockwise(q, k, v, options)
    o, lse = result
    if o.stride(2) != o.shape[1] * o.shape[3]:  # heads are neighbours in memory where they were so in q
        o = o.transpose(1, 2).contiguous().transpose(1, 2)
    return o, lse.contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, *args):
    _check(q, k, v, _Options(*args))
    return _empty_like_output(q, v), q.new_empty(q.shape[:-1], dtype=compute_dtype(q))


def _check_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, options: _Options) -> None:
    op = "attention_backward"
    _check(q, k, v, options, op)
    shape = (*q.shape[:-1], v.shape[-1])
    if o.shape != shape:
        _checks.refuse(op, "o", _checks.shape_of(o), f"{shape}, from q and v")
    _checks.gradient(op, do, o, "do")
    if lse.shape != q.shape[:-1]:
        _checks.refuse(op, "lse", _checks.shape_of(lse), f"one per query row, {tuple(q.shape[:-1])}")


def _eager_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *args):
    options = _Options(*args)
    _check_backward(do, q, k, v, o, lse, options)
    grads = _fused_backward(do, q, k, v, o, lse, options) if _fused_serves(q, k, v, options) else None
    if grads is None:
        grads = _blockwise_backward(do, q, k, v, o, options)
    return tuple(_laid_out_like(grad, t) for grad, t in zip(grads, (q, k, v), strict=True))


def _laid_out_like(grad: Tensor, t: Tensor) -> Tensor:
    """A gradient in t's dtype and, as far as t has no gaps, in its order in memory."""
    if grad.dtype == t.dtype and grad.stride() == t.stride():
        return grad
    out = torch.empty_like(t)
    return grad if grad.stride() == out.stride() and grad.dtype == t.dtype else out.copy_(grad)


def _fake_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *args):
    _check_backward(do, q, k, v, o, lse, _Options(*args))
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, *options):
        if options[-1] == "auto":
            options = (*options[:-1], _AUTO_WITH_BACKWARD)
        o, lse = _attention.below_autograd(q, k, v, mask, *options)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, k, v, o, lse, mask)
        ctx.options = options
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        if do is None:
            return (None,) * 10
        return (*_attention_backward(do, *ctx.saved_tensors, *ctx.options), *(None,) * 7)


def _autocast(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, *options):
    """Like torch's own attention, which autocast runs in its lower precision."""
    return *(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v)), *options


_OPTIONS = (
    "Tensor? mask, bool is_causal, bool lower_right, float scale, int? sliding_window, float? softcap, str algorithm"
)
_attention = define(
    f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor o, Tensor lse)",
    eager=_eager,
    fake=_fake,
    autograd=_Attention.apply,
    autocast=_autocast,
)
_attention_backward = define(
    f"attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    eager=_eager_backward,
    fake=_fake_backward,
)
