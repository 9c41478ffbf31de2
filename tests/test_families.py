"""Patched models of every family against stock ones: logits, gradients, generation, checkpointing, compilation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint
from transformers import StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.models import (
    FAMILIES,
    PAD,
    VARIANTS,
    assert_as_accurate,
    assert_equals_stock,
    batch,
    exact_copy,
    generate,
    patched_copy,
    recorded_ops,
    run,
    tiny,
    tiny_config,
    with_lora,
)
from torch_metalk import patch
from torch_metalk.patching.attention import attention_forward

# PEFT and transformers rename things and ask for the old names themselves.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

#: RMSNorms per layer; one more follows the last layer.
NORMS = {"qwen3": 4, "gemma2": 4, "gemma3": 6, "olmo2": 4}
#: LoRA layers per layer where all linears are targets; Phi 3 fuses q, k, v and gate, up.
LORA_LAYERS = {"phi3": 4}
# The operator of the gated unit: of one fused projection in Phi 3.
GATED = {"gemma": "geglu", "gemma2": "geglu", "gemma3": "geglu", "phi3": "swiglu_packed"}


def lora_calls(family: str) -> dict[str, int]:
    """Calls in two layers: q, k, v in one, o alone, and a whole MLP. Phi 3 has four layers on four inputs."""
    if family == "phi3":
        return {"lora_qkv": 8}
    return {"lora_qkv": 4, "lora_mlp": 2, GATED.get(family, "swiglu"): 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_stock(family, lora, dtype):
    stock = tiny(family, dtype)
    if lora:
        stock = with_lora(stock)
    ours = patched_copy(stock)
    with recorded_ops() as ops:
        run(ours)
    # Each operator is used as often as the model has the module for it: nothing fell back to stock unseen.
    gated = GATED.get(family, "swiglu")
    rotations = 1 if family == "smollm3" else 2
    expected = {"rms_norm": 2 * NORMS.get(family, 2) + 1, gated: 2, "rope": rotations, "attention": 2}
    if lora:
        expected |= lora_calls(family)
        expected = {name: n for name, n in expected.items() if n}
        assert ops.lora_layers == 2 * LORA_LAYERS.get(family, 7)
    assert {name: n for name, n in ops.items() if not name.endswith("_backward")} == expected
    assert_equals_stock(ours, stock)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_stock(variant):
    stock = tiny(variant)
    ours = patched_copy(stock)
    with recorded_ops() as ops:
        run(ours)
    gated = {"llama, relu": 0}.get(variant, 2)
    assert ops["attention"] == ops["rope"] == 2
    assert sum(ops[op] for op in ("swiglu", "swiglu_packed", "geglu")) == gated
    assert_equals_stock(ours, stock)


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_batches_without_padding_equal_stock(name):
    """Where transformers makes no mask at all, unless a window is narrower than the row."""
    stock = tiny(name)
    assert_equals_stock(patched_copy(stock), stock, batch(padded=False))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_padded_rows_equal_stock_too(family):
    """Rows that attend to nothing are what stock's masks of True and False make of them."""
    stock = tiny(family)
    inputs = batch()
    # float32 roundings through two layers on logits of about 1.6: stock is 1e-4 / sqrt(300 * 22) off by itself.
    torch.testing.assert_close(patched_copy(stock)(**inputs).logits, stock(**inputs).logits, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_does_not_change_a_row(family):
    model = tiny(family).eval()
    patch(model)
    inputs = batch()
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    padded = model(inputs["input_ids"], attention_mask=inputs["attention_mask"], position_ids=positions).logits
    for row, length in enumerate(inputs["attention_mask"].sum(-1).tolist()):
        alone = model(inputs["input_ids"][row : row + 1, -length:]).logits[0]
        # The same numbers in other batch shapes: BLAS adds in another order.
        torch.testing.assert_close(padded[row, -length:], alone, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["fp32 weight", "bf16 weight"])
@pytest.mark.parametrize("family", FAMILIES)
def test_norms_round_where_stock_rounds(family, weight_dtype):
    """1 + 0.00390625 has no bfloat16; and the product with a float32 weight is float32 in some families."""
    stock = tiny(family).model.norm
    stock.weight.data = torch.full((64,), 0.00390625, dtype=weight_dtype)
    ours = patched_copy(stock)
    x = torch.randn(50, 64).to(torch.bfloat16)
    actual, expected = ours(x), stock(x)
    assert type(ours) is not type(stock) and actual.dtype == expected.dtype
    # Another order of summation moves a value over the edge of a rounding now and then; a rounding in another place
    # moves about half of them.
    assert (actual != expected).float().mean() < 0.02 or torch.allclose(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_four_dimensional_masks_equal_stock(kind):
    stock = tiny("llama")
    inputs = batch()
    mask = inputs["attention_mask"].bool()[:, None, None, :] & torch.ones(11, 11, dtype=torch.bool).tril()
    if kind == "additive":  # as the eager masks of transformers are
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    ours = patched_copy(stock)
    expected = stock(inputs["input_ids"], attention_mask=mask).logits
    actual = ours(inputs["input_ids"], attention_mask=mask).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)  # float32 roundings, as above


@pytest.mark.parametrize("argument", [None, True, False], ids=lambda value: f"argument {value}")
@pytest.mark.parametrize("attribute", [True, False], ids=lambda value: f"attribute {value}")
@pytest.mark.parametrize(
    ("queries", "keys"),
    [(5, 5), (1, 5), (1, 1), (5, 9)],
    ids=["prefill", "decode", "first token", "prefill of a static cache"],
)
def test_causality_without_a_mask_is_that_of_stock(queries, keys, attribute, argument, device):
    model = tiny("llama")
    patch(model)
    module = model.model.layers[0].self_attn
    module.is_causal = attribute
    q, k, v = (torch.randn(2, h, n, 16).to(device) for h, n in ((4, queries), (2, keys), (2, keys)))
    given = {"attention_mask": None, "scaling": 0.3, "is_causal": argument}
    with recorded_ops() as ops:
        actual, _ = attention_forward(module, q, k, v, **given)
    expected, _ = sdpa_attention_forward(module, q, k, v, **given)
    assert ops["attention"] == 1
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)  # float32 roundings of values around 1


