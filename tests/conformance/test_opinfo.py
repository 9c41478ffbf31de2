"""PyTorch's own operator tests: every sample of every entry, forward and backward, on the device against the CPU.

A case is an entry of PyTorch's `op_db`, in float32, or in another dtype where the operator has no float32. The tables
below name every entry of which not all samples can be compared by value, with the reason.
"""

import functools
import random
import re
from unittest import mock

import numpy as np
import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

# The device computes with the CPU's kernels, so that what differs is what a composite operator is composed of.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
GRADIENT_TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
BACKWARD_SAMPLES = 10

# Some samples ask for float64 or complex128, which an MPS device refuses, in these words; bincount with integer weights
# gives float64 on the CPU.
FLOAT64 = r"doesn't support float64|Trying to convert ComplexDouble to the MPS backend"
ASK_FOR_FLOAT64 = set(
    """
    bincount cdouble double empty_like float_power full_like log_softmax.with_dtype new_empty new_empty_strided
    new_full new_ones new_zeros nn.functional.softmin.with_dtype ones_like rand_like randint randint_like randn_like
    softmax.with_dtype to zeros_like
    """.split()
)

# The samples are tensors in a compressed sparse layout, which PyTorch's MPS backend does not have either.
COMPRESSED = r"new_compressed_tensor|only strided and sparse \(COO\)"
ASK_FOR_COMPRESSED = {"sparse.mm.reduce", "sparse.sampled_addmm"}

# The operators are for CUDA alone: the CPU refuses them as well.
CUDA_ONLY = {
    "jiterator_2inputs_2outputs",
    "jiterator_4inputs_with_extra_args",
    "jiterator_binary",
    "jiterator_binary_return_by_ref",
    "jiterator_unary",
}
# Nor do these have a dtype on the CPU that the device has: the last two are for float8.
WITHOUT_DTYPE = {
    "nn.functional.batch_norm.without_cudnn",
    "torch.ops.aten._efficient_attention_forward",
    "torch.ops.aten._flash_attention_forward",
    "torch._scaled_mm",
    "torch._scaled_mm_v2",
}

# Results are memory that nobody wrote: shapes, strides and dtypes are compared.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

# Results are random, and the device has a generator of its own: their distribution is compared.
RANDOM = set(
    """
    bernoulli cauchy exponential geometric log_normal multinomial nn.functional.alpha_dropout nn.functional.dropout
    nn.functional.dropout2d nn.functional.dropout3d nn.functional.feature_alpha_dropout.with_train
    nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d nn.functional.rrelu
    nn.functional.multi_head_attention_forward nn.functional.scaled_dot_product_attention
    normal normal.in_place normal.number_mean rand_like randint randint_like randn randn_like uniform
    """.split()
)
DRAWS = 128
# Of these the values of one draw depend on one another.
DEPENDENT = set(
    """
    multinomial nn.functional.dropout2d nn.functional.dropout3d nn.functional.feature_alpha_dropout.with_train
    nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d
    nn.functional.multi_head_attention_forward nn.functional.scaled_dot_product_attention
    """.split()
)


def max_distance(n: int) -> float:
    """Two samples of n values from one distribution have a Kolmogorov-Smirnov distance above this once in a million
    times."""
    return (-np.log(1e-6 / 2) / 2) ** 0.5 * (2 / n) ** 0.5


# The factors are found with a random projection and are unique up to signs: what is compared is the product. It is the
# best approximation of its rank up to a few percent, with two passes over the projection.
FACTORS = {"pca_lowrank", "svd_lowrank"}
FACTORS_TOLERANCE = 0.1

# Arguments that the operator takes on the CPU alone, on every device.
HOST_TENSORS = {"tensor_split"}


def _name(op) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def _dtype(op) -> torch.dtype | None:
    return next((d for d in (torch.float32, torch.int64, torch.bool, torch.complex64) if d in op.dtypes), None)


CASES = {_name(op): op for op in op_db if _dtype(op)}


def test_tables_name_entries_of_op_db():
    assert {_name(op) for op in op_db} - set(CASES) == WITHOUT_DTYPE
    assert len(CASES) + len(WITHOUT_DTYPE) == len(op_db) > 600
    tables = (ASK_FOR_FLOAT64, ASK_FOR_COMPRESSED, CUDA_ONLY, UNINITIALISED, RANDOM, FACTORS, HOST_TENSORS, DEPENDENT)
    assert not set().union(*tables) - set(CASES)


class _ToDevice:
    """Moves the parts of one sample. Tensors that share memory go on sharing it, strides and offsets included."""

    def __init__(self, host_tensors: bool):
        self.storages: dict[tuple, torch.Tensor] = {}
        self.host_tensors = host_tensors
        self.moved = False

    def __call__(self, value):
        if torch.is_tensor(value) and not (self.host_tensors and not value.requires_grad):
            self.moved = True
            return self._tensor(value.detach()).requires_grad_(value.requires_grad)
        if isinstance(value, (str, torch.device)) and str(value) == "cpu":
            self.moved = True
            return "mps"
        return value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            return value.to("mps")
        storage = value.untyped_storage()
        key = storage.data_ptr(), storage.nbytes(), value.dtype
        if key not in self.storages:
            whole = storage.nbytes() // value.element_size()
            self.storages[key] = value.as_strided((whole,), (1,), 0).to("mps")
        return self.storages[key].as_strided(value.shape, value.stride(), value.storage_offset())


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _tensors(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if torch.is_tensor(leaf)]


def _wants_grad(value) -> bool:
    return torch.is_tensor(value) and value.requires_grad


def _values(results) -> torch.Tensor:
    return torch.cat([t.detach().cpu().double().flatten() for t in _tensors(results) if not t.is_complex()])


