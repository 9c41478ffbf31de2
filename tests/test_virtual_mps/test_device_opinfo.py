"""A fixed sample of PyTorch's own operator tests: forward and backward on the device against the CPU."""

import itertools

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

pytestmark = pytest.mark.usefixtures("mps")

# Names as one text: a list literal of them would be a page long.
SAMPLE = """
add sub mul div pow remainder clamp where lerp addcmul sign exp log1p sqrt rsqrt sigmoid tanh erf logaddexp
eq lt logical_and isnan bitwise_xor
sum mean std var amax argmin prod cumsum logsumexp softmax log_softmax norm count_nonzero
matmul mm bmm addmm baddbmm einsum outer linalg.inv linalg.svd linalg.solve linalg.vector_norm
cat stack split chunk gather scatter scatter_add index_select index_add index_put masked_fill masked_select take
transpose permute flip roll repeat tile expand view_as unfold diagonal tril triu sort topk unique nonzero searchsorted
nn.functional.linear nn.functional.conv2d nn.functional.conv1d nn.functional.conv_transpose2d nn.functional.max_pool2d
nn.functional.avg_pool2d nn.functional.layer_norm nn.functional.rms_norm nn.functional.group_norm
nn.functional.batch_norm nn.functional.gelu nn.functional.silu nn.functional.softplus nn.functional.cross_entropy
nn.functional.mse_loss nn.functional.nll_loss nn.functional.embedding nn.functional.interpolate nn.functional.pad
nn.functional.scaled_dot_product_attention nn.functional.one_hot clone contiguous resize_ fill zero_ arange linspace
full ones_like new_zeros item
""".split()

SAMPLES_EACH = 4
BY_NAME: dict[str, list] = {}
for _op in op_db:
    BY_NAME.setdefault(_op.name, []).append(_op)


def _case(op, dtype):
    variant = f".{op.variant_test_name}" if op.variant_test_name else ""
    return pytest.param(op, dtype, id=f"{op.name}{variant}-{str(dtype).removeprefix('torch.')}")


CASES = [
    _case(op, dtype)
    for name in SAMPLE
    for op in BY_NAME.get(name, [])
    for dtype in (torch.float32, torch.int64, torch.bool)
    if op.variant_test_name != "with_dtype"  # which asks for float64
    and dtype in op.dtypes
    and (dtype == torch.float32 or torch.float32 not in op.dtypes)
]


def test_the_sample_is_not_empty():
    assert len(CASES) > 110


def _to_device(value):
    if torch.is_tensor(value):
        return value.detach().to("mps").requires_grad_(value.requires_grad)
    if isinstance(value, (str, torch.device)) and str(value) == "cpu":
        return "mps"
    return value


def _comparable(sample) -> bool:
    """Not those that ask for float64, which the device refuses, or that draw random numbers."""
    dtypes = [getattr(leaf, "dtype", leaf) for leaf in tree_leaves((sample.input, sample.args, sample.kwargs))]
    return torch.float64 not in dtypes and not sample.kwargs.get("dropout_p")


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_against_the_cpu(op, dtype):
    gradients = op.supports_autograd and dtype.is_floating_point
    samples = filter(_comparable, op.sample_inputs("cpu", dtype, requires_grad=gradients))
    compared = 0
    for sample in itertools.islice(samples, SAMPLES_EACH):
        compared += 1
        on_device = tree_map(_to_device, (sample.input, sample.args, sample.kwargs))
        expected = op(sample.input, *sample.args, **sample.kwargs)
        result = op(on_device[0], *on_device[1], **on_device[2])
        tensors = [t for t in tree_leaves(expected) if torch.is_tensor(t)]
        found = [t for t in tree_leaves(result) if torch.is_tensor(t)]
        assert all(t.is_mps for t in found) and len(found) == len(tensors)
        for a, b in zip(found, tensors, strict=True):
            torch.testing.assert_close(a.detach().cpu(), b.detach(), atol=1e-5, rtol=1e-5, equal_nan=True)
        if not (gradients and torch.is_tensor(expected) and expected.requires_grad):
            continue
        inputs = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if _wants_grad(t)]
        device_inputs = [t for t in tree_leaves(on_device) if _wants_grad(t)]
        grad = torch.randn_like(expected)
        for a, b in zip(
            torch.autograd.grad(result, device_inputs, grad.to("mps"), allow_unused=True),
            torch.autograd.grad(expected, inputs, grad, allow_unused=True),
            strict=True,
        ):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a.cpu(), b, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert compared


def _wants_grad(value) -> bool:
    return torch.is_tensor(value) and value.requires_grad