def test_packed_sequences_equal_stock():
    stock = tiny("llama")
    ids, positions = batch(padded=False)["input_ids"][:1], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0]])
    expected = stock(ids, position_ids=positions, use_cache=False).logits
    assert (stock(ids, use_cache=False).logits - expected).abs().max() > 0.1  # the packing matters
    actual = patched_copy(stock)(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)  # float32 roundings, as above


@pytest.mark.parametrize(("window", "differs"), [(None, False), (12, False), (4, True)])
def test_sliding_window_counts_only_where_it_is_narrower(window, differs, device):
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(5))
    logits = []
    for sliding_window in (None, window):
        stock = tiny("mistral", sliding_window=sliding_window).eval()
        logits.append(patched_copy(stock).to(device)(ids.to(device)).logits.cpu())
        torch.testing.assert_close(logits[-1], stock(ids).logits, rtol=1e-5, atol=2e-5)  # float32 roundings, as above
    if differs:
        assert torch.allclose(logits[0][:, :4], logits[1][:, :4], rtol=1e-5, atol=2e-5)
        assert (logits[0][:, 4:] - logits[1][:, 4:]).abs().amax(-1).min() > 1e-2
    else:
        assert torch.allclose(*logits, rtol=1e-5, atol=2e-5)


# ---- generation


def talkative(family, **settings):
    """A model whose tokens change with what it attends to: with tied embeddings, Gemma repeats one token."""
    return tiny(family, tie_word_embeddings=False, **settings).eval()


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_stock(family, lora, device):
    """Three prompts of different length, padded on the left. Stock runs on the CPU."""
    stock = talkative(family)
    if lora:
        stock = with_lora(stock)
    expected = generate(stock, batch())
    ours = patched_copy(stock).to(device)
    assert torch.equal(generate(ours, batch()), expected)
    if family == "llama":  # with a cache as without
        assert torch.equal(generate(ours, batch(), use_cache=False), expected)


STRATEGIES = {
    "dynamic cache": lambda model: {},
    "no cache": lambda model: {"use_cache": False},
    "static cache": lambda model: {"past_key_values": StaticCache(config=model.config, max_cache_len=40)},
    "prompt lookup": lambda model: {"prompt_lookup_num_tokens": 3},
    "assistant is a deepcopy": lambda model: {"assistant_model": copy.deepcopy(model)},
}
#: A window of 6 over 20 tokens; windows in every other layer, with and without a cap on the scores.
SPEAKERS = {"llama": {}, "qwen3": {}, "mistral": {"sliding_window": 6}, "gemma2": {}, "gemma3": {}}


