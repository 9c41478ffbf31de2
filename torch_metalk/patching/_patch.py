"""`patch` and `unpatch`: which modules of one model run through the operators of this package."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable

from torch import nn

from torch_metalk.ops import _checks, _cpu_share
from torch_metalk.patching import families
from torch_metalk.patching.report import PatchReport

#: What the `ops` argument of `patch` may name.
PATCHABLE_OPS = ("rms_norm", "rope", "attention", "swiglu", "geglu", "lora_linear", "lora_qkv", "lora_mlp")

#: Who makes the products of frozen weights inside of the fused LoRA units.
BASE_MATMULS = ("torch", "metal")

#: Those among them that run PEFT's layers.
LORA_OPS = families.LORA_LAYER_OPS | {"lora_mlp"}

#: Implementations of attention that stand for "whatever is fast", not for a wish of the user.
_REPLACEABLE_ATTENTION = ("sdpa", "eager")


def patch(
    model: nn.Module,
    ops: Iterable[str] | None = None,
    base_matmul: str = "torch",
    cpu_share: float | str | None = None,
) -> PatchReport:
    """Run a model's norms, MLPs, attention and LoRA layers through this package's operators.

    Works on this model alone: no class or function of transformers or PEFT is changed, and another model built from the
    same config object stays as it was. May come before or after `get_peft_model`, may be repeated (after more adapters
    were added, or to add operators to those in use), and is undone by `unpatch`.

    Args:
        model: a transformers model, a PEFT model around one, or any module that contains some.
        ops: the operators to use, names out of `PATCHABLE_OPS`, in addition to those in use already; None for all.
            ``"lora_linear"`` adds an adapter to what its layer made, ``"lora_qkv"`` makes the frozen product as well,
            of one layer or of an attention's q, k and v at once, and ``"lora_mlp"`` is a whole gated MLP. On every call
            the largest of them runs that gives what PEFT gives.
        base_matmul: ``"torch"``, or ``"metal"`` to have the frozen products inside of ``"lora_qkv"`` and ``"lora_mlp"``
            made by this package's kernels on mps. The last call decides, for the whole model.
        cpu_share: the CPU's share of the rows of the frozen products of LoRA layers on mps, from 0 to 1 or ``"auto"``,
            as `ops.matmul_rows_split` takes it; ``"lora_linear"`` adds the adapters then, layer by layer. Of a half
            precision weight that is split a float32 copy is kept on the CPU. Means nothing on other devices and under
            torch.compile. None splits nothing. The last call decides, for the whole model.

    Returns:
        A `PatchReport`: what is patched now, and what was left alone and why. Print it.

    Raises:
        TypeError: model is not a module; cpu_share no number.
        ValueError: an unknown name in `ops`, or none at all; an unknown `base_matmul`; a share outside of 0 to 1.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    wanted = _check(model, ops).union(*map(_in_use, modules))
    _checks.one_of("patch", "base_matmul", base_matmul, BASE_MATMULS)
    if cpu_share is not None:
        _cpu_share.check_share("patch", cpu_share)
    products = families.FrozenProducts(base_matmul == "metal", cpu_share)
    lora_layers = [module for module in modules if _is_lora(module)]
    if wanted & families.LORA_LAYER_OPS:
        _take_over(lora_layers, wanted, products)
    if cpu_share is None:
        _forget_twins(lora_layers)
    patched, skipped, within = Counter(), Counter(), {}
    for module in modules:
        _patch_module(module, wanted, products, patched, skipped, within)
    for module in modules:
        families.write_twins(module, cpu_share)
    for layer in lora_layers:
        _report_split(layer, patched, skipped)
        _report_lora(layer, wanted, patched, skipped, within)
    if "attention" in wanted:
        _patch_attention(model, modules, patched, skipped)
    return PatchReport(patched, skipped)


def unpatch(model: nn.Module) -> nn.Module:
    """Give every module below `model` its stock class, and the config object it had, back. Returns the model.

    Settings made on the patched model's config after `patch` are lost with it.
    """
    _check(model, None)
    _forget_twins([module for module in model.modules() if _is_lora(module)])
    for module in model.modules():
        if (stock := families.stock_class(module)) is not type(module):
            module.__class__ = stock
            for attribute in (families.OPS_ATTRIBUTE, families.MATMUL_ATTRIBUTE, families.SHARE_ATTRIBUTE):
                module.__dict__.pop(attribute, None)
        for name, config in module.__dict__.pop(families.CONFIGS_ATTRIBUTE, {}).items():
            module.__dict__[name] = config
    return model


def _check(model: nn.Module, ops: Iterable[str] | None) -> frozenset[str]:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"torch_metalk.patch: argument 'model' is a {type(model).__name__}; accepted: a torch.nn.Module"
        )
    if isinstance(ops, str):
        ops = [ops]
    wanted = frozenset(PATCHABLE_OPS if ops is None else ops)
    if not wanted:
        raise ValueError(f"torch_metalk.patch: argument 'ops' names nothing; accepted: {', '.join(PATCHABLE_OPS)}")
    if unknown := wanted.difference(PATCHABLE_OPS):
        raise ValueError(
            f"torch_metalk.patch: argument 'ops' names {', '.join(sorted(map(repr, unknown)))}; "
            f"accepted: {', '.join(PATCHABLE_OPS)}"
        )
    return wanted


