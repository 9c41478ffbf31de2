from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch.nn import functional as F

from tests.operators import DTYPES, Case, OpTests, assert_accurate, on_device, run
from torch_metalk import ops


def stock(x, base_out, lora_a, lora_b, scaling):
    """As PEFT calculates it outside of autocast: in the adapter's dtype, rounded once to the base layer's."""
    delta = F.linear(F.linear(x.to(lora_a.dtype), lora_a), lora_b) * scaling
    return (base_out + delta).to(base_out.dtype)


def make(rows, k, r, n):
    def tensors():
        shape = rows if isinstance(rows, tuple) else (rows,)
        return {
            "x": torch.randn(*shape, k),
            "base_out": torch.randn(*shape, n),
            "lora_a": torch.randn(r, k) / k**0.5,
            "lora_b": torch.randn(n, r),
        }

    return tensors


def case(name, make, scaling, keep_dtype=()):
    ours, reference = (functools.partial(f, scaling=scaling) for f in (ops.lora_linear, stock))
    return Case(name, make, ours, reference, ("x", "lora_a", "lora_b"), keep_dtype=keep_dtype, handed_on=("base_out",))


class TestLoraLinear(OpTests):
    op = "lora_linear"
    cases = (
        case("peft", make((2, 9), 40, 8, 33), 2.0, keep_dtype=("lora_a", "lora_b")),
        case("one dtype", make(5, 16, 4, 12), 0.5),
        case("rank 1", make(3, 7, 1, 5), 1.0),
        case("wide rank", make(2, 8, 64, 9), -1.5),
        case("one row", make((), 6, 2, 3), 1.0),
        case("scaling 0", make(4, 6, 2, 3), 0.0),
    )

    @staticmethod
    def more_calls(device):
        # Both tiles, and every mix of dtypes that a product of theirs can have.
        for size, base, adapter in itertools.product((8, 512), DTYPES, DTYPES):
            if adapter in (base, torch.float32):
                tensors = {n: t.to(device, adapter if "lora" in n else base) for n, t in make(*[size] * 4)().items()}
                yield functools.partial(run, functools.partial(ops.lora_linear, scaling=1.0), tensors, list(tensors))


@pytest.mark.parametrize("rows", [(0,), (2, 0)], ids=str)
def test_no_rows(rows, device):
    tensors = {n: t.to(device) for n, t in make(rows, 6, 2, 3)().items()}
    (y,), grads = run(functools.partial(ops.lora_linear, scaling=1.0), tensors, list(tensors))
    assert y.shape == (*rows, 3)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize(("k", "n"), [(0, 3), (6, 0)])
def test_no_features(k, n, device):
    tensors = {name: t.to(device) for name, t in make(4, max(k, 1), 2, n)().items()}
    tensors["x"], tensors["lora_a"] = tensors["x"][:, :k], tensors["lora_a"][:, :k]
    (y,), grads = run(functools.partial(ops.lora_linear, scaling=1.0), tensors, list(tensors))
    assert torch.equal(y, tensors["base_out"])
    assert [g.shape for g in grads] == [t.shape for t in tensors.values()]


