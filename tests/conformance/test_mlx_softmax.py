"""MLX's softmax kernels: one row a threadgroup, in registers or looped over."""

import pytest
import torch

from . import mlx

LOOPED_LIMIT, READS = 4096, 4
# Rows shorter than a simdgroup's reads, with a tail, at the limit of one pass, and past it.
SHAPES = [(3, 1), (2, 5), (5, 127), (1, 128), (7, 1000), (2, 4095), (1, 4096), (2, 4097), (1, 9001)]


def softmax(x: torch.Tensor, precise: bool) -> torch.Tensor:
    rows, size = x.shape
    looped = size > LOOPED_LIMIT
    name = "softmax_looped" if looped else "softmax_single_row"
    arguments = (x.dtype, "float") if precise else (x.dtype,)
    kernel = mlx.kernel(("softmax.h",), name, *arguments)
    out = mlx.unwritten(rows, size, dtype=x.dtype)
    threads = 1024 if looped else -(-size // (READS * 32)) * 32
    mlx.launch(kernel, x, out, mlx.np.int32(size), threads=(rows * threads,), threads_per_threadgroup=(threads,))
    return out


@pytest.mark.parametrize("precise", [True, False], ids=["precise", "own"])
@pytest.mark.parametrize("dtype", mlx.DTYPES, ids=mlx.short)
@pytest.mark.parametrize("looped", [False, True], ids=["row", "looped"])
def test_softmax(looped, dtype, precise, mode):
    import mlx.core as mx

    for rows, size in SHAPES:
        if (size > LOOPED_LIMIT) != looped:
            continue
        x = mlx.values(rows, size, dtype=dtype, scale=3)
        x[0, : size // 3] = -torch.inf
        exact = torch.softmax(x.double(), -1)
        # An exponential's error grows with its argument: fast::exp(d) is good to 3 + |2d| units in the last place.
        terms = exact * (1 + (x.double() - x.double().amax(-1, keepdim=True)).abs().clamp(max=1e4))
        found = softmax(x, precise)
        if precise or dtype is mlx.F32:
            mlx.check(found, exact, terms)
        else:
            # Sums of the dtype itself: a rounding for each of the 4 additions and 5 halvings within a simdgroup, as
            # many again between simdgroups, and one for each of a thread's loops.
            loops = -(-size // (READS * 1024))
            mlx.check(found, exact, terms, inner=32 + 4 * loops)
        theirs = mlx.from_mlx(mx.softmax(mlx.to_mlx(x), axis=-1, precise=True))
        mlx.check(theirs, exact, terms)


def test_softmax_of_large_values(mode):
    x = torch.tensor([[1e4, 1e4, -1e4, 3e38], [-3e38, -3e38, -3e38, -3e38]])
    assert softmax(x, precise=False).tolist() == [[0, 0, 0, 1], [0.25] * 4]
