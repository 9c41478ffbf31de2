"""Tiny random models of every family with their LoRA adapters, and how a patched one is compared with a stock one."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask

from torch_metalk import patch

PAD = 0

_COMMON = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Ten times the usual: attention is far from uniform, and a wrong scale, mask or rotation is seen in the logits.
    "initializer_range": 0.2,
}
_ALTERNATING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

#: Family -> model type and what its config adds.
FAMILIES: dict[str, dict] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    # Scores are about 3: a cap of 2 bends them.
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 24} | _ALTERNATING,
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 24} | _ALTERNATING,
    "phi3": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
}
#: Further configurations that a patched class has to get right.
VARIANTS: dict[str, dict] = {
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, one kv head": {"model_type": "llama", "num_key_value_heads": 1},
    "llama, tied embeddings": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, exact gelu": {"model_type": "llama", "hidden_act": "gelu"},
    "llama, tanh gelu": {"model_type": "llama", "hidden_act": "gelu_pytorch_tanh"},
    "llama, relu": {"model_type": "llama", "hidden_act": "relu"},
    # yarn folds an attention scaling into cos and sin, which are no rotation then.
    "llama, yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 8,
            "attention_factor": 1.5,
        },
    },
    "mistral, wide heads": {"model_type": "mistral", "head_dim": 24, "sliding_window": None},
    "qwen2, sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "phi3, partial rotation": {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "gemma3, bidirectional": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "use_bidirectional_attention": True,
    }
    | _ALTERNATING,
}

ALL_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny_config(name: str, **overrides):
    settings = _COMMON | (FAMILIES | VARIANTS).get(name, {}) | overrides
    return AutoConfig.for_model(settings.pop("model_type", name), **settings)


def build(config, dtype: torch.dtype = torch.float32, **options) -> PreTrainedModel:
    """A model for a config: the same weights every time, norms and biases away from 1 and 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, **options)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model.to("cpu", dtype)


def tiny(name: str, dtype: torch.dtype = torch.float32, attn_implementation: str | None = None, **overrides):
    """A model of a family, of a variant, or of any other model type that transformers knows."""
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    return build(tiny_config(name, **overrides), dtype, **options)


def lora_config(**settings) -> LoraConfig:
    return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | settings)


def add_noise(model: nn.Module) -> None:
    """Away from lora_B = 0, where most faults hide."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter))


def with_lora(model: nn.Module, **settings) -> PeftModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = get_peft_model(model, lora_config(**settings))
    add_noise(model)
    return model


def patched_copy(model: nn.Module, ops=None) -> nn.Module:
    copied = copy.deepcopy(model)
    patch(copied, ops)
    return copied


def batch(padded: bool = True) -> dict[str, Tensor]:
    """Three rows of 11 tokens, padded on the left by 0, 3 and 8; labels to match."""
    ids = torch.randint(3, 300, (3, 11), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([11, 8, 3] if padded else [11, 11, 11])
    mask = (torch.arange(11) >= 11 - lengths[:, None]).long()
    ids = ids.masked_fill(mask == 0, PAD)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@dataclass
class Run:
    """Logits, and the gradient of every parameter that has one."""

    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        return {"logits": self.logits, "loss": self.loss} | self.grads


def run(model: nn.Module, inputs: dict[str, Tensor] | None = None, **options) -> Run:
    """One step without an optimizer, from the same seed every time.

    The logits are those of rows that hold tokens: a row that may attend to nothing is zero with masks of True and
    False, and the mean of all values in transformers' eager attention. No gradient comes from there.
    """
    inputs = batch() if inputs is None else inputs
    model.zero_grad(set_to_none=True)
    torch.manual_seed(4)  # for dropout
    out = model(**inputs, use_cache=False, **options)
    out.loss.backward()
    grads = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    return Run(out.logits.detach()[inputs["attention_mask"].bool()], out.loss.detach(), grads)


def generate(model: PreTrainedModel | PeftModel, inputs: dict[str, Tensor], tokens: int = 12, **options) -> Tensor:
    """The prompts and their greedy continuation, on the CPU."""
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=PAD, eos_token_id=None)
    given = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    return model.eval().generate(**given, generation_config=config, **options).cpu()


def _exact_attention(module, query, key, value, mask, scaling, softcap=None, **kwargs):
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * scaling
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool)
        mask = mask.tril() if module.is_causal else mask
    attends = mask.any(-1, keepdim=True)
    p = scores.masked_fill(~mask & attends, -torch.inf).softmax(-1) * attends
    return (p @ value.repeat_interleave(groups, 1)).transpose(1, 2), None


AttentionInterface.register("exact", _exact_attention)
AttentionMaskInterface.register("exact", sdpa_mask)


def exact_copy(stock: nn.Module) -> nn.Module:
    """The model in float64, with attention written out: the eager one of transformers is NaN there under padding."""
    model = copy.deepcopy(stock).double()
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    inner.set_attn_implementation("exact")
    return model


def assert_as_accurate(ours: Run, stock: Run, exact: Run, factor: float = 2.0, but: tuple[str, ...] = ()) -> None:
    """Every tensor of ours is as near to float64 as that of stock.

    Errors are measured in the Euclidean norm, since a maximum over a few hundred roundings is left to chance. They add
    up through two layers in another order than in stock, hence the factor. Beside it stands one rounding of the dtype
    they come from, for where stock happens to be exact; two for the loss, which the reference makes in float32 as well.
    `but` names tensors to leave out.
    """
    assert ours.grads.keys() == stock.grads.keys() == exact.grads.keys()
    for name, expected in exact.tensors().items():
        if name in but:
            continue
        a, b = ours.tensors()[name], stock.tensors()[name]
        assert a.dtype == b.dtype and a.shape == b.shape, name
        error, allowed = ((t.double() - expected).norm().item() for t in (a, b))
        eps = 2 * torch.finfo(ours.logits.dtype).eps if name == "loss" else torch.finfo(a.dtype).eps
        limit = factor * allowed + eps * expected.norm().item()
        assert error <= limit, f"{name}: error {error:.3g}, stock has {allowed:.3g}"


def assert_equals_stock(ours: nn.Module, stock: nn.Module, inputs: dict[str, Tensor] | None = None) -> None:
    assert_as_accurate(run(ours, inputs), run(stock, inputs), run(exact_copy(stock), inputs))


def assert_identical(ours: Run, stock: Run) -> None:
    """Bit for bit, as two runs of the same code are."""
    assert ours.grads.keys() == stock.grads.keys()
    for name, expected in stock.tensors().items():
        assert torch.equal(ours.tensors()[name], expected), name


class Calls(Counter[str]):
    """Calls by operator, and how many LoRA layers were calculated by them, alone or with others in one operator."""

    lora_layers: int = 0


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = Calls()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "torch_metalk":
            name = func.name().removeprefix("torch_metalk::")
            self.calls[name] += 1
            if name == "lora_linear":
                self.calls.lora_layers += 1
            elif name in ("lora_qkv", "lora_mlp"):
                self.calls.lora_layers += sum(a is not None for a in args[3])
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded_ops() -> Iterator[Calls]:
    """Counts the operators of this package that are called, forward and backward."""
    with _Recorder() as recorder:
        yield recorder.calls


def classes(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}
