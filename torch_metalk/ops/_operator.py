"""The one way an operator gets into the dispatcher.

Every operator of this package is registered under ``torch_metalk::`` from its own file: schema, shape rule (fake
kernel), eager twin and gradient. The eager twin is registered as ``CompositeExplicitAutograd`` and so serves every
device that has nothing better; the compiled extension only adds kernels for ``MPS``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

_LIBRARY = torch.library.Library("torch_metalk", "DEF")
_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "mps": "AutocastMPS", "cuda": "AutocastCUDA"}
_NO_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
for _key in ("AutocastMPS", "AutocastCUDA"):
    _NO_AUTOCAST = _NO_AUTOCAST | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key))

below_autograd = torch._C._AutoDispatchBelowAutograd

#: Name -> overload of every operator, in order of registration. `doctor` and the tests walk it.
OPERATORS: dict[str, torch._ops.OpOverload] = {}


class _NotDifferentiable(torch.autograd.Function):
    """Runs a backward operator whose result must not be differentiated again.

    Differentiating a native backward kernel would silently give zeros, and `once_differentiable` notices it only where
    the incoming gradient requires a gradient itself. This marks the outputs whenever any input does.
    """

    @staticmethod
    def forward(ctx, op, structure, *flat):
        ctx.op_name = op.name()
        ctx.set_materialize_grads(False)
        with below_autograd():
            result = op(*pytree.tree_unflatten(flat, structure))
        return tuple(result) if isinstance(result, list) else result

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            f"{ctx.op_name} was asked for a gradient: torch_metalk operators are differentiable once. "
            "Run the stock modules (torch_metalk.unpatch) where second derivatives are needed."
        )


def _not_differentiable(op: torch._ops.OpOverload, *args):
    flat, structure = pytree.tree_flatten(args)
    result = _NotDifferentiable.apply(op, structure, *flat)
    returns_list = len(op._schema.returns) == 1 and isinstance(op._schema.returns[0].type, torch.ListType)
    return list(result) if returns_list else result


def _requires_grad(args: tuple[Any, ...]) -> bool:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if arg.requires_grad:
                return True
        elif isinstance(arg, list) and any(isinstance(item, torch.Tensor) and item.requires_grad for item in arg):
            return True
    return False


def define(
    schema: str,
    *,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
    autocast: Callable[..., tuple[Any, ...]] | None = None,
) -> torch._ops.OpOverload:
    """Register one operator and return its overload.

    Args:
        schema: the signature without namespace, e.g. ``"swiglu(Tensor gate, Tensor up) -> Tensor"``.
        eager: the twin in plain PyTorch; checks its arguments before any work.
        fake: the shape rule; makes the same checks and returns empty tensors like those of `eager`.
        autograd: called with the operator's arguments when any of them requires a gradient, usually the `apply` of a
            `torch.autograd.Function` that calls the operator again inside `below_autograd`. None makes it an operator
            of the backward pass: its outputs raise when they are differentiated.
        autocast: called with the autocast dtype and the operator's arguments; returns the arguments to use. None
            leaves an operator alone under autocast.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.torch_metalk, name).default
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torch_metalk::{name}", fake, lib=_LIBRARY)

    differentiate = autograd or functools.partial(_not_differentiable, op)

    def autograd_kernel(*args):
        if torch.is_grad_enabled() and _requires_grad(args):
            return differentiate(*args)
        with below_autograd():
            return op(*args)

    _LIBRARY.impl(name, autograd_kernel, "Autograd")

    if autocast is not None:
        for device_type, key in _AUTOCAST_KEYS.items():

            def autocast_kernel(*args, _device_type=device_type):
                args = autocast(torch.get_autocast_dtype(_device_type), *args)
                with torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
                    return op(*args)

            _LIBRARY.impl(name, autocast_kernel, key)

    OPERATORS[name] = op
    return op


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """What the eager twins calculate in: float32, or float64 where an input has it (gradcheck needs that)."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
