"""What `patch` changes, what it leaves alone, and that `unpatch` gives everything back."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft.tuners import lora
from peft.tuners.lora import layer as lora_layer
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedConfig
from transformers.models.olmo2 import modeling_olmo2

from tests.models import (
    FAMILIES,
    assert_equals_stock,
    assert_identical,
    batch,
    build,
    classes,
    lora_config,
    patched_copy,
    recorded_ops,
    run,
    tiny,
    tiny_config,
    with_lora,
)
from torch_metalk import PatchReport, patch, unpatch
from torch_metalk.patching import PATCHABLE_OPS, families, modules
from torch_metalk.patching.report import Line

# PEFT and transformers rename things and ask for the old names themselves.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def configs(model: nn.Module) -> dict[str, int]:
    """Which config object each module holds, under which name."""
    return {
        f"{path}.{name}": id(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig)
    }


@pytest.fixture
def fresh_probes():
    """The stock classes are examined again: in the test, and by whoever comes after it."""
    probes = (families.probe_norm, families.probe_mlp, families.probe_rope)
    for probe in probes:
        probe.cache_clear()
    yield
    for probe in probes:
        probe.cache_clear()


def attributes(model: nn.Module) -> dict[str, list[str]]:
    return {path: sorted(vars(module)) for path, module in model.named_modules()}


# ---- what is changed


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_gives_everything_back(family, lora):
    model = with_lora(tiny(family)) if lora else tiny(family)
    before = classes(model), configs(model), attributes(model), repr(model), copy.deepcopy(model.config.to_dict())
    expected = run(model)
    report = patch(model)
    assert not report.skipped and classes(model) != before[0]
    run(model)
    assert unpatch(model) is model
    assert before == (classes(model), configs(model), attributes(model), repr(model), model.config.to_dict())
    assert_identical(run(model), expected)


def test_patching_twice_is_patching_once():
    model = with_lora(tiny("gemma3"))
    stock = configs(model), classes(model)
    first = patch(model)
    patched = classes(model), configs(model), attributes(model)
    expected = run(model)
    second = patch(model)
    assert (classes(model), configs(model), attributes(model)) == patched
    assert (first.patched, first.skipped) == (second.patched, second.skipped)
    assert_identical(run(model), expected)
    unpatch(model)
    assert (configs(model), classes(model)) == stock
    unpatch(model)
    assert (configs(model), classes(model)) == stock


def test_another_model_with_the_same_config_stays_stock():
    config = tiny_config("llama")
    a, b = build(config), build(config)
    # transformers copies the config in `from_config`; models that were made from one object share it.
    c, d = type(a)(config), type(a)(config)
    assert c.config is d.config is config
    for patched, other in ((a, b), (c, d)):
        other_state = classes(other), configs(other)
        expected = run(other)
        patch(patched)
        assert config._attn_implementation != "torch_metalk"
        assert (classes(other), configs(other)) == other_state
        with recorded_ops() as ops:
            assert_identical(run(other), expected)
        assert not ops
        unpatch(patched)
    assert c.config is config and c.model.layers[0].self_attn.config is config


def test_a_model_built_from_the_config_of_a_patched_one_is_stock():
    model = tiny("llama")
    expected = run(model)
    patch(model)
    for child in (build(model.config), build(copy.deepcopy(model.config))):
        with recorded_ops() as ops:
            assert_identical(run(child), expected)
        assert not ops
        report = patch(child)
        with recorded_ops() as ops:
            run(child)
        assert ops["attention"] == report.count("attention") == 2
        unpatch(child)
        assert_identical(run(child), expected)


def test_nothing_of_transformers_or_peft_is_assigned_to():
    def state():
        found = {}
        for name, module in list(sys.modules.items()):
            if name.startswith(("transformers.models.", "peft.tuners.lora", "transformers.modeling_utils")):
                for attribute, value in vars(module).items():
                    found[name, attribute] = id(value)
                    if isinstance(value, type) and value.__module__ == name:
                        found |= {(name, attribute, member): id(v) for member, v in vars(value).items()}
        return found

    models = [with_lora(tiny(family)) for family in FAMILIES]
    for model in models:
        run(model)  # whatever is imported or cached on first use is there
    before = state()
    for model in models:
        patch(model)
        run(model)
    # `torch.compile`-like caches of abc and of classes' annotations are not members that anyone looks up.
    after = {key: value for key, value in state().items() if key in before}
    ignored = ("_abc_impl", "__annotations__", "__annotations_cache__")
    assert [key for key in before if after.get(key) != before[key] and key[-1] not in ignored] == []


def test_state_dict_buffers_and_modes_are_untouched(fresh_probes):
    model = with_lora(tiny("qwen3")).eval()
    state = {name: (t.data_ptr(), t.requires_grad) for name, t in model.state_dict(keep_vars=True).items()}
    random_state = torch.get_rng_state()
    patch(model)
    assert {name: (t.data_ptr(), t.requires_grad) for name, t in model.state_dict(keep_vars=True).items()} == state
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random_state), "patching draws from the generator"


@pytest.mark.parametrize(
    "context",
    [lambda: torch.device("meta"), lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode, torch.no_grad],
    ids=["meta device", "autocast", "inference mode", "no grad"],
)
def test_patching_does_not_depend_on_its_surroundings(context, fresh_probes):
    model = tiny("olmo2")
    with context():
        report = patch(model)
    assert not report.skipped
    run(model)


def test_patched_modules_are_what_they_were_to_isinstance_and_repr():
    stock = with_lora(tiny("llama"))
    ours = patched_copy(stock)
    for (name, a), b in zip(ours.named_modules(), stock.modules(), strict=True):
        assert isinstance(a, type(b)), name
    assert repr(ours).replace("Metalk", "").replace("LoraLinear", "Linear") == repr(stock)
    assert str(ours.get_base_model().model.norm) == "MetalkLlamaRMSNorm((64,), eps=1e-06)"


def test_modules_take_their_argument_by_name():
    for family in ("llama", "gemma", "phi3", "olmo2"):
        stock = tiny(family).model.layers[0]
        ours = patched_copy(stock)
        x = torch.randn(2, 3, 64)
        for name in ("mlp", "post_attention_layernorm"):
            module = getattr(stock, name)
            (parameter,) = module.forward.__func__.__code__.co_varnames[
                1 : module.forward.__func__.__code__.co_argcount
            ]
            expected = module(**{parameter: x})
            # float32 roundings on values up to 10
            torch.testing.assert_close(getattr(ours, name)(**{parameter: x}), expected, rtol=1e-5, atol=1e-5)


def test_hooks_of_patched_modules_are_called():
    model = tiny("llama")
    patch(model)
    layer = model.model.layers[0]
    seen = Counter()
    for name in ("self_attn", "mlp", "input_layernorm"):
        getattr(layer, name).register_forward_hook(lambda module, args, out, name=name: seen.update([name]))
        getattr(layer, name).register_full_backward_hook(lambda module, grads, _, name=name: seen.update([name]))
    run(model)
    assert seen == {"self_attn": 2, "mlp": 2, "input_layernorm": 2}


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_activations_are_called(kind):
    """The operator would leave the activation out, so that such an MLP calculates as stock does."""
    stock = tiny("llama")
    ours = patched_copy(stock)
    calls = []
    for model in (stock, ours):
        act = model.model.layers[0].mlp.act_fn
        getattr(act, f"register_{kind}_hook")(lambda *args: calls.append(kind))
    with recorded_ops() as ops:
        run(ours)
    assert ops["swiglu"] == 1 and calls == [kind]
    assert_equals_stock(ours, stock)


def test_activation_is_read_on_every_call():
    stock = tiny("llama")
    ours = patched_copy(stock)
    for model in (stock, ours):
        model.model.layers[0].mlp.act_fn = nn.ReLU()
        model.model.layers[1].mlp.act_fn = nn.GELU(approximate="tanh")
    with recorded_ops() as ops:
        run(ours)
    assert ops["swiglu"] == 0 and ops["geglu"] == 1
    assert_equals_stock(ours, stock)


# ---- which operators


@pytest.mark.parametrize("op", PATCHABLE_OPS)
def test_one_operator_alone(op):
    family = "gemma" if op == "geglu" else "llama"
    stock = with_lora(tiny(family))
    ours = copy.deepcopy(stock)
    report = patch(ours, op if op == "rope" else [op])  # one name may stand alone
    assert {line.op for line in report.patched} == {op} and not report.skipped
    with recorded_ops() as ops:
        run(ours)
    assert {name.removesuffix("_backward") for name in ops} == {op}
    assert ops[op] == report.count(op)
    assert_equals_stock(ours, stock)
    unpatch(ours)
    assert classes(ours) == classes(stock)


def test_no_operators_are_an_error_and_change_nothing():
    model = tiny("llama")
    before = classes(model), configs(model), attributes(model)
    with pytest.raises(ValueError, match="'ops' names nothing; accepted: rms_norm"):
        patch(model, [])
    assert before == (classes(model), configs(model), attributes(model))


def test_operators_add_up():
    model = with_lora(tiny("llama"))
    for op in PATCHABLE_OPS:
        report = patch(model, iter([op]))
    # The report tells the state, not the last call. Llama has no GELU, and the operators that do more at once run.
    assert {line.op for line in report.patched} == set(PATCHABLE_OPS) - {"geglu", "lora_linear"}
    with recorded_ops() as ops:
        run(model)
    assert {name for name in ops if not name.endswith("_backward")} == set(PATCHABLE_OPS) - {
        "geglu",
        "lora_linear",
        "swiglu",
    }
    assert attributes(model) == attributes(patched_copy(with_lora(tiny("llama"))))


def test_lora_layers_are_not_fused_where_that_was_not_asked_for():
    base = tiny("llama")
    patch(base, ["swiglu", "rope"])
    model = with_lora(base)
    assert {type(m) for m in model.modules() if isinstance(m, lora.LoraLayer)} == {lora.Linear}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("llama",), TypeError, "torch_metalk.patch: argument 'model' is a str; accepted: a torch.nn.Module"),
        ((nn.Linear,), TypeError, "argument 'model' is a type"),
        ((None,), TypeError, "argument 'model' is a NoneType"),
        (
            (nn.Linear(1, 1), ["rmsnorm", "rope", "a"]),
            ValueError,
            "argument 'ops' names 'a', 'rmsnorm'; accepted: rms_",
        ),
        ((nn.Linear(1, 1), "flash"), ValueError, "argument 'ops' names 'flash'"),
    ],
    ids=["a name", "a class", "None", "unknown operators", "an unknown operator"],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        patch(*arguments)


def test_bad_argument_of_unpatch():
    with pytest.raises(TypeError, match="argument 'model' is a dict"):
        unpatch({})


# ---- the report


def test_report_says_what_was_patched():
    report = patch(with_lora(tiny("llama"), target_modules=["q_proj", "down_proj"]))
    assert isinstance(report, PatchReport)
    assert Counter(report.patched) == Counter(
        [
            Line("LlamaAttention", "rope", 2),
            Line("LlamaAttention", "attention", 2),
            Line("LlamaMLP", "lora_mlp", 2),
            Line("LlamaMLP", "swiglu", 2, "within lora_mlp at present"),
            Line("LlamaRMSNorm", "rms_norm", 5),
            Line("lora.Linear", "lora_qkv", 2),
            Line("lora.Linear", "lora_mlp", 2, "within LlamaMLP at present"),
        ]
    )
    assert report.skipped == []
    assert {op: report.count(op) for op in PATCHABLE_OPS} == {
        "rms_norm": 5,
        "rope": 2,
        "attention": 2,
        "swiglu": 0,
        "geglu": 0,
        "lora_linear": 0,
        "lora_qkv": 2,
        "lora_mlp": 2,
    }
    header, *rows = str(report).splitlines()
    assert header.split() == ["module", "op", "count", "status"]
    assert ["lora.Linear", "lora_qkv", "2", "patched"] in [row.split() for row in rows]
    assert len({row.index("patched") for row in rows if "patched" in row}) == 1, "columns are aligned"
    assert repr(report) == "<PatchReport: 17 patched, 0 kinds left alone>"


def test_report_of_nothing():
    report = patch(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert str(report) == "torch_metalk: nothing in this model is a candidate for the operators asked for"


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("glm", {("GlmAttention", "attention", 2), ("GlmMLP", "swiglu", 2), ("GlmRMSNorm", "rms_norm", 5)}),
        ("cohere", {("CohereAttention", "attention", 2), ("CohereMLP", "swiglu", 2)}),
        ("glm4", {("Glm4Attention", "attention", 2), ("Glm4MLP", "swiglu", 2), ("Glm4RMSNorm", "rms_norm", 9)}),
    ],
)
def test_unknown_families_stay_stock(model_type, expected):
    """GLM rotates neighbours in half of each head, Cohere in float32: taken for Llama's they would be wrong."""
    model = with_lora(tiny(model_type, head_dim=16), target_modules=["q_proj", "v_proj"])
    stock = copy.deepcopy(model)
    before = classes(model.get_base_model()), configs(model)
    report = patch(model, [op for op in PATCHABLE_OPS if not op.startswith("lora")])
    assert before == (classes(model.get_base_model()), configs(model))
    assert {line[:3] for line in report.skipped} == expected and not report.patched
    assert {line.reason for line in report.skipped} == {"not in the table of model families"}
    assert "left alone: not in the table of model families" in str(report)
    assert_identical(run(model), run(stock))
    assert patch(model).count("lora_qkv") == 4, "PEFT's layers are the same everywhere"
    assert_equals_stock(model, stock)


