"""Whole shaders as others write them, in the style of MLX and of extensions on PyTorch's own headers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from virtual_mps.compiler.preprocess import preprocess
from virtual_mps.executor import Library

SOURCES = Path(__file__).parent / "sources"
RNG = np.random.default_rng(7)
# Storage and unit roundoff of each type.
TYPES = {"float32": (np.float32, 2**-23), "float16": (np.float16, 2**-10), "bfloat16": (np.uint16, 2**-7)}


def library(name: str) -> Library:
    include = Path(torch.__file__).parent / "include"
    return Library(preprocess(SOURCES / f"{name}.metal", include_dirs=[str(include)]), preprocessed=True)


def encode(x: np.ndarray, kind: str) -> np.ndarray:
    if kind != "bfloat16":
        return x.astype(TYPES[kind][0])
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decode(x: np.ndarray, kind: str) -> np.ndarray:
    return (
        (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) if kind == "bfloat16" else x.astype(np.float64)
    )


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("size", [4, 127, 1000, 2048])
@pytest.mark.parametrize("has_w", [True, False])
@pytest.mark.parametrize("kind", TYPES)
def test_rms_norm(kind, has_w, size):
    x, w = encode(RNG.standard_normal((5, size)), kind), encode(RNG.standard_normal(size), kind)
    out = np.zeros_like(x)
    threads = -(-size // 4 // 32) * 32 if size > 128 else 32
    kernel = library("norms").kernel(f"rms{kind}", {"has_w": np.bool_(has_w)})
    arguments = (x, w, out, np.float32(1e-5), np.uint32(size), np.uint32(1))
    kernel(*arguments, threadgroups=(5,), threads_per_threadgroup=(max(threads, -(-size // 4)),))
    wide = decode(x, kind)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * (decode(w, kind) if has_w else 1)
    np.testing.assert_allclose(decode(out, kind), expected, rtol=2 * TYPES[kind][1], atol=1e-6)


@pytest.mark.parametrize("size", [3, 500, 4099])
@pytest.mark.parametrize("kind", TYPES)
def test_looped_softmax(kind, size):
    x = encode(RNG.standard_normal((3, size)) * 3, kind)
    out = np.zeros_like(x)
    kernel = library("norms").kernel(f"looped_softmax_{kind}")
    kernel(x, out, np.int32(size), threadgroups=(3,), threads_per_threadgroup=(256,))
    np.testing.assert_allclose(decode(out, kind), softmax(decode(x, kind)), rtol=4 * TYPES[kind][1], atol=1e-7)


@pytest.mark.parametrize(("m", "n", "k"), [(32, 64, 32), (45, 70, 37), (1, 1, 1)])
@pytest.mark.parametrize("kind", TYPES)
def test_gemm_of_fragments(kind, m, n, k):
    a, b = encode(RNG.standard_normal((m, k)), kind), encode(RNG.standard_normal((k, n)), kind)
    d = np.zeros((m, n), a.dtype)
    kernel = library("fragments").kernel(f"fragment_gemm_{kind}_bm32_bn32_bk16")
    assert kernel.max_threads == 64
    params = np.array([m, n, k, k, n, n], np.int32)
    grid = (-(-n // 32), -(-m // 32))
    kernel(a, b, None, d, params, threadgroups=grid, threads_per_threadgroup=(32, 2))
    expected = decode(a, kind) @ decode(b, kind)
    np.testing.assert_allclose(decode(d, kind), expected, rtol=TYPES[kind][1], atol=1e-4)


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize(
    ("kernel_name", "dim", "kind"), [("sdpa_vector_half_64", 64, "float16"), ("sdpa_vector_float_96", 96, "float32")]
)
def test_decode_attention(kernel_name, dim, kind, mask):
    heads, kv_heads, length = 4, 2, 77
    q, k, v = (
        encode(RNG.standard_normal(s), kind) for s in ((heads, dim), (kv_heads, length, dim), (kv_heads, length, dim))
    )
    keep = RNG.random(length) > 0.3
    bias = encode(RNG.standard_normal(length), kind)
    constants = {
        "has_mask": np.bool_(mask is not None),
        "do_causal": np.bool_(True),
        "bool_mask": np.bool_(mask == "bool"),
    }
    kernel = library("decode").kernel(kernel_name, constants)
    assert ("bmask" in [p[2] for p in kernel.parameters], "fmask" in [p[2] for p in kernel.parameters]) == (
        mask == "bool", mask == "float",
    )  # fmt: skip
    out = np.zeros_like(q)
    scale = np.float32(dim**-0.5)
    arguments = (q, k, v, out, np.int32(2), np.int32(length), np.uint64(length * dim), scale)
    masks = (keep if mask == "bool" else None, bias if mask == "float" else None)
    kernel(*arguments, *masks, threadgroups=(heads,), threads_per_threadgroup=(1024,))
    scores = np.einsum("hd,hld->hl", decode(q, kind), np.repeat(decode(k, kind), 2, 0)) * scale
    if mask == "bool":
        scores = np.where(keep, scores, -np.inf)
    elif mask == "float":
        scores = scores + decode(bias, kind)
    expected = np.einsum("hl,hld->hd", softmax(scores), np.repeat(decode(v, kind), 2, 0))
    np.testing.assert_allclose(
        decode(out, kind), expected, rtol=TYPES[kind][1], atol=1e-3 if kind == "float16" else 1e-5
    )


def test_quantised_matrix_vector_product():
    rows, columns, group = 12, 512, 32
    values = RNG.integers(0, 16, (rows, columns))
    scales = RNG.standard_normal((rows, columns // group)).astype(np.float16)
    biases = RNG.standard_normal((rows, columns // group)).astype(np.float16)
    x = RNG.standard_normal(columns).astype(np.float16)
    packed = (values.reshape(rows, -1, 8) << (4 * np.arange(8))).sum(2).astype(np.uint32)
    y = np.zeros(rows, np.float16)
    kernel = library("decode").kernel("qmv4_half_32")
    kernel(packed, scales, biases, x, y, np.uint32(columns), threadgroups=(rows,), threads_per_threadgroup=(32,))
    weights = values * np.repeat(scales.astype(np.float64), group, 1) + np.repeat(biases.astype(np.float64), group, 1)
    np.testing.assert_allclose(y.astype(np.float64), weights @ x.astype(np.float64), rtol=2**-9, atol=0.05)


def test_everyday_constructs():
    derived = np.dtype(
        {
            "names": ["a", "v", "h"],
            "formats": [np.float32, (np.float32, 4), (np.float16, 3)],
            "offsets": [0, 16, 32],
            "itemsize": 48,
        }
    )
    d = np.zeros(1, derived)
    d["a"], d["v"], d["h"] = 3, [1, 2, 3, 4], [1, 2, 0.5]
    y, seen = np.zeros(17, np.float32), np.zeros(1, np.uint32)
    run = library("everyday").kernel("everyday")
    run(y, d, np.arange(8, dtype=np.float16), np.uint8(3), seen, threads=(1,))
    np.testing.assert_array_equal(y, [10, 127, 307, 10.5, 12, 3, 0, 1, 9, 0, 0, 5.5, 2, 14, 5, 4, 13])
    assert seen[0] == 6


@pytest.fixture(scope="module")
def c10():
    return library("c10")


def test_special_functions_of_pytorch(c10):
    x = np.array([0.1, 0.5, 1.0, 2.5, 4.0, 7.5], np.float32)
    y = np.zeros((len(x), 12), np.float32)
    c10.kernel("special")(x, y, threads=(len(x),))
    t = torch.tensor(x, dtype=torch.float64)
    functions = torch.special
    expected = [
        functions.erf(t), functions.erfinv(t / 10), functions.gammaln(t), functions.digamma(t), functions.i0(t),
        functions.i1e(t), functions.sinc(t), functions.expm1(t), functions.log1p(t), functions.bessel_j0(t),
        functions.zeta(t + 1, torch.tensor(2.0, dtype=torch.float64)), functions.spherical_bessel_j0(t),
    ]  # fmt: skip
    # The headers' own approximations are of single precision.
    np.testing.assert_allclose(y, torch.stack(expected, 1).numpy(), rtol=2e-5, atol=2e-6)


def test_incomplete_gamma_of_pytorch(c10):
    a, x = (RNG.uniform(0.1, 20, 64).astype(np.float32) for _ in range(2))
    y = np.zeros(64, np.float32)
    c10.kernel("gamma_ratio")(a, x, y, threads=(64,))
    expected = torch.special.gammainc(*(torch.tensor(v, dtype=torch.float64) for v in (a, x)))
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [32, 100, 1024])
def test_reductions_of_pytorch(c10, size):
    x = RNG.integers(-8, 8, size).astype(np.float16)
    y = np.zeros(2, np.float32)
    c10.kernel("reductions_half")(x, y, threadgroups=(1,), threads_per_threadgroup=(size,))
    np.testing.assert_array_equal(y, [x.astype(np.float32).sum(), x.max()])


@pytest.mark.parametrize(
    ("kind", "dtype"), [("float", np.float32), ("half", np.float16), ("int", np.int32), ("short", np.int16)]
)
def test_atomics_of_pytorch(c10, kind, dtype):
    x, where = RNG.integers(0, 5, 1000).astype(dtype), RNG.integers(0, 7, 1000).astype(np.int32)
    y = np.zeros(8, dtype)
    c10.kernel(f"scatter_add_{kind}")(x, where, y, threads=(1000,))
    np.testing.assert_array_equal(y, np.bincount(where, x, 8).astype(dtype))


def test_random_numbers_of_pytorch(c10):
    y = np.zeros(20000, np.float32)
    c10.kernel("random")(y, np.array([42, 0], np.int64), threads=(20000,))
    assert 0 <= y.min() < 0.001 < 0.999 < y.max() < 1
    assert abs(y.mean() - 0.5) < 4 * (1 / 12 / 20000) ** 0.5
    assert len(np.unique(y)) > 19900


def test_every_kernel_of_pytorchs_headers_compiles(c10):
    """Among them those that the registration macros of its pointwise operators make."""
    names = list(c10.table["kernels"])
    assert len(names) > 20
    for name in names[:: max(1, len(names) // 12)]:
        c10.kernel(name)


def test_pointwise_registration_of_pytorch(c10):
    name = next(n for n in c10.table["kernels"] if n.startswith("square_dense_float"))
    x, y = np.arange(10, dtype=np.float32), np.zeros(10, np.float32)
    c10.kernel(name)(y, x, np.uint32(10), threads=(10,))
    np.testing.assert_array_equal(y, x * x)


@pytest.mark.usefixtures("plain_run")
def test_a_missing_barrier_in_a_known_kernel_shows():
    """The executor is strict enough to notice: without the barrier the sum of the simdgroups is read too early."""
    text = preprocess(SOURCES / "norms.metal")
    broken = text.replace("metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);", ";")
    assert broken != text
    x, w, out = np.ones((1, 1024), np.float32), np.ones(1024, np.float32), np.zeros((1, 1024), np.float32)
    kernel = Library(broken, preprocessed=True).kernel("rmsfloat32", {"has_w": np.bool_(True)})
    kernel(x, w, out, np.float32(0), np.uint32(1024), np.uint32(1), threadgroups=(1,), threads_per_threadgroup=(256,))
    assert not np.allclose(out, 1)