def _ignoring_argument(function, value, _):
    return function(value)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Kolmogorov-Smirnov: the greatest difference of the two distribution functions."""
    points = torch.cat((a, b))
    below = [torch.searchsorted(x.sort().values, points, right=True) / x.numel() for x in (a, b)]
    return (below[0] - below[1]).abs().max().item()


class _Case:
    def __init__(self, name: str):
        self.name, self.op, self.dtype = name, CASES[name], _dtype(CASES[name])
        self.gradients = self.op.supports_autograd and self.dtype.is_floating_point
        self.backward_left = BACKWARD_SAMPLES if self.gradients else 0
        self.counts = dict.fromkeys(("samples", "by value", "by distribution", "by shape", "backward", "refused"), 0)

    def run(self) -> None:
        _seed()
        for sample in self.op.sample_inputs("cpu", self.dtype, requires_grad=self.gradients):
            self.counts["samples"] += 1
            try:
                self._compare(sample)
            except (TypeError, NotImplementedError) as refusal:
                if not self._is_justified(refusal):
                    raise
                self.counts["refused"] += 1
            except AssertionError as error:
                raise AssertionError(f"sample {self.counts['samples'] - 1}: {sample}\n{error}") from error

    def _is_justified(self, refusal: Exception) -> bool:
        return (self.name in ASK_FOR_FLOAT64 and re.search(FLOAT64, str(refusal)) is not None) or (
            self.name in ASK_FOR_COMPRESSED and re.search(COMPRESSED, str(refusal)) is not None
        )

    def _call(self, inputs):
        return self.op(inputs[0], *inputs[1], **inputs[2])

    def _compare(self, sample) -> None:
        inputs = (sample.input, sample.args, sample.kwargs)
        move = _ToDevice(self.name in HOST_TENSORS)
        on_device = tree_map(move, inputs)
        _seed()
        expected = self._call(inputs)
        _seed()
        result = self._call(on_device)
        found, wanted = _tensors(result), _tensors(expected)
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert a.is_mps or not move.moved
            assert (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)
        if self.name in UNINITIALISED:
            assert [t.stride() for t in found] == [t.stride() for t in wanted]
            self.counts["by shape"] += 1
        elif self.name in RANDOM and not all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True)):
            self._compare_distributions(inputs, on_device)
            self.counts["by distribution"] += 1
        else:
            self.counts["by value"] += 1
            if self.name in FACTORS:
                difference = _product(found) - _product(wanted)
                assert difference.norm() <= FACTORS_TOLERANCE * _product(wanted).norm()
                return
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), equal_nan=True, **TOLERANCE)
            # What gradients are defined of: eigenvectors have any sign, say.
            gauge = sample.output_process_fn_grad
            self._compare_gradients(inputs, on_device, _tensors(gauge(expected)), _tensors(gauge(result)))

    def _compare_distributions(self, inputs, on_device) -> None:
        of_each = []
        for arguments in (inputs, on_device):
            draws = []
            for draw in range(DRAWS):
                torch.manual_seed(draw)
                # Many entries seed the generators themselves, with one number.
                with mock.patch("torch.manual_seed", functools.partial(_ignoring_argument, torch.manual_seed, draw)):
                    draws.append(_values(self._call(arguments)))
            of_each.append(torch.cat(draws))
        independent = DRAWS if self.name in DEPENDENT else of_each[0].numel()
        distance = _distance(*of_each)
        assert distance < max_distance(independent), f"the distributions differ by {distance}"

    def _compare_gradients(self, inputs, on_device, expected, found) -> None:
        pairs = [(_dense(a), _dense(b)) for a, b in zip(expected, found, strict=True) if a.requires_grad]
        assert all(b.requires_grad for _, b in pairs)
        if not self.backward_left or not pairs:
            return
        self.backward_left -= 1
        self.counts["backward"] += 1
        grads = [torch.randn_like(a) for a, _ in pairs]
        wanted = _gradients([a for a, _ in pairs], inputs, grads)
        got = _gradients([b for _, b in pairs], on_device, [g.to("mps") for g in grads])
        for a, b in zip(got, wanted, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a.cpu(), b, equal_nan=True, **GRADIENT_TOLERANCE)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _gradients(outputs, inputs, grads):
    leaves = [t for t in tree_leaves(inputs) if _wants_grad(t)]
    return torch.autograd.grad(outputs, leaves, grads, allow_unused=True)


def _product(factors: list[torch.Tensor]) -> torch.Tensor:
    u, s, v = (t.detach().cpu() for t in factors)
    for basis in (u, v):
        torch.testing.assert_close(basis.mH @ basis, torch.eye(s.shape[-1]).expand_as(basis.mH @ basis), **TOLERANCE)
    return (u * s.unsqueeze(-2)) @ v.mH


@pytest.mark.parametrize("name", CASES)
def test_against_the_cpu(name, record_property):
    if name in CUDA_ONLY:
        sample = next(iter(CASES[name].sample_inputs("cpu", torch.float32)))
        with pytest.raises(AssertionError, match="only supported on CUDA"):
            CASES[name](sample.input, *sample.args, **sample.kwargs)
        return
    case = _Case(name)
    case.run()
    for kind, n in case.counts.items():
        record_property(f"OpInfo: {kind}", n)
    record_property("OpInfo: samples in float32", case.counts["samples"] * (case.dtype is torch.float32))
    assert case.counts["samples"]
    refuses = name in ASK_FOR_FLOAT64 | ASK_FOR_COMPRESSED
    assert (case.counts["refused"] > 0) == refuses, "a table names an entry that it need not"
    assert (case.counts["by distribution"] > 0) == (name in RANDOM), "a table names an entry that it need not"
