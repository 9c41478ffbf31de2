"""`patch(model, cpu_share=…)`: the frozen products of LoRA layers shared by CPU and GPU."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from peft.tuners import lora
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import DEVICES
from tests.models import assert_as_accurate, batch, exact_copy, recorded_ops, run, tiny, with_lora
from tests.test_calibrate import cache as cache
from torch_metalk import patch, unpatch
from torch_metalk.ops import _cpu_share
from torch_metalk.ops._cpu_share import Times
from torch_metalk.patching.families import SHARE_ATTRIBUTE
from torch_metalk.patching.report import Line
from torch_metalk.patching.twins import output_twin, weight_twins

# PEFT and transformers rename things and ask for the old names themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.skipif("mps" not in DEVICES, reason="products are split where there is an mps device"),
]
SPLIT = ("lora.Linear", "matmul_rows_split")
_GEMMAS = ("gemma2", "gemma3")  # whose configs name the type of each layer


def inputs(device="mps"):
    return {name: t.to(device) for name, t in batch().items()}


def model(dtype=torch.float32, family="llama", **settings):
    """On mps, with norms that are trained, so that gradients of the layers' inputs are compared. Three rows of 11
    tokens: 32 rows on the CPU and one on the GPU, by half."""
    layer = {"num_hidden_layers": 1} | ({"layer_types": ["sliding_attention"]} if family in _GEMMAS else {})
    made = with_lora(tiny(family, dtype, **layer), **settings).to("mps")
    for name, parameter in made.named_parameters():
        if "norm" in name:
            parameter.requires_grad_()
    return made


@contextmanager
def split_calls() -> Iterator[list[tuple]]:
    """(has a twin of the input, has one of the weight, rows of the CPU forward, and backward) of each forward call."""
    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket.__name__ == "matmul_rows_split":
                calls.append((args[4] is not None, args[5] is not None, *args[6:]))
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield calls


def moved(ours):
    """What `run` found, on the CPU, where it is compared."""
    ours.logits, ours.loss = ours.logits.cpu(), ours.loss.cpu()
    ours.grads = {name: grad.cpu() for name, grad in ours.grads.items()}
    return ours


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_stock(family, dtype):
    ours = model(dtype, family)
    stock = copy.deepcopy(ours).to("cpu")
    patch(ours, cpu_share=0.5)
    with recorded_ops() as calls:
        found = moved(run(ours, inputs()))
    layers = sum(isinstance(module, lora.Linear) for module in ours.modules())
    assert calls["matmul_rows_split"] == calls["lora_linear"] == layers and not calls["lora_qkv"] + calls["lora_mlp"]
    # 3: half precision rounds between base product and adapter, where stock's fused sums differ too.
    assert_as_accurate(found, run(stock, batch()), run(exact_copy(stock), batch()), factor=3.0)


def test_losses_of_steps_equal_stock():
    ours = model()
    stock = copy.deepcopy(ours).to("cpu")
    patch(ours, cpu_share=0.5)
    losses = []
    for trained, given in ((ours, inputs()), (stock, batch())):
        optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.1)
        losses.append([])
        for _ in range(5):
            loss = trained(**given, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    # float32 sums in another order, five times over.
    torch.testing.assert_close(*(torch.tensor(each) for each in losses), rtol=1e-4, atol=0)


def test_twins():
    """In half precision each split weight has one, and each layer behind a norm gets that of its input."""
    ours = model(torch.float16)
    patch(ours, cpu_share=0.5)
    before = len(weight_twins)
    with split_calls() as calls:
        ours(**inputs())
    behind_norms, others = (True, True, 32, 32), (False, True, 32, 32)
    # q, k, v; o; gate, up; down
    assert calls == 3 * [behind_norms] + [others] + 2 * [behind_norms] + [others]
    assert len(weight_twins) == before + 7
    assert output_twin._twin is None, "it is dropped after use"
    unpatch(ours)
    assert len(weight_twins) == before


def test_float32_needs_no_twins():
    ours = model()
    patch(ours, cpu_share=0.5)
    before = len(weight_twins)
    with split_calls() as calls:
        ours(**inputs())
    assert calls == 7 * [(False, False, 32, 32)] and len(weight_twins) == before


def test_norms_that_feed_no_linear_layer_write_none():
    for family, expected in (("llama", 2), ("qwen3", 2), ("gemma2", 2), ("gemma3", 2), ("olmo2", 0)):
        ours = model(torch.float16, family)
        patch(ours, cpu_share=0.5)
        norms = [m for m in ours.modules() if type(m).__name__.endswith("RMSNorm") and SHARE_ATTRIBUTE in m.__dict__]
        assert len(norms) == expected, family


def test_twins_are_not_kept_for_backward():
    """With a graph alive, no tensor of a norm's output in float32 is."""
    ours = model(torch.float16)
    patch(ours, cpu_share=0.5)
    loss = ours(**inputs()).loss
    gc.collect()
    shape = (3, 11, 64)
    alive = [
        t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.shape == shape and t.dtype == torch.float32
    ]
    assert not [t for t in alive if t.device.type == "mps"]
    loss.backward()


