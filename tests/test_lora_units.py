"""Several LoRA layers in one operator: when a patched attention and a patched MLP do so, and when not."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from peft import PeftModel
from peft.tuners import lora
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import (
    add_noise,
    assert_as_accurate,
    assert_equals_stock,
    assert_identical,
    batch,
    exact_copy,
    lora_config,
    patched_copy,
    recorded_ops,
    run,
    tiny,
    with_lora,
)
from torch_metalk import patch, unpatch
from torch_metalk.patching.families import MATMUL_ATTRIBUTE, OPS_ATTRIBUTE
from torch_metalk.patching.report import Line
from torch_metalk.peft.linear import handed_over

# PEFT and transformers rename things and ask for the old names themselves.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

QKV = ["q_proj", "k_proj", "v_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def one_layer(**settings) -> PeftModel:
    """Its norms are trained too, so that the gradients of the layers' inputs are compared."""
    model = with_lora(tiny("llama, biases", num_hidden_layers=1), **settings)
    train_norms(model)
    return model


def train_norms(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_()


def decoder_layer(model: PeftModel) -> nn.Module:
    return model.get_base_model().model.layers[0]


def projection(model: PeftModel, name: str) -> nn.Module:
    layer = decoder_layer(model)
    return getattr(layer.self_attn if name in (*QKV, "o_proj") else layer.mlp, name)


def unit_calls(ours: PeftModel) -> list[tuple[str, int]]:
    """The calls of LoRA operators in one forward pass, with the number of layers each."""
    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if name in ("lora_qkv", "lora_mlp"):
                calls.append((name, sum(a is not None for a in args[3])))
            elif name == "lora_linear":
                calls.append((name, 1))
            return func(*args, **(kwargs or {}))

    with Recorder():
        ours(**batch())
    return calls


ALONE = ("lora_qkv", 1)
BY_OUTPUT = ("lora_linear", 1)


@pytest.mark.parametrize(
    ("targets", "calls"),
    [
        ("all-linear", [("lora_qkv", 3), ALONE, ("lora_mlp", 3)]),
        (QKV, [("lora_qkv", 3)]),
        (["q_proj", "v_proj"], [("lora_qkv", 2)]),
        (["k_proj"], [ALONE]),
        (["o_proj"], [ALONE]),
        (["gate_proj", "up_proj"], [("lora_mlp", 2)]),
        (["down_proj"], [("lora_mlp", 1)]),
        (["v_proj", "up_proj"], [ALONE, ("lora_mlp", 1)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("order", ["patch, then lora", "lora, then patch"])
def test_layers_of_one_input_are_one_call(targets, calls, order):
    stock = one_layer(target_modules=targets)
    if order == "lora, then patch":
        ours = patched_copy(stock)
    else:
        base = tiny("llama, biases", num_hidden_layers=1)
        patch(base)
        ours = with_lora(base, target_modules=targets)
        train_norms(ours)
    assert unit_calls(ours) == calls
    assert_equals_stock(ours, stock)


def test_unequal_ranks_and_scales_in_one_call():
    stock = one_layer(
        target_modules=[*QKV, *MLP],
        rank_pattern={"k_proj": 16, "down_proj": 1},
        alpha_pattern={"^model.layers.0.self_attn.q_proj": 100, "v_proj": 2, "up_proj": 50},
    )
    ours = patched_copy(stock)
    assert [projection(ours, name).scaling["default"] for name in QKV] == [25.0, 0.5, 0.5]
    assert unit_calls(ours) == [("lora_qkv", 3), ("lora_mlp", 3)]
    assert_equals_stock(ours, stock)


@pytest.mark.parametrize(
    ("variant", "op"),
    [("llama, exact gelu", "lora_mlp"), ("llama, tanh gelu", "lora_mlp"), ("llama, relu", None)],
)
def test_activations(variant, op):
    stock = with_lora(tiny(variant), target_modules=MLP)
    ours = patched_copy(stock)
    with recorded_ops() as ops:
        run(ours)
    assert ops.lora_layers == 6 and ops["lora_mlp"] == (2 if op else 0)
    assert_equals_stock(ours, stock)


# ---- one member that does not fit


def add_adapter(model: PeftModel, name: str) -> None:
    """Two active adapters in this layer alone."""
    model.add_adapter("other", lora_config(r=3, target_modules=[name]))
    add_noise(model)
    projection(model, name).set_adapter(["default", "other"])


def replace_forward(module: nn.Module) -> None:
    # The class's forward at the time of the call: a deepcopied closure would compute with the module it was made for.
    module.forward = lambda x: type(module).forward(module, x) * 2


def dropout(model: PeftModel, name: str) -> None:
    projection(model, name).lora_dropout["default"] = nn.Dropout(0.3)


# What is done to one layer, and whether it is a LoRA operator's call still: by its output, alone, or not.
OBSTACLES = {
    "dropout": (dropout, BY_OUTPUT),
    "trained weight": (lambda model, name: projection(model, name).base_layer.weight.requires_grad_(), BY_OUTPUT),
    "trained bias": (lambda model, name: projection(model, name).base_layer.bias.requires_grad_(), BY_OUTPUT),
    "disabled": (lambda model, name: projection(model, name).enable_adapters(False), None),
    "merged": (lambda model, name: projection(model, name).merge(), None),
    "two active adapters": (add_adapter, None),
    "hook of the base": (
        lambda model, name: projection(model, name).base_layer.register_forward_hook(lambda m, a, out: out * 2),
        None,
    ),
    "pre-hook": (
        lambda model, name: projection(model, name).register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
        ALONE,
    ),
    "backward hook": (
        lambda model, name: projection(model, name).register_full_backward_hook(lambda m, grads, _: (grads[0] * 2,)),
        ALONE,
    ),
}


@pytest.mark.parametrize("name", ["q_proj", "v_proj"])
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_an_attention_calls_the_others_together(obstacle, name):
    change, call = OBSTACLES[obstacle]
    stock = one_layer(target_modules=QKV)
    change(stock, name)
    ours = patched_copy(stock)
    assert unit_calls(ours) == [("lora_qkv", 2)] + [call] * (call is not None)
    assert_equals_stock(ours, stock)


@pytest.mark.parametrize("name", MLP)
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_an_mlp_goes_layer_by_layer(obstacle, name):
    change, call = OBSTACLES[obstacle]
    stock = one_layer(target_modules=MLP)
    change(stock, name)
    ours = patched_copy(stock)
    calls = [call if n == name else ALONE for n in MLP]
    assert unit_calls(ours) == [c for c in calls if c is not None]
    assert_equals_stock(ours, stock)


@pytest.mark.parametrize("kind", ["trained", "forward hook", "backward hook", "own class"])
def test_an_mlp_with_a_plain_layer_that_is_not_plain(kind):
    class OwnLinear(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    stock = one_layer(target_modules=["gate_proj", "up_proj"])
    layer = projection(stock, "down_proj")
    if kind == "trained":
        layer.weight.requires_grad_()
    elif kind == "forward hook":
        layer.register_forward_hook(lambda module, args, out: out * 2)
    elif kind == "backward hook":
        layer.register_full_backward_hook(lambda module, grads, _: (grads[0] * 2,))
    else:
        layer.__class__ = OwnLinear
    ours = patched_copy(stock)
    assert unit_calls(ours) == [ALONE, ALONE]
    assert_equals_stock(ours, stock)


def test_layers_of_another_dtype_go_alone():
    """An error of stock's is stock's: without autocast a layer takes its own dtype."""
    models = [one_layer(target_modules=[*QKV, *MLP]) for _ in range(2)]
    patch(models[0])
    for name in ("k_proj", "up_proj"):
        for model in models:
            projection(model, name).base_layer.to(torch.bfloat16)
    for model in models:
        with pytest.raises(RuntimeError, match="same dtype"):
            model(**batch())
    with torch.autocast("cpu", torch.bfloat16):
        assert unit_calls(models[0]) == [("lora_qkv", 3), ("lora_mlp", 3)]
        ours, stock = (run(model) for model in models)
    assert_as_accurate(ours, stock, run(exact_copy(models[1])))


@pytest.mark.parametrize("name", [*QKV, *MLP])
def test_forward_hooks_of_layers_are_called(name):
    """With the layer's own input and output, which they may replace."""
    stock = one_layer(target_modules=[*QKV, *MLP])
    ours = patched_copy(stock)
    seen = {}
    for key, model in (("stock", stock), ("ours", ours)):

        def hook(module, args, out, key=key):
            seen[key] = args[0].detach(), out.detach()
            return out * 2

        projection(model, name).register_forward_hook(hook)
    if name in QKV:
        assert unit_calls(ours)[0] == ("lora_qkv", 3)
    assert_equals_stock(ours, stock)
    with torch.no_grad():
        for model in (stock, ours):
            model(**batch())
    for a, b in zip(seen["ours"], seen["stock"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # float32 sums in another order


def test_replaced_forwards_of_layers_are_called():
    stock, ours = one_layer(target_modules=[*QKV, *MLP]), one_layer(target_modules=[*QKV, *MLP])
    patch(ours)
    for model in (stock, ours):
        for name in ("q_proj", "gate_proj"):
            replace_forward(projection(model, name))
    assert ("lora_qkv", 2) in unit_calls(ours) and "lora_mlp" not in dict(unit_calls(ours))
    a, b = run(ours), run(stock)
    torch.testing.assert_close(a.logits, b.logits, rtol=1e-5, atol=2e-5)  # float32 sums in another order
    for name, grad in b.grads.items():
        torch.testing.assert_close(a.grads[name], grad, rtol=1e-4, atol=1e-5, msg=name)


def test_states_of_adapters_are_read_on_every_call():
    stock = one_layer(target_modules=[*QKV, *MLP])
    ours = patched_copy(stock)
    together = [("lora_qkv", 3), ("lora_mlp", 3)]

    def both(change, expected):
        for model in (ours, stock):
            torch.manual_seed(7)  # for the weights of a new adapter
            change(model)
        assert unit_calls(ours) == expected
        assert_equals_stock(ours, stock)

    def layers(model):
        return [module for module in model.modules() if isinstance(module, lora.LoraLayer)]

    both(lambda model: None, together)
    both(lambda model: model.merge_adapter(), [])
    both(lambda model: model.unmerge_adapter(), together)
    both(lambda model: [layer.scale_layer(2.0) for layer in layers(model)], together)
    both(lambda model: [layer.set_scale("default", 0) for layer in layers(model)], together)
    both(lambda model: [layer.unscale_layer() for layer in layers(model)], together)
    both(lambda model: [layer.enable_adapters(False) for layer in layers(model)], [])
    both(lambda model: [layer.enable_adapters(True) for layer in layers(model)], together)
    both(lambda model: (model.add_adapter("b", lora_config(r=2, target_modules=QKV)), add_noise(model)), together)
    both(lambda model: model.set_adapter("b"), [("lora_qkv", 3)])
    both(lambda model: model.base_model.set_adapter(["default", "b"]), [("lora_mlp", 3)])
    both(lambda model: model.set_adapter("default"), together)


# ---- what is handed over from an attention to its layers


def test_a_layer_that_is_called_with_another_input_calculates_it():
    model = one_layer(target_modules=QKV)
    patch(model)
    layer, x = projection(model, "k_proj"), torch.randn(2, 3, 64)
    expected, other = layer(x), layer(x + 1)
    handed_over.x, handed_over.results = x, {layer: torch.zeros(1)}
    try:
        assert torch.equal(layer(x + 1), other)
        assert torch.equal(layer(x.clone()), expected)
        assert torch.equal(layer(x), torch.zeros(1)), "handed over"
        assert torch.equal(layer(x), expected), "once"
    finally:
        handed_over.x, handed_over.results = None, {}


def test_nothing_is_left_behind():
    model = one_layer(target_modules=QKV)
    patch(model)
    inner = model.get_base_model().model
    x = torch.randn(2, 3, 64, requires_grad=True)
    angles = inner.rotary_emb(x, torch.arange(3)[None])
    attention = inner.layers[0].self_attn
    gc.disable()
    try:
        refs = []
        handle = projection(model, "q_proj").register_forward_hook(lambda m, a, out: refs.append(weakref.ref(out)))
        attention(hidden_states=x, position_embeddings=angles)
        assert (handed_over.x, handed_over.results) == (None, {})
        assert refs[0]() is None
        handle.remove()
        with pytest.raises(TypeError):  # after the projections
            attention(x, position_embeddings=None)
        assert (handed_over.x, handed_over.results) == (None, {})
    finally:
        gc.enable()


def test_each_thread_has_its_own():
    """Another thread is inside of an attention of its own while this one's calls its layers."""
    models = [one_layer(target_modules=QKV), one_layer(target_modules=QKV)]
    for model in models:
        patch(model)
    inside, leave = threading.Event(), threading.Event()

    def wait_inside(*_):
        inside.set()
        assert leave.wait(60)

    projection(models[1], "q_proj").register_forward_hook(wait_inside)
    other = threading.Thread(target=lambda: models[1](**batch()))

    def start_other(*_):
        other.start()
        assert inside.wait(60)

    projection(models[0], "q_proj").register_forward_hook(start_other)
    try:
        assert unit_calls(models[0]) == [("lora_qkv", 3)]
    finally:
        leave.set()
        other.join()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_changes_no_gradient(reentrant):
    model = with_lora(tiny("llama"))
    patch(model)
    model.enable_input_require_grads()
    plain = run(model.train())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    with recorded_ops() as ops:
        checkpointed = run(model)
    assert ops["lora_qkv"] == 2 * 4 and ops["lora_mlp"] == 2 * 2, "each layer is calculated twice"
    assert_identical(checkpointed, plain)


# ---- who makes the frozen products


def own_matmul(model: nn.Module) -> set[bool]:
    """What the fused operators of a step are told, forward and backward."""
    told = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.name == "own_matmul":
                    told.add(value)
            return func(*args, **(kwargs or {}))

    with Recorder():
        run(model)
    return told


def noted(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if MATMUL_ATTRIBUTE in module.__dict__}


@pytest.mark.parametrize("order", ["patch, then lora", "lora, then patch"])
def test_base_matmul(order):
    if order == "patch, then lora":
        base = tiny("llama")
        patch(base, base_matmul="metal")
        model = with_lora(base)
    else:
        model = with_lora(tiny("llama"))
        patch(model, base_matmul="metal")
    stock = with_lora(tiny("llama"))
    expected = run(patched_copy(stock))
    assert own_matmul(model) == {True}
    assert len(noted(model)) == 4 + 14, "attention, MLP and LoRA layers"
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert own_matmul(copied) == {True}
        assert_identical(run(copied), expected)  # the eager twin is the same
    patch(model)
    assert own_matmul(model) == {False} and not noted(model)
    patch(model, base_matmul="metal")
    assert own_matmul(model) == {True}
    unpatch(model)
    assert not noted(model)
    assert not any(OPS_ATTRIBUTE in module.__dict__ for module in model.modules())
    assert_identical(run(model), run(stock))


def test_base_matmul_belongs_to_a_model():
    a, b = with_lora(tiny("llama")), with_lora(tiny("llama"))
    patch(a, base_matmul="metal")
    patch(b)
    assert own_matmul(a) == {True} and own_matmul(b) == {False}


@pytest.mark.parametrize("value", ["mps", None, True, ["metal"]], ids=repr)
def test_bad_base_matmul(value):
    model = with_lora(tiny("llama"))
    with pytest.raises(
        ValueError, match=r"torch_metalk.patch: argument 'base_matmul' is .*; accepted: 'torch', 'metal'"
    ):
        patch(model, base_matmul=value)
    assert type(decoder_layer(model).mlp).__name__ == "LlamaMLP", "nothing was changed"


# ---- the report


def lora_lines(model: PeftModel, ops=None) -> set[Line]:
    report = patch(model, ops)
    return {line for line in (*report.patched, *report.skipped) if line.op.startswith("lora")}


def test_report_of_units():
    report = patch(with_lora(tiny("llama")))
    assert {line for line in report.patched if line.op.startswith("lora")} == {
        Line("LlamaAttention", "lora_qkv", 2),
        Line("lora.Linear", "lora_qkv", 6, "within LlamaAttention at present"),
        Line("lora.Linear", "lora_qkv", 2),
        Line("LlamaMLP", "lora_mlp", 2),
        Line("lora.Linear", "lora_mlp", 6, "within LlamaMLP at present"),
    }
    assert [report.count(op) for op in ("lora_qkv", "lora_mlp", "lora_linear", "swiglu")] == [4, 2, 0, 0]


def test_report_says_why_units_are_not_in_use():
    model = with_lora(tiny("llama", num_hidden_layers=1), lora_dropout=0.1)
    reason = "layer by layer at present: dropout is active"
    assert lora_lines(model.train()) == {
        Line("LlamaAttention", "lora_qkv", 1, reason),
        Line("LlamaMLP", "lora_mlp", 1, reason),
        Line("lora.Linear", "lora_linear", 7),
    }
    assert Line("LlamaMLP", "lora_mlp", 1) in lora_lines(model.eval())
    projection(model, "up_proj").base_layer.weight.requires_grad_()
    assert Line("LlamaMLP", "lora_mlp", 1, "layer by layer at present: the base layer is trained") in lora_lines(model)
    model.merge_adapter()
    reason = "at present: adapters are merged"
    assert lora_lines(model) == {
        Line("LlamaAttention", "lora_qkv", 1, f"layer by layer {reason}"),
        Line("LlamaMLP", "lora_mlp", 1, f"layer by layer {reason}"),
        Line("lora.Linear", "lora_linear", 7, f"runs stock {reason}"),
    }


def test_report_of_some_operators():
    settings = {"lora_dropout": 0.1, "target_modules": [*QKV, *MLP]}
    model = with_lora(tiny("llama", num_hidden_layers=1), **settings).train()
    assert lora_lines(copy.deepcopy(model), ["lora_mlp"]) == {
        Line("LlamaMLP", "lora_mlp", 1, "layer by layer at present: dropout is active")
    }
    assert lora_lines(copy.deepcopy(model), ["lora_qkv"]) == {
        Line("LlamaAttention", "lora_qkv", 1, "layer by layer at present: dropout is active"),
        Line("lora.Linear", "lora_qkv", 6, "runs stock at present: dropout is active"),
    }
    assert lora_lines(copy.deepcopy(model), ["lora_linear"]) == {Line("lora.Linear", "lora_linear", 6)}


def test_modules_without_lora_layers_are_no_candidates():
    assert not lora_lines(tiny("llama"))
    assert lora_lines(with_lora(tiny("llama"), target_modules=["o_proj"])) == {Line("lora.Linear", "lora_qkv", 2)}


def test_phi3_has_no_layers_for_a_unit():
    """q, k and v are one projection there, and gate and up another."""
    assert lora_lines(with_lora(tiny("phi3"))) == {Line("lora.Linear", "lora_qkv", 8)}
