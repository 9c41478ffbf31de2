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
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

_LIBRARY = torch.library.Library("torch_metalk", "DEF")
_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "mps": "AutocastMPS", "cuda": "AutocastCUDA"}
_NO_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
for _key in ("AutocastMPS", "AutocastCUDA"):
    _NO_AUTOCAST = _NO_AUTOCAST | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key))

#: Name -> overload of every operator, in order of registration. `doctor` and the tests walk it.
OPERATORS: dict[str, torch._ops.OpOverload] = {}


_ONCE = (
    "torch_metalk operators are differentiable once. Run the stock modules (torch_metalk.unpatch) where second "
    "derivatives are needed."
)


class _NotDifferentiable(torch.autograd.Function):
    """Runs an operator whose result must not be differentiated, such as a backward operator.

    Differentiating a native backward kernel would silently give zeros, and `once_differentiable` notices it only where
    the incoming gradient requires a gradient itself. This marks the outputs whenever any input does.
    """

    @staticmethod
    def forward(ctx, op, reason, structure, result_structure, *flat):
        ctx.refusal = f"{op.name()} was asked for a gradient: {reason}"
        ctx.set_materialize_grads(False)
        with torch._C._AutoDispatchBelowAutograd():
            result = op(*pytree.tree_unflatten(flat, structure))
        # Only tensors that are outputs by themselves get marked, not those in a list.
        flat_result, spec = pytree.tree_flatten(result)
        result_structure.append(spec)
        return tuple(flat_result)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(ctx.refusal)


def _not_differentiable(op: torch._ops.OpOverload, reason: str, *args):
    flat, structure = pytree.tree_flatten(args)
    result_structure: list[pytree.TreeSpec] = []
    result = _NotDifferentiable.apply(op, reason, structure, result_structure, *flat)
    return pytree.tree_unflatten(result, result_structure[0])


def _requires_grad(args: tuple[Any, ...]) -> bool:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if arg.requires_grad:
                return True
        elif isinstance(arg, list) and any(isinstance(item, torch.Tensor) and item.requires_grad for item in arg):
            return True
    return False


def _plain_device(args: tuple[Any, ...] | list[Any], device: str = "") -> str | None:
    """The device type that all tensors share; None where they differ, or one of them is of a class of its own."""
    for arg in args:
        cls = type(arg)
        if cls is torch.Tensor or cls is torch.nn.Parameter:
            found = "cpu" if arg.is_cpu else arg.device.type
            if device and found != device:
                return None
            device = found
        elif cls is list:
            device = _plain_device(arg, device)
            if device is None:
                return None
        elif isinstance(arg, torch.Tensor):
            return None
    return device


def nobody_listens(device: str) -> bool:
    """No dispatch mode, functorch transform, forward-mode derivative or autocast that has to see the operator."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled(device)
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _refuse_transforms(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    """torch.func.grad and forward-mode derivatives would lose the operator's derivative without a word."""
    advice = "use torch.autograd, or the stock modules (torch_metalk.unpatch)"
    if torch._C._functorch.peek_interpreter_stack() is not None and torch.is_grad_enabled() and _requires_grad(args):
        raise RuntimeError(f"{op.name()} does not support the transforms of torch.func: {advice}")
    if forward_ad._current_level >= 0:
        tensors = (t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor))
        if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise RuntimeError(f"{op.name()} has no forward-mode derivative: {advice}")


class Operator:
    """An operator as the rest of the package calls it.

    A call goes through the dispatcher, which chooses the kernel. Each of its calls into Python costs tens of
    microseconds where the caches are cold, as they are between the products of a model and on the thread of a backward
    pass, and a training step makes a thousand. So with plain tensors of one device and nobody listening, the same
    steps are taken directly: autograd first, and below it the kernel, which on the CPU can only be the eager twin.
    """

    def __init__(self, op: torch._ops.OpOverload, eager: Callable[..., Any], differentiate: Callable[..., Any]):
        self.op, self._eager, self._differentiate = op, eager, differentiate

    def __call__(self, *args):
        if torch.compiler.is_compiling():
            return self.op(*args)
        device = _plain_device(args)
        if device is None or not nobody_listens(device or "cpu"):
            return self.op(*args)
        if torch.is_grad_enabled() and _requires_grad(args):
            return self._differentiate(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return self._eager(*args) if device in ("cpu", "") else self.op(*args)

    def below_autograd(self, *args):
        """For the forward of an autograd function: the operator's kernel, without recording a gradient again."""
        first = args[0][0] if type(args[0]) is list else args[0]
        with torch._C._AutoDispatchBelowAutograd():
            if first.is_cpu and _plain_device(args) and nobody_listens("cpu"):
                return self._eager(*args)
            return self.op(*args)


def define(
    schema: str,
    *,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
    no_gradient: str = _ONCE,
    autocast: Callable[..., tuple[Any, ...]] | None = None,
) -> Operator:
    """Register one operator.

    Args:
        schema: the signature without namespace, e.g. ``"swiglu(Tensor gate, Tensor up) -> Tensor"``.
        eager: the twin in plain PyTorch; checks its arguments before any work.
        fake: the shape rule; makes the same checks and returns empty tensors like those of `eager`.
        autograd: called with the operator's arguments when any of them requires a gradient, usually the `apply` of a
            `torch.autograd.Function` whose forward calls `Operator.below_autograd`. None for an operator that has none,
            as those of the backward pass: its outputs raise when they are differentiated.
        no_gradient: what that error says behind the operator's name.
        autocast: called with the autocast dtype and the operator's arguments; returns the arguments to use. None
            leaves an operator alone under autocast.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.torch_metalk, name).default
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torch_metalk::{name}", fake, lib=_LIBRARY)

    differentiate = autograd or functools.partial(_not_differentiable, op, no_gradient)

    def autograd_kernel(*args):
        _refuse_transforms(op, args)
        if torch.is_grad_enabled() and _requires_grad(args):
            return differentiate(*args)
        with torch._C._AutoDispatchBelowAutograd():
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
    return Operator(op, eager, differentiate)


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """What the eager twins calculate in: float32, or float64 where an input has it (gradcheck needs that)."""
    for t in tensors:
        if t.dtype is torch.float64:
            return torch.float64
    return torch.float32


def cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`t.to(dtype)`, without a call into torch where there is nothing to do."""
    return t if t.dtype is dtype else t.to(dtype)


def rows(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[..., K]`` as a matrix ``[rows, K]`` of this dtype."""
    t = cast(t, dtype)
    return t if t.dim() == 2 else t.flatten(0, -2) if t.dim() > 2 else t[None]