@pytest.mark.parametrize("padding", [0, 5], ids=["", "padded"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", SPEAKERS)
def test_generation_strategies_give_the_same_tokens(family, strategy, padding, device):
    """Caches longer than the queries or full of empty places. In a vocabulary of 40, prompt lookup proposes
    something."""
    model = talkative(family, vocab_size=40, **SPEAKERS[family])
    ids = torch.randint(3, 40, (1, 20), generator=torch.Generator().manual_seed(6))
    mask = (torch.arange(20) >= padding).long()[None]
    inputs = {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}
    expected = generate(model, inputs)
    assert len(set(expected[0, 20:].tolist())) > 3, "tokens have to change"
    patch(model)
    model = model.to(device)
    rows = []
    model.model.layers[1].register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    assert torch.equal(generate(model, inputs, **STRATEGIES[strategy](model)), expected)
    if strategy in ("prompt lookup", "assistant is a deepcopy"):
        assert any(1 < n < 20 for n in rows), "several rows of queries at once"


# ---- training tools


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_gradient_checkpointing_changes_no_gradient(family, reentrant):
    model = with_lora(tiny(family), lora_dropout=0.1)
    patch(model)
    model.enable_input_require_grads()  # reentrant checkpoints need it where the embeddings are frozen
    plain = run(model.train())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    with recorded_ops() as ops:
        checkpointed = run(model)
    assert ops["attention"] == 4, "each layer is calculated twice"
    assert all(grad.abs().max() > 0 for name, grad in checkpointed.grads.items() if "lora_B" in name)
    assert plain.grads.keys() == checkpointed.grads.keys()
    for name, grad in plain.grads.items():
        assert torch.equal(checkpointed.grads[name], grad), name


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_compiles_into_one_graph(family):
    model = with_lora(tiny(family))
    patch(model)
    eager = run(model)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch.compiler.reset()
    out = run(torch.compile(model, backend=backend, fullgraph=True))
    called = {node.target.name() for node in graphs[0].graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert len(graphs) == 1
    mlp = "swiglu_packed" if family == "phi3" else "lora_mlp"
    assert called >= {f"torch_metalk::{op}" for op in ("rms_norm", "rope", "attention", "lora_qkv", mlp)}
    torch.testing.assert_close(out.logits, eager.logits, rtol=1e-5, atol=2e-5)  # float32 roundings
    for name, grad in eager.grads.items():
        torch.testing.assert_close(out.grads[f"_orig_mod.{name}"], grad, rtol=1e-4, atol=1e-6)  # the same, in sums


def test_a_layer_compiles_with_dropout_and_checkpointing():
    """Into one graph, and with the masks that dropout draws without compilation."""
    model = with_lora(tiny("llama"), lora_dropout=0.1).train()
    patch(model)
    decoder = model.get_base_model().model
    x = torch.randn(2, 11, 64, requires_grad=True)
    angles = decoder.rotary_emb(x, torch.arange(11)[None])

    def layer(x):
        return checkpoint(decoder.layers[0], x, position_embeddings=angles, use_reentrant=False)

    def gradients(function):
        model.zero_grad()
        torch.manual_seed(4)
        function(x).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients(layer)
    torch.compiler.reset()
    actual = gradients(torch.compile(layer, backend="aot_eager", fullgraph=True))
    assert len(expected) == 14 and all(grad.abs().max() > 0 for grad in expected.values())
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, rtol=1e-4, atol=1e-6, msg=name)  # sums in another order


@pytest.mark.parametrize("ops", [None, ["attention"]], ids=["all ops", "attention alone"])
@pytest.mark.parametrize(("family", "implementation"), [("llama", "sdpa"), ("llama", "eager"), ("gemma2", "eager")])
def test_attention_dropout_is_stock(family, implementation, ops, device):
    """The same draws from the same seed, so the same numbers; in eval the operator runs."""
    stock = tiny(family, attn_implementation=implementation, attention_dropout=0.3).train()
    ours = patched_copy(stock, ops).to(device)
    inputs = {name: t.to(device) for name, t in batch().items()}
    with recorded_ops() as calls:
        actual = run(ours, inputs)
    assert calls["attention"] == 0
    expected = run(stock.to(device), inputs)
    assert actual.grads.keys() == expected.grads.keys()
    for name, t in expected.tensors().items():
        # float32 roundings, on tensors of all sizes; another draw changes them by a tenth and more
        error = (actual.tensors()[name] - t).norm() / t.norm()
        assert error < 1e-4, f"{name}: {error:.3g}"
    with recorded_ops() as calls:
        run(ours.eval(), inputs)
    assert calls["attention"] == 2


def one_attention(device):
    """A patched attention module, and three queries and seven keys that its projections might have made."""
    model = tiny("llama")
    patch(model)
    qkv = [torch.randn(2, heads, rows, 16) for heads, rows in ((4, 3), (2, 7), (2, 7))]
    return model.model.layers[0].self_attn, [t.to(device).requires_grad_() for t in qkv]


def test_a_learned_mask_is_left_to_stock(device):
    """A patched model gives the mask the gradient that it had before."""
    module, qkv = one_attention(device)
    mask = torch.randn(1, 4, 3, 7).to(device).requires_grad_()
    grads = []
    for forward in (attention_forward, sdpa_attention_forward):
        with recorded_ops() as calls:
            o, _ = forward(module, *qkv, mask)
        assert not calls
        grads.append(torch.autograd.grad(o.square().sum(), [*qkv, mask]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert grads[0][-1].abs().max() > 0


def test_a_window_holds_where_a_caller_leaves_the_mask_out(device):
    """Torch's attention would drop it; those of transformers that take a window from the argument do not."""
    module, qkv = one_attention(device)
    o, _ = attention_forward(module, *qkv, None, sliding_window=2)
    i, j = torch.arange(3)[:, None], torch.arange(7)
    mask = ((j <= i) & (i - j < 2))[None, None]
    expected, _ = sdpa_attention_forward(module, *qkv, mask.to(device))
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)  # float32 roundings of values around 1


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(2, 1, 3, 6, dtype=torch.bool), ValueError, "'mask' is a tensor of shape .2, 1, 3, 6"),
        (torch.ones(2, 1, 3, 8), ValueError, "'mask' is a tensor of shape .2, 1, 3, 8"),
        (torch.ones(2, 3, 7, dtype=torch.bool), ValueError, "'mask' is a tensor of shape .2, 3, 7"),
        (torch.ones(2, 1, 3, 7, dtype=torch.int64), TypeError, "'mask' is of dtype torch.int64; accepted: bool"),
    ],
    ids=["narrower than the keys", "wider", "of rank 3", "of integers"],
)
def test_masks_that_do_not_fit_are_refused(mask, error, message, device):
    module, qkv = one_attention(device)
    with pytest.raises(error, match=f"torch_metalk.attention.*{message}"):
        attention_forward(module, *qkv, mask.to(device))


