"""The subclasses that patched modules get, made on demand: ``modules.LlamaRMSNorm`` is a subclass of transformers'.

A module is patched by giving it one of these classes, which keeps its state where it is, and can be undone, copied and
pickled: a pickle names the class, and importing it makes it again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from torch_metalk import ops
from torch_metalk.patching import families
from torch_metalk.patching.attention import register
from torch_metalk.patching.twins import output_twin

register()

_HALF = (torch.float16, torch.bfloat16)


class Patched:
    """Mixed into every class of this module. `stock` is the class the module had before."""

    stock: type[nn.Module]

    def __setattr__(self, name, value):
        # PEFT puts its LoRA layers into their parents by setattr. Taking them over here makes `patch` work before
        # `get_peft_model` too, for this model alone and without a hook.
        if families.is_lora_linear(value) and (given := self.__dict__.get(families.OPS_ATTRIBUTE)):
            from torch_metalk.peft import take_over

            take_over(value, given, families.frozen_products(self))
        super().__setattr__(name, value)


def _first_argument(target: families.Target) -> str:
    """The name that stock has for the tensor that its forward takes first."""
    return list(inspect.signature(target.stock.forward).parameters)[1]


def _forward_of_one(target: families.Target, run: Callable[[nn.Module, Tensor], Tensor]):
    """A forward of one tensor, which may be given by its name."""
    name = _first_argument(target)

    @functools.wraps(target.stock.forward)
    def forward(self, *args, **kwargs):
        (x,) = args or (kwargs[name],)
        return run(self, x)

    return {"forward": forward}


def _has_lora(module: nn.Module, names: Iterable[str]) -> bool:
    return any(families.is_lora_linear(module._modules.get(name)) for name in names)


def _norm(target: families.Target):
    def run(self, x):
        arguments = families.norm_args(self, target.family.norm)
        share = families.cpu_share(self)
        # Twins are of a call and not of a graph, as are the products that read them.
        if share is None or x.dtype not in _HALF or torch.compiler.is_compiling() or families.why_unsplit(share, x):
            return ops.rms_norm(x, *arguments)
        y, twin = ops.rms_norm(x, *arguments, also_float32=True)
        if y.dtype in _HALF:
            output_twin.put(y, twin)
        return y

    return _forward_of_one(target, run)


def _last_reader(forward: Callable) -> Callable:
    """The forward of a module that a norm wrote its twin for: afterwards nobody needs that."""

    @functools.wraps(forward)
    def wrapped(self, *args, **kwargs):
        if families.cpu_share(self) is None or torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        try:
            return forward(self, *args, **kwargs)
        finally:
            output_twin.drop()

    return wrapped


def _attention(target: families.Target):
    rotary_forward = families.attention_forward(target)
    name = _first_argument(target)

    def forward(self, *args, **kwargs):
        run = rotary_forward if families.may_use(self, "rope") else target.stock.forward
        # What is handed over to the layers is of a call and not of a graph: compiled layers go one by one.
        if torch.compiler.is_compiling() or not families.may_use(self, "lora_qkv") or not _has_lora(self, families.QKV):
            return run(self, *args, **kwargs)
        from torch_metalk.peft import units

        with units.projected_together(self, args[0] if args else kwargs[name]):
            return run(self, *args, **kwargs)

    return {"forward": _last_reader(functools.wraps(target.stock.forward)(forward))}


def _mlp(target: families.Target):
    members = (*target.family.gate_up, "down_proj")

    def run(self, x):
        if families.may_use(self, "lora_mlp") and _has_lora(self, members):
            from torch_metalk.peft import units

            unit = units.gated_unit(self, target.family, x)
            if not isinstance(unit, str):
                return ops.lora_mlp(x, *unit, own_matmul=families.own_matmul(self))
        if families.may_use(self, "swiglu") or families.may_use(self, "geglu"):
            return families.mlp_forward(self, x, target.family)
        return target.stock.forward(self, x)

    return _forward_of_one(target, _last_reader(run))


_MAKERS = {"RMSNorm": _norm, "Attention": _attention, "MLP": _mlp}


@functools.cache
def patched_class(stock: type[nn.Module]) -> type[nn.Module]:
    """The subclass for a stock class that `families.target_of` knows."""
    target = families.target_of(stock)
    members = _MAKERS[target.kind](target)
    members |= {"stock": stock, "__module__": __name__, "__doc__": f"{stock.__name__} through torch_metalk."}
    return type("Metalk" + stock.__name__, (Patched, stock), members)


def __getattr__(name: str) -> type[nn.Module]:
    for model_type, family in families.FAMILIES.items():
        for kind in _MAKERS:
            if name == f"Metalk{family.prefix}{kind}":
                return patched_class(getattr(families.modeling_module(model_type), family.prefix + kind))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
