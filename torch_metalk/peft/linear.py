"""`peft.tuners.lora.Linear` with the adapter's contribution in one operator."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import NamedTuple

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from torch_metalk import ops
from torch_metalk.patching.families import (
    BY_TORCH,
    HOOKS,
    LORA_LAYER_OPS,
    FrozenProducts,
    cpu_share,
    give_ops,
    may_use,
    own_matmul,
    why_unsplit,
)
from torch_metalk.patching.twins import output_twin, weight_twins

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
_GLOBAL_HOOKS = tuple(
    getattr(nn_module, name)
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
)


class MetalkLoraLinear(lora.Linear):
    """A LoRA layer that takes the fused path where that gives what PEFT gives, and is PEFT's own layer elsewhere.

    The choice is made on every call, since adapters are switched, merged, scaled and replaced at any time. The name
    contains "Linear" because PEFT's ``target_modules="all-linear"`` looks for that when a second adapter is added.
    """

    stock = lora.Linear

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        if args or kwargs:
            return super().forward(x, *args, **kwargs)
        if not torch.compiler.is_compiling() and (given := handed_over.take(self, x)) is not None:
            return given
        adapter = fused_adapter(self, x)
        if isinstance(adapter, str):
            return super().forward(x)
        split = why_not_split(self, adapter, x) is None
        if not split and may_use(self, "lora_qkv") and why_not_with_base(adapter, x) is None:
            layer = [adapter.weight], [adapter.bias], [adapter.lora_a], [adapter.lora_b], [adapter.scaling]
            return ops.lora_qkv(x, *layer, own_matmul=own_matmul(self))[0]
        if not may_use(self, "lora_linear"):
            return super().forward(x)
        base_out = _split_product(self, adapter, x) if split else self.base_layer(x)
        if adapter.drops():
            # PEFT drops from the input in the adapter's dtype, so the scaled values are rounded there.
            x = adapter.dropout(self._cast_input_dtype(x, adapter.lora_a.dtype))
        return ops.lora_linear(x, base_out, adapter.lora_a, adapter.lora_b, adapter.scaling)

    # Both write to the `data` of the base weight, which nothing counts: its twin is made anew when it is needed.

    def merge(self, *args, **kwargs) -> None:
        super().merge(*args, **kwargs)
        forget_twin(self)

    def unmerge(self) -> None:
        super().unmerge()
        forget_twin(self)


class _HandedOver(threading.local):
    """What an attention has calculated for its projections, between its call and theirs.

    The stock forward of an attention calls its layers one after the other. A layer that is called with the very input
    that its result was calculated from returns this result; so its hooks run, and a forward that calls it with anything
    else gets what it asks for.
    """

    x: Tensor | None = None
    results: dict[nn.Module, Tensor]

    def __init__(self):
        self.results = {}

    def take(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        return self.results.pop(layer, None) if x is self.x else None


handed_over = _HandedOver()


def take_over(module: nn.Module, given: Iterable[str] = LORA_LAYER_OPS, products: FrozenProducts = BY_TORCH) -> bool:
    """Put a stock LoRA layer on the fused path, by those of the given operators that a layer may use.

    True if it is on it now. Where none of them is one that a layer may use, it is left alone.
    """
    given = LORA_LAYER_OPS.intersection(given)
    if not given:
        return False
    if type(module) is lora.Linear and "forward" not in module.__dict__:
        module.__class__ = MetalkLoraLinear
    if type(module) is not MetalkLoraLinear:
        return False
    give_ops(module, given, products)
    return True


class Adapter(NamedTuple):
    """What the operators need of a layer and the one adapter in use."""

    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor
    lora_b: Tensor
    dropout: nn.Module
    scaling: float

    def drops(self) -> bool:
        return self.dropout.training and getattr(self.dropout, "p", 0) > 0


def why_stock(layer: lora.Linear, x: Tensor | None = None) -> str | None:
    """Why a call of this layer goes to PEFT's own forward, or None where it takes the fused path.

    Args:
        layer: any `lora.Linear`.
        x: the input, where there is one: its dtype and device count too.
    """
    adapter = fused_adapter(layer, x)
    return adapter if isinstance(adapter, str) else None


def why_not_with_base(adapter: Adapter, x: Tensor) -> str | None:
    """Why an operator cannot make the base layer's product of x as well, or None where it can."""
    if adapter.drops():
        return "dropout is active"
    return why_not_base(adapter.weight, adapter.bias, x, x.shape[-1:])


