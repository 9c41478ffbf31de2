"""Times virtual_mps on this machine against its targets, which are for two cores: `python -m benchmarks.virtual_mps`.

Each time is the smallest of several, the way to see the code and not the machine's other load; the training steps are
interleaved, and the ratio is that of the medians.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

# This file's folder stands first when it runs as a script, and would be searched for the package of the same name.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"

GEMM = (
    HEADER
    + """
// Four simdgroups a threadgroup; each computes a tile of 32x32 with simdgroup_load, multiply and store alone.
kernel void gemm(const device half* A [[buffer(0)]], const device half* B [[buffer(1)]], device float* D [[buffer(2)]],
                 constant uint3& mnk [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
                 uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  uint row = group.y * 32, column = (group.x * 4 + simdgroup) * 32;
  simdgroup_float8x8 sum[4][4];
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint k = 0; k < mnk.z; k += 8) {
    simdgroup_half8x8 a[4], b[4];
    for (int i = 0; i < 4; i++) simdgroup_load(a[i], A + (row + i * 8) * mnk.z + k, mnk.z);
    for (int j = 0; j < 4; j++) simdgroup_load(b[j], B + k * mnk.y + column + j * 8, mnk.y);
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 4; j++) simdgroup_multiply_accumulate(sum[i][j], a[i], b[j], sum[i][j]);
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) simdgroup_store(sum[i][j], D + (row + i * 8) * mnk.y + column + j * 8, mnk.y);
}
"""
)

RMS_NORM = (
    HEADER
    + """