def test_activations_without_an_operator_are_reported():
    model = tiny("llama, relu")
    report = patch(model)
    assert report.skipped == [Line("LlamaMLP", "swiglu", 2, "activation ReLU has no operator")]
    assert report.count("rms_norm") == 5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda config: setattr(config, "_attn_implementation", "flex_attention"), "'flex_attention' was chosen"),
        (lambda config: setattr(config, "output_attentions", True), "output_attentions asks for the attention weights"),
    ],
    ids=["chosen implementation", "output_attentions"],
)
def test_attention_that_was_chosen_stays(change, reason):
    model = tiny("llama", attn_implementation="eager")
    change(model.config)
    before = configs(model)
    report = patch(model)
    assert [(line.op, line.count) for line in report.skipped] == [("attention", 2)]
    assert reason in report.skipped[0].reason
    assert report.count("rope") == 2 and report.count("attention") == 0
    assert configs(model) == before


def test_attention_that_shares_its_config_with_an_unknown_one_stays():
    """A class that is not known may read another meaning out of the name of the implementation."""
    model = tiny("llama")

    class OwnAttention(type(model.model.layers[0].self_attn)):
        pass

    model.model.layers[0].self_attn.__class__ = OwnAttention
    before = configs(model)
    report = patch(model)
    reason = "shares its config with attention of an unknown family"
    assert report.skipped == [Line("LlamaAttention", "attention", 1, reason)]
    assert configs(model) == before


