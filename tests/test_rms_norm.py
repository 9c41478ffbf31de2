from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_metalk
from tests.conftest import WITH_DEVICE
from tests.operators import DTYPES, Case, OpTests, _opchecks, assert_accurate, assert_rounding_only, on_device, run
from torch_metalk import ops


def stock(x, weight=None, *, eps=1e-6, weight_offset=0.0, rounding="before_weight"):
    """As transformers writes it: Llama, Gemma, Olmo 2, or without weight."""
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return h.to(x.dtype)
    if rounding == "before_weight":
        return weight * h.to(x.dtype)
    return (h * (weight_offset + weight.to(wide))).to(x.dtype)


def make(*shape, weight=True, scale=1.0):
    def tensors():
        made = {"x": scale * torch.randn(shape)}
        return made | ({"weight": torch.randn(shape[-1:])} if weight else {})

    return tensors


def case(name, make, keep_dtype=(), **kwargs):
    ours, reference = functools.partial(ops.rms_norm, **kwargs), functools.partial(stock, **kwargs)
    saved = ("x", "<row>") + (("weight",) if "weight" in make() else ())
    return Case(
        name, make, ours, reference, saved, keep_dtype=keep_dtype, rows=lambda t: t["x"].numel() // t["x"].shape[-1]
    )