def test_an_output_that_was_changed_has_no_twin():
    output_twin.put(y := torch.ones(3), twin := torch.ones(3))
    assert output_twin.of(y) is twin and output_twin.of(y.view(3)) is None and output_twin.of(torch.ones(3)) is None
    y += 1
    assert output_twin.of(y) is None
    output_twin.drop()


@pytest.mark.parametrize("change", ["in place", "data", "load_state_dict", "merge", "unmerge"])
def test_a_changed_weight_gets_another_twin(change):
    ours = model(torch.float16)
    patch(ours, cpu_share=1)
    ours(**inputs())
    layer = ours.get_base_model().model.layers[0].self_attn.q_proj
    weight = layer.base_layer.weight
    old = weight_twins.of(weight)
    with torch.no_grad():
        if change == "in place":
            weight.mul_(2)
        elif change == "data":
            weight.data = weight.data * 2
        elif change == "load_state_dict":
            layer.base_layer.load_state_dict({"weight": weight.detach() * 2})
        else:
            layer.merge()
            if change == "unmerge":
                weight_twins.of(weight)  # as another layer does that shares the weight
                layer.unmerge()
    ours(**inputs())
    twin = weight_twins.of(weight)
    assert twin is not old and torch.equal(twin, weight.detach().cpu().float())


def test_copies_and_files_have_no_twins():
    ours = model(torch.float16)
    patch(ours, cpu_share=0.5)
    expected = ours(**inputs()).logits
    twins = len(weight_twins)
    state = ours.state_dict()
    assert not [name for name in state if "twin" in name or "float32" in name]
    for copied_by in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        copied = copied_by(ours)
        assert len(weight_twins) == twins
        with split_calls() as calls:
            assert torch.equal(copied(**inputs()).logits, expected)
        assert len(calls) == 7 and len(weight_twins) == twins + 7
        del copied
        gc.collect()
        assert len(weight_twins) == twins, "a twin goes with its weight"
    torch.save(ours, io.BytesIO())


def test_report():
    ours = model()
    report = patch(ours, cpu_share=0.5)
    assert Line(*SPLIT, 7) in report.patched and report.count("matmul_rows_split") == 7
    assert Line("lora.Linear", "lora_linear", 7) in report.patched
    for op, name in (("lora_qkv", "LlamaAttention"), ("lora_mlp", "LlamaMLP")):
        reason = "layer by layer at present: CPU and GPU share the base layer's product"
        assert Line(name, op, 1, reason) in report.patched
    # The last call decides.
    report = patch(ours)
    assert "matmul_rows_split" not in str(report) and report.count("lora_mlp") == 1
    with split_calls() as calls:
        ours(**inputs())
    assert not calls