def test_attention_sinks_are_left_to_stock_and_reported():
    """gpt-oss: its eager attention adds a learned score to each row, which no other would."""
    model = tiny("gpt_oss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=4)
    stock = copy.deepcopy(model)
    report = patch(model)
    reason = "not in the table of model families; uses attention sinks (s_aux), which the operator does not do"
    assert Line("GptOssAttention", "attention", 2, reason) in report.skipped
    assert f"left alone: {reason}" in str(report)
    assert_identical(run(model), run(stock))


def test_a_known_family_that_comes_to_use_sinks_is_left_to_stock(monkeypatch, fresh_probes):
    """Another release of transformers may pass arguments that the operator does not know."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        apply_rotary_pos_emb(hidden_states, hidden_states, *position_embeddings)  # noqa: F821
        return self.attend(hidden_states, s_aux=self.sinks, position_bias=None, **kwargs)

    model = tiny("llama")
    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", forward)
    before = configs(model)
    report = patch(model, ["attention"])
    reason = "uses attention sinks (s_aux) and a position bias (position_bias), which the operator does not do"
    assert report.skipped == [Line("LlamaAttention", "attention", 2, reason)] and not report.patched
    assert configs(model) == before


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_attention_dropout_is_reported(training):
    """Models come from files in eval mode and are patched then, so that the mode of the moment says nothing."""
    model = tiny("llama", attention_dropout=0.3).train(training)
    report = patch(model, ["attention"])
    reason = "runs stock in training: attention_dropout is 0.3"
    assert report.patched == [Line("LlamaAttention", "attention", 2, reason)] and not report.skipped
    assert report.count("attention") == 0


def test_replaced_forwards_stay():
    model = with_lora(tiny("llama"))
    inner = model.get_base_model().model
    calls = []

    def replace(module):
        original = module.forward
        module.forward = lambda *args, **kwargs: calls.append(type(module)) or original(*args, **kwargs)

    for module in (inner.norm, inner.layers[0].mlp, inner.layers[0].self_attn.q_proj, inner.layers[1].self_attn):
        replace(module)
    report = patch(model)
    assert {line[:3] for line in report.skipped} == {
        ("LlamaRMSNorm", "rms_norm", 1),
        ("LlamaMLP", "swiglu", 1),
        ("LlamaAttention", "rope", 1),
        ("lora.Linear", "lora_linear", 1),
    }
    assert {line.reason for line in report.skipped} == {"its forward was replaced on the instance"}
    run(model)
    assert len(calls) == 4


def test_lora_layers_on_the_stock_path_are_reported_with_the_reason():
    model = with_lora(tiny("llama"), target_modules=["q_proj"])
    model.merge_adapter()
    report = patch(model)
    assert report.count("lora_linear") == report.count("lora_qkv") == 0
    assert Line("lora.Linear", "lora_linear", 2, "runs stock at present: adapters are merged") in report.patched
    model.unmerge_adapter()
    assert patch(model).count("lora_qkv") == 2


def test_an_attribute_named_stock_is_nobodys_business():
    class Market(nn.Module):
        stock = 5

        def __init__(self):
            super().__init__()
            self.inner = tiny("llama")

    market = Market()
    assert patch(market).count("rms_norm") == 5
    unpatch(market)
    assert type(market) is Market and classes(market.inner) == classes(tiny("llama"))


def test_subclasses_are_left_alone():
    """A subclass may calculate something else."""
    model = tiny("llama")

    class OwnRMSNorm(type(model.model.norm)):
        def forward(self, hidden_states):
            return super().forward(hidden_states) * 2

    model.model.norm.__class__ = OwnRMSNorm
    stock = copy.deepcopy(model)
    report = patch(model)
    assert report.count("rms_norm") == 4 and type(model.model.norm) is OwnRMSNorm
    assert Line("OwnRMSNorm", "rms_norm", 1, "not in the table of model families") in report.skipped
    assert_equals_stock(model, stock)


def test_changed_mathematics_of_stock_is_noticed(monkeypatch, fresh_probes):
    """A release of transformers whose classes calculate something else must not be patched over."""
    rotate = modeling_olmo2.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_olmo2.Olmo2RMSNorm, "forward", lambda self, x: x * self.weight)
    monkeypatch.setattr(modeling_olmo2.Olmo2MLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    monkeypatch.setattr(modeling_olmo2, "apply_rotary_pos_emb", lambda q, k, c, s, *args, **kw: rotate(q, k, c, -s))
    report = patch(tiny("olmo2"), ["rms_norm", "rope", "swiglu"])
    assert not report.patched
    assert {line.op for line in report.skipped} == {"rms_norm", "rope", "swiglu"}
    assert all("calculates something else" in line.reason for line in report.skipped)


# ---- parts of models


def test_a_part_of_a_model():
    stock = tiny("llama")
    ours = copy.deepcopy(stock)
    before = classes(ours), configs(ours)
    report = patch(ours.model.layers[0])
    assert [report.count(op) for op in ("rms_norm", "attention", "rope", "swiglu")] == [2, 1, 1, 1]
    with recorded_ops() as ops:
        run(ours)
    assert ops["attention"] == ops["rope"] == 1
    assert_equals_stock(ours, stock)
    unpatch(ours)
    assert (classes(ours), configs(ours)) == before


@pytest.mark.parametrize("order", ["patch, then lora", "lora, then patch", "patch, then lora, then patch"])
def test_order_of_patch_and_peft_does_not_matter(order):
    stock = with_lora(tiny("llama"))
    ours = tiny("llama")
    config = ours.config
    for step in order.split(", then "):
        if step == "patch":
            patch(ours)
        else:
            ours = with_lora(ours)
    expected = patched_copy(stock)
    assert classes(ours) == classes(expected)
    assert_identical(run(ours), run(expected))
    unpatch(ours)
    assert classes(ours) == classes(stock)
    assert ours.config is ours.get_base_model().config is config
    assert_identical(run(ours), run(stock))


def test_settings_of_the_config_can_be_changed_after_patching():
    model = tiny("llama")
    patch(model)
    model.set_attn_implementation("sdpa")
    with recorded_ops() as ops:
        run(model)
    assert ops["attention"] == 0 and ops["rope"] == 2
    assert patch(model).count("attention") == 2
    unpatch(model)
    assert model.config._attn_implementation == "sdpa"


def test_text_model_inside_of_a_multimodal_one():
    """Its config stays the part of the whole one that it was; the vision tower is another family's."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = tiny_config("gemma3")
    config = Gemma3Config(text_config=text.to_dict(), vision_config=vision | {"image_size": 28, "patch_size": 14})
    with torch.random.fork_rng(devices=[]):
        model = Gemma3ForConditionalGeneration(config)
    before = classes(model), configs(model)
    expected = run(model)
    report = patch(model)
    assert report.count("attention") == 2 and {line.module_class for line in report.skipped} >= {"SiglipAttention"}
    for module in model.modules():
        if type(module).__name__ == "MetalkGemma3Attention":
            assert module.config is model.config.text_config
    assert config.text_config._attn_implementation == model.config.vision_config._attn_implementation == "sdpa"
    with recorded_ops() as ops:
        actual = run(model)
    assert ops["attention"] == 2
    # float32 roundings on logits of about 1
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-5, atol=2e-5)
    unpatch(model)
    assert before == (classes(model), configs(model))


