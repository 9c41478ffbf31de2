"""`patch` and `unpatch`: which modules of one model run through the operators of this package."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable

from torch import nn

from torch_metalk.patching import families
from torch_metalk.patching.report import PatchReport

#: What the `ops` argument of `patch` may name.
PATCHABLE_OPS = ("rms_norm", "rope", "attention", "swiglu", "geglu", "lora_linear")

#: Implementations of attention that stand for "whatever is fast", not for a wish of the user.
_REPLACEABLE_ATTENTION = ("sdpa", "eager")


def patch(model: nn.Module, ops: Iterable[str] | None = None) -> PatchReport:
    """Run a model's norms, MLPs, attention and LoRA layers through this package's operators.

    Works on this model alone: no class or function of transformers or PEFT is changed, and another model built from the
    same config object stays as it was. May come before or after `get_peft_model`, may be repeated (after more adapters
    were added, or to add operators), and is undone by `unpatch`.

    Args:
        model: a transformers model, a PEFT model around one, or any module that contains some.
        ops: the operators to use, names out of `PATCHABLE_OPS`; None for all.

    Returns:
        A `PatchReport`: what was patched, and what was left alone and why. Print it.

    Raises:
        TypeError: model is not a module.
        ValueError: an unknown name in `ops`.
    """
    wanted = _check(model, ops)
    patched, skipped = Counter(), Counter()
    modules = list(model.modules())
    for module in modules:
        _patch_module(module, wanted, patched, skipped)
    if "attention" in wanted:
        _patch_attention(model, modules, patched, skipped)
    return PatchReport(patched, skipped)


def unpatch(model: nn.Module) -> nn.Module:
    """Give every module below `model` its stock class, and the config object it had, back. Returns the model.

    Settings made on the patched model's config after `patch` are lost with it.
    """
    _check(model, None)
    for module in model.modules():
        if (stock := families.stock_class(module)) is not type(module):
            module.__class__ = stock
            module.__dict__.pop("_torch_metalk_ops", None)
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
    if unknown := wanted.difference(PATCHABLE_OPS):
        raise ValueError(
            f"torch_metalk.patch: argument 'ops' names {', '.join(sorted(map(repr, unknown)))}; "
            f"accepted: {', '.join(PATCHABLE_OPS)}"
        )
    return wanted


def _patch_module(module: nn.Module, wanted: frozenset[str], patched: Counter, skipped: Counter) -> None:
    cls = families.stock_class(module)
    target = families.target_of(cls)
    if target is not None:
        _patch_target(module, target, wanted, patched, skipped)
    elif _is_lora(module):
        if "lora_linear" in wanted:
            _patch_lora(module, patched, skipped)
    elif op := _looks_like(cls, wanted):
        skipped[cls.__name__, op, "not in the table of model families"] += 1


def _looks_like(cls: type[nn.Module], wanted: frozenset[str]) -> str | None:
    """The operator that a module of an unknown family would be a candidate for."""
    if cls.__name__.endswith("RMSNorm"):
        return "rms_norm" if "rms_norm" in wanted else None
    if cls.__name__.endswith("MLP"):
        return "swiglu" if "swiglu" in wanted else None
    if cls.__name__.endswith("Attention") and cls.__module__.startswith("transformers."):
        return "attention" if "attention" in wanted else None
    return None


def _patch_target(
    module: nn.Module, target: families.Target, wanted: frozenset[str], patched: Counter, skipped: Counter
) -> None:
    from torch_metalk.patching.modules import OPS_ATTRIBUTE, patched_class

    op, reason = _op_of(module, target)
    if reason is None and "forward" in module.__dict__:
        reason = "its forward was replaced on the instance"
    if op in wanted:
        key = (target.stock.__name__, op, reason or "")
        (patched if reason is None else skipped)[key] += 1
    # A module whose own operator is not wanted still has to notice LoRA layers that PEFT puts into it later.
    enabled = {op} & wanted if reason is None else set()
    if target.kind != "RMSNorm" and "forward" not in module.__dict__:
        enabled |= {"lora_linear"} & wanted
    if enabled:
        enabled |= set(module.__dict__.get(OPS_ATTRIBUTE, ()))
        module.__class__ = patched_class(target.stock)
        module.__dict__[OPS_ATTRIBUTE] = frozenset(enabled)


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


def _patch_lora(module: nn.Module, patched: Counter, skipped: Counter) -> None:
    from torch_metalk.peft import take_over, why_stock

    name = f"lora.{families.stock_class(module).__name__}"
    if not take_over(module):
        reason = "its forward was replaced on the instance" if "forward" in module.__dict__ else "not a lora.Linear"
        skipped[name, "lora_linear", reason] += 1
        return
    reason = why_stock(module)
    patched[name, "lora_linear", f"runs stock at present: {reason}" if reason else ""] += 1


# ---- attention, which transformers chooses by a string in the config


def _patch_attention(model: nn.Module, modules: list[nn.Module], patched: Counter, skipped: Counter) -> None:
    if importlib.util.find_spec("transformers") is None:
        return
    from torch_metalk.patching.attention import IMPLEMENTATION, register

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
        elif id(config) in foreign:
            reason = "shares its config with attention of an unknown family"
        else:
            reason, configs[id(config)] = None, config
        (patched if reason is None else skipped)[name, "attention", reason or ""] += 1
    if configs:
        register()
        _replace_configs(model, configs, IMPLEMENTATION)


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
