"""What one training step costs, in counts that are the same on every machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

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
        calls: operators that launch work.
        moved: bytes of their tensor arguments and results. It counts at the boundary of an operator, so it describes a
            kernel that touches each byte once, and not what an eager twin moves inside.
        kept: bytes that autograd keeps for backward, parameters apart.
        by_name: calls by operator.
    """

    loss: float
    calls: int
    moved: int
    kept: int
    by_name: Counter


class _Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.moved = 0
        self.by_name: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _NO_KERNEL:
            tensors = [t for t in pytree.tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.moved += sum(t.numel() * t.element_size() for t in tensors)
            self.by_name[name] += 1
        return result


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
    return StepCost(value.item(), counter.by_name.total(), counter.moved, sum(kept.values()), counter.by_name)
