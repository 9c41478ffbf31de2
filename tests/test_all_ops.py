"""What holds for all operators alike and needs them side by side: many rows, several threads, calls among stock ops."""

from __future__ import annotations

import threading

import pytest
import torch

from tests import (
    test_attention,
    test_geglu,
    test_lora_linear,
    test_rms_norm,
    test_rope,
    test_rope_positions,
    test_softmax,
)
from tests.operators import assert_rounding_only
from torch_metalk import ops
from torch_metalk.ops._operator import OPERATORS

ROWS = 65_537 * 2  # more than a 16-bit index or grid dimension can count


def angles(x: torch.Tensor) -> dict[str, torch.Tensor]:
    angle = (torch.arange(x.shape[0] * 2, device=x.device).view(-1, 2).repeat(1, 2) % 7).to(x.dtype)
    return {"cos": angle.cos(), "sin": angle.sin()}


def heads(x: torch.Tensor) -> dict[str, torch.Tensor]:
    keys = x[None, None, : min(3, len(x))]
    return {"q": x[None, None], "k": keys, "v": keys}


def adapter(x: torch.Tensor) -> dict[str, torch.Tensor]:
    eye = torch.eye(4, dtype=x.dtype, device=x.device)
    return {"base_out": x, "lora_a": eye, "lora_b": eye, "scaling": 2.0}


def layers(x: torch.Tensor, n: int) -> tuple[list, ...]:
    """So many layers of 4 features with an adapter."""
    eye = torch.eye(4, dtype=x.dtype, device=x.device)
    return [eye] * n, None, [eye / 2] * n, [eye] * n, [2.0] * n


MANY_ROWS = {
    "rms_norm": (ops.rms_norm, test_rms_norm.stock),
    "swiglu": (lambda x: ops.swiglu(x, x), lambda x: torch.nn.functional.silu(x) * x),
    "geglu": (lambda x: ops.geglu(x, x), lambda x: test_geglu.stock(x, x, "tanh")),
    "swiglu_packed": (ops.swiglu, lambda x: torch.nn.functional.silu(x[:, :2]) * x[:, 2:]),
    "geglu_packed": (ops.geglu, lambda x: test_geglu.stock(x[:, :2], x[:, 2:], "tanh")),
    "rope": (lambda x: ops.rope(x, **angles(x)), lambda x: test_rope.stock(x, **angles(x))),
    "rope_positions": (
        lambda x: ops.rope_positions(x, 0, 10000.0, 4),
        lambda x: test_rope_positions.stock(x, 0, 10000.0, 4),
    ),
    "softmax": (ops.softmax, test_softmax.stock),
    "matmul": (lambda x: ops.matmul(x, torch.eye(4).to(x) / 2), lambda x: x / 2),
    "matmul_rows_split": (lambda x: ops.matmul_rows_split(x, torch.eye(4).to(x) / 2, cpu_share=0.5), lambda x: x / 2),
    "lora_linear": (lambda x: ops.lora_linear(x, **adapter(x)), lambda x: test_lora_linear.stock(x, **adapter(x))),
    "lora_qkv": (lambda x: sum(ops.lora_qkv(x, *layers(x, 2))), lambda x: 4 * x),
    "lora_mlp": (lambda x: ops.lora_mlp(x, *layers(x, 3)), lambda x: 4 * x * torch.nn.functional.silu(2 * x)),
    "attention": (lambda x: ops.attention(**heads(x))[0, 0], lambda x: test_attention.stock(**heads(x))[0, 0]),
}


def cached(x: torch.Tensor) -> torch.Tensor:
    """Rows are keys, the first eight of them queries too."""
    keys = x[None, None]
    return ops.decode_attention(keys[:, :, :8], keys, keys)[0, 0]


