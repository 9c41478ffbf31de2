"""MLX's Metal kernels: instances of their templates, and launches as MLX's own host code makes them.

The headers come from the `mlx-metal` wheel for macOS; MLX's `.metal` files, which instantiate them, are not in it. What
is instantiated stands in the tables of the tests. Tensors are PyTorch's, since NumPy has no bfloat16.
"""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from virtual_mps.compiler.preprocess import preprocess
from virtual_mps.executor import Kernel, Library

from . import sources

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16)
METAL_NAMES = {F32: "float", F16: "float16_t", BF16: "bfloat16_t"}

# Where the headers' names are looked up in MLX's own .metal files.
PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cases(in_turns: Sequence[object], every_dtype: Sequence[object] = ()) -> pytest.MarkDecorator:
    """Parametrises a test of `case` and `dtype`: the first list takes the dtypes in turns, the second all of them."""
    pairs = [(case, DTYPES[i % len(DTYPES)]) for i, case in enumerate(in_turns)]
    pairs += [(case, dtype) for case in every_dtype for dtype in DTYPES]
    return pytest.mark.parametrize(
        ("case", "dtype"),
        [pytest.param(case, dtype, id=f"{case}-{short(dtype)}") for case, dtype in dict.fromkeys(pairs)],
    )


@functools.cache
def _library(headers: tuple[str, ...], function: str, arguments: tuple[str, ...]) -> Library:
    include = sources.unpacked("mlx-metal") / "include"
    folder = "mlx/backend/metal/kernels"
    text = PRELUDE + "".join(f'#include "{folder}/{name}"\n' for name in ("utils.h", *headers))
    instance = f"{function}<{', '.join(arguments)}>"
    text += f'template [[host_name("{function}")]] [[kernel]] decltype({instance}) {instance};\n'
    with tempfile.TemporaryDirectory() as scratch:  # local includes are looked for from a file, not from a string
        path = Path(scratch) / "instance.metal"
        path.write_text(text)
        return Library(preprocess(path, include_dirs=[str(include)]), preprocessed=True)


def kernel(
    headers: tuple[str, ...],
    function: str,
    *arguments: object,
    constants: Mapping[int, np.generic | bool] | None = None,
) -> Kernel:
    """An instance of a kernel template.

    headers: relative to MLX's kernels folder, in the order that MLX includes them after utils.h.
    arguments: of the template; dtypes and booleans are written as Metal writes them.
    """
    return _library(headers, function, tuple(map(_written, arguments))).kernel(function, constants)


def _written(argument: object) -> str:
    if isinstance(argument, torch.dtype):
        return METAL_NAMES[argument]
    return str(argument).lower() if isinstance(argument, bool) else str(argument)


def buffer(value: torch.Tensor | np.ndarray | np.generic | None) -> np.ndarray | np.generic | None:
    """What the executor binds: the tensor's own memory, as an array of NumPy."""
    if not torch.is_tensor(value):
        return value
    assert value.is_contiguous()
    return (value.view(torch.int16) if value.dtype is BF16 else value).numpy()


def launch(kernel: Kernel, *arguments, **geometry) -> None:
    kernel(*map(buffer, arguments), **geometry)


def unwritten(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a result: what a kernel leaves out stays NaN."""
    return torch.full(shape, torch.nan, dtype=dtype)


def values(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, dtype=torch.float64) * scale).to(dtype)


def to_mlx(tensor: torch.Tensor):
    import mlx.core as mx

    if tensor.dtype is BF16:
        return mx.array(tensor.float().numpy()).astype(mx.bfloat16)
    return mx.array(tensor.numpy())


def from_mlx(array) -> torch.Tensor:
    import mlx.core as mx

    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.astype(mx.float32))).to(BF16)
    return torch.from_numpy(np.array(array))


def check(found: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor | float, inner: float = 0) -> None:
    """Compares a result with the exact one, computed in float64 from the same inputs.

    terms: the sum of the magnitudes of what was added up, to which errors of float32 sums are relative.
    inner: how many values of that magnitude were rounded to the result's dtype on their way to it.

    A sum of n terms in float32 errs by at most n * 2^-24 times `terms`, and by sqrt(n) times that as a rule; 32 covers
    the sums here, of up to 2,000 terms, and fast exponentials of a few units in the last place.
    """
    unit, unit32 = torch.finfo(found.dtype).eps / 2, 2.0**-24
    bound = unit * exact.abs() + (inner * unit + 32 * unit32) * terms + torch.finfo(found.dtype).smallest_normal
    error = (found.double() - exact).abs()
    worst = (error / bound).max().item() if found.numel() else 0.0
    assert worst <= 1, f"error {error.max():.3g}, {worst:.3g} times its bound"
