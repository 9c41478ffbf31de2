"""`peft.tuners.lora.Linear` with the adapter's contribution in one operator."""

from __future__ import annotations

import math

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from torch_metalk import ops
from torch_metalk.patching.families import HOOKS

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
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
        if args or kwargs or why_stock(self, x) is not None:
            return super().forward(x, *args, **kwargs)
        (adapter,) = _active(self)
        lora_a, lora_b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        dropout = self.lora_dropout[adapter]
        base_out = self.base_layer(x)
        if dropout.training and getattr(dropout, "p", 0) > 0:
            # PEFT drops from the input in the adapter's dtype, so the scaled values are rounded there.
            x = dropout(self._cast_input_dtype(x, lora_a.dtype))
        return ops.lora_linear(x, base_out, lora_a, lora_b, float(self.scaling[adapter]))


def take_over(module: nn.Module) -> bool:
    """Put a stock LoRA layer on the fused path. True if it is on it now."""
    if type(module) is lora.Linear and "forward" not in module.__dict__:
        module.__class__ = MetalkLoraLinear
    return type(module) is MetalkLoraLinear


def _active(layer: lora.Linear) -> list[str]:
    return [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]


def _plain_linear(module: nn.Module) -> bool:
    """An `nn.Linear` as it comes: no subclass, parametrization, hook or replaced forward, an ordinary weight."""
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.layout == torch.strided
        and "forward" not in module.__dict__
        and not any(getattr(module, hooks) for hooks in HOOKS)
    )


def why_stock(layer: lora.Linear, x: Tensor | None = None) -> str | None:
    """Why a call of this layer goes to PEFT's own forward, or None where it takes the fused path.

    Args:
        layer: any `lora.Linear`.
        x: the input, where there is one: its dtype and device count too.
    """
    if layer.disable_adapters:
        return "adapters are disabled"
    if layer.merged:
        return "adapters are merged"
    active = _active(layer)
    if len(active) != 1:
        return f"{len(active)} active adapters" if active else "no active adapter"
    (adapter,) = active
    if adapter in layer.lora_variant:
        return f"a variant of LoRA ({type(layer.lora_variant[adapter]).__name__})"
    if layer.fan_in_fan_out:
        return "fan_in_fan_out"
    lora_a, lora_b, base, dropout = (
        layer.lora_A[adapter],
        layer.lora_B[adapter],
        layer.base_layer,
        layer.lora_dropout[adapter],
    )
    if not _plain_linear(base):
        return f"the base layer is not a plain nn.Linear ({type(base).__name__})"
    if not (_plain_linear(lora_a) and _plain_linear(lora_b)):
        return "the adapter is not two plain nn.Linear"
    if lora_a.bias is not None or lora_b.bias is not None:
        return "the adapter has a bias"
    if type(dropout) not in (nn.Dropout, nn.Identity):
        return f"dropout by {type(dropout).__name__}"
    if "forward" in dropout.__dict__ or any(getattr(dropout, hooks) for hooks in HOOKS):
        return "the dropout has hooks or a forward of its own"
    if any(_GLOBAL_HOOKS):
        return "global module hooks"
    if not getattr(layer, "cast_input_dtype_enabled", True):
        return "casting of inputs is disabled"
    if not math.isfinite(layer.scaling[adapter]):
        return "the scaling is not finite"
    tensors = [base.weight, lora_a.weight, lora_b.weight] + ([] if x is None else [x])
    if len({t.device for t in tensors}) > 1:
        return "base, adapter and input are on several devices"
    if any(t.dtype not in _DTYPES for t in tensors):
        return "a dtype that the operator does not take"
    return None