def _in_use(module: nn.Module) -> set[str]:
    """The operators that an earlier `patch` gave to a module."""
    ops = set(module.__dict__.get(families.OPS_ATTRIBUTE, ()))
    if families.has_own_config(module):
        ops.add("attention")
    return ops


def _patch_module(
    module: nn.Module,
    wanted: frozenset[str],
    products: families.FrozenProducts,
    patched: Counter,
    skipped: Counter,
    within: dict[nn.Module, tuple[str, str]],
) -> None:
    cls = families.stock_class(module)
    target = families.target_of(cls)
    if target is not None:
        _patch_target(module, target, wanted, products, patched, skipped, within)
    elif _is_lora(module):
        return
    elif op := _looks_like(cls, wanted):
        skipped[cls.__name__, op, _why_unknown(cls, op)] += 1


def _looks_like(cls: type[nn.Module], wanted: frozenset[str]) -> str | None:
    """The operator that a module of an unknown family would be a candidate for."""
    if cls.__name__.endswith("RMSNorm"):
        return "rms_norm" if "rms_norm" in wanted else None
    if cls.__name__.endswith("MLP"):
        return "swiglu" if "swiglu" in wanted else None
    if cls.__name__.endswith("Attention") and cls.__module__.startswith("transformers."):
        return "attention" if "attention" in wanted else None
    return None


def _why_unknown(cls: type[nn.Module], op: str) -> str:
    reason = "not in the table of model families"
    if op == "attention":
        from torch_metalk.patching.attention import why_stock

        if asked := why_stock(cls):
            reason = f"{reason}; {asked}"
    return reason


def _patch_target(
    module: nn.Module,
    target: families.Target,
    wanted: frozenset[str],
    products: families.FrozenProducts,
    patched: Counter,
    skipped: Counter,
    within: dict[nn.Module, tuple[str, str]],
) -> None:
    from torch_metalk.patching.modules import patched_class

    name = target.stock.__name__
    op, reason = _op_of(module, target)
    if reason is None and "forward" in module.__dict__:
        reason = "its forward was replaced on the instance"
    enabled = {op} & wanted if reason is None else set()
    if target.kind != "RMSNorm" and "forward" not in module.__dict__:
        # A module whose own operator is not wanted still has to notice LoRA layers that PEFT puts into it later.
        enabled |= families.LORA_LAYER_OPS & wanted
        if target.kind == "MLP" and reason is None and len(target.family.gate_up) == 2:
            enabled |= {"lora_mlp"} & wanted
    if enabled:
        enabled |= set(module.__dict__.get(families.OPS_ATTRIBUTE, ()))
        module.__class__ = patched_class(target.stock)
        families.give_ops(module, enabled, families.BY_TORCH if enabled.isdisjoint(LORA_OPS) else products)
    unit, why_not = _unit_of(module, target, enabled, within)
    if unit is not None:
        patched[name, unit, why_not] += 1
    if op in wanted:
        if reason is None and (unit, why_not) == ("lora_mlp", ""):
            patched[name, op, "within lora_mlp at present"] += 1
        else:
            (patched if reason is None else skipped)[name, op, reason or ""] += 1


def _op_of(module: nn.Module, target: families.Target) -> tuple[str, str | None]:
    """The operator for a module of a known class, and the reason to leave it alone if there is one."""
    if target.kind == "RMSNorm":
        return "rms_norm", families.probe_norm(target)
    if target.kind == "Attention":
        return "rope", families.probe_rope(target)
    act = getattr(module, target.family.act)
    gated = families.gated_op(act)
    if gated is None:
        return "swiglu", f"activation {type(act).__name__} has no operator"
    return gated[0], families.probe_mlp(target)


# ---- LoRA


def _is_lora(module: nn.Module) -> bool:
    # A module of PEFT's exists only where PEFT is imported: asking sys.modules spares everyone else its import.
    layer = sys.modules.get("peft.tuners.lora.layer")
    return layer is not None and isinstance(module, layer.LoraLayer)


def _take_over(lora_layers: list[nn.Module], wanted: frozenset[str], products: families.FrozenProducts) -> None:
    for layer in lora_layers:
        from torch_metalk.peft import take_over

        take_over(layer, wanted, products)


def _forget_twins(lora_layers: list[nn.Module]) -> None:
    for layer in lora_layers:
        from torch_metalk.peft.linear import forget_twin

        forget_twin(layer)


