"""Which modules of which model families become which operators, as one table.

The stock classes are not trusted to stay what they were when this table was written: before a class is used, a small
instance of it is asked what it does (`probe_norm`, `probe_mlp`, `probe_rope`), and where that is not what our operator
does, the class is left alone and the report says so. That survives renamed variables in another transformers release
and catches changed mathematics, which a comparison of sources would do the other way round.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_metalk import ops
from torch_metalk.ops import _cpu_share


class NormSpec(NamedTuple):
    """How an RMSNorm class calls `ops.rms_norm`."""

    eps: str
    weight_offset: float = 0.0
    rounding: str = "before_weight"


class Family(NamedTuple):
    """One modeling module of transformers; its classes are ``<prefix>RMSNorm``, ``…Attention`` and ``…MLP``.

    `input_norms` are the norms of a decoder layer whose output is the input of its attention or its MLP.
    """

    prefix: str
    norm: NormSpec
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    act: str = "act_fn"
    input_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")


_LLAMA_NORM = NormSpec("variance_epsilon")
_GEMMA_NORM = NormSpec("eps", weight_offset=1.0, rounding="after_weight")
_OLMO2_NORM = NormSpec("variance_epsilon", rounding="after_weight")
# Gemma 2 and 3 norm the attention's output as well, under the name that others have for the MLP's input.
_GEMMA2_INPUT_NORMS = ("input_layernorm", "pre_feedforward_layernorm")

FAMILIES = {
    "llama": Family("Llama", _LLAMA_NORM),
    "mistral": Family("Mistral", _LLAMA_NORM),
    "qwen2": Family("Qwen2", _LLAMA_NORM),
    "qwen3": Family("Qwen3", _LLAMA_NORM),
    "smollm3": Family("SmolLM3", _LLAMA_NORM),
    "phi3": Family("Phi3", _LLAMA_NORM, gate_up=("gate_up_proj",), act="activation_fn"),
    "gemma": Family("Gemma", _GEMMA_NORM),
    "gemma2": Family("Gemma2", _GEMMA_NORM, input_norms=_GEMMA2_INPUT_NORMS),
    "gemma3": Family("Gemma3", _GEMMA_NORM, input_norms=_GEMMA2_INPUT_NORMS),
    "olmo2": Family("Olmo2", _OLMO2_NORM, input_norms=()),
}


class Target(NamedTuple):
    """A stock class that this package has a subclass for."""

    family: Family
    kind: str  # "RMSNorm", "Attention" or "MLP"
    stock: type[nn.Module]


def modeling_module(model_type: str) -> types.ModuleType:
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def target_of(cls: type[nn.Module]) -> Target | None:
    """The table's entry for exactly this class, if there is one."""
    for model_type, family in FAMILIES.items():
        if cls.__module__ != f"transformers.models.{model_type}.modeling_{model_type}":
            continue
        for kind in ("RMSNorm", "Attention", "MLP"):
            if cls.__name__ == family.prefix + kind:
                return Target(family, kind, cls)
    return None


#: Where a patched module keeps the names of the operators it may use.
OPS_ATTRIBUTE = "_torch_metalk_ops"
#: Where a module keeps that the frozen products of its LoRA units are made by this package's matmul.
MATMUL_ATTRIBUTE = "_torch_metalk_own_matmul"
#: Where a module keeps the CPU's share of the rows of frozen products: a LoRA layer splits its own, a module that may
#: get LoRA layers hands it on to them, and a norm writes its output's twin for them.
SHARE_ATTRIBUTE = "_torch_metalk_cpu_share"
#: The operators that a LoRA layer itself may use.
LORA_LAYER_OPS = frozenset({"lora_linear", "lora_qkv"})
#: The projections of one input that an attention calls.
QKV = ("q_proj", "k_proj", "v_proj")
#: Where a module whose config was replaced keeps the one it had: attribute name -> stock config.
CONFIGS_ATTRIBUTE = "_torch_metalk_stock_configs"
#: Where a module keeps what others want called with it: an operator that replaces the module would not call them.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class a module has, or had before it was patched."""
    cls = type(module)
    return getattr(cls, "stock", cls) if cls.__module__.startswith("torch_metalk.") else cls


class FrozenProducts(NamedTuple):
    """How products with frozen weights are made."""

    own_matmul: bool = False
    cpu_share: float | str | None = None


BY_TORCH = FrozenProducts()


def give_ops(module: nn.Module, ops: Iterable[str], products: FrozenProducts = BY_TORCH) -> None:
    """Note which operators a module may use from now on."""
    module.__dict__[OPS_ATTRIBUTE] = frozenset(ops)
    _note(module, MATMUL_ATTRIBUTE, products.own_matmul or None)
    _note(module, SHARE_ATTRIBUTE, products.cpu_share)