// One row a threadgroup, four elements a thread.
kernel void rms_norm(const device half4* x [[buffer(0)]], const device half4* w [[buffer(1)]],
                     device half4* y [[buffer(2)]], constant float& eps [[buffer(3)]],
                     constant uint& size [[buffer(4)]], uint row [[threadgroup_position_in_grid]],
                     uint i [[thread_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[32];
  float4 v = float4(x[row * (size / 4) + i]);
  float sum = simd_sum(dot(v, v));
  if (lane == 0) partial[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum = simd_sum(lane < simdgroups ? partial[lane] : 0.0f);
  y[row * (size / 4) + i] = w[i] * half4(v * rsqrt(sum / size + eps));
}
"""
)

POINTS = (
    HEADER
    + """
kernel void barriers(device float* y [[buffer(0)]], constant uint& n [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {
  for (uint k = 0; k < n; k++) threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = 1;
}
kernel void simdgroup_functions(device float* y [[buffer(0)]], constant uint& n [[buffer(1)]],
                                uint i [[thread_position_in_grid]]) {
  for (uint k = 0; k < n; k++) simdgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = 1;
}
"""
)

ELEMENTWISE = (
    HEADER
    + """
kernel void affine(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  y[i] = x[i] * 0.5f + 1.0f;
}
"""
)


def best(action: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def show(what: str, value: float, unit: str, target: float, at_least: bool = False) -> None:
    met = value >= target if at_least else value <= target
    sign = ">=" if at_least else "<="
    print(f"{what:52} {value:9.2f} {unit:9} target {sign} {target:g}{'' if met else '  MISSED'}", flush=True)


def gemm(library, repeats: int) -> None:
    m = n = k = 512
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((512, 512)).astype(np.float16) for _ in range(2))
    d = np.zeros((m, n), np.float32)
    run = library(GEMM).kernel("gemm")
    mnk = np.array([m, n, k, 0], np.uint32)
    seconds = best(lambda: run(a, b, d, mnk, threadgroups=(n // 128, m // 32), threads_per_threadgroup=(128,)), repeats)
    np.testing.assert_allclose(d, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-3, atol=1e-3)
    show("half GEMM 512^3 with simdgroup_load", 2 * m * n * k / seconds / 1e9, "GFLOP/s", 12, at_least=True)


def rms_norm(library, repeats: int) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((512, 2048)).astype(np.float16), rng.standard_normal(2048).astype(np.float16)
    y = np.zeros_like(x)
    run = library(RMS_NORM).kernel("rms_norm")
    arguments = (x, w, y, np.float32(1e-5), np.uint32(2048))
    seconds = best(lambda: run(*arguments, threadgroups=(512,), threads_per_threadgroup=(512,)), repeats)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=3e-3, atol=1e-6)
    show("RMSNorm 512x2048 half", seconds * 1e3, "ms", 25)


def convergence(library, repeats: int) -> None:
    groups, points = 16, np.uint32(50)
    for name, what in (("simdgroup_functions", "simdgroup function"), ("barriers", "threadgroup barrier")):
        run = library(POINTS).kernel(name)
        for size in (32, 256, 1024):
            y = np.zeros(groups * size, np.float32)

            def launch(run=run, y=y, size=size):
                run(y, points, threadgroups=(groups,), threads_per_threadgroup=(size,))

            seconds = best(launch, repeats)
            show(f"{what}, {size} threads", seconds / (groups * size * int(points)) * 1e9, "ns a lane", 20)


def elementwise(library, repeats: int) -> None:
    x = np.ones(1 << 20, np.float32)
    y = np.zeros_like(x)
    run = library(ELEMENTWISE).kernel("affine")
    seconds = best(lambda: run(x, y, threads=(1 << 20,), threads_per_threadgroup=(256,)), repeats)
    np.testing.assert_array_equal(y, 1.5)
    show("elementwise kernel, 1 M threads", seconds * 1e3, "ms", 6)


LOAD = """
import sys, time
from virtual_mps.executor import Library
Library("")
source = sys.stdin.read()
start = time.perf_counter()
Library(source).kernel(sys.argv[1])
print(time.perf_counter() - start)
"""


def compilation(library) -> None:
    for name, source in (("rms_norm", RMS_NORM), ("gemm", GEMM)):
        start = time.perf_counter()
        library(source).kernel(name)
        show(f"{name}: read and compile", time.perf_counter() - start, "s", 2)
        # In a process of its own, where the loader has not seen it either.
        command = [sys.executable, "-c", LOAD, name]
        result = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
        show(f"{name}: load from the cache", float(result.stdout) * 1e3, "ms", 20)


def from_python(repeats: int) -> None:
    import torch

    kernel = torch.mps.compile_shader(ELEMENTWISE).affine
    x, y = torch.ones(32, device="mps"), torch.zeros(32, device="mps")
    calls = 1000

    def many() -> None:
        for _ in range(calls):
            kernel(x, y)
        torch.mps.synchronize()

    show("trivial kernel from Python", best(many, repeats) / calls * 1e6, "us", 5)


def observed(rounds: int) -> None:
    """RMSNorm of the extension, forward and backward, [512, 2048], observed and plain by turns."""
    import torch

    import virtual_mps
    from torch_metalk import ops

    observers = {"checked": lambda: virtual_mps.mode(check=True), "counted": virtual_mps.count}
    for dtype in (torch.float16, torch.float32):
        x, weight, dy = torch.randn(512, 2048), torch.randn(2048), torch.randn(512, 2048)
        x, weight, dy = (t.to("mps", dtype).requires_grad_() for t in (x, weight, dy))

        def step(x=x, weight=weight, dy=dy) -> None:
            torch.autograd.grad(ops.rms_norm(x, weight), (x, weight), dy)

        ratios: dict[str, list[float]] = {name: [] for name in observers}
        for round_index in range(rounds + 1):
            for name, observer in observers.items():
                plain = best(step, 1)
                with observer():
                    ratio = best(step, 1) / plain
                if round_index:  # the first one compiles
                    ratios[name].append(ratio)
        for name, values in ratios.items():
            show(f"{name} RMSNorm forward and backward, {dtype}", statistics.median(values), "times", 20)


def training_step(rounds: int) -> None:
    """LoRA on all linear layers of SmolLM2-135M, stock operators, 128 tokens; weights do not matter and are random."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )

    def stepper(device: str) -> Callable[[], None]:
        lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(LlamaForCausalLM(config), lora).to(device).train()
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        ids = torch.randint(0, config.vocab_size, (1, 128)).to(device)

        def step() -> None:
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            loss.item()

        return step

    steps = {device: stepper(device) for device in ("cpu", "mps")}
    times: dict[str, list[float]] = {device: [] for device in steps}
    for round_index in range(rounds + 1):
        for device, step in steps.items():
            seconds = best(step, 1)
            if round_index:  # the first one warms up
                times[device].append(seconds)
    cpu, mps = (statistics.median(times[device]) for device in ("cpu", "mps"))
    what = f"SmolLM2 LoRA step, {mps:.2f} s against the CPU's {cpu:.2f} s"
    show(what, mps / cpu, "times", 1.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved training steps")
    options = parser.parse_args()
    import virtual_mps

    virtual_mps.activate()  # builds the native half, if need be in the cache of every day
    with tempfile.TemporaryDirectory() as cache:  # an empty cache, so that compilation is measured too
        os.environ["VIRTUAL_MPS_CACHE"] = cache
        from virtual_mps.executor import Library

        Library(HEADER)  # builds the executor
        compilation(Library)
        for benchmark in (gemm, rms_norm, convergence, elementwise):
            benchmark(Library, options.repeats)
        from_python(options.repeats)
        observed(options.repeats)
    training_step(options.rounds)


if __name__ == "__main__":
    main()
