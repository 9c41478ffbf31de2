"""What attention needs, counted on the device that the tests have on Linux: memory, products, and reads of the cache.

python -m benchmarks.attention memory    # forward and backward, [1, 9/3 heads, 4096, 64], against stock's math path
python -m benchmarks.attention flops     # of a causal forward, against the full square
python -m benchmarks.attention decode    # how often keys and values are read, contiguous and paged

Counts hold on every device that runs these kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.conftest import count
from torch_metalk import ops
from torch_metalk.benchmark import peak_memory

console = Console(width=120)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to("mps", dtype)


def training_memory(attend: Callable[..., Tensor], length: int, dtype: torch.dtype) -> int:
    """Peak bytes of causal attention with 9 heads and 3 of keys, and of its gradients."""
    q, k, v = (random(1, heads, length, 64, dtype=dtype).requires_grad_() for heads in (9, 3, 3))
    do = random(1, 9, length, 64, dtype=dtype)
    return peak_memory(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), do))


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.attention(q, k, v, is_causal=True, algorithm="tiled")


def materialised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.attention(q, k, v, is_causal=True, algorithm="materialised")


def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What MPS runs in training, as its fused kernels have no gradient: shared heads are expanded, scores are kept."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def memory(length: int) -> None:
    columns = ("dtype", "stock's math path", "tiled", "ratio", "materialised", "ratio")
    table = Table(*columns, title=f"Peak memory, [1, 9/3 heads, {length}, 64]")
    for dtype in (torch.float16, torch.float32):
        theirs, *ours = (training_memory(attend, length, dtype) for attend in (stock, tiled, materialised))
        cells = (text for bytes_ in ours for text in (f"{bytes_ / 1e6:,.1f} MB", f"{bytes_ / theirs:.4f}"))
        table.add_row(str(dtype), f"{theirs / 1e6:,.0f} MB", *cells)
    console.print(table)


def forward_flops(length: int, dtype: torch.dtype) -> float:
    """Matrix FLOPs of a causal forward of one head of 64, over those of all scores and all their values."""
    q, k, v = (random(1, 1, length, 64, dtype=dtype) for _ in range(3))
    with count() as c:
        tiled(q, k, v)
    return c.total.matrix_flops / (4 * length * length * 64)


def flops() -> None:
    table = Table("dtype", "L", "of the square", title="Matrix FLOPs of the causal forward")
    for dtype in (torch.float16, torch.float32):
        for length in (256, 2048):
            table.add_row(str(dtype), str(length), f"{forward_flops(length, dtype):.3f}")
    console.print(table)


#: Query heads of a key head, and queries of each.
ROWS = ((1, 1), (4, 1), (4, 2), (4, 8), (8, 8))
PAGE_SIZE = 16


def cache_reads(group: int, queries: int, context: int, paged: bool, dtype: torch.dtype) -> float:
    """Bytes of keys and values that decoding reads, over those that there are: 2 key heads of 64."""
    q = random(1, 2 * group, queries, 64, dtype=dtype)
    if paged:
        pages = -(-context // PAGE_SIZE)
        k, v = (random(pages, PAGE_SIZE, 2, 64, dtype=dtype) for _ in range(2))
        table = torch.randperm(pages).to("mps", torch.int32)[None]
        call = ops.paged_attention, (q, k, v, table, torch.tensor([context], dtype=torch.int32, device="mps"))
    else:
        call = ops.decode_attention, (q, *(random(1, 2, context, 64, dtype=dtype) for _ in range(2)))
    with count() as c:
        call[0](*call[1])
    read = sum(b.read for kernel in c.kernels.values() for b in kernel.buffers if b.name in ("k", "v"))
    return read / (2 * 2 * context * 64 * dtype.itemsize)


def decode() -> None:
    table = Table("group x queries", "short", "long", "paged, short", "paged, long", title="Reads of keys and values")
    for group, queries in ROWS:
        reads = [
            cache_reads(group, queries, context, paged, torch.float16)
            for paged in (False, True)
            for context in (200, 3000)
        ]
        table.add_row(f"{group} x {queries} = {group * queries}", *(f"{times:.3f}" for times in reads))
    console.print(table)
    console.print("float16, heads of 64, contexts of 200 and 3,000 keys, pages of 16; 1 is each key and value once.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "flops", "decode"])
    parser.add_argument("--length", type=int, default=4096, help="of `memory`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "memory":
        memory(args.length)
    elif args.what == "flops":
        flops()
    else:
        decode()


if __name__ == "__main__":
    main()
