"""What each operator's Metal kernels may do: dispatches and memory traffic, counted exactly by virtual_mps.

They hold on a GPU as well: how many dispatches an operator encodes, and which bytes its threads read and write, does
not depend on the device. An operator is a row of ROWS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.attention import forward_flops, materialised, tiled, training_memory
from tests.conftest import count
from torch_metalk import ops

SHAPES = [(512, 5632), (4, 9, 512, 64)]
DTYPES = [torch.float16, torch.float32]


@dataclass(frozen=True)
class Row:
    """One call of an operator, with all that it reads and writes among its arguments and results.

    Attributes:
        name: the test id.
        op: the dispatcher operator.
        arguments: shape and dtype -> the operator's arguments, tensors on mps.
        dispatches: exactly so many.
        unique: at most so many times the bytes of arguments and results, each byte once a dispatch.
        least: at least so many; less than 1 where a part of an argument need not be read.
        elementwise: takes no threadgroup memory.
    """

    name: str
    op: Callable[..., Any]
    arguments: Callable[[tuple[int, ...], torch.dtype], tuple]
    dispatches: int = 1
    unique: float = 1.02
    least: float = 0.99
    elementwise: bool = False


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to("mps", dtype)


def _norm(shape: tuple[int, ...], dtype: torch.dtype, also_float32: bool = False) -> tuple:
    return _random(shape, dtype), _random(shape[-1:], dtype), 1e-6, 0.0, True, also_float32


def _norm_backward(*output_mask: bool) -> Callable[[tuple[int, ...], torch.dtype], tuple]:
    def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> tuple:
        x, weight, *_ = _norm(shape, dtype)
        return _random(shape, dtype), x, weight, torch.rand(shape[:-1]).to("mps"), 0.0, output_mask

    return arguments


def _like(n: int, *rest: Any) -> Callable[[tuple[int, ...], torch.dtype], tuple]:
    """`n` tensors of the shape, and what follows them."""
    return lambda shape, dtype: (*(_random(shape, dtype) for _ in range(n)), *rest)


def _packed(*rest: Any) -> Callable[[tuple[int, ...], torch.dtype], tuple]:
    """A fused projection of two tensors of the shape, and what follows it."""
    return lambda shape, dtype: (_random((*shape[:-1], 2 * shape[-1]), dtype), *rest)


def _packed_backward(*rest: Any) -> Callable[[tuple[int, ...], torch.dtype], tuple]:
    return lambda shape, dtype: (_random(shape, dtype), *_packed(*rest)(shape, dtype))


def _rotated(heads_first: bool) -> Callable[[tuple[int, ...], torch.dtype], tuple]:
    """q and k of the shape, k with a third of the heads, and tables; [B, S, H, D] seen as [B, H, S, D] or as it is."""

    def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> tuple:
        *batch, positions, width = shape
        batch = batch or [1, 3]
        q, k = (_random((batch[0], positions, heads, width), dtype) for heads in (batch[1], batch[1] // 3))
        xs = [q.transpose(1, 2), k.transpose(1, 2)] if heads_first else [q, k]
        cos, sin = (_random((1, positions, min(width, 128)), dtype) for _ in range(2))
        return xs, cos, sin, -2 if heads_first else 1, False, False

    return arguments


def _positions(shape: tuple[int, ...], dtype: torch.dtype) -> tuple:
    batch = shape[0] if len(shape) > 2 else 1
    positions = torch.full((batch,), 5, dtype=torch.int32, device="mps")
    return _random(shape, dtype), positions, 10000.0, min(shape[-1], 128), False, 1.0, False


def _masked(shape: tuple[int, ...], dtype: torch.dtype) -> tuple:
    mask = torch.rand(1, *shape[-2:]).to("mps") < 0.9
    return _random(shape, dtype)[None], mask, 0.125, False, False


OPS = torch.ops.torch_metalk

ROWS = [
    Row("rms_norm", OPS.rms_norm, _norm),
    Row("rms_norm_also_float32", OPS.rms_norm, partial(_norm, also_float32=True)),
    Row("rms_norm_backward", OPS.rms_norm_backward, _norm_backward(True, False)),
    # Its partial sums are written by the first dispatch and added up by a second.
    Row("rms_norm_backward_weight", OPS.rms_norm_backward, _norm_backward(True, True), dispatches=2, unique=1.06),
    Row("swiglu", OPS.swiglu, _like(2), elementwise=True),
    Row("swiglu_backward", OPS.swiglu_backward, _like(3, (True, True)), elementwise=True),
    Row("swiglu_packed", OPS.swiglu_packed, _packed(), elementwise=True),
    Row("swiglu_packed_backward", OPS.swiglu_packed_backward, _packed_backward(), elementwise=True),
    Row("geglu_tanh", OPS.geglu, _like(2, "tanh"), elementwise=True),
    Row("geglu_tanh_backward", OPS.geglu_backward, _like(3, "tanh", (True, True)), elementwise=True),
    Row("geglu_exact", OPS.geglu, _like(2, "none"), elementwise=True),
    Row("geglu_exact_backward", OPS.geglu_backward, _like(3, "none", (True, True)), elementwise=True),
    Row("geglu_packed", OPS.geglu_packed, _packed("tanh"), elementwise=True),
    Row("geglu_packed_backward", OPS.geglu_packed_backward, _packed_backward("tanh"), elementwise=True),
    # Of the tables the first half is read.
    Row("rope", OPS.rope, _rotated(heads_first=True), least=0.98, elementwise=True),
    Row("rope_heads_last", OPS.rope, _rotated(heads_first=False), least=0.98, elementwise=True),
    Row("rope_backward", OPS.rope_backward, _rotated(heads_first=True), least=0.98, elementwise=True),
    Row("rope_positions", OPS.rope_positions, _positions, elementwise=True),
    Row("rope_positions_backward", OPS.rope_positions_backward, _positions, elementwise=True),
    Row("softmax", OPS.softmax, _like(1, None, 0.125, False, False)),
    Row("softmax_masked", OPS.softmax, _masked),
    # What position hides is not read.
    Row("softmax_causal", OPS.softmax, _like(1, None, 0.125, True, False), least=0.5),
    Row("softmax_backward", OPS.softmax_backward, _like(2, 0.125)),
]


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _bytes(tensors: Iterator[Tensor]) -> int:
    return sum({(t.data_ptr(), t.nbytes, t.stride()): t.nbytes for t in tensors}.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_budget(row: Row, shape: tuple[int, ...], dtype: torch.dtype, count_kernels) -> None:
    arguments = row.arguments(shape, dtype)
    with count_kernels() as c:
        results = row.op(*arguments)
    total = c.total
    assert total.dispatches == row.dispatches
    needed = _bytes(_tensors([arguments, results]))
    assert needed * row.least <= total.device_unique_bytes <= needed * row.unique, total.device_unique_bytes / needed
    if row.elementwise:
        assert total.threadgroup_memory == 0
    # What is smaller than an output (a weight, cos and sin, a mask) is shared by rows, which read it again.
    smallest_output = min(t.nbytes for t in _tensors(results) if t.numel() >= shape[-1] * shape[-2])
    for kernel in c.kernels.values():
        for buffer in kernel.buffers:
            if buffer.unique_written >= smallest_output:
                assert buffer.written == buffer.unique_written, f"{kernel.name}: {buffer.name}"
            if buffer.unique_read >= smallest_output:
                # Rows too long for registers are read a second time.
                times = 2 if "looped" in kernel.name else 1
                assert buffer.read <= times * buffer.unique_read, f"{kernel.name}: {buffer.name}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_gradient", [False, True])
def test_training_dispatches_what_the_operators_do(weight_gradient: bool, dtype: torch.dtype, count_kernels) -> None:
    """The public function under autograd: nothing is copied or cast in between."""
    x, weight = _random((4, 9, 512, 64), dtype).requires_grad_(), _random((64,), dtype).requires_grad_(weight_gradient)
    with count_kernels() as forward:
        y = ops.rms_norm(x, weight)
    with count_kernels() as backward:
        y.backward(torch.ones_like(y))
    assert forward.total.dispatches == 1
    assert backward.total.dispatches == 1 + weight_gradient


# ---- matrix products


def _product(m: int, n: int, k: int, dtype: torch.dtype, count_kernels, transpose_b: bool = False):
    """Counts of one product, the bytes of its operands and result, and what they are beside the counts' names."""
    a = _random((m, k), dtype)
    b = _random((n, k) if transpose_b else (k, n), dtype)
    with count_kernels() as c:
        d = OPS.matmul(a, b, False, transpose_b, None)
    return c, a.nbytes + b.nbytes + d.nbytes


