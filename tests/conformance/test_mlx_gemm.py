"""MLX's steel GEMM kernels: fused with an addition, batched, and split along K."""

import struct
from dataclasses import dataclass

import pytest
import torch

from virtual_mps.executor import MetalError

from . import mlx

FUSED = (
    "steel/gemm/gemm.h",
    "steel/gemm/kernels/steel_gemm_fused.h",
)
SPLIT = ("steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_splitk.h")

# BM, BN, BK, WM, WN: those that MLX has instances of.
TILES = [
    (64, 64, 16, 2, 2),
    (64, 64, 16, 1, 2),
    (64, 32, 32, 2, 2),
    (32, 64, 16, 1, 2),
    (32, 32, 16, 2, 2),
    (64, 32, 8, 4, 1),
]
TILE = TILES[4]  # the smallest, which is compiled fastest
LAYOUTS = {"nn": (False, False), "nt": (False, True), "tn": (True, False)}


@dataclass(frozen=True)
class Case:
    tile: tuple[int, ...]
    layout: str
    size: tuple[int, int, int]  # M, N, K
    batch: tuple[int, ...] = ()
    broadcast_b: bool = False
    addition: str = ""  # of alpha * product + beta * C: "add" where both are 1, "axpby"

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.tile)), self.layout, "x".join(map(str, self.size))]
        parts += ["b" + "x".join(map(str, self.batch))] * bool(self.batch) + ["broadcast"] * self.broadcast_b
        return "-".join([*parts, self.addition] if self.addition else parts)


# Aligned in every way, in no way, in one way each; K below one block; one row, one column.
SIZES = [(64, 64, 64), (70, 66, 50), (64, 64, 50), (70, 64, 32), (64, 70, 32), (33, 17, 7), (1, 40, 40), (40, 1, 40)]
CASES = [
    *(Case(TILE, layout, size) for layout in LAYOUTS for size in SIZES),
    *(
        Case(tile, layout, (70, 66, 50))
        for tile, layout in zip(TILES, ("nt", "nt", "nn", "tn", "nn", "tn"), strict=True)
    ),
    *(Case(TILE, layout, (40, 36, 40), batch=(3,)) for layout in LAYOUTS),
    Case(TILE, "nt", (40, 36, 40), batch=(2, 3), broadcast_b=True),
    *(Case(TILE, "nt", size, addition=("add", "axpby")[i % 2]) for i, size in enumerate(SIZES[:5])),
    Case(TILE, "nn", (40, 36, 40), batch=(2, 2), addition="axpby"),
]
EVERY_DTYPE = [Case(TILE, layout, (70, 66, 50)) for layout in LAYOUTS]