@pytest.mark.parametrize(
    ("share", "options", "reason"),
    [
        (0, {}, "the share is 0"),
        ("auto", {}, "no times for this chip: run torch_metalk.calibrate() once, or give a number"),
        (
            0.5,
            {"ops": ["lora_qkv"]},
            "lora_linear, which adds the adapter to a split product, is not among the operators",
        ),
    ],
)
def test_reasons(share, options, reason, cache):
    ours = model()
    report = patch(ours, cpu_share=share, **options)
    assert Line(*SPLIT, 7, reason) in report.skipped
    with recorded_ops() as calls:
        ours(**inputs())
    assert not calls["matmul_rows_split"] and calls["lora_qkv"]


def test_on_the_cpu_it_means_nothing():
    ours = with_lora(tiny("llama", num_hidden_layers=1))
    other = copy.deepcopy(ours)
    report = patch(ours, cpu_share=0.5)
    assert Line(*SPLIT, 7, "the tensors are on cpu, and cpu_share is for mps") in report.skipped
    without = patch(other)
    assert report.patched == without.patched
    assert torch.equal(ours(**batch()).logits, other(**batch()).logits)


def test_auto(cache):
    times = {"forward": Times(1, 3), "backward": Times(1e9, 1)}
    _cpu_share.store(_cpu_share.device_name(), "float32", times)
    ours = model()
    assert patch(ours, cpu_share="auto").count("matmul_rows_split") == 7
    with split_calls() as calls:
        ours(**inputs())
    assert calls == 7 * [(False, False, 32, 0)]


def test_layers_that_come_later():
    base = tiny("llama", torch.float16, num_hidden_layers=1).to("mps")
    patch(base, cpu_share=0.5)
    ours = with_lora(base)
    with split_calls() as calls:
        ours(**inputs())
    assert sorted(calls) == 2 * [(False, True, 32, 32)] + 5 * [(True, True, 32, 32)]


def test_layers_that_are_not_split():
    """Trained weights have another twin in each step; merged, disabled and hooked layers run stock."""
    ours = model()
    attention = ours.get_base_model().model.layers[0].self_attn
    attention.q_proj.base_layer.weight.requires_grad_()
    attention.k_proj.enable_adapters(False)
    attention.v_proj.merge()
    attention.o_proj.base_layer.register_forward_hook(lambda *args: None)
    report = patch(ours, cpu_share=0.5)
    reasons = {line.reason for line in report.skipped if line[:2] == SPLIT}
    assert len(reasons) == 4 and "the base layer is trained" in reasons and Line(*SPLIT, 3) in report.patched
    with split_calls() as calls:
        ours(**inputs())
    assert len(calls) == 3


def test_dropout_and_checkpointing():
    """What dropout leaves goes to the adapter, all of the input to the split product."""
    ours = model(lora_dropout=0.5)
    stock = copy.deepcopy(ours)
    patch(ours, cpu_share=0.5)
    results = []
    for each in (ours, stock):
        each.train()
        each.gradient_checkpointing_enable({"use_reentrant": True})
        each.enable_input_require_grads()
        results.append(run(each, inputs()))
    torch.testing.assert_close(results[0].logits, results[1].logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_autocast(dtype):
    """Half precision weights are split; of others autocast makes new ones on every call."""
    ours = model(dtype)
    patch(ours, cpu_share=0.5)
    with split_calls() as calls, torch.autocast("mps", torch.float16):
        ours(**inputs())
    assert len(calls) == (7 if dtype == torch.float16 else 0)


def test_unpatch():
    ours = model(torch.float16)
    expected = ours(**inputs()).logits
    patch(ours, cpu_share=0.5)
    ours(**inputs())
    unpatch(ours)
    assert not [module for module in ours.modules() if SHARE_ATTRIBUTE in module.__dict__]
    with split_calls() as calls:
        assert torch.equal(ours(**inputs()).logits, expected)
    assert not calls


@pytest.mark.parametrize(
    ("share", "error"), [(1.5, ValueError), (float("nan"), ValueError), ("half", ValueError), (True, TypeError)]
)
def test_bad_share(share, error):
    with pytest.raises(error, match=r"torch_metalk.patch: argument 'cpu_share' is"):
        patch(nn.Linear(2, 2), cpu_share=share)
