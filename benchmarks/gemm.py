"""What matrix products do, counted on the device that the tests have on Linux: single products, and a LoRA step.

python -m benchmarks.gemm products    # threadgroups, traffic and FLOPs of some shapes
python -m benchmarks.gemm block       # RMSNorm and SwiGLU MLP, 512 tokens, 2048 x 5632, rank 32

Counts hold on every device that runs these kernels. The block is that of KRNL's report: adapters on gate and up, frozen
weights, gradient to the input; its products take 72.4 GFLOP.
"""

from __future__ import annotations

import argparse
import importlib

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from tests.conftest import count
from torch_metalk import ops
from torch_metalk.benchmark import step_cost

console = Console(width=120)

SHAPES = [
    # m, n, k, transpose_b: LoRA's projections, and the products of the block.
    (512, 32, 5632, False),
    (512, 32, 2048, True),
    (512, 2048, 32, False),
    (512, 5632, 2048, True),
    (512, 2048, 5632, False),
    (2048, 2048, 2048, False),
    (2048, 2048, 2048, True),
]


def products(dtype: torch.dtype) -> None:
    native = importlib.import_module("torch_metalk._C")
    table = Table("product", "tile", "chunks", "dispatches", "threadgroups", "unique bytes", "bytes read", "FLOPs")
    for m, n, k, transpose_b in SHAPES:
        a, b = torch.randn(m, k).to("mps", dtype), torch.randn(*((n, k) if transpose_b else (k, n))).to("mps", dtype)
        with count() as c:
            d = ops.matmul(a, b, transpose_b=transpose_b)
        side, chunks, _ = native.plan_gemm(m, n, k, 1, transpose_b, False)
        product = next(iter(c.kernels.values()))
        needed = a.nbytes + b.nbytes + d.nbytes
        tiles = -(-m // side) * -(-n // side)
        predicted = tiles * 2 * side * k * dtype.itemsize
        table.add_row(
            f"[{m}, {k}] x [{k}, {n}] {'nt' if transpose_b else 'nn'}",
            f"{side} x {side}",
            str(chunks),
            str(c.total.dispatches),
            str(product.threadgroups),
            f"{c.total.device_unique_bytes / needed:.3f}",
            f"{product.device_read / predicted:.3f}",
            f"{(c.total.matrix_flops + c.total.scalar_flops) / (2 * m * n * k):.3f}",
        )
    console.print(table)
    console.print(
        f"{dtype}. unique bytes: against reading the operands and writing the result once; bytes read: against what\n"
        "the tile predicts, M N / side^2 tiles of 2 side K numbers; FLOPs: against 2 M N K.",
        soft_wrap=True,
    )


class Block(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x))), adapters of rank 32 on gate and up."""

    def __init__(self, dtype: torch.dtype, width: int = 2048, hidden: int = 5632, rank: int = 32):
        super().__init__()
        torch.manual_seed(0)

        def frozen(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape).div_(shape[-1] ** 0.5).to(dtype), requires_grad=False)

        self.norm = nn.Parameter(torch.ones(width, dtype=dtype), requires_grad=False)
        self.weights = nn.ParameterList([frozen(hidden, width), frozen(hidden, width), frozen(width, hidden)])
        self.lora_a = nn.ParameterList([nn.Parameter(torch.randn(rank, width) / width**0.5) for _ in range(2)])
        self.lora_b = nn.ParameterList([nn.Parameter(torch.randn(hidden, rank) / rank**0.5) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = ops.rms_norm(x, self.norm)
        adapters = [*self.lora_a, None], [*self.lora_b, None]
        return ops.lora_mlp(h, list(self.weights), None, *adapters, [2.0, 2.0, 0.0], own_matmul=True)


class StockBlock(Block):
    """The same as transformers and PEFT write it."""

    def project(self, h: Tensor, i: int) -> Tensor:
        y = nn.functional.linear(h, self.weights[i])
        low = nn.functional.linear(nn.functional.linear(h.to(torch.float32), self.lora_a[i]), self.lora_b[i])
        return (y + low * 2.0).to(y.dtype)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = self.norm * wide.to(x.dtype)
        gated = nn.functional.silu(self.project(h, 0)) * self.project(h, 1)
        return nn.functional.linear(gated, self.weights[2])


def block(dtype: torch.dtype, tokens: int = 512) -> None:
    x = torch.randn(tokens, 2048, generator=torch.Generator().manual_seed(1)).to("mps", dtype).requires_grad_()
    dy = torch.randn(tokens, 2048, generator=torch.Generator().manual_seed(2)).to("mps", dtype)
    stock, ours = (cls(dtype).to("mps") for cls in (StockBlock, Block))
    cost = step_cost(stock, lambda: (stock(x) * dy).sum())
    # The loss is not a part of the block: one product and one sum, forward and backward.
    around = step_cost(stock, lambda: (x * dy).sum())
    with count() as c:
        ours(x).backward(dy)
    width, hidden, rank = 2048, 5632, 32
    # Forward and dX of three frozen products; of two adapters h, its second product, dh, dX, dA, dB.
    flops = 2 * tokens * (6 * width * hidden + 2 * (3 * width * rank + 3 * rank * hidden))
    table = Table("LoRA step of one block", "stock PEFT", "fused", "ratio", title=f"{tokens} tokens, {dtype}")
    calls = cost.calls - around.calls
    table.add_row(
        "operator calls / dispatches", str(calls), str(c.total.dispatches), f"{c.total.dispatches / calls:.2f}"
    )
    gflop = (c.total.matrix_flops + c.total.scalar_flops) / 1e9
    table.add_row(
        "GFLOP, products alone / all counted", f"{flops / 1e9:.1f}", f"{gflop:.1f}", f"{gflop / (flops / 1e9):.3f}"
    )
    console.print(table)
    print(c)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["products", "block"])
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    {"products": products, "block": block}[args.what](getattr(torch, args.dtype))


if __name__ == "__main__":
    main()