@pytest.mark.parametrize("transpose_b", [False, True], ids=["nn", "nt"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split_product(dtype: torch.dtype, transpose_b: bool, count_kernels) -> None:
    """A LoRA projection has one column of tiles. Split along K it occupies eight times the threadgroups, and moves its
    operands once, and its partial sums."""
    c, needed = _product(512, 32, 5632, dtype, count_kernels, transpose_b)
    product, sums = c.kernels.values()
    assert product.threadgroups == 8 * (512 // 32)
    assert c.total.dispatches == 2
    assert c.total.device_unique_bytes <= 1.25 * needed
    assert sums.device_read == sums.device_unique_read, "each partial sum is read once"
    assert c.total.matrix_flops == 2 * 512 * 32 * 5632
    assert c.total.scalar_flops <= 0.02 * c.total.matrix_flops


@pytest.mark.parametrize(
    ("shape", "transpose_b", "side"),
    [
        ((512, 512, 256), False, 64),
        ((512, 512, 256), True, 32),
        ((512, 544, 192), True, 32),
        ((256, 320, 128), False, 32),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unsplit_product(
    shape: tuple[int, ...], transpose_b: bool, side: int, dtype: torch.dtype, count_kernels
) -> None:
    """Unique bytes: operands and result once. All bytes read: each tile of the result reads its rows of A and its
    columns of B once, M N / side^2 tiles of 2 side K numbers."""
    m, n, k = shape
    c, needed = _product(m, n, k, dtype, count_kernels, transpose_b)
    (kernel,) = c.kernels.values()
    assert kernel.name.endswith(f"_{side}")
    assert c.total.dispatches == 1
    assert kernel.device_unique_bytes <= 1.05 * needed
    predicted = (m // side) * (n // side) * 2 * side * k * dtype.itemsize
    assert 0.95 * predicted <= kernel.device_read <= 1.05 * predicted
    assert kernel.device_written == m * n * dtype.itemsize
    assert kernel.matrix_flops == 2 * m * n * k
    # One multiplication a result, by the scale.
    assert kernel.scalar_flops <= 0.02 * kernel.matrix_flops


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lora_linear_dispatches(dtype: torch.dtype, count_kernels) -> None:
    """Forward: x A^T in chunks, their sum, and the second product with scale and base output in its epilogue. Backward:
    dh and dx, dA, and h again for dB; nothing is cast, copied or added in between. Mixed dtypes take no more."""
    x, base_out, dy = (_random((512, width), dtype) for width in (2048, 640, 640))
    a, b = _random((32, 2048), torch.float32), _random((640, 32), torch.float32)
    with count_kernels() as forward:
        y = OPS.lora_linear(x, base_out, a, b, 2.0)
    assert forward.total.dispatches == 3
    h, scratch = 512 * 32 * 4, 8 * 512 * 32 * 4
    needed = sum(t.nbytes for t in (x, base_out, a, b, y)) + 2 * h + 2 * scratch
    assert forward.total.device_unique_bytes <= 1.01 * needed
    with count_kernels() as backward:
        OPS.lora_linear_backward(dy, x, a, b, 2.0, [True, True, True])
    # dh (split in two) and its sum, dx, dA, h (split in eight) and its sum, dB (split in two) and its sum.
    assert backward.total.dispatches == 8


# ---- attention


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_peak_memory_of_attention(dtype: torch.dtype) -> None:
    """Forward and backward of the tiled kernels hold results and a few numbers a row at a time. At 4,096 tokens that is
    0.007 (float16) and 0.014 times what the math path of stock takes, whose scores grow with the square."""
    q, rows = 9 * 256 * 64 * dtype.itemsize, 9 * 256
    statistics = 4 + 16  # lse, and what backward makes of it
    assert training_memory(tiled, 256, dtype) == q + q + 2 * q // 3 + rows * statistics, "o, dq, dk and dv"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_attention_skips_tiles(dtype: torch.dtype, counted_device: torch.device) -> None:
    """In tiles of 32 x 32, 8 rows of 1 to 8 are 36 of 64. At 2,048 tokens it is 0.508."""
    assert forward_flops(256, dtype) == 36 / 64


@pytest.mark.parametrize("bias", [False, True], ids=["bool", "additive"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_skips_what_a_mask_hides(dtype: torch.dtype, bias: bool, counted_device: torch.device) -> None:
    """Two sequences in one, and padding: 2 x 2 tiles of 32 x 32 see each other, and 1 more; 3 of 8 columns are padding.
    Backward, with five products a tile and two a second time, skips them too."""
    seen = torch.zeros(256, 256, dtype=torch.bool)
    seen[:64, :64] = seen[64:96, 64:96] = True
    mask = torch.zeros(256, 256).masked_fill_(~seen, -torch.inf) if bias else seen
    tensors = [_random((1, 1, 256, 64), dtype) for _ in range(4)]
    call = (mask.to(counted_device), False, False, 0.125, None, None, "tiled")
    product = 5 * 2 * 32 * 32 * 64
    with count() as forward:
        o, lse = OPS.attention(*tensors[:3], *call)
    assert forward.total.matrix_flops == 2 * product
    with count() as backward:
        OPS.attention_backward(tensors[3], *tensors[:3], o, lse, *call)
    assert backward.total.matrix_flops == 7 * product


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_peak_memory_of_materialised_attention(dtype: torch.dtype) -> None:
    """Scores of one head at a time, and in backward their gradients; sums over heads that share keys, in float32; q, k
    and do once more, with 0 for what is not finite."""
    q, rows, scores = 9 * 256 * 64, 9 * 256, 256 * 256 * 4
    results = (q + q + 2 * q // 3) * dtype.itemsize + rows * (4 + 16)
    finite, sums = (q + q // 3 + q) * dtype.itemsize, 2 * q // 3 * 4
    assert training_memory(materialised, 256, dtype) == results + finite + sums + 2 * scores


# ---- attention to a cache


def _attended(
    heads: int, kv_heads: int, queries: int, keys: int, dtype: torch.dtype, count_kernels, page_size: int = 0
):
    q = _random((1, heads, queries, 64), dtype)
    k, v = (_random((1, kv_heads, keys, 64), dtype) for _ in range(2))
    arguments, op = (q, k, v, None, None, 0.125, None, None), OPS.decode_attention
    if page_size:
        pages = [t[0].transpose(0, 1).reshape(-1, page_size, kv_heads, 64) for t in (k, v)]
        tables = torch.arange(keys // page_size, dtype=torch.int32, device="mps")[None]
        lengths = torch.full((1,), keys, dtype=torch.int32, device="mps")
        arguments, op = (q, *pages, tables, lengths, 0.125, None, None), OPS.paged_attention
    with count_kernels() as c:
        op(*arguments)
    return c, k.nbytes


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys"),
    [(9, 3, 1, 256), (32, 8, 1, 2048), (8, 8, 1, 200), (32, 1, 1, 1536), (8, 2, 8, 256), (32, 2, 8, 160)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_is_read_once_for_32_rows(
    heads: int, kv_heads: int, queries: int, keys: int, page_size: int, dtype: torch.dtype, count_kernels
) -> None:
    """All heads that share keys and values, and all queries, read them together. Two passes read them as often as
    one."""
    if page_size:
        keys -= keys % page_size
    c, nbytes = _attended(heads, kv_heads, queries, keys, dtype, count_kernels, page_size)
    main, *join = c.kernels.values()
    times = -(-heads // kv_heads * queries // 32)
    for name in "kv":
        assert main.buffer(name).unique_read == nbytes
        assert main.buffer(name).read == times * nbytes
    assert c.total.dispatches == 1 + len(join)
    assert len(join) == (keys >= 1024 and times == 1)


def test_threadgroup_memory_does_not_grow_with_the_context(count_kernels) -> None:
    used = [_attended(8, 1, 1, keys, torch.float32, count_kernels)[0].total.threadgroup_memory for keys in (64, 4096)]
    assert used[0] == used[1] <= 32768


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_is_written_once(dtype: torch.dtype, count_kernels) -> None:
    k, v = (_random((7, 3, 64), dtype) for _ in range(2))
    k_pages, v_pages = (_random((9, 8, 3, 64), dtype) for _ in range(2))
    slots = torch.tensor([0, 70, 9, 33, 1, -1, 100], device="mps")
    with count_kernels() as c:
        ops.paged_cache_write(k, v, k_pages, v_pages, slots)
    (kernel,) = c.kernels.values()
    assert c.total.dispatches == 1
    assert c.total.threadgroup_memory == 0
    for new, pages in (("k", "k_pages"), ("v", "v_pages")):  # of 5 tokens: two are left out
        assert kernel.buffer(new).read == kernel.buffer(new).unique_read == 5 * k[0].nbytes
        assert kernel.buffer(pages).written == kernel.buffer(pages).unique_written == 5 * k[0].nbytes