def _report_split(layer: nn.Module, patched: Counter, skipped: Counter) -> None:
    """Whether CPU and GPU share the product of a layer's frozen weight at present, where that was asked for."""
    if families.cpu_share(layer) is None:
        return
    from torch_metalk.peft.linear import fused_adapter, why_not_split

    adapter = fused_adapter(layer, None)
    reason = adapter if isinstance(adapter, str) else why_not_split(layer, adapter, adapter.weight)
    name = f"lora.{families.stock_class(layer).__name__}"
    (patched if reason is None else skipped)[name, "matmul_rows_split", reason or ""] += 1


def _unit_of(
    module: nn.Module, target: families.Target, enabled: set[str], within: dict[nn.Module, tuple[str, str]]
) -> tuple[str | None, str]:
    """The operator that calls several LoRA layers of a module at once, and why it does not at present.

    None where the module has no layers for one. Notes the layers that it calls in `within`.
    """
    op, names = {
        "Attention": ("lora_qkv", families.QKV),
        "MLP": ("lora_mlp", (*target.family.gate_up, "down_proj")),
    }.get(target.kind, (None, ()))
    layers = [module._modules.get(name) for name in names]
    if op not in enabled or not any(map(families.is_lora_linear, layers)):
        return None, ""
    from torch_metalk.peft import units

    if op == "lora_qkv":
        unit = units.qkv_unit(module)
        layers = unit[0] if isinstance(unit, tuple) else []
    else:
        unit = units.gated_unit(module, target.family)
    if unit is None:
        return None, ""
    if isinstance(unit, str):
        return op, f"layer by layer at present: {unit}"
    within |= dict.fromkeys(layers, (op, target.stock.__name__))
    return op, ""


def _report_lora(
    layer: nn.Module,
    wanted: frozenset[str],
    patched: Counter,
    skipped: Counter,
    within: dict[nn.Module, tuple[str, str]],
) -> None:
    """What runs a LoRA layer at present: an operator of the module that it is in, one of its own, or PEFT."""
    name = f"lora.{families.stock_class(layer).__name__}"
    if layer in within:
        op, where = within[layer]
        patched[name, op, f"within {where} at present"] += 1
        return
    ops = [op for op in ("lora_qkv", "lora_linear") if op in wanted]
    if not ops:
        return
    from torch_metalk.peft import MetalkLoraLinear, units

    if type(layer) is not MetalkLoraLinear:
        reason = "its forward was replaced on the instance" if "forward" in layer.__dict__ else "not a lora.Linear"
        skipped[name, ops[-1], reason] += 1
        return
    op, reason = units.op_alone(layer)
    patched[name, op or ops[-1], f"runs stock at present: {reason}" if reason else ""] += 1


# ---- attention, which transformers chooses by a string in the config


def _patch_attention(model: nn.Module, modules: list[nn.Module], patched: Counter, skipped: Counter) -> None:
    if importlib.util.find_spec("transformers") is None:
        return
    from torch_metalk.patching.attention import IMPLEMENTATION, register, why_stock

    ours, foreign = [], set()
    for module in modules:
        cls = families.stock_class(module)
        target = families.target_of(cls)
        if target is not None and target.kind == "Attention":
            ours.append((module, cls.__name__))
        elif cls.__name__.endswith("Attention") and "config" in module.__dict__:
            foreign.add(id(module.config))
    configs = {}
    for module, name in ours:
        config = module.config
        if config._attn_implementation == IMPLEMENTATION and families.has_own_config(module):
            reason = None
        elif config._attn_implementation not in (*_REPLACEABLE_ATTENTION, IMPLEMENTATION):
            reason = f"attention implementation {config._attn_implementation!r} was chosen"
        elif getattr(config, "output_attentions", False):
            reason = "output_attentions asks for the attention weights"
        elif asked := why_stock(families.stock_class(module)):
            reason = asked
        elif id(config) in foreign:
            reason = "shares its config with attention of an unknown family"
        else:
            reason, configs[id(config)] = None, config
        (patched if reason is None else skipped)[name, "attention", reason or _attention_at_times(module)] += 1
    if configs:
        register()
        _replace_configs(model, configs, IMPLEMENTATION)


def _attention_at_times(module: nn.Module) -> str:
    """When calls of an attention that uses the operator run stock code, as far as that is known before a call."""
    dropout = getattr(module, "attention_dropout", 0)
    return f"runs stock in training: attention_dropout is {dropout}" if dropout else ""


def _replace_configs(model: nn.Module, configs: dict[int, object], implementation: str) -> None:
    """Give the model its own copy of each config tree, since configs are shared between models built from one."""
    from transformers import PretrainedConfig

    holders = [
        (module, name, value)
        for module in model.modules()
        for name, value in module.__dict__.items()
        if isinstance(value, PretrainedConfig)
    ]
    memo: dict[int, object] = {}
    # One memo for all: a text config inside of a multimodal one stays a part of it.
    for _, _, config in holders:
        copy.deepcopy(config, memo)
    for module, name, config in holders:
        module.__dict__.setdefault(families.CONFIGS_ATTRIBUTE, {}).setdefault(name, config)
        module.__dict__[name] = memo[id(config)]
    for config in configs.values():
        memo[id(config)]._attn_implementation_internal = implementation
