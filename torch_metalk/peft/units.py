"""Several LoRA layers in one operator: the projections of an attention, and a whole gated MLP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from torch_metalk import ops
from torch_metalk.patching import families
from torch_metalk.peft.linear import (
    Adapter,
    MetalkLoraLinear,
    fused_adapter,
    handed_over,
    plain,
    plain_linear,
    why_not_base,
    why_not_split,
    why_not_with_base,
)

_SPLIT = "CPU and GPU share the base layer's product"


class Layers(NamedTuple):
    """Layers as `ops.lora_qkv` takes them; an adapter may be absent for `ops.lora_mlp`."""

    weights: list[Tensor]
    biases: list[Tensor | None]
    lora_a: list[Tensor | None]
    lora_b: list[Tensor | None]
    scalings: list[float]

    def add(self, weight: Tensor, bias: Tensor | None, lora_a=None, lora_b=None, scaling: float = 0.0) -> None:
        for part, value in zip(self, (weight, bias, lora_a, lora_b, scaling), strict=True):
            part.append(value)


def op_alone(layer: MetalkLoraLinear) -> tuple[str | None, str | None]:
    """The operator that this layer would call by itself at present; or None, and the reason why it runs stock."""
    adapter = fused_adapter(layer, None)
    if isinstance(adapter, str):
        return None, adapter
    obstacle = _why_not_whole(layer, adapter, adapter.weight)
    if families.may_use(layer, "lora_qkv") and obstacle is None:
        return "lora_qkv", None
    return ("lora_linear", None) if families.may_use(layer, "lora_linear") else (None, obstacle)


def _why_not_whole(layer: nn.Module, adapter: Adapter, x: Tensor) -> str | None:
    """Why an operator does not make the base layer's product of x as well, or None where it does."""
    return why_not_with_base(adapter, x) or (_SPLIT if why_not_split(layer, adapter, x) is None else None)


# ---- q, k and v


def projections(attention: nn.Module) -> list[nn.Module]:
    """The projections of an attention that are LoRA layers on the fused path."""
    members = (attention._modules.get(name) for name in families.QKV)
    return [member for member in members if type(member) is MetalkLoraLinear]


def qkv_unit(attention: nn.Module, x: Tensor | None = None) -> tuple[list[nn.Module], Layers] | str | None:
    """Those LoRA layers of an attention that one call of `ops.lora_qkv` can serve.

    Args:
        attention: whose layers are called `families.QKV`.
        x: the input, where there is one.

    Returns:
        Two or more layers and their tensors, or the reason why there are not; None where the attention has no two.
    """
    members = projections(attention)
    if len(members) < 2:
        return None
    if x is None:
        x = members[0].base_layer.weight  # has the dtype, the device and the number of features of an input
    served, layers, reason = [], Layers([], [], [], [], []), ""
    for member in members:
        adapter = fused_adapter(member, x)
        obstacle = adapter if isinstance(adapter, str) else _changes_input(member) or _why_not_whole(member, adapter, x)
        if obstacle is None:
            served.append(member)
            layers.add(adapter.weight, adapter.bias, adapter.lora_a, adapter.lora_b, adapter.scaling)
        else:
            reason = obstacle
    return (served, layers) if len(served) > 1 else reason


def _changes_input(layer: nn.Module) -> str | None:
    """Hooks that come between the attention's input and the layer: its result would be calculated in vain."""
    attributes = layer.__dict__
    if "forward" in attributes:
        return "a forward was replaced on the instance"
    if any(attributes[hooks] for hooks in families.HOOKS if hooks != "_forward_hooks"):
        return "a LoRA layer has hooks"
    return None


@contextmanager
def projected_together(attention: nn.Module, x: Tensor) -> Iterator[None]:
    """Where one operator can serve several projections of x, calculate them, for the layers called inside to return."""
    unit = qkv_unit(attention, x)
    if not isinstance(unit, tuple):
        yield
        return
    served, layers = unit
    results = ops.lora_qkv(x, *layers, own_matmul=families.own_matmul(attention))
    before = handed_over.x, handed_over.results
    handed_over.x, handed_over.results = x, dict(zip(served, results, strict=True))
    del results
    try:
        yield
    finally:
        handed_over.x, handed_over.results = before


# ---- gate, up and down

_ACTIVATIONS = {("swiglu", None): "silu", ("geglu", "tanh"): "gelu_tanh", ("geglu", "none"): "gelu"}


def gated_unit(mlp: nn.Module, family: families.Family, x: Tensor | None = None) -> tuple | str:
    """The arguments of `ops.lora_mlp` after x, or the reason why it cannot serve this MLP, which has LoRA layers.

    Args:
        mlp: with separate layers for gate and up.
        family: names its parts.
        x: the input, where there is one.
    """
    activation = families.gated_op(getattr(mlp, family.act))
    if activation is None:
        return "the activation has no operator"
    layers = Layers([], [], [], [], [])
    for member in (mlp._modules[name] for name in (*family.gate_up, "down_proj")):
        if families.is_lora_linear(member):
            adapter = fused_adapter(member, x)
            if isinstance(adapter, str):
                return adapter
            if not plain(member):
                return "a LoRA layer has hooks or a forward of its own"
            if adapter.drops():
                return "dropout is active"
            if why_not_split(member, adapter, adapter.weight if x is None else x) is None:
                return _SPLIT
            layers.add(adapter.weight, adapter.bias, adapter.lora_a, adapter.lora_b, adapter.scaling)
        elif plain_linear(member):
            layers.add(member._parameters["weight"], member._parameters["bias"])
        else:
            return f"{type(member).__name__} is not a plain nn.Linear"
        weight, bias = layers.weights[-1], layers.biases[-1]
        if x is None:
            x = weight  # has the dtype, the device and the number of features of an input
        features = x.shape[-1:] if len(layers.weights) < 3 else layers.weights[0].shape[:1]
        if obstacle := why_not_base(weight, bias, x, features):
            return obstacle
    return (*layers, _ACTIVATIONS[activation])
