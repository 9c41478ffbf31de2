"""`peft.tuners.lora.Linear` with the adapter's contribution in one operator."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from torch_metalk import ops
from torch_metalk.patching.families import HOOKS

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
        adapter = "arguments that are PEFT's" if args or kwargs else _fused_adapter(self, x)
        if isinstance(adapter, str):
            return super().forward(x, *args, **kwargs)
        base_out = self.base_layer(x)
        if adapter.dropout.training and getattr(adapter.dropout, "p", 0) > 0:
            # PEFT drops from the input in the adapter's dtype, so the scaled values are rounded there.
            x = adapter.dropout(self._cast_input_dtype(x, adapter.lora_a.dtype))
        return ops.lora_linear(x, base_out, adapter.lora_a, adapter.lora_b, adapter.scaling)


def take_over(module: nn.Module) -> bool:
    """Put a stock LoRA layer on the fused path. True if it is on it now."""
    if type(module) is lora.Linear and "forward" not in module.__dict__:
        module.__class__ = MetalkLoraLinear
    return type(module) is MetalkLoraLinear


class _Adapter(NamedTuple):
    """What the operator needs of the one adapter in use."""

    lora_a: Tensor
    lora_b: Tensor
    dropout: nn.Module
    scaling: float


def why_stock(layer: lora.Linear, x: Tensor | None = None) -> str | None:
    """Why a call of this layer goes to PEFT's own forward, or None where it takes the fused path.

    Args:
        layer: any `lora.Linear`.
        x: the input, where there is one: its dtype and device count too.
    """
    adapter = _fused_adapter(layer, x)
    return adapter if isinstance(adapter, str) else None


def _plain(module: nn.Module) -> bool:
    """No hook and no replaced forward: calling the operator instead of the module leaves nothing out."""
    attributes = module.__dict__
    return "forward" not in attributes and not any(attributes[hooks] for hooks in HOOKS)


def _plain_linear(module: nn.Module) -> bool:
    """An `nn.Linear` as it comes: no subclass, parametrization, hook or replaced forward, an ordinary weight."""
    if type(module) is not nn.Linear or not _plain(module):
        return False
    weight = module._parameters["weight"]
    return type(weight) is nn.Parameter and weight.layout == torch.strided


def _fused_adapter(layer: lora.Linear, x: Tensor | None) -> _Adapter | str:
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
    if not _plain_linear(base):
        return f"the base layer is not a plain nn.Linear ({type(base).__name__})"
    if not (_plain_linear(linear_a) and _plain_linear(linear_b)):
        return "the adapter is not two plain nn.Linear"
    if linear_a._parameters["bias"] is not None or linear_b._parameters["bias"] is not None:
        return "the adapter has a bias"
    if type(dropout) not in (nn.Dropout, nn.Identity) or not _plain(dropout):
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
    return _Adapter(lora_a, lora_b, dropout, scaling)
