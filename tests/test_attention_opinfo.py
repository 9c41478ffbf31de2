"""PyTorch's own samples of `scaled_dot_product_attention`, served by `ops.attention`, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput

from tests.operators import DTYPES, assert_accurate, run
from torch_metalk import ops

(SDPA,) = (info for info in op_db if info.name == "nn.functional.scaled_dot_product_attention")
NAMES = ("query", "key", "value")
stock = torch.nn.functional.scaled_dot_product_attention


def served(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool = False, **options
) -> Tensor:
    """Attention that knows four dimensions, with torch's arguments: without `enable_gqa` heads are a dimension like any
    other, and all that come before rows are broadcast."""
    q, k, v = query, key, value
    if not enable_gqa:
        shape = torch.broadcast_shapes(*(t.shape[:-2] for t in (q, k, v)))
        q, k, v = (t.expand(*shape, *t.shape[-2:]) for t in (q, k, v))
    if q.dim() == 3:
        return attend(q[None], k[None], v[None], **options)[0]
    return attend(q, k, v, **options)


def ours(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options) -> Tensor:
    return ops.attention(q, k, v, mask=attn_mask, **options)


def fused(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """Torch's kernel that keeps no scores either, for values of one width."""
    return stock(q, k, v, enable_gqa=True, **options)


def forgotten(dtype: torch.dtype) -> list[SampleInput]:
    """What PyTorch's function makes ready and leaves out of its list: shared heads, and values of another width."""
    q, k, v, wide = (torch.randn(4, *shape).to(dtype) for shape in ((4, 3, 8), (2, 6, 8), (2, 6, 8), (2, 6, 16)))
    mask = torch.rand(4, 1, 3, 6) > 0.3
    return [
        SampleInput(q, k, v, is_causal=True, enable_gqa=True),
        SampleInput(q, k, v, attn_mask=mask, scale=0.5, enable_gqa=True),
        SampleInput(q[:, :2], k, wide, is_causal=True),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_match_float64(dtype, device):
    """All but those with dropout, which nobody but stock serves.

    Their scores reach 100, and most probabilities are 0 or 1. What is left of the gradients of q and k is the rounding
    of the output then, of which backward makes ``do * o`` where no probabilities are kept. So the measure is torch's
    kernel that keeps none.
    """
    samples = [s for s in SDPA.sample_inputs("cpu", dtype, requires_grad=True) if not s.kwargs.pop("dropout_p")]
    assert len(samples) >= 13
    for number, sample in enumerate(samples + forgotten(dtype)):
        options = sample.kwargs
        tensors = {name: t.detach() for name, t in zip(NAMES, (sample.input, *sample.args), strict=True)}
        if "attn_mask" in options:  # a gradient of the mask is for stock too; without one it is an argument as any
            tensors["attn_mask"] = options.pop("attn_mask").detach()
        exact = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
        incoming = torch.randn(stock(**tensors, **options).shape).to(dtype)

        def outcome(function, tensors, options=options, incoming=incoming):
            results, grads = run(partial(function, **options), tensors, NAMES, [incoming.to(tensors["query"].dtype)])
            return [*results, *grads]

        triples = zip(
            outcome(partial(served, ours), {name: t.to(device) for name, t in tensors.items()}),
            outcome(partial(served, fused), tensors),
            outcome(stock, exact),
            strict=True,
        )
        for name, triple in zip(("output", *NAMES), triples, strict=True):
            # Ours rounds numbers of the size of the scores four times: the scale with log2(e) in it, the product with
            # it, lse, and the difference; torch's kernel the product alone. To that come sums in another order.
            assert_accurate(*triple, f"{name} of sample {number}, {options}", factor=6.0)