def _note(module: nn.Module, attribute: str, value: object) -> None:
    if value is None:
        module.__dict__.pop(attribute, None)
    else:
        module.__dict__[attribute] = value


def may_use(module: nn.Module, op: str) -> bool:
    return op in module.__dict__.get(OPS_ATTRIBUTE, ())


def own_matmul(module: nn.Module) -> bool:
    return module.__dict__.get(MATMUL_ATTRIBUTE, False)


def cpu_share(module: nn.Module) -> float | str | None:
    return module.__dict__.get(SHARE_ATTRIBUTE)


def frozen_products(module: nn.Module) -> FrozenProducts:
    return FrozenProducts(own_matmul(module), cpu_share(module))


def why_unsplit(share: float | str, t: Tensor) -> str | None:
    """Why CPU and GPU do not share a product of this tensor's dtype and device, or None where they do."""
    shares = _cpu_share.shares(share, t.device, t.dtype)
    return None if shares.forward or shares.backward else shares.reason


def write_twins(layer: nn.Module, share: float | str | None) -> None:
    """Have the norms of a decoder layer that its attention and MLP start with write their output's twin, or no more."""
    for name, norm in layer._modules.items():
        target = target_of(stock_class(norm))
        if target is not None and target.kind == "RMSNorm" and name in target.family.input_norms:
            _note(norm, SHARE_ATTRIBUTE, share if may_use(norm, "rms_norm") else None)


def is_lora_linear(module: nn.Module | None) -> bool:
    """Whether this is PEFT's LoRA layer of a linear layer, stock or ours; asked without importing PEFT."""
    cls = type(module)
    return (cls.__module__, cls.__qualname__) in (
        ("peft.tuners.lora.layer", "Linear"),
        ("torch_metalk.peft.linear", "MetalkLoraLinear"),
    )


def has_own_config(module: nn.Module) -> bool:
    """Whether `patch` gave this attention its config. A model built from such a config is not patched by that."""
    return "config" in module.__dict__.get(CONFIGS_ATTRIBUTE, ())


# ---- activations of gated MLPs


def _gelu_approximation(act: nn.Module) -> str | None:
    return getattr(act, "approximate", None)


_ACTIVATIONS: dict[str, Callable[[nn.Module], tuple[str, str | None]]] = {
    "torch.nn.modules.activation.SiLU": lambda act: ("swiglu", None),
    "transformers.activations.SiLUActivation": lambda act: ("swiglu", None),
    "torch.nn.modules.activation.GELU": lambda act: ("geglu", _gelu_approximation(act)),
    "transformers.activations.GELUTanh": lambda act: ("geglu", "tanh"),
    "transformers.activations.GELUActivation": lambda act: ("geglu", "none"),
}


def gated_op(act: nn.Module) -> tuple[str, str | None] | None:
    """The operator that fuses this activation with the product, and its approximation; None where there is none."""
    if "forward" in act.__dict__ or any(getattr(act, hooks) for hooks in HOOKS):
        return None
    cls = type(act)
    entry = _ACTIVATIONS.get(f"{cls.__module__}.{cls.__qualname__}")
    return None if entry is None else entry(act)


def apply_gate(act: nn.Module, gate: Tensor, up: Tensor | None) -> Tensor:
    """``act(gate) * up``, fused where an operator does the same; without `up`, gate is a fused projection."""
    op = gated_op(act)
    if op is None or (up is not None and gate.dtype != up.dtype):
        if up is None:
            gate, up = gate.chunk(2, dim=-1)
        return act(gate) * up
    return ops.swiglu(gate, up) if op[0] == "swiglu" else ops.geglu(gate, up, op[1])


# ---- rotary position embedding


