"""What SwiGLU and GeGLU share: ``activation(gate) * up``, and a backward that keeps gate and up only."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_metalk.ops import _checks
from torch_metalk.ops._operator import compute_dtype, define


class Activation(NamedTuple):
    """An activation and its vector-Jacobian product, both out of place, in the dtype they get."""

    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]


def define_gated(name: str, parameters: str, activation: Activation, check: Callable[..., None] | None = None):
    """Register ``name(gate, up, *parameters)`` and its backward; returns the forward overload."""
    signature = "".join(f", {p}" for p in parameters.split(", ") if p)
    extra = len([p for p in parameters.split(", ") if p])

    def validate(gate: Tensor, up: Tensor, *args, op: str = name) -> None:
        _checks.floating(op, gate=gate, up=up)
        _checks.same_device(op, gate=gate, up=up)
        _checks.same_dtype(op, gate=gate, up=up)
        if gate.shape != up.shape:
            _checks.refuse(op, "up", _checks.shape_of(up), f"the shape of gate, {tuple(gate.shape)}")
        if check is not None:
            check(*args)

    def eager(gate: Tensor, up: Tensor, *args) -> Tensor:
        validate(gate, up, *args)
        dtype = compute_dtype(gate)
        return activation.forward(gate.to(dtype), *args).mul_(up.to(dtype)).to(gate.dtype).contiguous()

    def fake(gate: Tensor, up: Tensor, *args) -> Tensor:
        validate(gate, up, *args)
        return gate.new_empty(gate.shape)

    def validate_backward(dy: Tensor, gate: Tensor, up: Tensor, *args) -> None:
        validate(gate, up, *args, op=f"{name}_backward")
        _checks.gradient(f"{name}_backward", dy, gate)

    def eager_backward(dy: Tensor, gate: Tensor, up: Tensor, *args):
        *args, output_mask = args
        validate_backward(dy, gate, up, *args)
        dtype = compute_dtype(gate, dy)
        dy_, gate_ = dy.to(dtype), gate.to(dtype)
        dgate = dup = None
        if output_mask[0]:
            dgate = activation.backward(dy_ * up.to(dtype), gate_, *args).to(gate.dtype).contiguous()
        if output_mask[1]:
            dup = activation.forward(gate_, *args).mul_(dy_).to(up.dtype).contiguous()
        return dgate, dup

    def fake_backward(dy: Tensor, gate: Tensor, up: Tensor, *args):
        *args, output_mask = args
        validate_backward(dy, gate, up, *args)
        return tuple(
            t.new_empty(t.shape) if wanted else None for t, wanted in zip((gate, up), output_mask, strict=True)
        )

    class Gated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up, *args):
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(gate, up)
            ctx.args = args
            return op.below_autograd(gate, up, *args)

        @staticmethod
        def backward(ctx, dy):
            if dy is None:
                return (None,) * (2 + extra)
            grads = op_backward(dy, *ctx.saved_tensors, *ctx.args, list(ctx.needs_input_grad[:2]))
            return (*grads, *(None,) * extra)

    op = define(f"{name}(Tensor gate, Tensor up{signature}) -> Tensor", eager=eager, fake=fake, autograd=Gated.apply)
    op_backward = define(
        f"{name}_backward(Tensor dy, Tensor gate, Tensor up{signature}, bool[2] output_mask)"
        " -> (Tensor dgate, Tensor dup)",
        eager=eager_backward,
        fake=fake_backward,
    )
    return op
