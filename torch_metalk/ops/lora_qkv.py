"""Several linear layers of one input with their low-rank adapters (Hu et al., "LoRA", arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_metalk.ops import _checks
from torch_metalk.ops._operator import cast, compute_dtype, define, rows


def lora_qkv(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    scalings: Sequence[float],
    *,
    own_matmul: bool = False,
) -> list[Tensor]:
    """``linear(x, W, b) + scaling * (x @ A.T) @ B.T`` for each of several layers: q, k, v, or gate, up, or one alone.

    The adapters of all layers read x once, and their gradients for x are added onto that of the frozen layers without
    another pass. The frozen product is rounded to the layers' dtype, as a linear layer rounds it; the adapter's is
    summed in float32, added in float32 and rounded once. Under autocast x, weights and biases are cast to the autocast
    dtype and the adapters stay as they are, so that their gradients are sums in float32.

    Args:
        x: ``[..., K]``.
        weights: ``[N, K]`` each, of x's dtype; frozen. N may differ from layer to layer.
        biases: ``[N]`` or None each, of x's dtype, frozen; None where no layer has one.
        lora_a: ``[R, K]`` each; R may differ from layer to layer.
        lora_b: ``[N, R]`` each.
        scalings: one finite number each, 0 is allowed.
        own_matmul: on mps, whether the frozen products are made by `ops.matmul`'s kernels instead of by torch's. It
            means nothing to the eager twin.

    Returns:
        A list of contiguous tensors ``[..., N]`` of x's dtype. Backward keeps x, weights, lora_a and lora_b, and each
        gradient has the dtype of its tensor.

    Raises:
        ValueError: shapes that do not chain, lists of different lengths, rank 0, a scaling that is not finite, devices
            differ, a weight or bias that would need a gradient.
        TypeError: an integer tensor, a weight or bias of another dtype than x, a scaling that is no number.
    """
    weights, biases, lora_a, lora_b, scalings = as_lists("lora_qkv", weights, biases, lora_a, lora_b, scalings)
    for name, tensors in (("lora_a", lora_a), ("lora_b", lora_b)):
        for i, t in enumerate(tensors):
            if t is None:
                _checks.refuse("lora_qkv", f"{name}[{i}]", "None", "a tensor", TypeError)
    return _lora_qkv(x, weights, biases, lora_a, lora_b, scalings, own_matmul)


def as_lists(op: str, weights, biases, lora_a, lora_b, scalings):
    """The arguments as the dispatcher takes them."""
    for i, scaling in enumerate(scalings):
        _checks.number(op, f"scalings[{i}]", scaling)
    biases = [None] * len(weights) if biases is None else list(biases)
    return list(weights), biases, list(lora_a), list(lora_b), list(scalings)


# ---- what this operator and `lora_mlp` check alike


def check_layers(
    op: str,
    x: Tensor,
    in_features: Sequence[int],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    lora_a: Sequence[Tensor | None],
    lora_b: Sequence[Tensor | None],
    scalings: Sequence[float],
) -> None:
    """Linear layers with these features of their inputs, each with a bias or without, with an adapter or without."""
    biases = [None] * len(weights) if biases is None else biases
    check_lengths(op, len(weights), biases=biases, lora_a=lora_a, lora_b=lora_b, scalings=scalings)
    frozen = [t for t in (*weights, *biases) if t is not None]
    adapters = [t for t in (*lora_a, *lora_b) if t is not None]
    if not (
        _checks.alike(x, *frozen) and (not adapters or (_checks.alike(*adapters) and adapters[0].device == x.device))
    ):
        named = {"x": x} | {f"weights[{i}]": t for i, t in enumerate(weights)}
        named |= {f"biases[{i}]": t for i, t in enumerate(biases)}
        _checks.floating(
            op,
            **named,
            **{f"lora_a[{i}]": t for i, t in enumerate(lora_a)},
            **{f"lora_b[{i}]": t for i, t in enumerate(lora_b)},
        )
        _checks.same_dtype(op, **named)
    for i, (features, weight, bias, a, b) in enumerate(zip(in_features, weights, biases, lora_a, lora_b, strict=True)):
        if weight.dim() != 2 or weight.shape[1] != features:
            _checks.refuse(op, f"weights[{i}]", _checks.shape_of(weight), f"[N, {features}]")
        if bias is not None and bias.shape != weight.shape[:1]:
            _checks.refuse(op, f"biases[{i}]", _checks.shape_of(bias), f"[{weight.shape[0]}], from weights[{i}]")
        if (a is None) != (b is None):
            missing, other = ("lora_a", "lora_b") if a is None else ("lora_b", "lora_a")
            _checks.refuse(op, f"{missing}[{i}]", "None", f"a tensor, as {other}[{i}] is one")
        if a is not None:
            names = f"lora_a[{i}]", f"lora_b[{i}]", f"scalings[{i}]"
            _checks.adapter(op, features, a, b, scalings[i], names)
            if b.shape[0] != weight.shape[0]:
                _checks.refuse(
                    op, f"lora_b[{i}]", _checks.shape_of(b), f"[{weight.shape[0]}, {a.shape[0]}], from weights[{i}]"
                )


def check_lengths(op: str, n: int, **lists: Sequence) -> None:
    if not n:
        _checks.refuse(op, "weights", "an empty list", "at least one tensor")
    for name, given in lists.items():
        if len(given) != n:
            _checks.refuse(op, name, f"a list of length {len(given)}", f"one for each of the {n} weights")


def check_frozen(op: str, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    """Refuse what would lose its gradient."""
    for name, tensors in (("weights", weights), ("biases", biases)):
        for i, t in enumerate(tensors):
            if t is not None and t.requires_grad:
                accepted = "frozen layers; run others as linear layers, with lora_linear"
                _checks.refuse(op, f"{name}[{i}]", "a tensor that requires a gradient", accepted)


def _check(x, weights, biases, lora_a, lora_b, scalings, op="lora_qkv") -> None:
    if isinstance(x, Tensor) and x.dim() == 0:
        _checks.refuse(op, "x", _checks.shape_of(x), "at least one dimension")
    check_layers(op, x, [x.shape[-1]] * len(weights), weights, biases, lora_a, lora_b, scalings)


def _check_backward(dys, x, weights, lora_a, lora_b, scalings, output_mask) -> None:
    op = "lora_qkv_backward"
    _check(x, weights, None, lora_a, lora_b, scalings, op)
    check_mask(op, output_mask, 1 + 2 * len(weights))
    check_lengths(op, len(weights), dys=dys)
    for i, (dy, weight) in enumerate(zip(dys, weights, strict=True)):
        if dy is not None:
            check_gradient(op, dy, x, (*x.shape[:-1], weight.shape[0]), f"dys[{i}]")


def check_mask(op: str, output_mask: Sequence[bool], length: int) -> None:
    if len(output_mask) != length:
        _checks.refuse(op, "output_mask", f"a list of length {len(output_mask)}", f"{length} booleans")


def check_gradient(op: str, dy: Tensor, x: Tensor, shape: tuple[int, ...], name: str = "dy") -> None:
    """The incoming gradient of an output of this shape and of x's dtype."""
    if dy.shape != shape:
        _checks.refuse(op, name, _checks.shape_of(dy), f"the shape of the output, {shape}")
    if not _checks.alike(x, dy):
        _checks.floating(op, x=x, **{name: dy})
        _checks.same_dtype(op, x=x, **{name: dy})


