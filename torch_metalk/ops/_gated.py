"""What SwiGLU and GeGLU share: ``activation(gate) * up``, and a backward that keeps gate and up only."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_metalk.ops import _checks
from torch_metalk.ops._operator import Operator, cast, compute_dtype, define


class Activation(NamedTuple):
    """An activation and its vector-Jacobian product, both out of place, in the dtype they get."""

    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]


def halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gate and up as views of one fused projection ``[..., 2 F]``."""
    gate, up = gate_up.chunk(2, -1)
    return gate, up


class Gated(NamedTuple):
    """``call(gate, up, *parameters)``, its backward, and ``packed(gate_up, *parameters)``."""

    call: Operator
    call_backward: Operator
    packed: Operator

    def __call__(self, gate: Tensor, up: Tensor | None, *parameters) -> Tensor:
        return self.packed(gate, *parameters) if up is None else self.call(gate, up, *parameters)


def define_gated(name: str, parameters: str, activation: Activation, check: Callable[..., None] | None = None) -> Gated:
    """Register ``name(gate, up, *parameters)``, ``name_packed(gate_up, *parameters)`` and their backward."""
    signature = "".join(f", {p}" for p in parameters.split(", ") if p)
    extra = len([p for p in parameters.split(", ") if p])

    def validate(gate: Tensor, up: Tensor, *args, op: str = name) -> None:
        if not _checks.alike(gate, up):
            _checks.floating(op, gate=gate, up=up)
            _checks.same_dtype(op, gate=gate, up=up)
        if gate.shape != up.shape:
            _checks.refuse(op, "up", _checks.shape_of(up), f"the shape of gate, {tuple(gate.shape)}")
        if check is not None:
            check(*args)

    def eager(gate: Tensor, up: Tensor, *args) -> Tensor:
        validate(gate, up, *args)
        dtype = compute_dtype(gate)
        y = activation.forward(cast(gate, dtype), *args).mul_(cast(up, dtype))
        return cast(y, gate.dtype).contiguous()

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
        dy_, gate_ = cast(dy, dtype), cast(gate, dtype)
        dgate = dup = None
        if output_mask[0]:
            dgate = cast(activation.backward(dy_ * cast(up, dtype), gate_, *args), gate.dtype).contiguous()
        if output_mask[1]:
            dup = cast(activation.forward(gate_, *args).mul_(dy_), up.dtype).contiguous()
        return dgate, dup

    def fake_backward(dy: Tensor, gate: Tensor, up: Tensor, *args):
        *args, output_mask = args
        validate_backward(dy, gate, up, *args)
        return tuple(
            t.new_empty(t.shape) if wanted else None for t, wanted in zip((gate, up), output_mask, strict=True)
        )

    class Separate(torch.autograd.Function):
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

    op = define(f"{name}(Tensor gate, Tensor up{signature}) -> Tensor", eager=eager, fake=fake, autograd=Separate.apply)
    op_backward = define(
        f"{name}_backward(Tensor dy, Tensor gate, Tensor up{signature}, bool[2] output_mask)"
        " -> (Tensor dgate, Tensor dup)",
        eager=eager_backward,
        fake=fake_backward,
    )

    def validate_packed(gate_up: Tensor, *args, op: str = f"{name}_packed") -> None:
        _checks.floating(op, gate_up=gate_up)
        if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
            _checks.refuse(op, "gate_up", _checks.shape_of(gate_up), "[..., 2 F], gate and up side by side")
        if check is not None:
            check(*args)

    def eager_packed(gate_up: Tensor, *args) -> Tensor:
        validate_packed(gate_up, *args)
        return eager(*halves(gate_up), *args)

    def fake_packed(gate_up: Tensor, *args) -> Tensor:
        validate_packed(gate_up, *args)
        return gate_up.new_empty(halves(gate_up)[0].shape)

    def validate_packed_backward(dy: Tensor, gate_up: Tensor, *args) -> None:
        validate_packed(gate_up, *args, op=f"{name}_packed_backward")
        _checks.gradient(f"{name}_packed_backward", dy, halves(gate_up)[0])

    def eager_packed_backward(dy: Tensor, gate_up: Tensor, *args) -> Tensor:
        validate_packed_backward(dy, gate_up, *args)
        return torch.cat(eager_backward(dy, *halves(gate_up), *args, (True, True)), -1)

    def fake_packed_backward(dy: Tensor, gate_up: Tensor, *args) -> Tensor:
        validate_packed_backward(dy, gate_up, *args)
        return gate_up.new_empty(gate_up.shape)

    class Packed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate_up, *args):
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(gate_up)
            ctx.args = args
            return packed.below_autograd(gate_up, *args)

        @staticmethod
        def backward(ctx, dy):
            dgate_up = None if dy is None else packed_backward(dy, *ctx.saved_tensors, *ctx.args)
            return (dgate_up, *(None,) * extra)

    packed = define(
        f"{name}_packed(Tensor gate_up{signature}) -> Tensor",
        eager=eager_packed,
        fake=fake_packed,
        autograd=Packed.apply,
    )
    packed_backward = define(
        f"{name}_packed_backward(Tensor dy, Tensor gate_up{signature}) -> Tensor",
        eager=eager_packed_backward,
        fake=fake_packed_backward,
    )
    return Gated(op, op_backward, packed)