def why_not_base(weight: Tensor, bias: Tensor | None, x: Tensor, features: tuple[int, ...]) -> str | None:
    """The same of a layer without adapter, for an input of x's dtype and device and of so many features."""
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "the base layer is trained"
    dtypes = {x.dtype, weight.dtype} if bias is None else {x.dtype, weight.dtype, bias.dtype}
    # Autocast makes them one dtype, but for float64.
    fits = torch.float64 not in dtypes if torch.is_autocast_enabled(x.device.type) else len(dtypes) == 1
    if not fits or weight.device != x.device or features != weight.shape[1:]:
        return "the input does not fit the base layer"  # stock raises the error
    return None


def why_not_split(layer: nn.Module, adapter: Adapter, x: Tensor) -> str | None:
    """Why CPU and GPU do not share the rows of the base layer's product of x, or None where they do."""
    share = cpu_share(layer)
    if share is None:
        return "cpu_share is None"
    if not may_use(layer, "lora_linear"):
        return "lora_linear, which adds the adapter to a split product, is not among the operators"
    if torch.compiler.is_compiling():
        return "it is compiled"
    # A trained weight has another twin in every step.
    if reason := why_not_base(adapter.weight, adapter.bias, x, x.shape[-1:]):
        return reason
    device = x.device.type
    if torch.is_autocast_enabled(device) and adapter.weight.dtype != torch.get_autocast_dtype(device):
        return "autocast casts the weight"
    return why_unsplit(share, adapter.weight)


def _split_product(layer: nn.Module, adapter: Adapter, x: Tensor) -> Tensor:
    weight, bias, share = adapter.weight, adapter.bias, cpu_share(layer)
    twins = output_twin.of(x), weight_twins.of(weight)
    return ops.matmul_rows_split(x, weight, True, bias, share, *twins)


def forget_twin(layer: nn.Module) -> None:
    """Of the base layer's weight, where there is one."""
    weight = getattr(layer.base_layer, "weight", None)
    if isinstance(weight, Tensor):
        weight_twins.forget(weight)


def plain(module: nn.Module) -> bool:
    """No hook and no replaced forward: calling the operator instead of the module leaves nothing out."""
    attributes = module.__dict__
    return "forward" not in attributes and not any(attributes[hooks] for hooks in HOOKS)


def plain_linear(module: nn.Module) -> bool:
    """An `nn.Linear` as it comes: no subclass, parametrization, hook or replaced forward, an ordinary weight."""
    if type(module) is not nn.Linear or not plain(module):
        return False
    weight = module._parameters["weight"]
    return type(weight) is nn.Parameter and weight.layout == torch.strided


def fused_adapter(layer: lora.Linear, x: Tensor | None) -> Adapter | str:
    """The adapter that the operator can serve this call with, or the reason why it cannot.

    Runs on every call of every layer, so it reads modules and parameters from the dictionaries that hold them:
    `nn.Module.__getattr__` costs several times as much.
    """
    if layer.disable_adapters:
        return "adapters are disabled"
    if layer.merged:
        return "adapters are merged"
    modules = layer._modules
    adapters_a = modules["lora_A"]._modules
    active = [name for name in layer.active_adapters if name in adapters_a]
    if len(active) != 1:
        return f"{len(active)} active adapters" if active else "no active adapter"
    (name,) = active
    if name in layer.lora_variant:
        return f"a variant of LoRA ({type(layer.lora_variant[name]).__name__})"
    if layer.fan_in_fan_out:
        return "fan_in_fan_out"
    base, linear_a, linear_b = modules["base_layer"], adapters_a[name], modules["lora_B"]._modules[name]
    dropout = modules["lora_dropout"]._modules[name]
    if not plain_linear(base):
        return f"the base layer is not a plain nn.Linear ({type(base).__name__})"
    if not (plain_linear(linear_a) and plain_linear(linear_b)):
        return "the adapter is not two plain nn.Linear"
    if linear_a._parameters["bias"] is not None or linear_b._parameters["bias"] is not None:
        return "the adapter has a bias"
    if type(dropout) not in (nn.Dropout, nn.Identity) or not plain(dropout):
        return f"dropout by {type(dropout).__name__}"
    if any(_GLOBAL_HOOKS):
        return "global module hooks"
    if not getattr(layer, "cast_input_dtype_enabled", True):
        return "casting of inputs is disabled"
    scaling = float(layer.scaling[name])
    if not math.isfinite(scaling):
        return "the scaling is not finite"
    weight, lora_a, lora_b = (linear._parameters["weight"] for linear in (base, linear_a, linear_b))
    device = weight.device
    if lora_a.device != device or lora_b.device != device or (x is not None and x.device != device):
        return "base, adapter and input are on several devices"
    dtypes = {weight.dtype, lora_a.dtype, lora_b.dtype}
    if x is not None:
        dtypes.add(x.dtype)
    if not dtypes <= _DTYPES:
        return "a dtype that the operator does not take"
    return Adapter(weight, base._parameters["bias"], lora_a, lora_b, dropout, scaling)