# ---- the eager twins' products, of layers with an adapter or without


def _stack(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    parts = [cast(part, dtype) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def project(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    lora_a: Sequence[Tensor | None],
    lora_b: Sequence[Tensor | None],
    scalings: Sequence[float],
) -> list[Tensor]:
    """What each layer makes of x."""
    ys = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    adapted = [i for i, a in enumerate(lora_a) if a is not None]
    if not adapted:
        return ys
    dtype = compute_dtype(x, *(t[i] for t in (lora_a, lora_b) for i in adapted))
    h = torch.mm(rows(x, dtype), _stack([lora_a[i] for i in adapted], dtype).t())
    for i, part in zip(adapted, h.split([lora_a[i].shape[0] for i in adapted], 1), strict=True):
        y = rows(ys[i], dtype).addmm_(part, cast(lora_b[i], dtype).t(), alpha=scalings[i])
        ys[i] = cast(y.view(ys[i].shape), ys[i].dtype)
    return ys


def project_backward(
    dys: Sequence[Tensor | None],
    x: Tensor,
    weights: Sequence[Tensor],
    lora_a: Sequence[Tensor | None],
    lora_b: Sequence[Tensor | None],
    scalings: Sequence[float],
    need_x: bool,
    need_a: Sequence[bool],
    need_b: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """The gradients of x, of each A and of each B; None where it is not asked for."""
    dtype = compute_dtype(x, *(t for t in (*lora_a, *lora_b) if t is not None))
    given = [i for i, dy in enumerate(dys) if dy is not None]
    dy_rows = {i: rows(dys[i], dtype) for i in given if lora_a[i] is not None}
    # [R, rows] and not [rows, R]: with the narrow side first, BLAS libraries are up to 2.5 times as fast.
    dh = {
        i: torch.mm(cast(lora_b[i], dtype).t(), dy).mul_(scalings[i])
        for i, dy in ((i, dy.t()) for i, dy in dy_rows.items())
        if need_x or need_a[i]
    }
    dx = None
    if need_x:
        dx = _dx(dys, given, x, weights)
        if dh:
            low_rank = _stack(list(dh.values()), dtype).t(), _stack([lora_a[i] for i in dh], dtype)
            dx = cast(cast(dx, dtype).addmm_(*low_rank), x.dtype)
        dx = dx.view(x.shape)
    wanted_a = [i for i in dy_rows if need_a[i]]
    wanted_b = [i for i in dy_rows if need_b[i]]
    # Without an incoming gradient it is zero.
    da, db = (
        [torch.zeros_like(t, memory_format=torch.contiguous_format) if n else None for t, n in zip(*pair, strict=True)]
        for pair in ((lora_a, need_a), (lora_b, need_b))
    )
    x_ = rows(x, dtype) if wanted_a or wanted_b else None
    if wanted_a:
        grads = torch.mm(_stack([dh[i] for i in wanted_a], dtype), x_)
        for i, part in zip(wanted_a, _split(grads, wanted_a, lora_a), strict=True):
            # A gradient has memory of its own: whoever keeps it does not keep the others.
            da[i] = cast(part if len(wanted_a) == 1 else part.clone(), lora_a[i].dtype)
    if wanted_b:
        h = torch.mm(_stack([lora_a[i] for i in wanted_b], dtype), x_.t())
        for i, part in zip(wanted_b, _split(h, wanted_b, lora_a), strict=True):
            db[i] = cast(torch.mm(part.mul_(scalings[i]), dy_rows[i]).t(), lora_b[i].dtype).contiguous()
    return dx, da, db


def _split(t: Tensor, which: Sequence[int], lora_a: Sequence[Tensor]) -> Sequence[Tensor]:
    return t.split([lora_a[i].shape[0] for i in which])


def _dx(dys: Sequence[Tensor | None], given: Sequence[int], x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """What the frozen layers add to the gradient of x, ``[rows, K]``, in their dtype."""
    dx = None
    for i in given:
        dy = rows(dys[i], x.dtype)
        dx = torch.mm(dy, weights[i]) if dx is None else dx.addmm_(dy, weights[i])
    return rows(torch.zeros_like(x, memory_format=torch.contiguous_format), x.dtype) if dx is None else dx


def only(grads: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients that were asked for."""
    return [grad for grad in grads if grad is not None]


def spread(grads: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """The inverse of `only`."""
    following = iter(grads)
    return [next(following) if want else None for want in wanted]


def fake_backward(x: Tensor, parameters: Sequence[Tensor | None], output_mask: Sequence[bool]):
    want_x, *wanted = output_mask
    dx = x.new_empty(x.shape) if want_x else None
    return dx, [p.new_empty(p.shape) for p, want in zip(parameters, wanted, strict=True) if want]


def autocast_layers(dtype: torch.dtype, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *others):
    """As autocast treats a linear layer; the adapters stay."""

    def lower(t: Tensor | None) -> Tensor | None:
        return t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype)

    return lower(x), [lower(t) for t in weights], [lower(t) for t in biases], *others


def autocast_backward(dtype: torch.dtype, *args):
    """As they are: a backward pass inside of autocast sums in float32 too."""
    return args


# ---- the operator


def _eager(x, weights, biases, lora_a, lora_b, scalings, own_matmul):
    _check(x, weights, biases, lora_a, lora_b, scalings)
    return project(x, weights, biases, lora_a, lora_b, scalings)


def _fake(x, weights, biases, lora_a, lora_b, scalings, own_matmul):
    _check(x, weights, biases, lora_a, lora_b, scalings)
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


def _eager_backward(dys, x, weights, lora_a, lora_b, scalings, own_matmul, output_mask):
    _check_backward(dys, x, weights, lora_a, lora_b, scalings, output_mask)
    n = len(weights)
    need_x, need_a, need_b = output_mask[0], output_mask[1 : 1 + n], output_mask[1 + n :]
    dx, da, db = project_backward(dys, x, weights, lora_a, lora_b, scalings, need_x, need_a, need_b)
    return dx, only([*da, *db])


def _fake_backward(dys, x, weights, lora_a, lora_b, scalings, own_matmul, output_mask):
    _check_backward(dys, x, weights, lora_a, lora_b, scalings, output_mask)
    return fake_backward(x, [*lora_a, *lora_b], output_mask)


class _LoraQkv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n, scalings, own_matmul, x, *tensors):
        weights, biases, lora_a, lora_b = (list(tensors[i * n : (i + 1) * n]) for i in range(4))
        ys = _lora_qkv.below_autograd(x, weights, biases, lora_a, lora_b, scalings, own_matmul)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights, *lora_a, *lora_b)
        ctx.args = n, scalings, own_matmul
        return tuple(ys)

    @staticmethod
    def backward(ctx, *dys):
        n, scalings, own_matmul = ctx.args
        wanted = [ctx.needs_input_grad[3], *ctx.needs_input_grad[4 + 2 * n :]]
        dx, grads = None, [None] * 2 * n
        if any(dy is not None for dy in dys):
            x, *tensors = ctx.saved_tensors
            weights, lora_a, lora_b = (tensors[i * n : (i + 1) * n] for i in range(3))
            dx, grads = _lora_qkv_backward(list(dys), x, weights, lora_a, lora_b, scalings, own_matmul, wanted)
            grads = spread(grads, wanted[1:])
        return None, None, None, dx, *(None,) * 2 * n, *grads


def _autograd(x, weights, biases, lora_a, lora_b, scalings, own_matmul):
    check_lengths("lora_qkv", len(weights), biases=biases, lora_a=lora_a, lora_b=lora_b)
    check_frozen("lora_qkv", weights, biases)
    return list(_LoraQkv.apply(len(weights), scalings, own_matmul, x, *weights, *biases, *lora_a, *lora_b))


_lora_qkv = define(
    "lora_qkv(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor[] lora_a, Tensor[] lora_b, float[] scalings, "
    "bool own_matmul) -> Tensor[]",
    eager=_eager,
    fake=_fake,
    autograd=_autograd,
    autocast=autocast_layers,
)
_lora_qkv_backward = define(
    "lora_qkv_backward(Tensor?[] dys, Tensor x, Tensor[] weights, Tensor[] lora_a, Tensor[] lora_b, float[] scalings, "
    "bool own_matmul, bool[] output_mask) -> (Tensor dx, Tensor[] grads)",
    eager=_eager_backward,
    fake=_fake_backward,
    autocast=autocast_backward,
)