def paged(x: torch.Tensor) -> torch.Tensor:
    """The same; the last page is not full."""
    pages = torch.cat([x, x[: -len(x) % 32]]).view(-1, 32, 1, 4)
    tables = torch.arange(len(pages), dtype=torch.int32, device=x.device)[None]
    lengths = torch.tensor([len(x)], dtype=torch.int32, device=x.device)
    return ops.paged_attention(x[None, None, :8], pages, pages, tables, lengths)[0, 0]


def stock_of_cached(x: torch.Tensor) -> torch.Tensor:
    return test_attention.stock(
        x[None, None, :8], x[None, None], x[None, None], is_causal=True, causal_alignment="lower_right"
    )[0, 0]


def stored(x: torch.Tensor) -> torch.Tensor:
    """Every row in a slot of its own, in the opposite order."""
    k_pages = x.new_zeros(-(-len(x) // 8), 8, 1, 4)
    slots = torch.arange(len(x) - 1, -1, -1, device=x.device)
    ops.paged_cache_write(x[:, None], x[:, None], k_pages, k_pages.clone(), slots)
    return k_pages.view(-1, 4)[: len(x)]


WITHOUT_GRADIENT = {
    "decode_attention": (cached, stock_of_cached),
    "paged_attention": (paged, stock_of_cached),
    "paged_cache_write": (stored, lambda x: x.flip(0)),
}


def test_every_operator_is_in_the_table():
    forward = {name for name in OPERATORS if not name.endswith("_backward")}
    assert forward == {*MANY_ROWS, *WITHOUT_GRADIENT}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_more_rows_than_16_bits_count_without_gradient(name, device):
    ours, stock = WITHOUT_GRADIENT[name]
    x = torch.randn(ROWS, 4, device=device)
    # Sums of 131,074 terms in float32 and in the order that the CPU's kernel has; results are about 1.
    torch.testing.assert_close(ours(x).cpu().double(), stock(x.cpu().double()), rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", MANY_ROWS)
def test_more_rows_than_16_bits_count(name, device):
    ours, stock = MANY_ROWS[name]
    x = torch.randn(ROWS, 4, device=device, requires_grad=True)
    y = ours(x)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    exact_x = x.detach().cpu().double().requires_grad_()
    exact = stock(exact_x)
    (exact_grad,) = torch.autograd.grad(exact, exact_x, torch.ones_like(exact))
    assert_rounding_only(y.cpu(), exact.float())
    # Keys and values of the attention are rows of x too: their gradients are sums over all rows.
    torch.testing.assert_close(grad.cpu().double(), exact_grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MANY_ROWS)
def test_transforms_that_would_lose_the_derivative_raise(name, device):
    ours, _ = MANY_ROWS[name]
    x, tangent = torch.randn(2, 4, device=device), torch.ones(2, 4, device=device)
    with pytest.raises(RuntimeError, match=f"torch_metalk::{name} has no forward-mode derivative"):
        torch.func.jvp(ours, (x,), (tangent,))
    with pytest.raises(RuntimeError, match=f"torch_metalk::{name} does not support the transforms of torch.func"):
        torch.func.grad(lambda t: ours(t).sum())(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        ours(torch.autograd.forward_ad.make_dual(x, tangent))
    assert ours(x).shape == ours(x.requires_grad_()).shape == (2, 2 if name.endswith("_packed") else 4)


def test_calls_among_stock_operators(device):
    """A stock operator before, between and after: on an accelerator all of them share one stream of commands."""
    x = torch.randn(3, 8, device=device)
    expected = torch.sin(ops.swiglu(ops.rms_norm(x), x)) + x
    for _ in range(50):
        assert torch.equal(torch.sin(ops.swiglu(ops.rms_norm(x), x)) + x, expected)


def test_two_threads(device):
    x = torch.randn(4, 16, device=device)
    expected = ops.swiglu(ops.rms_norm(x), ops.rms_norm(x + x)).cpu()
    wrong = []

    def work():
        for _ in range(500):
            y = ops.swiglu(ops.rms_norm(x), ops.rms_norm(x + x)).cpu()
            if not torch.equal(y, expected):
                wrong.append(y)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
