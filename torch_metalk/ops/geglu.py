"""GeGLU (Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_metalk.ops import _checks
from torch_metalk.ops._gated import Activation, define_gated


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """``gelu(gate) * up``, calculated in float32 and rounded once.

    Args:
        gate: any shape and strides, float32, float16 or bfloat16 (float64 on the CPU).
        up: shape, dtype and device of gate. None where gate is a fused projection ``[..., 2 F]`` with gate in the first
            half and up in the second; its gradient is then one tensor too.
        approximate: ``"tanh"`` (Gemma) or ``"none"``, the exact form through the error function.

    Returns:
        A contiguous tensor of gate's dtype and shape, or of the shape of its first half where up is None. Backward
        keeps gate and up, not the activation.

    Raises:
        ValueError: shapes or devices differ, an odd last dimension where up is None, unknown approximation.
        TypeError: dtypes differ, or an integer tensor.
    """
    return _geglu(gate, up, approximate)


def _check(approximate: str) -> None:
    _checks.one_of("geglu", "approximate", approximate, ("tanh", "none"))


_geglu = define_gated(
    "geglu",
    "str approximate",
    Activation(
        lambda gate, approximate: F.gelu(gate, approximate=approximate),
        lambda dy, gate, approximate: torch.ops.aten.gelu_backward(dy, gate, approximate=approximate),
    ),
    _check,
)