def _operands(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B as they lie in memory."""
    m, n, k = case.size
    a_transposed, b_transposed = LAYOUTS[case.layout]
    b_batch = (*case.batch[:-1], 1) if case.broadcast_b else case.batch
    a = mlx.values(*case.batch, *((k, m) if a_transposed else (m, k)), dtype=dtype)
    b = mlx.values(*b_batch, *((n, k) if b_transposed else (k, n)), dtype=dtype)
    return a, b


def _batch_strides(tensor: torch.Tensor) -> list[int]:
    return [0 if size == 1 else stride for size, stride in zip(tensor.shape[:-2], tensor.stride(), strict=False)]


def _leading(tensor: torch.Tensor) -> int:
    return tensor.shape[-1]


def _reads_past_c(case: Case) -> bool:
    """MLX's apply_epilogue_safe asks whether a column is there, and not whether a row is."""
    return bool(case.addition) and case.size[0] % case.tile[0] != 0


def _with_rows_to_spare(c: torch.Tensor, rows: int) -> torch.Tensor:
    """C's memory and more: NaN, which shows where it is used."""
    return torch.cat((c.flatten(), c.new_full((rows * c.shape[-1],), torch.nan)))


def gemm(
    case: Case,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    c_memory: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> torch.Tensor:
    m, n, k = case.size
    bm, bn, bk, wm, wn = case.tile
    count = torch.Size(case.batch).numel()
    strided = len(case.batch) > 1
    constants = {
        10: strided,
        100: c is not None,
        110: case.addition == "axpby",
        200: m % bm == 0,
        201: n % bn == 0,
        202: k % bk == 0,
    }
    kernel = mlx.kernel(FUSED, "gemm", a.dtype, *case.tile, *LAYOUTS[case.layout], constants=constants)
    tiles_n, tiles_m = -(-n // bn), -(-m // bm)
    swizzle = 1 if tiles_m > 1 else 0
    # GEMMParams, whose 64-bit members lie at multiples of 8.
    batch_strides = [(_batch_strides(x) or [0])[-1] for x in (a, b)]
    params = struct.pack(
        "=8i3q3i4x",
        *(m, n, k, _leading(a), _leading(b), n, tiles_n, tiles_m),
        *(*batch_strides, m * n),
        *(swizzle, k // bk, len(case.batch)),
    )
    addmm = None
    if c is not None:  # GEMMAddMMParams
        addmm = struct.pack("=2iq2f", _leading(c), 1, (_batch_strides(c) or [0])[-1], alpha, beta)
    shape = strides = None
    if strided:
        shape = mlx.np.array(case.batch, mlx.np.int32)
        strides = mlx.np.array([_batch_strides(x) for x in (a, b) + ((c,) if c is not None else ())], mlx.np.int64)
    out = mlx.unwritten(*case.batch, m, n, dtype=a.dtype)
    mlx.launch(
        kernel,
        *(a, b, c_memory, out),
        *(packed if packed is None else mlx.np.frombuffer(packed, mlx.np.uint8) for packed in (params, addmm)),
        *(shape, strides),
        threadgroups=(tiles_n << swizzle, -(-tiles_m // (1 << swizzle)), count),
        threads_per_threadgroup=(32, wn, wm),
    )
    return out


def _product(case: Case, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a_transposed, b_transposed = LAYOUTS[case.layout]
    return (a.mT if a_transposed else a) @ (b.mT if b_transposed else b)


@mlx.cases(CASES, EVERY_DTYPE)
def test_gemm(case, dtype, mode):
    import mlx.core as mx

    a, b = _operands(case, dtype)
    alpha, beta = (0.5, -2.0) if case.addition == "axpby" else (1.0, 1.0)
    c = mlx.values(*case.batch, *case.size[:2], dtype=dtype) if case.addition else None
    exact, terms = _product(case, a.double(), b.double()), _product(case, a.double().abs(), b.double().abs())
    if c is not None:
        exact, terms = alpha * exact + beta * c.double(), abs(alpha) * terms + abs(beta) * c.double().abs()
    c_memory = c
    if _reads_past_c(case):
        if mode == "checked":
            with pytest.raises(MetalError, match=r"out-of-bounds read .*/steel/gemm/mma\.h:.* of buffer\(2\) 'C'"):
                gemm(case, a, b, c, c, alpha, beta)
        c_memory = _with_rows_to_spare(c, case.tile[0])
    found = gemm(case, a, b, c, c_memory, alpha, beta)
    # Where C is added it meets a product that was already rounded to the dtype.
    mlx.check(found, exact, terms, inner=2 if c is not None else 0)
    if c is None:
        a_mlx, b_mlx = mlx.to_mlx(a), mlx.to_mlx(b)
        a_transposed, b_transposed = LAYOUTS[case.layout]
        a_mlx = a_mlx.swapaxes(-1, -2) if a_transposed else a_mlx
        b_mlx = b_mlx.swapaxes(-1, -2) if b_transposed else b_mlx
        # MLX's CPU backend sums half precision in blocks of its own.
        mlx.check(mlx.from_mlx(mx.matmul(a_mlx, b_mlx)), exact, terms, inner=4)


# M, N, K and partitions: with and without a rest of K, which the last partition takes.
SPLITS = [((32, 32, 512), 4), ((40, 20, 530), 2), ((16, 33, 1030), 8), ((1, 64, 2048), 16)]


@dataclass(frozen=True)
class Split:
    layout: str
    size: tuple[int, int, int]
    partitions: int

    def __str__(self) -> str:
        return f"{self.layout}-{'x'.join(map(str, self.size))}-{self.partitions}"


@mlx.cases([Split(layout, *split) for layout in LAYOUTS for split in SPLITS], [Split("nt", *SPLITS[1])])
def test_split_k(case, dtype, mode):
    (m, n, k), partitions, layout = case.size, case.partitions, case.layout
    case = Case(TILE, layout, case.size)
    bm, bn, bk, wm, wn = case.tile
    a, b = _operands(case, dtype)
    alignment = (m % bm == 0 and n % bn == 0, k % bk == 0)
    kernel = mlx.kernel(SPLIT, "gemm_splitk", dtype, mlx.F32, *case.tile, *LAYOUTS[layout], *alignment)
    iterations = k // bk // partitions
    # GEMMSpiltKParams.
    params = struct.pack(
        "=13i",
        *(m, n, k, _leading(a), _leading(b), n, -(-n // bn), -(-m // bm)),
        *(partitions, m * n, iterations * bk, 0, iterations),
    )
    parts = mlx.unwritten(partitions, m, n, dtype=mlx.F32)
    mlx.launch(
        kernel,
        *(a, b, parts, mlx.np.frombuffer(params, mlx.np.uint8)),
        threadgroups=(-(-n // bn), -(-m // bm), partitions),
        threads_per_threadgroup=(32, wn, wm),
    )
    exact, terms = _product(case, a.double(), b.double()), _product(case, a.double().abs(), b.double().abs())
    mlx.check(parts.double().sum(0).float(), exact, terms)
    out = mlx.unwritten(m, n, dtype=dtype)
    accumulate = mlx.kernel(SPLIT, "gemm_splitk_accum", mlx.F32, dtype)
    scalars = (mlx.np.int32(value) for value in (partitions, m * n, n))
    mlx.launch(accumulate, parts, out, *scalars, threads=(n, m), threads_per_threadgroup=(16, 8))
    mlx.check(out, exact, terms)
