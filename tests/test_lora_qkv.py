"""Several adapted layers of one input in one operator."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch.nn import functional as F

from tests.operators import Case, OpTests, assert_accurate, on_device, run
from torch_metalk import ops


def stock(x, scalings, **tensors):
    """As PEFT calculates it outside of autocast: in the adapter's dtype, rounded once to the base layer's."""
    ys = []
    for weight, bias, a, b, scaling in zip(*lists(tensors), scalings, strict=True):
        base = F.linear(x, weight, bias)
        ys.append((base + F.linear(F.linear(x.to(a.dtype), a), b) * scaling).to(base.dtype))
    return ys


def lists(tensors):
    """weights, biases, lora_a and lora_b out of ``{"w0": ..., "bias1": ..., "a0": ...}``."""
    n = sum(name.startswith("w") for name in tensors)
    return [[tensors.get(f"{kind}{i}") for i in range(n)] for kind in ("w", "bias", "a", "b")]


def ours(x, scalings, **tensors):
    return ops.lora_qkv(x, *lists(tensors), scalings)


def make(rows, k, layers, biases=()):
    """Layers as pairs of rank and output features; `biases` names those that have one."""

    def tensors():
        shape = rows if isinstance(rows, tuple) else (rows,)
        made = {"x": torch.randn(*shape, k)}
        for i, (r, n) in enumerate(layers):
            made[f"w{i}"] = torch.randn(n, k) / max(k, 1) ** 0.5
            made[f"a{i}"] = torch.randn(r, k) / max(k, 1) ** 0.5
            made[f"b{i}"] = torch.randn(n, r)
            if i in biases:
                made[f"bias{i}"] = torch.randn(n)
        return made

    return tensors


def case(name, make, scalings, keep_adapters=False):
    names = list(make())
    adapters = tuple(n for n in names if n[0] in "ab" and not n.startswith("bias"))
    return Case(
        name,
        make,
        functools.partial(ours, scalings=scalings),
        functools.partial(stock, scalings=scalings),
        saved=("x", *(n for n in names if n.startswith("w")), *adapters),
        constant=tuple(n for n in names if n.startswith(("w", "bias"))),
        keep_dtype=adapters if keep_adapters else (),
    )


class TestLoraQkv(OpTests):
    op = "lora_qkv"
    cases = (
        case("peft q, k, v", make((2, 9), 40, [(8, 33), (8, 12), (8, 12)]), [2.0, 2.0, 2.0], keep_adapters=True),
        case("unequal ranks and scales", make((2, 5), 16, [(4, 12), (16, 5), (1, 7)]), [25.0, 0.5, -2.0]),
        case("biases", make(5, 12, [(4, 6), (2, 8)], biases=(0, 1)), [0.5, 1.0]),
        case("one bias", make(5, 12, [(4, 6), (2, 8)], biases=(1,)), [0.5, 1.0]),
        case("one layer", make((3, 4), 10, [(4, 9)]), [1.5]),
        case("one row", make((), 6, [(2, 3), (3, 4)]), [1.0, 2.0]),
        case("scaling 0", make(4, 6, [(2, 3), (2, 3)]), [0.0, 1.0]),
    )


ADAPTERS = ["a0", "a1", "a2", "b0", "b1", "b2"]


def three(device, dtype=torch.float32):
    made = make((2, 5), 16, [(4, 12), (16, 5), (1, 7)], biases=(1,))()
    return {name: t.to(device, dtype) for name, t in made.items()}, [25.0, 0.5, -2.0]


def backward(mask, dys, tensors, scalings):
    weights, _, lora_a, lora_b = lists({name: t for name, t in tensors.items() if name != "x"})
    op = torch.ops.torch_metalk.lora_qkv_backward
    return op(dys, tensors["x"], weights, lora_a, lora_b, scalings, False, mask)


def test_every_choice_of_gradients(device):
    """The operator gives the wanted gradients, in the order x, A of each layer, B of each layer, and no others."""
    tensors, scalings = three(device)
    dys = [torch.randn(2, 5, n).to(device) for n in (12, 5, 7)]
    dx, all_grads = backward([True] * 7, dys, tensors, scalings)
    for mask in itertools.product([False, True], repeat=7):
        dx_, grads = backward(list(mask), dys, tensors, scalings)
        assert (dx_ is not None) == mask[0]
        if mask[0]:
            torch.testing.assert_close(dx_, dx, rtol=1e-5, atol=1e-5)  # float32 sums in another order
        expected = [grad for grad, wanted in zip(all_grads, mask[1:], strict=True) if wanted]
        assert len(grads) == len(expected)
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            assert a.is_contiguous()
            assert a.untyped_storage().nbytes() == a.numel() * a.element_size(), "keeps the memory of others alive"


def test_missing_gradients_count_as_zero(device):
    tensors, scalings = three(device)
    dys = [torch.randn(2, 5, n).to(device) for n in (12, 5, 7)]
    for given in itertools.product([False, True], repeat=3):
        sparse = [dy if use else None for dy, use in zip(dys, given, strict=True)]
        zeros = [dy if use else torch.zeros_like(dy) for dy, use in zip(dys, given, strict=True)]
        dx, grads = backward([True] * 7, sparse, tensors, scalings)
        expected_dx, expected = backward([True] * 7, zeros, tensors, scalings)
        for name, a, b in zip(["x", *ADAPTERS], [dx, *grads], [expected_dx, *expected], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)  # float32 sums in another order
            assert given[int(name[1])] if name != "x" and a.any() else True, name


def test_outputs_of_which_one_is_used(device):
    tensors, scalings = three(device)
    leaves = {name: t.requires_grad_(name[0] in "ab" and "bias" not in name) for name, t in tensors.items()}
    ours(**leaves, scalings=scalings)[1].sum().backward()
    assert {name for name in ADAPTERS if leaves[name].grad.any()} == {"a1", "b1"}


@pytest.mark.parametrize("rows", [(0,), (2, 0)], ids=str)
def test_no_rows(rows, device):
    made = {name: t.to(device) for name, t in make(rows, 6, [(2, 3), (1, 4)])().items()}
    ys, grads = run(functools.partial(ours, scalings=[1.0, 2.0]), made, ["x", "a0", "b0", "a1", "b1"])
    assert [y.shape for y in ys] == [(*rows, 3), (*rows, 4)]
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize(("k", "n"), [(0, 3), (6, 0)])
def test_no_features(k, n, device):
    made = {name: t.to(device) for name, t in make(4, k, [(2, n), (1, 4)], biases=(1,))().items()}
    names = ["x", "a0", "b0", "a1", "b1"]
    ys, grads = run(functools.partial(ours, scalings=[1.0, 2.0]), made, names)
    assert [g.shape for g in grads] == [made[name].shape for name in names]
    if k == 0:
        assert torch.equal(ys[1], made["bias1"].expand(4, 4)) and not ys[0].any()


@pytest.mark.parametrize("adapter", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_mix_of_dtypes(base, adapter, device):
    """The results have the layers' dtype and each gradient its own tensor's."""
    made = make(6, 32, [(4, 8), (2, 5)], biases=(0,))()
    names = ["x", "a0", "a1", "b0", "b1"]
    tensors = {n: t.to(device, adapter if n in names[1:] else base) for n, t in made.items()}
    incoming = [torch.randn(6, 8).to(base), torch.randn(6, 5).to(base)]
    scalings = [2.0, 0.5]
    ys, grads = run(functools.partial(ours, scalings=scalings), tensors, names, incoming)
    reference = functools.partial(stock, scalings=scalings)
    exact, exact_grads = run(reference, {n: t.cpu().double() for n, t in tensors.items()}, names, incoming)
    plain, plain_grads = run(reference, {n: t.cpu() for n, t in tensors.items()}, names, incoming)
    for triple in zip(ys, plain, exact, strict=True):
        assert_accurate(*triple, "y")
    for name, *triple in zip(names, grads, plain_grads, exact_grads, strict=True):
        assert_accurate(*triple, name)
        assert triple[0].dtype == tensors[name].dtype


def test_small_gradients_do_not_underflow(device):
    """dA and dB of float32 adapters over fp16 data: 1e-6 * 1e-3 has no fp16."""
    made = make(8, 16, [(4, 8), (4, 8)])()
    names = ["a0", "a1", "b0", "b1"]
    tensors = {n: t.to(device, torch.float32 if n in names else torch.float16) for n, t in made.items()}
    for name in ("b0", "b1"):
        tensors[name] *= 1e-3
    incoming = [torch.full((8, 8), 2e-6, dtype=torch.float16)] * 2
    _, grads = run(functools.partial(ours, scalings=[1.0, 1.0]), tensors, names, incoming)
    exact_tensors = {n: t.cpu().double() for n, t in tensors.items()}
    _, exact = run(functools.partial(stock, scalings=[1.0, 1.0]), exact_tensors, names, incoming)
    for grad, reference in zip(grads, exact, strict=True):
        # Sums in float32 of products of fp16 values: 1e-5 of the largest element.
        torch.testing.assert_close(grad.cpu().double(), reference, rtol=0, atol=1e-5 * reference.abs().max().item())


@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, backward_inside, device):
    """x, weights and biases are cast as autocast casts a linear layer's; adapters keep float32 gradients."""
    made = {n: t.to(device) for n, t in make(6, 32, [(4, 8), (2, 5)], biases=(0,))().items()}
    names = ["x", "a0", "b0", "a1", "b1"]
    for name in names:
        made[name].requires_grad_()
    kept = []
    with torch.autocast(device.type, dtype):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
            ys = ours(**made, scalings=[2.0, 0.5])
        if backward_inside:
            grads = torch.autograd.grad(sum(y.float().sum() for y in ys), [made[n] for n in names])
    if not backward_inside:
        grads = torch.autograd.grad(sum(y.float().sum() for y in ys), [made[n] for n in names])
    assert [y.dtype for y in ys] == [dtype] * 2
    assert kept == [dtype] * 3 + [torch.float32] * 4, "x and weights in half precision, adapters as they are"
    wide = {n: t.detach().cpu().double().requires_grad_(n in names) for n, t in made.items()}
    exact = stock(**wide, scalings=[2.0, 0.5])
    exact_grads = torch.autograd.grad(sum(y.sum() for y in exact), [wide[n] for n in names])
    eps = torch.finfo(dtype).eps
    for y, reference in zip(ys, exact, strict=True):
        # One rounding of x, weight and result each, of values up to `scale`.
        torch.testing.assert_close(y.cpu().double(), reference, rtol=0, atol=4 * eps * reference.abs().max().item())
    for name, grad, reference in zip(names, grads, exact_grads, strict=True):
        assert grad.dtype == torch.float32
        limit = 4 * eps * reference.abs().max().item()
        torch.testing.assert_close(grad.cpu().double(), reference, rtol=0, atol=limit, msg=name)
    # Of the incoming gradient, which is 1, and of float32 adapters nothing is rounded but x: to lose more shows here.
    h = made["x"].detach().to(dtype).cpu().double() @ wide["a0"].detach().T
    expected = 2.0 * h.sum(0).expand(8, 4)
    torch.testing.assert_close(grads[2].cpu().double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_a_layer_that_needs_a_gradient_is_refused(device):
    tensors, scalings = three(device)
    for name, accepted in (("w2", r"weights\[2\]"), ("bias1", r"biases\[1\]")):
        leaves = tensors | {name: tensors[name].clone().requires_grad_()}
        with pytest.raises(ValueError, match=f"lora_qkv: argument '{accepted}' is a tensor that requires a gradient"):
            ours(**leaves, scalings=scalings)
        with torch.no_grad():  # nothing would be lost
            assert len(ours(**leaves, scalings=scalings)) == 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(4, 5)}, ValueError, r"'weights\[0\]' is a tensor of shape \(3, 6\); accepted: \[N, 5\]"),
        ({"x": torch.tensor(1.0)}, ValueError, "'x'"),
        ({"x": torch.ones(4, 6, dtype=torch.int8)}, TypeError, "'x' is of dtype torch.int8"),
        ({"x": torch.ones(4, 6).half()}, TypeError, r"'weights\[0\]' is of dtype torch.float32"),
        ({"weights": []}, ValueError, "'weights' is an empty list"),
        ({"weights": [torch.ones(3, 6)] * 3}, ValueError, "'biases' is a list of length 2; accepted: one for each of"),
        ({"weights": [torch.ones(3, 6), torch.ones(6)]}, ValueError, r"'weights\[1\]'"),
        ({"weights": [torch.ones(3, 6), torch.ones(4, 6).half()]}, TypeError, r"'weights\[1\]' is of dtype"),
        ({"biases": [None]}, ValueError, "'biases' is a list of length 1"),
        ({"biases": [None, torch.ones(3)]}, ValueError, r"'biases\[1\]' is a tensor of shape \(3,\); accepted: \[4\]"),
        ({"biases": [None, torch.ones(4).half()]}, TypeError, r"'biases\[1\]' is of dtype torch.float16"),
        ({"lora_a": [torch.ones(2, 6)]}, ValueError, "'lora_a' is a list of length 1"),
        ({"lora_a": [torch.ones(2, 6), None]}, TypeError, r"'lora_a\[1\]' is None"),
        ({"lora_a": [torch.ones(2, 6), torch.ones(1, 5)]}, ValueError, r"'lora_a\[1\]' is a tensor of shape \(1, 5\)"),
        ({"lora_a": [torch.ones(0, 6), torch.ones(1, 6)]}, ValueError, r"'lora_a\[0\]' is of rank 0"),
        ({"lora_a": [torch.ones(2, 6), torch.ones(1, 6, device="meta")]}, ValueError, r"'lora_a\[1\]' is on meta"),
        ({"lora_a": [torch.ones(2, 6), torch.ones(1, 6).int()]}, TypeError, r"'lora_a\[1\]' is of dtype torch.int32"),
        ({"lora_b": [torch.ones(3, 2), torch.ones(4, 2)]}, ValueError, r"'lora_b\[1\]' is a tensor of shape \(4, 2\)"),
        ({"lora_b": [torch.ones(5, 2), torch.ones(4, 1)]}, ValueError, r"'lora_b\[0\]'.*accepted: \[3, 2\]"),
        ({"scalings": [1.0]}, ValueError, "'scalings' is a list of length 1"),
        ({"scalings": [1.0, None]}, TypeError, r"'scalings\[1\]' is None"),
        ({"scalings": [float("nan"), 1.0]}, ValueError, r"'scalings\[0\]' is nan"),
    ],
)
@pytest.mark.parametrize("grad", [False, True], ids=["no gradient", "gradient"])
def test_bad_input(change, error, message, grad, device):
    weights, biases, lora_a, lora_b = lists(make(4, 6, [(2, 3), (1, 4)])())
    lora_b[0].requires_grad_(grad)
    arguments = {"weights": weights, "biases": biases, "lora_a": lora_a, "lora_b": lora_b}
    arguments |= {"x": torch.ones(4, 6), "scalings": [1.0, 1.0]} | change
    with pytest.raises(error, match=f"lora_qkv: argument {message}"):
        ops.lora_qkv(**on_device(arguments, device))


def test_no_biases_may_be_left_out():
    weights, biases, lora_a, lora_b = lists(make(4, 6, [(2, 3)])())
    x = torch.randn(4, 6)
    expected = ops.lora_qkv(x, weights, biases, lora_a, lora_b, [1.0])
    assert torch.equal(ops.lora_qkv(x, tuple(weights), None, tuple(lora_a), tuple(lora_b), (1.0,))[0], expected[0])
