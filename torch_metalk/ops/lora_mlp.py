"""A gated MLP with low-rank adapters on any of its three projections (arXiv:2002.05202, arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_metalk.ops import _checks
from torch_metalk.ops._gated import Gated
from torch_metalk.ops._operator import define
from torch_metalk.ops.geglu import _geglu
from torch_metalk.ops.lora_qkv import (
    as_lists,
    autocast_backward,
    autocast_layers,
    check_frozen,
    check_gradient,
    check_layers,
    check_lengths,
    check_mask,
    fake_backward,
    only,
    project,
    project_backward,
    spread,
)
from torch_metalk.ops.swiglu import _swiglu

#: Activation -> the operator of ``activation(gate) * up`` and its further arguments.
_GATED: dict[str, tuple[Gated, tuple]] = {
    "silu": (_swiglu, ()),
    "gelu_tanh": (_geglu, ("tanh",)),
    "gelu": (_geglu, ("none",)),
}


def lora_mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    lora_a: Sequence[Tensor | None],
    lora_b: Sequence[Tensor | None],
    scalings: Sequence[float],
    activation: str = "silu",
    *,
    own_matmul: bool = False,
) -> Tensor:
    """``down(activation(gate(x)) * up(x))``, each projection with its adapter as `lora_qkv` has it, or without one.

    gate and up read x once. Each projection and the product are rounded once to x's dtype, as the layers round them.

    Args:
        x: ``[..., K]``.
        weights: those of gate ``[F, K]``, up ``[F, K]`` and down ``[N, F]``, of x's dtype; frozen.
        biases: ``[F]``, ``[F]`` and ``[N]``, or None each, of x's dtype, frozen; None where no projection has one.
        lora_a: ``[R, K]``, ``[R, K]`` and ``[R, F]``, or None where a projection has no adapter. R may differ.
        lora_b: ``[F, R]``, ``[F, R]`` and ``[N, R]``, None where lora_a has None.
        scalings: three finite numbers; that of a projection without adapter means nothing.
        activation: ``"silu"``, ``"gelu_tanh"`` or ``"gelu"``, the exact form.
        own_matmul: on mps, whether the frozen products are made by `ops.matmul`'s kernels instead of by torch's. It
            means nothing to the eager twin.

    Returns:
        A contiguous tensor ``[..., N]`` of x's dtype. Backward keeps x, gate, up and the parameters; it recomputes the
        product. Each gradient has the dtype of its tensor.

    Raises:
        ValueError: shapes that do not chain, other than three projections, rank 0, a scaling that is not finite,
            devices differ, a weight or bias that would need a gradient, an unknown activation.
        TypeError: an integer tensor, a weight or bias of another dtype than x, a scaling that is no number.
    """
    weights, biases, lora_a, lora_b, scalings = as_lists("lora_mlp", weights, biases, lora_a, lora_b, scalings)
    return _lora_mlp(x, weights, biases, lora_a, lora_b, scalings, activation, own_matmul)[0]


def _check_three(op: str, weights) -> None:
    if len(weights) != 3:
        _checks.refuse(op, "weights", f"a list of length {len(weights)}", "those of gate, up and down")


def _check(x, weights, biases, lora_a, lora_b, scalings, activation, op="lora_mlp") -> None:
    if isinstance(x, Tensor) and x.dim() == 0:
        _checks.refuse(op, "x", _checks.shape_of(x), "at least one dimension")
    _check_three(op, weights)
    _checks.one_of(op, "activation", activation, tuple(_GATED))
    hidden = weights[0].shape[0] if weights[0].dim() else 0
    check_layers(op, x, (x.shape[-1], x.shape[-1], hidden), weights, biases, lora_a, lora_b, scalings)
    if weights[1].shape[0] != hidden:
        _checks.refuse(op, "weights[1]", _checks.shape_of(weights[1]), f"[{hidden}, {x.shape[-1]}], as weights[0]")


def _check_backward(dy, x, gate, up, weights, lora_a, lora_b, scalings, activation, output_mask) -> None:
    op = "lora_mlp_backward"
    _check(x, weights, None, lora_a, lora_b, scalings, activation, op)
    check_mask(op, output_mask, 7)
    hidden = (*x.shape[:-1], weights[0].shape[0])
    check_gradient(op, gate, x, hidden, "gate")
    check_gradient(op, up, x, hidden, "up")
    check_gradient(op, dy, x, (*x.shape[:-1], weights[2].shape[0]))
    for i, (parameter, want) in enumerate(zip([*lora_a, *lora_b], output_mask[1:], strict=True)):
        if want and parameter is None:
            _checks.refuse(op, f"output_mask[{1 + i}]", "True", "False, as this projection has no adapter")


def _eager(x, weights, biases, lora_a, lora_b, scalings, activation, own_matmul):
    _check(x, weights, biases, lora_a, lora_b, scalings, activation)
    layers = weights, biases, lora_a, lora_b, scalings
    gate, up = project(x, *(part[:2] for part in layers))
    gated, parameters = _GATED[activation]
    product = gated.call.below_autograd(gate, up, *parameters)
    (y,) = project(product, *(part[2:] for part in layers))
    return y, gate, up


def _fake(x, weights, biases, lora_a, lora_b, scalings, activation, own_matmul):
    _check(x, weights, biases, lora_a, lora_b, scalings, activation)
    gate, up, y = (x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights)
    return y, gate, up


def _eager_backward(dy, x, gate, up, weights, lora_a, lora_b, scalings, activation, own_matmul, output_mask):
    _check_backward(dy, x, gate, up, weights, lora_a, lora_b, scalings, activation, output_mask)
    need_x, need_a, need_b = output_mask[0], output_mask[1:4], output_mask[4:]
    gated, parameters = _GATED[activation]
    layers = weights, lora_a, lora_b, scalings
    need_inner = need_x or any((*need_a[:2], *need_b[:2]))
    product = gate
    if need_a[2] or need_b[2]:
        product = gated.call.below_autograd(gate, up, *parameters)
    # Without a gradient of down's adapter the product's values are not read, only its shape and dtype.
    dproduct, da_down, db_down = project_backward(
        [dy], product, *(part[2:] for part in layers), need_inner, need_a[2:], need_b[2:]
    )
    dx, da, db = None, [None, None], [None, None]
    if need_inner:
        dgate_up = gated.call_backward.below_autograd(dproduct, gate, up, *parameters, [True, True])
        dx, da, db = project_backward(dgate_up, x, *(part[:2] for part in layers), need_x, need_a[:2], need_b[:2])
    return dx, only([*da, *da_down, *db, *db_down])


def _fake_backward(dy, x, gate, up, weights, lora_a, lora_b, scalings, activation, own_matmul, output_mask):
    _check_backward(dy, x, gate, up, weights, lora_a, lora_b, scalings, activation, output_mask)
    return fake_backward(x, [*lora_a, *lora_b], output_mask)


class _LoraMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scalings, activation, own_matmul, x, *tensors):
        weights, biases, lora_a, lora_b = (list(tensors[i : i + 3]) for i in range(0, 12, 3))
        y, gate, up = _lora_mlp.below_autograd(x, weights, biases, lora_a, lora_b, scalings, activation, own_matmul)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(gate, up)
        ctx.save_for_backward(x, gate, up, *weights, *lora_a, *lora_b)
        ctx.args = scalings, activation, own_matmul
        return y, gate, up

    @staticmethod
    def backward(ctx, dy, *_):
        wanted = [ctx.needs_input_grad[3], *ctx.needs_input_grad[10:]]
        dx, grads = None, [None] * 6
        if dy is not None:
            x, gate, up, *tensors = ctx.saved_tensors
            parts = (tensors[i : i + 3] for i in range(0, 9, 3))
            dx, grads = _lora_mlp_backward(dy, x, gate, up, *parts, *ctx.args, wanted)
            grads = spread(grads, wanted[1:])
        return None, None, None, dx, *(None,) * 6, *grads


def _autograd(x, weights, biases, lora_a, lora_b, scalings, activation, own_matmul):
    _check_three("lora_mlp", weights)
    check_lengths("lora_mlp", len(weights), biases=biases, lora_a=lora_a, lora_b=lora_b)
    check_frozen("lora_mlp", weights, biases)
    return _LoraMlp.apply(scalings, activation, own_matmul, x, *weights, *biases, *lora_a, *lora_b)


_lora_mlp = define(
    "lora_mlp(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor?[] lora_a, Tensor?[] lora_b, float[] scalings, "
    "str activation, bool own_matmul) -> (Tensor y, Tensor gate, Tensor up)",
    eager=_eager,
    fake=_fake,
    autograd=_autograd,
    autocast=autocast_layers,
)
_lora_mlp_backward = define(
    "lora_mlp_backward(Tensor dy, Tensor x, Tensor gate, Tensor up, Tensor[] weights, Tensor?[] lora_a, "
    "Tensor?[] lora_b, float[] scalings, str activation, bool own_matmul, bool[] output_mask) "
    "-> (Tensor dx, Tensor[] grads)",
    eager=_eager_backward,
    fake=_fake_backward,
    autocast=autocast_backward,
)