def autocast_dtypes(model):
    """The dtype of every module's output under autocast, but for the parts that operators replace."""
    dtypes = {}

    def note(name):
        return lambda module, args, out: dtypes.__setitem__(name, getattr(out, "dtype", None))

    # Hooks on the parts of a LoRA layer would send it to stock.
    hooks = [
        module.register_forward_hook(note(name))
        for name, module in model.named_modules()
        if not any(part in name for part in ("lora_", "base_layer", "act"))
    ]
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**batch())
    for hook in hooks:
        hook.remove()
    rotated = out.past_key_values.layers[0].keys.dtype
    return dtypes | {"rotated keys": rotated, "logits": out.logits.dtype, "loss": out.loss.dtype}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "olmo2"])
def test_autocast_gives_the_dtypes_of_stock(family, lora):
    """Norm and rotation stay float32 islands where stock has them; checked after every module."""
    stock = tiny(family)
    if lora:
        stock = with_lora(stock)
    ours = patched_copy(stock)
    with recorded_ops() as ops:
        seen = [autocast_dtypes(model) for model in (stock, ours)]
    assert ops["rope"] == ops["attention"] == 2
    assert seen[0] == seen[1]
    assert torch.bfloat16 in seen[1].values() and seen[1]["loss"] == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        runs = [run(model) for model in (ours, stock)]
    # bf16 through two layers: the errors themselves are chaotic, a factor of 2 between them is not.
    assert_as_accurate(*runs, run(exact_copy(stock)))


def test_layers_that_record_outputs_equal_stock():
    stock = tiny("llama", attn_implementation="eager").eval()
    inputs = {name: batch()[name] for name in ("input_ids", "attention_mask")}
    expected = stock(**inputs, output_attentions=True, output_hidden_states=True)
    actual = patched_copy(stock)(**inputs, output_attentions=True, output_hidden_states=True)
    assert len(actual.attentions) == 2 and len(actual.hidden_states) == 3
    for kind in ("attentions", "hidden_states"):
        for a, b in zip(actual[kind], expected[kind], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)  # float32 roundings


def test_half_precision_after_patching():
    """`to` after `patch`: nothing of the dtype is remembered."""
    model = tiny("qwen3")
    patch(model)
    ours, stock = model.to(torch.bfloat16), tiny("qwen3", torch.bfloat16)
    assert_equals_stock(ours, stock)


def test_config_of_no_rope_layers_means_use():
    """In SmolLM3 1 stands for a layer with rotation."""
    assert tiny_config("smollm3").no_rope_layers == [1, 0]
    model = tiny("smollm3", no_rope_layers=[1, 1])
    patch(model)
    with recorded_ops() as ops:
        run(model)
    assert ops["rope"] == 2