class TestRMSNorm(OpTests):
    op = "rms_norm"
    cases = (
        case("llama", make(3, 5, 64)),
        case("gemma", make(2, 33), weight_offset=1.0, rounding="after_weight"),
        case("olmo2", make(4, 3, 40), rounding="after_weight"),
        case("no weight", make(7, 31, weight=False)),
        case("fp32 weight", make(3, 64), keep_dtype=("weight",)),
        case("one column", make(5, 1)),
        case("one row", make(130)),
        case("heads", make(2, 3, 4, 16), eps=1e-5),
    )


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8), (3, 4, 0), (0,)], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_empty(shape, weighted, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(shape[-1:], device=device, requires_grad=True) if weighted else None
    y = ops.rms_norm(x, weight)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape
    if weighted:
        assert torch.equal(weight.grad.cpu(), torch.zeros(shape[-1:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_precision_statistics_are_float32(dtype, device):
    """fp16 squares of 1000 overflow, and an eps of 1e-6 beside a mean square of 2e-4 vanishes in bf16."""
    rows = [torch.full((64,), 1000.0), torch.full((64,), 2e-4**0.5), torch.tensor([-1000.0, 1000.0] * 32)]
    x = torch.stack(rows).to(dtype)
    weight = torch.ones(64, dtype=dtype)
    exact = stock(x.double(), weight.double())
    assert_accurate(ops.rms_norm(x.to(device), weight.to(device)), stock(x, weight), exact, "y")


# One simdgroup, several of them, the longest row of a vector a thread, rows of two, and rows that are walked through in
# a loop, each with and without a tail behind the vectors of 4; 37 rows are more than one threadgroup adds up for the
# weight's gradient.
ROWS = [(37, 200), (37, 203), (3, 4096), (3, 4097), (37, 4100), (3, 8192), (37, 8196), (2, 9001)]


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows(shape, dtype, device):
    tensors = {n: t.to(dtype) for n, t in make(*shape)().items()}
    incoming = [torch.randn(shape).to(dtype)]
    ours = run(ops.rms_norm, {n: t.to(device) for n, t in tensors.items()}, list(tensors), incoming)
    plain = run(stock, tensors, list(tensors), incoming)
    exact = run(stock, {n: t.double() for n, t in tensors.items()}, list(tensors), incoming)
    for what, *triple in zip(
        ("y", "dx", "dweight"), *([*result, *grads] for result, grads in (ours, plain, exact)), strict=True
    ):
        assert_accurate(*triple, what)


@pytest.mark.parametrize("shape", [(37, 203), (3, 4096), (17, 4100), (2, 4203), (26, 8196), (2, 8197)], ids=str)
def test_long_rows_in_checked_mode(shape, checked_device):
    test_long_rows(shape, torch.float32, checked_device)


def test_also_float32_in_checked_mode(checked_device):
    for shape in ((5, 203), (2, 4100), (2, 8197)):
        test_also_float32(shape, torch.float16, {}, checked_device)


FORMS = [{}, {"weight_offset": 1.0, "rounding": "after_weight"}]


@pytest.mark.parametrize("form", FORMS, ids=["llama", "gemma"])
@pytest.mark.parametrize("shape", [(5, 200), (5, 203), (2, 4100), (2, 8196), (2, 9001), (3, 0), (0, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_also_float32(shape, dtype, form, device):
    """The float32 of the rounded result, from the kernel that the result comes from; no gradient comes from there."""
    tensors = {n: t.to(device, dtype).requires_grad_() for n, t in make(*shape)().items()}
    expected = ops.rms_norm(**tensors, **form)
    y, twin = ops.rms_norm(**tensors, **form, also_float32=True)
    assert torch.equal(y, expected) and twin.dtype == torch.float32 and torch.equal(twin, y.detach().float())
    assert y.requires_grad and not twin.requires_grad and twin.is_contiguous()
    assert (twin.data_ptr() == y.data_ptr()) == (dtype == torch.float32 or not y.numel()), "float32 needs no other one"
    dy = torch.randn(shape, device=device).to(dtype)
    for ours, plain in zip(
        *(torch.autograd.grad(result, list(tensors.values()), dy) for result in (y, expected)), strict=True
    ):
        assert torch.equal(ours, plain)


def test_also_float32_is_an_output_of_the_operator(device):
    x, weight = torch.randn(3, 8, device=device).half().requires_grad_(), torch.ones(8, device=device).half()
    op = torch.ops.torch_metalk.rms_norm
    assert op(x, weight, 1e-6, 0.0, True, False)[2] is None
    y, _, twin = op(x, weight, 1e-6, 0.0, True, True)
    assert torch.equal(twin, y.float())
    for also_float32 in (False, True):
        checks = _opchecks(x.dtype, device)
        torch.library.opcheck(op.default, (x, weight, 1e-6, 0.0, True, also_float32), test_utils=checks)
    compiled = torch.compile(functools.partial(ops.rms_norm, also_float32=True), backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled(x, weight), (y, twin), strict=True))


def test_zero_row_and_zero_eps(device):
    x = torch.zeros(2, 8, device=device)
    assert torch.equal(ops.rms_norm(x, eps=1e-6), x)
    x[0] = 3.0
    y = ops.rms_norm(x, eps=0.0)
    assert_rounding_only(y[0], torch.ones_like(y[0]))
    assert y[1].isnan().all(), "0 / 0, as float64 says"


def test_gemma_weight_is_added_in_float32(device):
    """1 + 0.00390625 has no bfloat16: rounding it first would lose the weight entirely."""
    x = torch.randn(4, 48).bfloat16()
    weight = torch.full((48,), 0.00390625, dtype=torch.bfloat16)
    form = {"eps": 1e-6, "weight_offset": 1.0, "rounding": "after_weight"}
    exact = stock(x.double(), weight.double(), **form).bfloat16()
    lost = stock(x.double(), torch.zeros(48).double(), **form).bfloat16()
    assert not torch.equal(exact, lost)
    assert torch.equal(ops.rms_norm(x.to(device), weight.to(device), **form).cpu(), exact)


def test_float32_weight_over_bfloat16_gives_float32(device):
    x = torch.randn(2, 8, device=device).bfloat16()
    weight = torch.randn(8, device=device)
    assert ops.rms_norm(x, weight).dtype == torch.float32
    assert ops.rms_norm(x, weight, rounding="after_weight").dtype == torch.bfloat16
    # Rounded to x's dtype before the weight, as Llama's norm does: times 1, a float32 result holds bfloat16 values.
    y = ops.rms_norm(x, torch.ones_like(weight))
    assert torch.equal(y, y.bfloat16().float())


def test_norm_residual_norm(device):
    """The incoming gradient serves the residual branch too, so no backward may write into it."""

    def block(x, w1, w2, norm):
        h = x + norm(x, w1)
        return h + norm(h, w2)

    leaves = [torch.randn(4, 16, requires_grad=True, dtype=torch.float64), *torch.randn(2, 16, dtype=torch.float64)]
    leaves = [t.detach().requires_grad_() for t in leaves]
    exact = torch.autograd.grad(block(*leaves, stock).square().sum(), leaves)
    leaves = [t.detach().float().to(device).requires_grad_() for t in leaves]
    ours = torch.autograd.grad(block(*leaves, ops.rms_norm).square().sum(), leaves)
    for a, b in zip(ours, exact, strict=True):
        # A dozen float32 roundings on values up to 100.
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": torch.tensor(1.0)}, ValueError, "'x'"),
        ({"x": torch.ones(2, 3, dtype=torch.int32)}, TypeError, "'x' is of dtype torch.int32"),
        ({"x": torch.ones(2, 3), "weight": torch.ones(4)}, ValueError, r"'weight' is a tensor of shape \(4,\)"),
        ({"x": torch.ones(2, 3), "weight": torch.ones(1, 3)}, ValueError, "'weight'"),
        ({"x": torch.ones(2, 3), "weight": torch.ones(3, dtype=torch.int64)}, TypeError, "'weight'"),
        ({"x": torch.ones(2, 3), "weight": torch.ones(3, device="meta")}, ValueError, "'weight' is on meta"),
        ({"x": torch.ones(2, 3), "eps": -1e-6}, ValueError, "'eps' is -1e-06"),
        ({"x": torch.ones(2, 3), "eps": float("nan")}, ValueError, "'eps'"),
        ({"x": [1.0, 2.0]}, TypeError, "'x' is a list"),
        ({"x": torch.ones(2, 3), "eps": None}, TypeError, "'eps' is None"),
        ({"x": torch.ones(2, 3), "weight_offset": float("nan")}, ValueError, "'weight_offset' is nan"),
        ({"x": torch.ones(2, 3), "rounding": "never"}, ValueError, "'rounding' is 'never'"),
        ({"x": torch.ones(2, 3).to_sparse()}, TypeError, "'x'"),
    ],
)
def test_bad_input(arguments, error, message, device):
    with pytest.raises(error, match=f"rms_norm.*{message}"):
        ops.rms_norm(**on_device(arguments, device))


needs_metal = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no mps device")


@needs_metal
def test_mps_runs_the_metal_kernels():
    """Without this, every test above could pass on the eager twin."""
    found = torch_metalk.doctor()
    assert found["extension"] == {"loaded": True, "reason": ""}
    assert found["operators"]["rms_norm"]["mps"] == found["operators"]["rms_norm_backward"]["mps"] == "Metal"


ROOT = Path(__file__).parent.parent
LIBRARY = "rms_norm.metallib"
SOURCE = "rms_norm.metal"

# Of kernels in one pass, with a vector a thread and with two, and of a looped one, forward and backward.
BITS = """
import hashlib
import torch
import torch_metalk
from torch_metalk import ops
print(torch_metalk.__file__)
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for columns in (203, 4100, 8200):
        x, weight, dy = torch.randn(21, columns), torch.randn(columns), torch.randn(21, columns)
        x, weight, dy = (t.to("mps", dtype).requires_grad_() for t in (x, weight, dy))
        y = ops.rms_norm(x, weight)
        for t in (y, *torch.autograd.grad(y, (x, weight), dy)):
            print(hashlib.sha256(t.detach().float().cpu().numpy().tobytes()).hexdigest())
"""


@pytest.fixture
def package(tmp_path):
    """A copy of the package as it is installed, whose shaders may be changed; gives its `_shaders`."""
    shutil.copytree(ROOT / "torch_metalk", tmp_path / "torch_metalk", ignore=shutil.ignore_patterns("__pycache__"))
    shaders = tmp_path / "torch_metalk" / "_shaders"
    (shaders / LIBRARY).unlink(missing_ok=True)
    return shaders


def run_in(package: Path) -> subprocess.CompletedProcess:
    """`BITS` in a process of its own, where no shader is loaded yet."""
    command = [sys.executable, "-c", BITS]
    folder = package.parents[1]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | WITH_DEVICE, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.startswith(f"{folder}{os.sep}"), "another copy of the package was tested"
    return done


def compile_library(folder: Path) -> None:
    compiler = shutil.which("xcrun", path=(os.environ | WITH_DEVICE)["PATH"])
    command = [compiler, "metal", "-std=metal3.1", "-fno-fast-math", "-mmacosx-version-min=14.0"]  # as setup.py does
    command += [str(ROOT / "shaders" / SOURCE), "-o", str(folder / LIBRARY)]
    subprocess.run(command, env=os.environ | WITH_DEVICE, check=True, timeout=300)


@needs_metal
def test_prebuilt_library_and_source_give_the_same_bits(package):
    from_source = run_in(package)
    assert from_source.returncode == 0, from_source.stderr
    compile_library(package)
    (package / SOURCE).unlink()
    prebuilt = run_in(package)
    assert prebuilt.returncode == 0, prebuilt.stderr
    assert prebuilt.stdout == from_source.stdout and len(prebuilt.stdout.split()) == 1 + 2 * 3 * 3


@needs_metal
def test_shader_that_is_missing(package):
    (package / SOURCE).unlink()
    done = run_in(package)
    assert done.returncode == 1
    assert f"RuntimeError: torch_metalk: cannot read {package / SOURCE}: " in done.stderr


@needs_metal
def test_prebuilt_library_that_is_none(package):
    (package / LIBRARY).write_text("not a library")
    done = run_in(package)
    assert done.returncode == 1
    assert f"RuntimeError: torch_metalk: cannot load {package / LIBRARY}: " in done.stderr


@needs_metal
def test_shader_that_does_not_compile(package):
    text = (package / SOURCE).read_text()
    (package / SOURCE).write_text(text.replace("simd_sum", "simd_summ"))
    done = run_in(package)
    assert done.returncode == 1
    assert f"RuntimeError: torch_metalk: Metal does not compile {package / SOURCE}: " in done.stderr
    assert "simd_summ" in done.stderr


@needs_metal
def test_kernel_that_is_missing(package):
    text = (package / SOURCE).read_text()
    (package / SOURCE).write_text(text.replace("host_name(#kernel", 'host_name("other_" #kernel'))
    done = run_in(package)
    assert done.returncode == 1
    assert "RuntimeError: torch_metalk: no kernel rms_norm_single_row_float_float_float in rms_norm: " in done.stderr
