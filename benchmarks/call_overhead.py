"""Host cost of a call: operators on 8 elements, forward, and forward with backward, in microseconds.

`python benchmarks/call_overhead.py [--device mps|cpu] [--rounds N]`. Everything takes turns within a round. A line is
the median of the rounds, less that of a call of the dispatcher that does nothing (`aten::alias`). The line `nothing`
is such a call on a tensor with a gradient: its backward is what PyTorch's engine alone costs, which runs on a thread of
its own for a device. The stock sequences are printed to compare, with their own backward.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from torch_metalk import ops  # noqa: E402

CALLS = 50  # of one measurement; its time is divided by that


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def stock_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = x.to(torch.float32)
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def sequences(device: torch.device) -> dict[str, tuple[Callable, Callable, tuple[torch.Tensor, ...]]]:
    """Name -> the operator, the stock sequence, the tensors that get a gradient."""

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, requires_grad=True)

    cos, sin = (torch.randn(1, 1, 8, device=device) for _ in range(2))
    mask = torch.ones(8, dtype=torch.bool, device=device)
    return {
        "nothing": (torch.ops.aten.alias.default, torch.ops.aten.alias.default, (made(1, 8),)),
        "rms_norm": (ops.rms_norm, stock_rms_norm, (made(1, 8), made(8))),
        "swiglu": (ops.swiglu, lambda gate, up: F.silu(gate) * up, (made(1, 8), made(1, 8))),
        "geglu": (ops.geglu, lambda gate, up: F.gelu(gate, approximate="tanh") * up, (made(1, 8), made(1, 8))),
        "rope": (
            lambda x: ops.rope(x, cos, sin),
            lambda x: x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1),
            (made(1, 1, 1, 8),),
        ),
        "rope_positions": (
            lambda x: ops.rope_positions(x, 3, 10000.0, 8),
            lambda x: x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1),
            (made(1, 1, 1, 8),),
        ),
        "softmax": (
            lambda x: ops.softmax(x, mask=mask, scale=0.5),
            lambda x: torch.softmax((x * 0.5).masked_fill(~mask, -torch.inf), -1),
            (made(1, 8),),
        ),
    }


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)

    plain = torch.randn(8, device=device)
    calls: dict[str, Callable[[], object]] = {"alias": lambda: torch.ops.aten.alias.default(plain)}
    for name, (ours, stock, tensors) in sequences(device).items():
        for label, function in (("", ours), (" (stock)", stock)):
            incoming = torch.ones_like(function(*tensors))
            calls[f"{name}{label}"] = lambda function=function, tensors=tensors: function(*tensors)
            calls[f"{name}{label} + backward"] = lambda function=function, tensors=tensors, incoming=incoming: (
                torch.autograd.grad(function(*tensors), tensors, incoming)
            )
    for call in calls.values():
        microseconds(call)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, call in calls.items():
            times[name].append(microseconds(call))

    nothing = statistics.median(times["alias"])
    print(f"torch {torch.__version__}, {device.type}, {os.cpu_count()} cores, {args.rounds} rounds of {CALLS} calls")
    print(f"a call that does nothing: {nothing:.1f} µs\n")
    print(f"{'µs above it':18}{'forward':>9}{'+ backward':>12}{'stock forward':>16}{'+ backward':>12}")
    for name in sequences(device):
        columns = (name, f"{name} + backward", f"{name} (stock)", f"{name} (stock) + backward")
        values = [statistics.median(times[column]) - nothing for column in columns]
        print(f"{name:18}{values[0]:9.1f}{values[1]:12.1f}{values[2]:16.1f}{values[3]:12.1f}")


if __name__ == "__main__":
    main()