@pytest.mark.parametrize("adapter", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_mix_of_dtypes(base, adapter, device):
    """The result has the base layer's dtype and each gradient its own tensor's."""
    made = make(6, 32, 4, 8)()
    dtypes = {"x": base, "base_out": base, "lora_a": adapter, "lora_b": adapter}
    tensors = {n: t.to(device, dtypes[n]) for n, t in made.items()}
    exact_tensors = {n: t.cpu().double() for n, t in tensors.items()}
    incoming = torch.randn(6, 8).to(base)
    names = list(tensors)
    (ours,), grads = run(functools.partial(ops.lora_linear, scaling=2.0), tensors, names, [incoming])
    (exact,), exact_grads = run(functools.partial(stock, scaling=2.0), exact_tensors, names, [incoming])
    (plain,), plain_grads = run(
        functools.partial(stock, scaling=2.0), {n: t.cpu() for n, t in tensors.items()}, names, [incoming]
    )
    assert_accurate(ours, plain, exact, "y")
    for name, *triple in zip(names, grads, plain_grads, exact_grads, strict=True):
        assert_accurate(*triple, name)
        assert triple[0].dtype == dtypes[name]


def test_small_gradients_do_not_underflow(device):
    """dA and dB of float32 adapters over fp16 data: 1e-6 * 1e-3 has no fp16."""
    tensors = {
        n: t.to(device, torch.float16 if n in ("x", "base_out") else torch.float32)
        for n, t in make(8, 16, 4, 8)().items()
    }
    tensors["lora_b"] *= 1e-3
    incoming = torch.full((8, 8), 2e-6, dtype=torch.float16)
    _, (da, db) = run(functools.partial(ops.lora_linear, scaling=1.0), tensors, ["lora_a", "lora_b"], [incoming])
    exact_tensors = {n: t.cpu().double() for n, t in tensors.items()}
    _, exact = run(functools.partial(stock, scaling=1.0), exact_tensors, ["lora_a", "lora_b"], [incoming])
    for grad, reference in zip((da, db), exact, strict=True):
        # Sums in float32 of products of fp16 values: 1e-5 of the largest element.
        torch.testing.assert_close(grad.cpu().double(), reference, rtol=0, atol=1e-5 * reference.abs().max().item())


def test_loss_scale_passes_through_exactly(device):
    """A power of two, as GradScaler uses: gradients scale without a rounding, in every dtype."""
    tensors = {
        n: t.to(device, torch.float16 if n in ("x", "base_out") else torch.float32)
        for n, t in make(8, 16, 4, 8)().items()
    }
    incoming = (torch.randn(8, 8) * 2**-8).half()
    function = functools.partial(ops.lora_linear, scaling=2.0)
    _, plain = run(function, tensors, ["lora_a", "lora_b"], [incoming])
    _, scaled = run(function, tensors, ["lora_a", "lora_b"], [incoming * 2**8])
    assert all(torch.equal(p * 2**8, s) for p, s in zip(plain, scaled, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, device):
    """x is cast as autocast casts the base layer's input, adapters keep float32 gradients, the result is the base's."""
    tensors = {n: t.to(device).requires_grad_() for n, t in make(6, 32, 4, 8)().items()}
    weight = torch.randn(8, 32, device=device)
    kept = []
    with torch.autocast(device.type, dtype):
        base_out = F.linear(tensors["x"], weight)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
            y = ops.lora_linear(tensors["x"], base_out, tensors["lora_a"], tensors["lora_b"], 2.0)
        expected = base_out + F.linear(F.linear(tensors["x"], tensors["lora_a"]), tensors["lora_b"]) * 2.0
    assert y.dtype == base_out.dtype == expected.dtype == dtype
    assert kept == [dtype, torch.float32, torch.float32], "x is kept in half precision, as PEFT's own layer keeps it"
    wide = {n: t.detach().cpu().double().requires_grad_() for n, t in tensors.items()}
    exact = F.linear(wide["x"], weight.cpu().double()) + wide["x"] @ wide["lora_a"].T @ wide["lora_b"].T * 2.0
    names = ["x", "lora_a", "lora_b"]
    ours = torch.autograd.grad(y.float().sum(), [tensors[n] for n in names])
    reference = torch.autograd.grad(exact.sum(), [wide[n] for n in names])
    scale = exact.abs().max().item()
    # One rounding of x, of the base product and of the result each, of values up to `scale`.
    torch.testing.assert_close(
        y.detach().cpu().double(), exact.detach(), rtol=0, atol=3 * torch.finfo(dtype).eps * scale
    )
    for grad, exact_grad in zip(ours, reference, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(
            grad.cpu().double(), exact_grad, rtol=0, atol=3 * torch.finfo(dtype).eps * exact_grad.abs().max().item()
        )


def test_gradients_of_parameters_are_contiguous(device):
    """Optimizers that read memory in order are wrong on a transposed view."""
    tensors = {n: t.to(device) for n, t in make(8, 16, 4, 8)().items()}
    tensors["lora_a"] = tensors["lora_a"].T.contiguous().T
    _, grads = run(functools.partial(ops.lora_linear, scaling=1.0), tensors, ["lora_a", "lora_b"])
    assert all(g.is_contiguous() for g in grads)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(4, 5)}, ValueError, r"'lora_a' is a tensor of shape \(2, 6\)"),
        ({"x": torch.tensor(1.0)}, ValueError, "'x'"),
        ({"lora_a": torch.ones(0, 6), "lora_b": torch.ones(3, 0)}, ValueError, "'lora_a' is of rank 0"),
        ({"lora_a": torch.ones(6)}, ValueError, "'lora_a'"),
        ({"lora_b": torch.ones(3, 4)}, ValueError, r"'lora_b' is a tensor of shape \(3, 4\)"),
        ({"base_out": torch.ones(4, 2)}, ValueError, r"'base_out' is a tensor of shape \(4, 2\)"),
        ({"base_out": torch.ones(5, 3)}, ValueError, "'base_out'"),
        ({"lora_a": torch.ones(2, 6, device="meta")}, ValueError, "'lora_a' is on meta"),
        ({"x": torch.ones(4, 6, dtype=torch.int8)}, TypeError, "'x' is of dtype torch.int8"),
        ({"scaling": None}, TypeError, "'scaling' is None"),
        ({"scaling": float("inf")}, ValueError, "'scaling' is inf"),
    ],
)
def test_bad_input(change, error, message, device):
    arguments = {**make(4, 6, 2, 3)(), "scaling": 1.0} | change
    with pytest.raises(error, match=f"lora_linear.*{message}"):
        ops.lora_linear(**on_device(arguments, device))
