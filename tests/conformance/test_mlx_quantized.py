"""MLX's affine quantisation: quantise and dequantise, and products with quantised matrices."""

from dataclasses import dataclass

import pytest
import torch

from . import mlx

HEADERS = ("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
NO_BATCH = [mlx.np.int32(0), None, None, mlx.np.int32(0), None, None, None, None]


class Weight:
    """A matrix (rows, columns), quantised along its rows by MLX on the CPU."""

    def __init__(self, rows: int, columns: int, bits: int, group: int, dtype: torch.dtype):
        import mlx.core as mx

        self.bits, self.group, self.dtype = bits, group, dtype
        self.dense = mlx.values(rows, columns, dtype=dtype)
        self.mlx = mx.quantize(mlx.to_mlx(self.dense), group_size=group, bits=bits)
        self.packed = torch.from_numpy(mlx.np.array(self.mlx[0]).view(mlx.np.uint8))
        self.scales, self.biases = map(mlx.from_mlx, self.mlx[1:])

    def codes(self) -> torch.Tensor:
        """The integers, unpacked: little-endian bit fields."""
        bits = (self.packed[..., None] >> torch.arange(8)) & 1
        fields = bits.reshape(self.packed.shape[0], -1, self.bits).long()
        return (fields << torch.arange(self.bits)).sum(-1)

    def exact(self) -> torch.Tensor:
        scales, biases = (x.double().repeat_interleave(self.group, 1) for x in (self.scales, self.biases))
        return self.codes() * scales + biases

    def magnitude(self) -> torch.Tensor:
        scales, biases = (x.double().abs().repeat_interleave(self.group, 1) for x in (self.scales, self.biases))
        return self.codes() * scales + biases


@dataclass(frozen=True)
class Format:
    bits: int
    group: int

    def __str__(self) -> str:
        return f"{self.bits}bit-g{self.group}"


BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
EVERY_DTYPE = [Format(4, 64)]


def formats(turn: int) -> list[Format]:
    """Each number of bits with one group size; three turns give all."""
    return [Format(bits, GROUPS[(i + turn) % len(GROUPS)]) for i, bits in enumerate(BITS)]


def _kernel(name: str, weight: Weight, *more: object):
    return mlx.kernel(HEADERS, name, weight.dtype, weight.group, weight.bits, *more)


@mlx.cases(formats(0) + formats(1), EVERY_DTYPE)
def test_dequantize(case, dtype, mode):
    weight = Weight(3, 256, case.bits, case.group, dtype)
    out = mlx.unwritten(3, 256, dtype=dtype)
    per_pack = {3: 8, 5: 8, 6: 4}.get(case.bits, 8 // case.bits)
    mlx.launch(
        _kernel("affine_dequantize", weight),
        *(weight.packed, weight.scales, weight.biases, out),
        threads=(out.numel() // per_pack,),
        threads_per_threadgroup=(64,),
    )
    # The product of code and scale, and in half precision the code too, are rounded to the dtype.
    mlx.check(out, weight.exact(), weight.magnitude(), inner=2)


@mlx.cases(formats(1) + formats(2), EVERY_DTYPE)
def test_quantize(case, dtype, mode):
    weight = Weight(4, 256, case.bits, case.group, dtype)
    packed = torch.zeros_like(weight.packed)
    scales, biases = (mlx.unwritten(*weight.scales.shape, dtype=dtype) for _ in range(2))
    mlx.launch(
        _kernel("affine_quantize", weight),
        *(weight.dense, packed, scales, biases),
        threads=(weight.dense.numel() // (case.group // 32),),
        threads_per_threadgroup=(64,),
    )
    mlx.check(scales, weight.scales.double(), weight.scales.double().abs(), inner=2)
    mlx.check(biases, weight.biases.double(), weight.biases.double().abs(), inner=2)
    theirs = weight.codes()
    weight.packed = packed
    differences = (weight.codes() - theirs).abs()
    # Where a value lies half-way between two codes, rounding decides.
    assert differences.max() <= 1 and differences.double().mean() < 0.01


@dataclass(frozen=True)
class Product:
    kernel: str
    m: int
    n: int
    k: int
    format: Format

    def __str__(self) -> str:
        return f"{self.kernel}-{self.m}x{self.n}x{self.k}-{self.format}"


def _product(case: Product, dtype: torch.dtype) -> None:
    transposed = case.kernel not in ("qvm", "qmm_n")
    rows, columns = (case.n, case.k) if transposed else (case.k, case.n)
    weight = Weight(rows, columns, case.format.bits, case.format.group, dtype)
    x = mlx.values(case.m, case.k, dtype=dtype)
    out = mlx.unwritten(case.m, case.n, dtype=dtype)
    rows_at_once = {"qmv": 8, "qmv_fast": 8, "qmv_quad": 64, "qvm": 64}
    sizes = [mlx.np.int32(case.k), mlx.np.int32(case.n)]
    if case.kernel in rows_at_once:
        options = (case.k, False) if case.kernel == "qmv_quad" else (False,)
        geometry = {
            "threadgroups": (case.m, -(-case.n // rows_at_once[case.kernel])),
            "threads_per_threadgroup": (32, 1 if case.kernel == "qmv_quad" else 2),
        }
    else:
        options = (case.n % 32 == 0, False) if transposed else (False,)
        sizes.append(mlx.np.int32(case.m))
        geometry = {
            "threadgroups": (-(-case.n // 32), -(-case.m // 32)),
            "threads_per_threadgroup": (32, 2, 2),
        }
    mlx.launch(
        _kernel(f"affine_{case.kernel}", weight, *options),
        *(weight.packed, weight.scales, weight.biases, x, out, *sizes, *NO_BATCH),
        **geometry,
    )
    dense, magnitude = weight.exact(), weight.magnitude()
    dense, magnitude = (dense.mT, magnitude.mT) if transposed else (dense, magnitude)
    exact, terms = x.double() @ dense, x.double().abs() @ magnitude
    # Matrix products put the restored weights into threadgroup memory in the dtype, and scaled inputs are rounded too.
    mlx.check(out, exact, terms, inner=4)

    import mlx.core as mx

    theirs = mx.quantized_matmul(
        mlx.to_mlx(x), *weight.mlx, transpose=transposed, group_size=weight.group, bits=weight.bits
    )
    mlx.check(mlx.from_mlx(theirs), exact, terms, inner=8)


PRODUCTS = [
    *(Product("qmv_fast", 2, 16, 512, f) for f in formats(0)),
    *(Product("qmv", 3, 20, 384, f) for f in formats(1)),
    *(Product("qvm", 2, 128, 96, f) for f in formats(2)),
    *(Product("qmm_t", 35, 40, 128, f) for f in formats(3)),
    *(Product("qmm_n", 35, 128, 64, f) for f in formats(4)),
    *(Product("qmv_quad", 2, 70, 128, Format(bits, 64)) for bits in (2, 4, 8)),
    Product("qmv", 1, 5, 640, Format(4, 64)),  # fewer rows than a threadgroup computes
    Product("qmm_t", 64, 64, 256, Format(4, 64)),
]
PRODUCTS_IN_EVERY_DTYPE = [
    Product(kernel, 33, 128, 128, Format(4, 64)) for kernel in ("qmv", "qvm", "qmm_t", "qmm_n", "qmv_quad")
]


@mlx.cases(PRODUCTS, PRODUCTS_IN_EVERY_DTYPE)
def test_product(case, dtype, mode):
    _product(case, dtype)


@pytest.mark.parametrize("bits", [3, 4])
def test_codes_are_read_as_mlx_packs_them(bits):
    """Of the reference above: it agrees with MLX about the format."""
    import mlx.core as mx

    weight = Weight(2, 128, bits, 32, mlx.F32)
    theirs = mlx.from_mlx(mx.dequantize(*weight.mlx, group_size=32, bits=bits))
    torch.testing.assert_close(theirs.double(), weight.exact(), atol=1e-6, rtol=1e-6)