# ---- copies and files


def copies(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
    }


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("family", FAMILIES)
def test_copies_are_patched_and_independent(family, how):
    original = with_lora(tiny(family))
    stock = classes(original)
    patch(original)
    expected = run(original)
    copied = copies(original)[how]
    assert classes(copied) == classes(original)
    assert not set(configs(copied).values()) & set(configs(original).values())
    assert_identical(run(copied), expected)
    # A copy computes with its own weights and is undone on its own.
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.1)
    assert not torch.equal(run(copied).logits, expected.logits)
    unpatch(copied)
    assert classes(copied) == stock
    inner = copied.get_base_model()
    assert inner.config._attn_implementation in ("sdpa", "eager")
    assert len({id(c) for c in (copied.config, inner.config, inner.model.layers[0].self_attn.config)}) == 1
    assert classes(original) != stock
    assert_identical(run(original), expected)


IN_A_FRESH_PROCESS = """
import pickle, sys, torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
from peft import PeftModel
folder = sys.argv[1]
ids = torch.load(f"{folder}/ids.pt")
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", device_map="cpu")
saved = model(ids).logits
saved_lora = PeftModel.from_pretrained(model, f"{folder}/adapter")(ids).logits
implementation = model.config._attn_implementation
stock = not any(name.startswith("torch_metalk") for name in sys.modules)
with open(f"{folder}/model.pickle", "rb") as file:
    unpickled = pickle.load(file)
torch.save({"saved": saved, "saved_lora": saved_lora, "unpickled": unpickled(ids).logits, "stock": stock,
            "implementation": implementation, "name": type(unpickled.model.norm).__name__}, f"{folder}/result.pt")
"""