def rotary(stock: Callable, promotes: bool) -> Callable:
    """A replacement for a modeling module's `apply_rotary_pos_emb`, with stock's result dtype.

    Args:
        stock: the function it replaces; serves what the operator does not do.
        promotes: whether stock returns the promotion of q's and cos's dtypes (Llama) or q's dtype (Olmo 2).
    """

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        if cos.dim() != 3 or q.dim() != 4 or unsqueeze_dim not in (1, 2) or cos.requires_grad or q.dtype != k.dtype:
            return stock(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        if promotes and q.dtype != cos.dtype:
            dtype = torch.promote_types(q.dtype, cos.dtype)
            q, k, cos, sin = q.to(dtype), k.to(dtype), cos.to(dtype), sin.to(dtype)
        return ops.rope_qk(q, k, cos, sin, seq_dim=-2 if unsqueeze_dim == 1 else 1)

    return apply_rotary_pos_emb


def rebind_global(function: Callable, name: str, value: object) -> Callable:
    """A copy of `function` that sees `value` under the global `name`, through decorators made by functools.wraps."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        namespace, closure = {**function.__globals__, name: value}, function.__closure__
        # By this entry torch.compile would look the globals up in the module itself, where `name` is something else.
        namespace.pop("__name__", None)
    else:
        rebound = rebind_global(inner, name, value)
        cells = function.__closure__ or ()
        if not any(cell.cell_contents is inner for cell in cells):
            raise LookupError(f"the decorator of {function.__qualname__} does not hold the function it wraps")
        namespace = function.__globals__
        closure = tuple(types.CellType(rebound) if cell.cell_contents is inner else cell for cell in cells)
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__module__ = function.__module__
    if inner is not None:
        copy.__wrapped__ = rebound
    return copy


# ---- asking the stock classes what they do; each returns the reason not to patch, or None


def _sample(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values without structure, the same in every process and without a draw from a generator."""
    n = torch.Size(shape).numel()
    return torch.arange(1, n + 1, dtype=torch.float32, device="cpu").mul_(1.7).sin_().reshape(shape).to(dtype)


def _differs(ours: Tensor, stock: Tensor) -> bool:
    # Half a unit of bfloat16 is 2e-3: a value rounded in another place is found, another order of a sum is not.
    return ours.dtype != stock.dtype or not torch.allclose(ours.float(), stock.float(), rtol=1e-5, atol=1e-6)


def _probe(check: Callable[[Target], str | None]) -> Callable[[Target], str | None]:
    @functools.cache
    def probe(target: Target) -> str | None:
        try:
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices=[]),
                torch.device("cpu"),
                torch.autocast("cpu", enabled=False),
            ):
                return check(target)
        except Exception as error:  # a class that changed its interface is left alone, whatever it raises
            return f"{target.stock.__name__} could not be examined: {error!r}"

    return probe


def norm_args(module: nn.Module, spec: NormSpec) -> tuple:
    return module.weight, getattr(module, spec.eps), spec.weight_offset, spec.rounding


@_probe
def probe_norm(target: Target) -> str | None:
    module = target.stock(6, 1e-3)
    module.weight = nn.Parameter(_sample(6))
    x = _sample(5, 6, dtype=torch.bfloat16)
    if _differs(ops.rms_norm(x, *norm_args(module, target.family.norm)), module(x)):
        return f"{target.stock.__name__} of this transformers release calculates something else"
    return None


@_probe
def probe_mlp(target: Target) -> str | None:
    activation = "gelu_pytorch_tanh"
    config = types.SimpleNamespace(
        hidden_size=4, intermediate_size=6, mlp_bias=False, hidden_act=activation, hidden_activation=activation
    )
    module = target.stock(config).float()
    x = _sample(3, 4)
    if _differs(mlp_forward(module, x, target.family), module(x)):
        return f"{target.stock.__name__} of this transformers release calculates something else"
    return None


@_probe
def probe_rope(target: Target) -> str | None:
    stock_forward, apply = target.stock.forward, _stock_rotary(target)
    if "apply_rotary_pos_emb" not in inspect.unwrap(stock_forward).__code__.co_names:
        return f"{target.stock.__name__}.forward of this transformers release does not call apply_rotary_pos_emb"
    q, k, angle = _sample(2, 3, 5, 8), _sample(2, 1, 5, 8), _sample(2, 5, 4)
    cos, sin = angle.repeat(1, 1, 2).cos(), angle.repeat(1, 1, 2).sin()
    for dtype, table in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        given = q.to(dtype), k.to(dtype), cos.to(table), sin.to(table)
        ours = rotary(apply, rope_promotes(target))(*given)
        if any(_differs(a, b) for a, b in zip(ours, apply(*given), strict=True)):
            return f"apply_rotary_pos_emb for {target.stock.__name__} calculates something else"
    rebind_global(stock_forward, "apply_rotary_pos_emb", apply)
    return None


def _stock_rotary(target: Target) -> Callable:
    return inspect.unwrap(target.stock.forward).__globals__["apply_rotary_pos_emb"]


def rope_promotes(target: Target) -> bool:
    """Whether stock's rotation of a half precision q by float32 angles returns float32."""
    q, cos = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16, device="cpu"), torch.zeros(1, 1, 2, device="cpu")
    return _stock_rotary(target)(q, q, cos, cos)[0].dtype == torch.float32


def attention_forward(target: Target) -> Callable:
    """The stock forward of an attention class, with only `apply_rotary_pos_emb` rebound to the operator."""
    stock = _stock_rotary(target)
    return rebind_global(target.stock.forward, "apply_rotary_pos_emb", rotary(stock, rope_promotes(target)))


def mlp_forward(module: nn.Module, x: Tensor, family: Family) -> Tensor:
    """A gated MLP with its activation and product in one operator."""
    gate, *others = [getattr(module, name)(x) for name in family.gate_up]
    up = others[0] if others else None
    return module.down_proj(apply_gate(getattr(module, family.act), gate, up))
