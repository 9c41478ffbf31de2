"""What one training step costs, in counts that are the same on every machine."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that look at memory in another way, or only reserve it: they launch no kernel.
_NO_KERNEL = frozenset(
    """view _unsafe_view t transpose permute expand slice select unsqueeze squeeze as_strided alias detach
    _reshape_alias split split_with_sizes unbind unsafe_split lift_fresh empty empty_like empty_strided new_empty
    new_empty_strided""".split()
)


class StepCost(NamedTuple):
    """Counts of one forward and backward pass.

    Attributes:
        loss: the loss of the step, to see that it did what it should.
        calls: operators that launch work, and the products that fused operators have stock operators make.
        moved: bytes of their tensor arguments and results. It counts at the boundary of an operator, so it describes a
            kernel that touches each byte once, and not what an eager twin moves inside.
        kept: bytes that autograd keeps for backward, parameters apart.
        by_name: calls by operator; a product inside of one is ``"mm in lora_qkv"``.
        inside: those of the calls and of the bytes moved that are products inside of an operator.
    """

    loss: float
    calls: int
    moved: int
    kept: int
    by_name: Counter
    inside: tuple[int, int]


def _bytes(*values: object) -> int:
    tensors = (t for t in pytree.tree_leaves(values) if isinstance(t, Tensor))
    return sum(t.numel() * t.element_size() for t in tensors)


class _Counter(TorchDispatchMode):
    """Counts what reaches it; with `weights`, only products with one of them, which are those of frozen layers."""

    def __init__(self, weights: Sequence[Tensor] | None = None):
        super().__init__()
        self.moved = 0
        self.by_name: Counter = Counter()
        self.inside: list[int] = [0, 0]
        self.weights = None if weights is None else {t.untyped_storage().data_ptr() for t in weights}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        weights = _argument(func, args, "weights") if self.weights is None else None
        if weights is None:
            result = func(*args, **(kwargs or {}))
        else:
            # A fused operator leaves the products of its frozen layers to others: they are launches like any other.
            # To the kernel itself: by an ordinary call the mode would see the operator, and nothing inside.
            key = torch._C._dispatch_key_for_device(weights[0].device.type)
            keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
            with _Counter(weights) as products:
                result = func.redispatch(keys, *args, **(kwargs or {}))
            self.by_name.update({f"{product} in {name}": n for product, n in products.by_name.items()})
            self.moved += products.moved
            self.inside[0] += products.by_name.total()
            self.inside[1] += products.moved
        if name not in _NO_KERNEL and (self.weights is None or self._takes_a_weight(args)):
            self.moved += _bytes(args, kwargs, result)
            self.by_name[name] += 1
        return result

    def _takes_a_weight(self, args: tuple) -> bool:
        return any(isinstance(t, Tensor) and t.untyped_storage().data_ptr() in self.weights for t in args)


def _argument(func: torch._ops.OpOverload, args: tuple, name: str) -> Any:
    """An argument of an operator by its name; None where it has none of this name."""
    for i, argument in enumerate(func._schema.arguments[: len(args)]):
        if argument.name == name:
            return args[i]
    return None


def step_cost(model: nn.Module, loss: Callable[[], Tensor]) -> StepCost:
    """Count one step: ``loss()``, then its backward.

    Args:
        model: whose parameters do not count as kept.
        loss: runs the forward pass and returns a scalar that requires a gradient.
    """
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with _Counter() as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            value = loss()
        value.backward()
    return StepCost(
        value.item(),
        counter.by_name.total(),
        counter.moved,
        sum(kept.values()),
        counter.by_name,
        tuple(counter.inside),
    )


def peak_memory(function: Callable[[], Any]) -> int:
    """The most device memory that a call holds on mps at any time, in bytes, above what is held before.

    By the driver's figure, which the allocator's cache keeps up until it is emptied. On a Mac that is in units of the
    allocator's heaps, so use sizes to which those are small.
    """
    gc.collect()
    # The thread of backward passes lets go of the last one's tensors when it likes, but before it takes the next.
    empty = torch.zeros(0, device="mps", requires_grad=True)
    torch.autograd.grad(empty * 1, empty, torch.zeros(0, device="mps"))
    torch.mps.synchronize()
    torch.mps.empty_cache()
    before = torch.mps.driver_allocated_memory()
    function()
    torch.mps.synchronize()
    return torch.mps.driver_allocated_memory() - before
