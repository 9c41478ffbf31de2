"""PEFT's LoRA layers on the fused path against PEFT's own, alone and in models."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from peft import PeftModel, get_peft_model, inject_adapter_in_model
from peft.helpers import disable_input_dtype_casting
from peft.tuners import lora
from torch import nn
from torch.nn.utils import parametrize

from tests.models import (
    ALL_LINEARS,
    add_noise,
    assert_equals_stock,
    assert_identical,
    lora_config,
    patched_copy,
    recorded_ops,
    run,
    tiny,
    with_lora,
)
from tests.operators import assert_accurate
from torch_metalk import patch, unpatch
from torch_metalk.peft import MetalkLoraLinear, why_stock

# PEFT and transformers rename things and ask for the old names themselves.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

K, N = 24, 18


class Holder(nn.Module):
    """A module with one linear layer, which PEFT can wrap; hands on what it is called with."""

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.linear = linear

    def forward(self, x, **kwargs):
        return self.linear(x, **kwargs)


def holder(dtype=torch.float32, base=None, **settings) -> PeftModel:
    torch.manual_seed(0)
    base = nn.Linear(K, N, dtype=dtype) if base is None else base
    settings = {"task_type": None, "target_modules": ["linear"]} | settings
    model = get_peft_model(Holder(base), lora_config(**settings))
    add_noise(model)
    return model


def layer_of(model: PeftModel) -> lora.Linear:
    return model.base_model.model.linear


def call(model: nn.Module, x: torch.Tensor, **kwargs):
    """Output, gradients of x and of all parameters, and the state that the generator is left in."""
    model.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_(x.requires_grad)
    torch.manual_seed(4)
    y = model(x, **kwargs)
    if y.requires_grad:
        generator = torch.Generator().manual_seed(5)
        state = torch.get_rng_state()
        y.backward(torch.randn(y.shape, generator=generator).to(y))
        assert torch.equal(torch.get_rng_state(), state)
    tensors = {"y": y.detach()} | ({} if x.grad is None else {"x": x.grad})
    tensors |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return tensors, torch.get_rng_state()


def compare(stock: nn.Module, fused: bool | str, x: torch.Tensor | None = None, use=None, **kwargs) -> None:
    """A patched copy is called and gives what stock gives: bit for bit where it has to fall back.

    Args:
        stock: the model.
        fused: whether an operator is to be used, or the name of the one.
        x: the input.
        use: the operators to patch with; None for all.
        kwargs: handed on to the model.
    """
    x = torch.randn(2, 5, K, requires_grad=True) if x is None else x
    ours = patched_copy(stock, use)
    with recorded_ops() as ops:
        actual, our_state = call(ours, x, **kwargs)
    assert ops.lora_layers == bool(fused)
    assert not isinstance(fused, str) or ops[fused] == 1
    expected, state = call(stock, x, **kwargs)
    assert torch.equal(our_state, state), "other draws from the generator"
    assert actual.keys() == expected.keys()
    for name, b in expected.items():
        a = actual[name]
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert a.is_contiguous() or not b.is_contiguous(), name
        if fused:
            # float32 sums of at most 24 products of values around 1, in another order.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=name)


def freeze(part: str) -> Callable:
    return lambda model: [p.requires_grad_(False) for name, p in model.named_parameters() if part in name]


def add_inactive_adapter(model):
    model.add_adapter("other", lora_config(task_type=None, target_modules=["linear"], r=7))
    add_noise(model)


def unfreeze_base(model):
    layer_of(model).base_layer.requires_grad_(True)


def name_an_absent_adapter(model):
    layer_of(model)._active_adapter = ["default", "absent"]


def dropout_alone_in_train(model):
    model.eval()
    layer_of(model).lora_dropout.train()


def dropout_alone_in_eval(model):
    model.train()
    layer_of(model).lora_dropout.eval()


FUSED = {
    "plain": {},
    "rank 1": {"r": 1},
    "rank above both sizes": {"r": 33},
    "rslora": {"use_rslora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "dropout, train": {"lora_dropout": 0.3},
    "dropout, eval": {"lora_dropout": 0.3, "change": lambda model: model.eval()},
    "dropout alone in train": {"lora_dropout": 0.3, "change": dropout_alone_in_train},
    "dropout alone in eval": {"lora_dropout": 0.3, "change": dropout_alone_in_eval},
    "dropout of everything": {"lora_dropout": 0.999999},
    "scale_layer": {"change": lambda model: layer_of(model).scale_layer(3.0)},
    "set_scale": {"change": lambda model: layer_of(model).set_scale("default", 7)},
    "scaling 0": {"change": lambda model: layer_of(model).set_scale("default", 0)},
    "negative scaling": {"change": lambda model: layer_of(model).set_scale("default", -1.5)},
    "frozen A": {"change": freeze("lora_A")},
    "frozen B": {"change": freeze("lora_B")},
    "frozen A and B": {"change": freeze("lora_")},
    "trainable base": {"change": unfreeze_base},
    "trainable bias": {"bias": "all"},
    "another adapter, inactive": {"change": add_inactive_adapter},
    "an active adapter of other layers": {"change": name_an_absent_adapter},
}


# Where the operator cannot make the base layer's product as well.
WITHOUT_BASE = {
    "dropout, train",
    "dropout alone in train",
    "dropout of everything",
    "trainable base",
    "trainable bias",
}


@pytest.mark.parametrize("x_needs_grad", [True, False], ids=["x needs grad", "x without grad"])
@pytest.mark.parametrize("use", [None, ["lora_linear"], ["lora_qkv"]], ids=["all ops", "lora_linear", "lora_qkv"])
@pytest.mark.parametrize("case", FUSED)
def test_fused_path_equals_stock(case, use, x_needs_grad):
    settings = dict(FUSED[case])
    change = settings.pop("change", lambda model: None)
    model = holder(**settings)
    change(model)
    fused = "lora_linear" if use == ["lora_linear"] or case in WITHOUT_BASE else "lora_qkv"
    if use == ["lora_qkv"] and fused == "lora_linear":
        fused = False
    compare(model, fused, torch.randn(2, 5, K, requires_grad=x_needs_grad), use)


SHAPES = {
    "one vector": lambda: torch.randn(K),
    "rows": lambda: torch.randn(7, K),
    "four dimensions": lambda: torch.randn(2, 3, 2, K),
    "one token": lambda: torch.randn(1, 1, K),
    "no rows": lambda: torch.randn(0, 3, K),
    "transposed": lambda: torch.randn(K, 5, 2).transpose(0, 2),
    "slice": lambda: torch.randn(3, 5, K + 3)[1:, :, 2 : 2 + K],
    "expanded": lambda: torch.randn(1, 5, K).expand(3, 5, K),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_any_input_shape(shape):
    compare(holder(), fused=True, x=SHAPES[shape]().requires_grad_())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    stock = holder()
    x = torch.randn(2, K)
    with mode(), recorded_ops() as ops:
        y = patched_copy(stock)(x)
    assert ops.lora_layers == 1 and not y.requires_grad
    torch.testing.assert_close(y, stock(x).detach(), rtol=1e-5, atol=1e-5)  # float32 sums in another order


# ---- where stock has to run


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class OwnParameter(nn.Parameter):
    pass


def replace_forward(module):
    original = module.forward
    module.forward = lambda x: original(x) + 1


def own_class(module):
    module.__class__ = OwnLinear


def add_active_adapter(model):
    add_inactive_adapter(model)
    model.base_model.set_adapter(["default", "other"])


STOCK = {
    "DoRA": {"use_dora": True},
    "DoRA, dropout": {"use_dora": True, "lora_dropout": 0.1},
    "lora_bias": {"lora_bias": True},
    "two active adapters": {"change": add_active_adapter},
    "no active adapter": {"change": lambda model: setattr(layer_of(model), "_active_adapter", [])},
    "disabled": {"change": lambda model: layer_of(model).enable_adapters(False)},
    "merged": {"change": lambda model: model.merge_adapter()},
    "infinite scaling": {"change": lambda model: layer_of(model).set_scale("default", float("inf"))},
    "own class of base": {"change": lambda model: own_class(layer_of(model).base_layer)},
    "own class of A": {"change": lambda model: own_class(layer_of(model).lora_A["default"])},
    "own parameter in base": {
        "change": lambda model: setattr(
            layer_of(model).base_layer, "weight", OwnParameter(layer_of(model).base_layer.weight.data)
        )
    },
    "own dropout": {"change": lambda model: layer_of(model).lora_dropout.update({"default": nn.AlphaDropout(0.3)})},
    "activation as dropout": {"change": lambda model: layer_of(model).lora_dropout.update({"default": nn.Tanh()})},
}
PARTS = {
    "base": lambda layer: layer.base_layer,
    "A": lambda layer: layer.lora_A["default"],
    "B": lambda layer: layer.lora_B["default"],
}
CHANGES = {
    "forward hook": lambda module: module.register_forward_hook(lambda module, args, out: out * 2),
    "forward pre-hook": lambda module: module.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "backward hook": lambda module: module.register_full_backward_hook(lambda module, grads, _: (grads[0] * 2,)),
    "backward pre-hook": lambda module: module.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,)),
    "parametrization": lambda module: parametrize.register_parametrization(module, "weight", Doubled()),
    "weight norm by hook": lambda module: nn.utils.weight_norm(module),
    "own forward": replace_forward,
}


@pytest.mark.parametrize("case", STOCK)
def test_stock_path_is_stock_bit_for_bit(case):
    settings = dict(STOCK[case])
    change = settings.pop("change", lambda model: None)
    model = holder(**settings)
    change(model)
    assert why_stock(layer_of(model)) is not None
    compare(model, fused=False)


# A deepcopied closure calls the forward of the module that it was made for, so these are changed after the copy.
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_parts_are_stock_bit_for_bit(part, change):
    models = [holder(), holder()]
    patch(models[0])
    untouched, _ = call(models[1], torch.ones(2, K, requires_grad=True))
    for model in models:
        CHANGES[change](PARTS[part](layer_of(model)))
    with recorded_ops() as ops:
        actual, _ = call(models[0], torch.ones(2, K, requires_grad=True))
    expected, _ = call(models[1], torch.ones(2, K, requires_grad=True))
    assert ops.lora_layers == 0 and actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    if change != "weight norm by hook":  # which starts as the identity
        assert any(not torch.equal(expected[name], untouched[name]) for name in untouched.keys() & expected.keys())


@pytest.mark.parametrize("change", ["forward hook", "own forward"])
def test_changed_dropout_is_stock_bit_for_bit(change):
    models = [holder(lora_dropout=0.3), holder(lora_dropout=0.3)]
    patch(models[0])
    results = []
    for model in models:
        CHANGES[change](layer_of(model).lora_dropout["default"])
        with recorded_ops() as ops:
            results.append(call(model, torch.ones(2, K))[0]["y"])
        assert not ops
    assert torch.equal(*results)


def test_global_hook_is_called():
    model = holder()
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module)))
    try:
        compare(model, fused=False)
    finally:
        handle.remove()
    assert seen.count(nn.Linear) == 6, "base, A and B of ours and of stock"
    compare(model, fused=True)


def test_casting_of_inputs_disabled():
    model = holder(torch.bfloat16)
    layer_of(model).lora_A.to(torch.bfloat16)
    layer_of(model).lora_B.to(torch.bfloat16)
    ours = patched_copy(model)
    x = torch.randn(2, K, dtype=torch.bfloat16)
    results = []
    for m in (ours, model):
        with disable_input_dtype_casting(m), recorded_ops() as ops:
            results.append(m(x))
        assert not ops
    assert torch.equal(*results)


def to_sparse(model):
    base = layer_of(model).base_layer
    base.weight = nn.Parameter(base.weight.detach().to_sparse_csr(), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "x_dtype", "reason"),
    [
        (
            lambda model: layer_of(model).lora_A.to("meta"),
            torch.float32,
            "base, adapter and input are on several devices",
        ),
        (
            lambda model: layer_of(model).lora_A.to(torch.float8_e5m2),
            torch.float32,
            "a dtype that the operator does not",
        ),
        (lambda model: None, torch.complex64, "a dtype that the operator does not take"),
        (to_sparse, torch.float32, "the base layer is not a plain nn.Linear"),
    ],
    ids=["devices", "float8 adapter", "complex input", "sparse base"],
)
def test_tensors_the_operator_does_not_take_are_left_to_stock(change, x_dtype, reason):
    """Where stock works with them or raises is its own affair."""
    model = holder()
    assert why_stock(layer_of(model), torch.ones(1, K)) is None
    change(model)
    assert why_stock(layer_of(model), torch.ones(1, K, dtype=x_dtype)).startswith(reason)


def test_fan_in_fan_out_is_stock():
    """Only the flag: PEFT warns and resets it for nn.Linear, and merges by it."""
    model = holder()
    layer_of(model).fan_in_fan_out = True
    compare(model, fused=False)


def test_variants_of_the_layer_are_left_alone():
    class Own(lora.Linear):
        pass

    model = holder()
    layer_of(model).__class__ = Own
    report = patch(model)
    assert type(layer_of(model)) is Own
    assert [(line.module_class, line.reason) for line in report.skipped] == [("lora.Own", "not a lora.Linear")]


@pytest.mark.parametrize("base", [nn.Embedding(30, K), nn.Conv1d(K, N, 1)], ids=["embedding", "conv"])
def test_other_lora_layers_are_left_alone(base):
    model = holder(base=base)
    before = type(layer_of(model))
    report = patch(model)
    assert type(layer_of(model)) is before
    assert [line.reason for line in report.skipped] == ["not a lora.Linear"]


def test_errors_of_stock_stay():
    for dtype, x in ((torch.float16, torch.randn(2, K)), (torch.float32, torch.randn(2, K + 1))):
        for model in (holder(dtype), patched_copy(holder(dtype))):
            with pytest.raises(RuntimeError):
                model(x)
    with pytest.raises(ValueError, match="adapter_names"):
        layer_of(patched_copy(holder()))(torch.randn(2, K), adapter_names=["default"])


# ---- dtypes

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


# Without autocast the base layer takes x in its own dtype only.
COMBINATIONS = [
    (x, base, adapter, autocast)
    for autocast in ("none", "bf16", "fp16")
    for x, base, adapter in itertools.product(DTYPES, repeat=3)
    if autocast != "none" or x == base
]


@pytest.mark.parametrize(("x_dtype", "base", "adapter", "autocast"), COMBINATIONS)
def test_dtypes_are_those_of_stock(x_dtype, base, adapter, autocast):
    stock = holder(DTYPES[base], lora_dropout=0.3)
    for part in (layer_of(stock).lora_A, layer_of(stock).lora_B):
        part.to(DTYPES[adapter])
    unfreeze_base(stock)
    x = torch.randn(3, 5, K).to(DTYPES[x_dtype]).requires_grad_()
    context = torch.autocast("cpu", DTYPES.get(autocast), enabled=autocast != "none")
    ours = patched_copy(stock)
    results = []
    for model in (ours, stock):
        with context:
            results.append(call(model, x)[0])
    exact, _ = call(copy.deepcopy(stock).double(), x.double())
    # The masks of dropout and the incoming gradients are the same in every dtype.
    assert results[0].keys() == results[1].keys()
    for name, actual in results[0].items():
        # Stock rounds between A and B too, so that it is the less exact one where dtypes are low.
        assert_accurate(actual, results[1][name], exact[name], name)
    for name, parameter in ours.named_parameters():
        assert parameter.grad.dtype == parameter.dtype, name
    assert results[0]["x"].dtype == x.dtype


def test_gradients_do_not_underflow_in_half():
    """Gradients of fp32 adapters over fp16 activations are fp32: 1e-9 has no fp16."""
    model = holder(torch.float16)
    patch(model)
    x = torch.full((1, K), 1e-3, dtype=torch.float16)
    (model(x) * 1e-5).sum().backward()
    grad = layer_of(model).lora_B["default"].weight.grad
    assert grad.dtype == torch.float32 and grad.count_nonzero() == grad.numel() and grad.abs().max() < 6e-8


# ---- adapters that are switched, merged, scaled


def both(stock: PeftModel) -> tuple[PeftModel, PeftModel]:
    return patched_copy(stock), stock


def assert_same_step(ours: PeftModel, stock: PeftModel, fused: bool, **kwargs) -> None:
    x = torch.randn(4, K, generator=torch.Generator().manual_seed(6))
    with recorded_ops() as ops:
        actual, _ = call(ours, x, **kwargs)
    assert ops.lora_layers == fused
    expected, _ = call(stock, x, **kwargs)
    assert actual.keys() == expected.keys()
    for name, b in expected.items():
        torch.testing.assert_close(actual[name], b, rtol=1e-5, atol=1e-5, msg=name)  # float32 sums, as above
    for (name, a), b in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert torch.equal(a, b), f"{name} was changed otherwise"


def two_adapters() -> PeftModel:
    model = holder()
    add_inactive_adapter(model)
    return model


def test_switching_adapters_equals_stock():
    ours, stock = both(two_adapters())
    for active, fused in ((["default"], True), (["other"], True), (["default", "other"], False), (["other"], True)):
        for model in (ours, stock):
            model.base_model.set_adapter(active)
        assert_same_step(ours, stock, fused)
    with ours.disable_adapter(), stock.disable_adapter():
        assert_same_step(ours, stock, False)
    assert_same_step(ours, stock, True)
    for model in (ours, stock):
        model.delete_adapter("other")
    assert layer_of(ours).active_adapters == layer_of(stock).active_adapters
    for model in (ours, stock):
        model.set_adapter("default")
    assert_same_step(ours, stock, True)


@pytest.mark.parametrize("names", [["default", "other"], ["default", "__base__"], ["__base__", "other"]], ids=str)
def test_mixed_batch_equals_stock(names):
    ours, stock = both(two_adapters())
    for model in (ours, stock):
        model.eval()
    assert_same_step(ours, stock, False, adapter_names=2 * names)
    assert_same_step(ours, stock, True)


@pytest.mark.parametrize("first", [["default"], ["other"]], ids=str)
def test_merging_one_of_two_active_adapters_equals_stock(first):
    ours, stock = both(two_adapters())
    for model in (ours, stock):
        model.base_model.set_adapter(["default", "other"])
    base = layer_of(ours).base_layer.weight.detach().clone()

    def on_both(name, *args):
        for model in (ours, stock):
            getattr(model, name)(*args)
        assert layer_of(ours).merged_adapters == layer_of(stock).merged_adapters
        assert_same_step(ours, stock, False)

    on_both("merge_adapter", first)
    assert not torch.equal(layer_of(ours).base_layer.weight, base)
    on_both("merge_adapter")
    on_both("unmerge_adapter")
    # float32 keeps the base within a rounding of what it was.
    torch.testing.assert_close(layer_of(ours).base_layer.weight, base, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_merge_cycles_with_training_equal_stock(dtype):
    """Nothing is kept from before a merge, an unmerge, a disabled call or an optimizer step."""
    ours, stock = both(holder(dtype))
    start = layer_of(stock).base_layer.weight.detach().clone()
    x = torch.randn(6, K, generator=torch.Generator().manual_seed(6)).to(dtype)
    eps = torch.finfo(dtype).eps

    def agree():
        outputs = [model(x) for model in (ours, stock)]
        # One rounding of the result's dtype on values up to 4.
        torch.testing.assert_close(*outputs, rtol=4 * eps, atol=4 * eps)
        return outputs[0].detach()

    for _ in range(3):
        separate = agree()
        for model in (ours, stock):
            model.merge_adapter()
        merged = agree()
        # The merged weight is rounded once more to the base's dtype: K of them add up.
        torch.testing.assert_close(merged, separate, rtol=4 * eps, atol=K * eps)
        for model in (ours, stock):
            model.unmerge_adapter()
        agree()
        with ours.disable_adapter(), stock.disable_adapter():
            agree()
        for model in (ours, stock):
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (agree() - separate).abs().max() > 8 * eps, "the step had no effect"
    # Each of three cycles adds and takes away a rounding of the base's dtype, on weights up to 0.2.
    torch.testing.assert_close(layer_of(ours).base_layer.weight, start, rtol=3 * eps, atol=3 * eps)


def test_disabled_call_unmerges_like_stock():
    ours, stock = both(holder())
    for model in (ours, stock):
        model.merge_adapter()
        layer_of(model)._disable_adapters = True
    assert_same_step(ours, stock, False)
    assert not layer_of(ours).merged and not layer_of(stock).merged


def test_functional_call_uses_the_given_weights():
    model = holder()
    patch(model)
    doubled = {name: 2 * p for name, p in model.named_parameters() if "lora_B" in name}
    x = torch.randn(3, K)
    base = layer_of(model).base_layer(x)
    expected = base + 2 * (model(x) - base)
    # float32 sums in another order.
    torch.testing.assert_close(torch.func.functional_call(model, doubled, (x,)), expected, rtol=1e-5, atol=1e-5)


def test_scaling_is_read_on_every_call():
    ours, stock = both(holder())
    for change in (
        lambda layer: layer.set_scale("default", 3),
        lambda layer: layer.scale_layer(0.5),
        lambda layer: layer.unscale_layer(),
        lambda layer: layer.scaling.update(default=torch.tensor(1.5)),  # as hotswapping of compiled models has it
    ):
        before = ours(torch.ones(1, K))
        change(layer_of(ours))
        change(layer_of(stock))
        assert not torch.equal(ours(torch.ones(1, K)), before)
        assert_same_step(ours, stock, True)


# ---- configurations of whole models, patched before and after PEFT


def lora_classes(model: nn.Module) -> Counter:
    return Counter(type(module) for module in model.modules() if isinstance(module, lora.LoraLayer))


CONFIGURATIONS = {
    "all linears": ({}, 14),
    "attention only": ({"target_modules": ["q_proj", "v_proj"]}, 4),
    "dropout": ({"lora_dropout": 0.2}, 14),
    "rslora": ({"use_rslora": True, "lora_alpha": 3}, 14),
    "dora": ({"use_dora": True, "lora_dropout": 0.1}, 0),
    "lora_bias": ({"lora_bias": True}, 0),
    "last half of the layers": ({"target_modules": ALL_LINEARS, "layers_to_transform": [1], "lora_alpha": 80}, 7),
    "rank and alpha patterns": (
        {
            "target_modules": ["q_proj", "k_proj", "v_proj"],
            "rank_pattern": {"k_proj": 16},
            "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 100, "layers.1.self_attn.v_proj": 2},
        },
        6,
    ),
    "saved head and embeddings": (
        {"target_modules": ALL_LINEARS, "modules_to_save": ["embed_tokens", "lm_head"], "lora_dropout": 0.05},
        14,
    ),
    "saved norms": ({"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "norm"]}, 2),
    "head and embeddings adapted": ({"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, 2),
    "trainable tokens": ({"target_modules": ["q_proj"], "trainable_token_indices": [5, 7]}, 2),
    "replicated layers": ({"target_modules": ["q_proj", "down_proj"], "layer_replication": [[0, 2], [1, 2]]}, 6),
    "biases trained": ({"bias": "all"}, 14),
    "alora": ({"target_modules": ["q_proj", "v_proj"], "alora_invocation_tokens": [7, 8]}, 0),
}
TIED = {"saved head and embeddings": "llama, tied embeddings", "biases trained": "llama, biases"}


@pytest.mark.parametrize("order", ["patch, then lora", "lora, then patch"])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.filterwarnings(
    "ignore:.*tie_word_embeddings.*", "ignore:.*tied.*", "ignore:.*alora.*", "ignore:.*padded.*"
)
def test_configurations_equal_stock(configuration, order):
    settings, fused = CONFIGURATIONS[configuration]
    name = TIED.get(configuration, "llama")
    stock = with_lora(tiny(name), **settings)
    if order == "lora, then patch":
        ours = patched_copy(stock)
    else:
        base = tiny(name)
        patch(base)
        ours = with_lora(base, **settings)
    assert list(ours.state_dict()) == list(stock.state_dict())
    if "head" in configuration and "adapted" in configuration and order == "lora, then patch":
        fused += 1  # the head's parent belongs to no family: only `patch` itself reaches it
    with recorded_ops() as ops:
        run(ours.train())
    assert ops.lora_layers == fused
    if "dropout" in settings or settings.get("lora_dropout"):
        # One mask per adapter from the same generator state: equal within float32 roundings on logits of 1.6.
        torch.testing.assert_close(run(ours).logits, run(stock.train()).logits, rtol=1e-5, atol=2e-5)
    assert_equals_stock(ours.eval(), stock.eval())


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*", "ignore:.*tied.*")
def test_saved_modules_are_the_ones_used():
    model = with_lora(tiny("qwen2", tie_word_embeddings=True), modules_to_save=["embed_tokens", "lm_head"])
    patch(model)
    inner = model.get_base_model()
    embed, head = (m.modules_to_save["default"].weight for m in (inner.model.embed_tokens, inner.lm_head))
    assert embed.data_ptr() != head.data_ptr() != inner.lm_head.original_module.weight.data_ptr()
    run(model)
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in (embed, head))
    assert inner.lm_head.original_module.weight.grad is None


@pytest.mark.parametrize("order", ["patch, then lora", "lora, then patch"])
def test_rank_and_scale_are_those_of_the_module(order):
    base = tiny("llama")
    if order == "patch, then lora":
        patch(base)
    model = with_lora(base, **CONFIGURATIONS["rank and alpha patterns"][0])
    patch(model)
    first, second = (layer.self_attn for layer in model.get_base_model().model.layers)
    assert first.k_proj.lora_A["default"].weight.shape == (16, 64)
    found = [m.scaling["default"] for layer in (first, second) for m in (layer.q_proj, layer.k_proj, layer.v_proj)]
    assert found == [25.0, 0.5, 2.0, 2.0, 0.5, 0.5]
    x = torch.randn(3, 64)
    for module in (first.q_proj, first.k_proj, second.v_proj):
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        expected = module.base_layer(x) + (x @ a.T @ b.T) * module.scaling["default"]
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-4)  # values up to 100


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_alora_leaves_positions_before_the_invocation_alone(checkpointing):
    ids = torch.tensor([[1, 5, 7, 8, 30, 40, 50]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    stock = with_lora(tiny("llama"), target_modules=["q_proj", "v_proj"], alora_invocation_tokens=[7, 8])
    ours = patched_copy(stock)
    with ours.disable_adapter():
        base = ours(**inputs, use_cache=False).logits
    for model in (ours, stock):
        model.train()
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with recorded_ops() as ops:
        actual = run(ours, inputs)
    assert ops.lora_layers == 0
    logits = actual.logits[None]
    assert torch.equal(logits[:, :2], base[:, :2]) and not torch.equal(logits[:, 2:], base[:, 2:])
    assert_equals_stock(ours, stock, inputs)


@pytest.mark.parametrize("target", [["q_proj"], "all-linear"], ids=str)
@pytest.mark.parametrize("order", ["patch, then lora", "lora, then patch"])
def test_a_second_adapter_is_fused_as_well(order, target):
    """Also on modules that the first adapter did not touch, where PEFT makes new layers after `patch`."""
    stock = with_lora(tiny("llama"), target_modules=["v_proj"])
    if order == "patch, then lora":
        base = tiny("llama")
        patch(base)
        ours = with_lora(base, target_modules=["v_proj"])
    else:
        ours = patched_copy(stock)
    for model in (ours, stock):
        torch.manual_seed(7)
        model.add_adapter("second", lora_config(r=2, target_modules=target))
        add_noise(model)
        model.set_adapter("second")
    assert sorted(ours.peft_config["second"].target_modules) == sorted(stock.peft_config["second"].target_modules)
    count = 14 if target == "all-linear" else 4  # with the two layers of the first adapter
    assert lora_classes(ours) == {MetalkLoraLinear: count}
    with recorded_ops() as ops:
        run(ours)
    assert ops.lora_layers == (14 if target == "all-linear" else 2)
    assert_equals_stock(ours, stock)


def test_adapters_injected_without_a_peft_model_are_fused():
    stock, ours = tiny("llama"), tiny("llama")
    patch(ours)
    for model in (stock, ours):
        torch.manual_seed(7)
        inject_adapter_in_model(lora_config(target_modules=ALL_LINEARS), model)
        add_noise(model)
    assert lora_classes(ours) == {MetalkLoraLinear: 14}
    assert_equals_stock(ours, stock)


def test_weights_of_adapters_are_read_on_every_call():
    """A step of an optimizer and a loaded state dict are seen, also where `.data` is replaced."""
    stock = with_lora(tiny("llama"))
    ours = patched_copy(stock)
    before = run(ours)
    for model in (ours, stock):
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data = p.data * 3
    assert not torch.equal(run(ours).logits, before.logits)
    assert_equals_stock(ours, stock)


def test_dora_magnitude_gets_its_gradient():
    model = with_lora(tiny("llama"), use_dora=True, target_modules=["q_proj"])
    report = patch(model)
    assert [line.reason for line in report.patched if line.op == "lora_linear"] == [
        "runs stock at present: a variant of LoRA (DoraLinearVariant)"
    ]
    grads = run(model).grads
    magnitudes = [grad for name, grad in grads.items() if "magnitude" in name]
    assert len(magnitudes) == 2 and all(grad.abs().max() > 0 for grad in magnitudes)


def test_merge_and_unload_equals_stock():
    stock = with_lora(tiny("llama"))
    ours = patched_copy(stock)
    merged, expected = ours.merge_and_unload(), stock.merge_and_unload()
    assert lora_classes(merged) == {}
    assert type(merged.model.layers[0].mlp.gate_proj) is nn.Linear
    assert all(torch.equal(a, b) for a, b in zip(merged.parameters(), expected.parameters(), strict=True))
    for model in (merged, expected):
        model.requires_grad_(True)
    assert_equals_stock(merged, expected)


def test_unload_gives_the_base_back():
    base = tiny("llama")
    expected = run(base)
    model = with_lora(tiny("llama"))
    patch(model)
    unloaded = model.unload()
    unloaded.requires_grad_(True)
    assert_identical(run(unpatch(unloaded)), expected)


def test_weighted_adapters_equal_stock():
    stock = with_lora(tiny("llama"), target_modules=["q_proj", "v_proj"])
    stock.add_adapter("other", lora_config(target_modules=["q_proj", "v_proj"]))
    add_noise(stock)
    ours = patched_copy(stock)
    for model in (ours, stock):
        model.add_weighted_adapter(["default", "other"], [0.7, 0.3], "mix", combination_type="linear")
        model.set_adapter("mix")
    assert_equals_stock(ours, stock)