def test_files_of_a_patched_model_are_read_by_a_fresh_process(tmp_path):
    """Saved models and adapters need nothing of this package; a pickle brings it in by itself."""
    ids = batch(padded=False)["input_ids"]
    base, stock = tiny("llama"), tiny("llama")
    patch(base)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(base))
    base.save_pretrained(tmp_path / "model")
    stock.save_pretrained(tmp_path / "stock")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()
    plain = base(ids).logits
    model = with_lora(base)
    model.save_pretrained(tmp_path / "adapter")
    torch.save(ids, tmp_path / "ids.pt")
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, tmp_path],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result = torch.load(tmp_path / "result.pt")
    assert result["stock"] and result["implementation"] == "sdpa"
    assert result["name"] == "MetalkLlamaRMSNorm"
    assert torch.equal(result["unpickled"], plain)
    for name, ours in (("saved", plain), ("saved_lora", model(ids).logits)):
        torch.testing.assert_close(result[name], ours, rtol=1e-5, atol=2e-5)  # stock against ours: float32 roundings


def test_saved_adapters_load_into_a_patched_model(tmp_path):
    stock = with_lora(tiny("llama"))
    stock.save_pretrained(tmp_path)
    base = tiny("llama")
    patch(base)
    ours = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    with recorded_ops() as ops:
        run(ours)
    assert ops.lora_layers == 14
    assert_equals_stock(ours, stock)


def test_saving_a_patched_model_and_loading_patched(tmp_path):
    model = tiny("gemma2")
    patch(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    assert classes(loaded) == classes(tiny("gemma2"))
    patch(loaded)
    assert_identical(run(loaded), run(model))


def test_patched_classes_are_importable_by_name():
    for family in FAMILIES:
        model = tiny(family)
        patch(model)
        for cls in {type(module) for module in model.modules()}:
            if cls.__module__ == modules.__name__:
                assert getattr(modules, cls.__name__) is cls
    with pytest.raises(AttributeError, match="MetalkNothing"):
        _ = modules.MetalkNothing


def test_lora_layer_class_keeps_what_peft_looks_for():
    model = with_lora(tiny("llama"))
    patch(model)
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    assert "Linear" in type(layer).__name__ and isinstance(layer, lora_layer.Linear)
    assert isinstance(model.peft_config["default"], type(lora_config()))
    assert isinstance(layer.forward, types.MethodType)
